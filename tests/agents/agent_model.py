"""The model that coding agents talk to in tests: a tiny trunk, a small vocabulary, a template with tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tiny_models import write_checkpoint

VOCABULARY = Path(__file__).parents[1] / "data" / "tiny-hybrid" / "tokenizer.json"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 262_144

# In the manner of Qwen3: tools in the system message, results in the user's turn.
TEMPLATE = (
    "{%- set first = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{%- if first or tools %}<|im_start|>system\n{{ first }}"
    "{%- if tools %}\n\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call a tool so:\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>{% endif %}'
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{%- elif not (loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_agent_model(folder: Path, vocabulary: Path = VOCABULARY, context: int = CONTEXT) -> Path:
    """`vocabulary`: a byte-level tokenizer.json with ChatML's marks."""
    tokenizer = Tokenizer.from_file(str(vocabulary))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    end_id = tokenizer.token_to_id("<|im_end|>")
    write_checkpoint(
        folder,
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=1,
        max_position_embeddings=context,
        eos_token_id=end_id,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.rmtree(folder / "mtp", ignore_errors=True)
    return folder
