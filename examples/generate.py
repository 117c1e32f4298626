"""Several prompts at once, each with its own parameters, and a chat. Prints accepted drafts by position."""

from outrider import LLM, SamplingParams

with LLM() as llm:
    outs = llm.generate(
        ["The capital of France is", "Once upon a time"],
        [
            SamplingParams(max_tokens=16, temperature=0),
            SamplingParams(max_tokens=16, temperature=0.8, seed=1),
        ],
    )
    for out in outs:
        print(repr(out.text), out.finish_reason, out.stats.accepted)
    print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
