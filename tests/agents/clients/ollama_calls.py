"""Every call of Ollama's Python client that the server answers: python ollama_calls.py URL MODEL TASK.

Prints what each call returned, as JSON.
"""

import json
import sys

from ollama import Client, ResponseError

url, name, task = sys.argv[1:]
client = Client(host=url)
messages = [{"role": "user", "content": task}]
found = {}


def failure(call):
    try:
        call()
    except ResponseError as error:
        return [error.status_code, error.error]
    return None


found["list"] = [model.model for model in client.list().models]
found["ps"] = [[model.name, model.context_length] for model in client.ps().models]
shown = client.show(name)
found["show"] = [shown.capabilities, shown.modelinfo["general.architecture"], shown.details.family]
whole = client.chat(name, messages, think=True, logprobs=True, top_logprobs=1)
found["chat"] = [whole.message.content, whole.message.thinking, whole.done_reason]
found["logprobs"] = len(whole.logprobs) == whole.eval_count
found["figures"] = [
    whole.total_duration >= whole.load_duration + whole.prompt_eval_duration + whole.eval_duration > 0,
    whole.prompt_eval_count > 0,
]
parts = list(client.generate(name, task, stream=True, options={"num_predict": 3}))
found["generate"] = [
    "".join(part.thinking or "" for part in parts),
    parts[-1].done_reason,
    parts[-1].eval_count,
]
found["raw"] = client.generate(name, task, raw=True, options={"num_predict": 2}).eval_count
found["load"] = client.generate(name, keep_alive="5m").done_reason
found["pull"] = [part.status for part in client.pull(name, stream=True)]
found["no model"] = failure(lambda: client.chat("none", messages))
found["no model, streamed"] = failure(lambda: list(client.chat("none", messages, stream=True)))
found["bad option"] = failure(lambda: client.chat(name, messages, options={"mirostat": 2}))
found["embed"] = failure(lambda: client.embed(name, "Hi"))
found["delete"] = failure(lambda: client.delete(name))
print(json.dumps(found))
