// A few requests of different kinds, so that one person can watch a mixed batch.

import { Problem, events, post } from "./api.js";

const REPORT = "The harbour was quiet this morning. Two ships left before sunrise, and a third waited for the tide. ";
const CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n";
const PEOPLE = { type: "object", required: ["people"], additionalProperties: false, properties: { people: { type: "array",
  minItems: 3, maxItems: 3, items: { type: "object", required: ["name", "age", "city"], additionalProperties: false,
    properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" }, city: { type: "string", maxLength: 20 } } } } } };
const GAP_MS = 400; // between two starts, so that the rows differ

// Few requests with several answers each: a browser opens only six connections to a server, and the page needs
// one for its live figures and one for the chat.
function requests(model) {
  const numParagraphs = Math.max(1, Math.min(40, Math.floor(model.max_model_len / 80)));
  return [
    { text: `Repeat this code twice, exactly:\n\n${CODE}`, temperature: 0.2, n: 2 },
    { text: "Invent three people.", n: 2, response_format: { type: "json_schema", json_schema: { name: "people", schema: PEOPLE } } },
    { text: `${REPORT.repeat(numParagraphs)}\n\nSummarise this report.`, draft_depth: 0 },
    { text: "Write a wild poem about the sea.", temperature: 1.2, n: 2 },
  ];
}

// Resolves when all requests have ended. `progress(numRunning)` is called whenever that number changes.
export async function runDemo(model, signal, progress) {
  let numRunning = 0;
  const one = async ({ text, ...options }, index) => {
    await new Promise((resolve) => setTimeout(resolve, index * GAP_MS));
    progress(++numRunning);
    const body = { model: model.id, messages: [{ role: "user", content: text }], max_tokens: 200, ...options, stream: true };
    try {
      const response = await post("v1/chat/completions", body, { signal });
      for await (const chunk of events(response)) if (chunk.error) throw new Problem(chunk.error.message);
    } finally {
      progress(--numRunning);
    }
  };
  const ended = await Promise.allSettled(requests(model).map(one));
  const failed = ended.find(({ reason }) => reason && reason.name !== "AbortError");
  if (failed) throw failed.reason;
}
