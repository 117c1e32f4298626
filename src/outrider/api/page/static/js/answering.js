// Asks the server for an answer and writes it into a message as it arrives.

import { Problem, events, post } from "./api.js";
import { chatBody } from "./params.js";

// `changed` is called after each event. The message ends with `finish`, `stopped` or `error`.
export async function receive(message, { settings, messages, model, signal, changed }) {
  let firstAt;
  try {
    const body = { ...chatBody(settings, messages, model), stream: true, stream_options: { include_usage: true } };
    const response = await post("v1/chat/completions", body, { signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Problem(chunk.error.message);
      if (take(message, chunk)) firstAt ??= performance.now();
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  if (firstAt !== undefined) message.seconds = (performance.now() - firstAt) / 1000;
}

// True if the chunk has a part of the answer.
function take(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return false;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content) message.text += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) takeCall(message, call);
  if (choice.token_origins) message.origins = [...(message.origins ?? []), ...choice.token_origins];
  if (choice.finish_reason) message.finish = choice.finish_reason;
  return Boolean(content || reasoning || calls);
}

function takeCall(message, { index, id, function: part }) {
  message.calls ??= [];
  message.calls[index] ??= { id, name: part.name, arguments: "" };
  message.calls[index].arguments += part.arguments ?? "";
}
