// Ollama's JavaScript client with two tools: node ollama_agent.mjs URL MODEL TASK
import { readFileSync, writeFileSync } from "node:fs";
import { Ollama } from "ollama";

const [host, model, task] = process.argv.slice(2);
const text = { type: "string" };
const functions = {
  read_file: ({ path }) => readFileSync(path, "utf8"),
  edit_file: ({ path, old, new: replacement }) => {
    writeFileSync(path, readFileSync(path, "utf8").replaceAll(old, replacement));
    return "replaced";
  },
};
const parameters = {
  read_file: { type: "object", properties: { path: text }, required: ["path"] },
  edit_file: { type: "object", properties: { path: text, old: text, new: text }, required: ["path", "old", "new"] },
};
const tools = Object.entries(parameters).map(([name, schema]) => ({
  type: "function",
  function: { name, description: name, parameters: schema },
}));

const ollama = new Ollama({ host });
const messages = [{ role: "user", content: task }];
let answer;
do {
  answer = { role: "assistant", content: "", tool_calls: [] };
  for await (const part of await ollama.chat({ model, messages, tools, stream: true })) {
    answer.content += part.message.content;
    answer.tool_calls.push(...(part.message.tool_calls ?? []));
  }
  messages.push(answer);
  for (const { function: called } of answer.tool_calls) {
    messages.push({ role: "tool", content: functions[called.name](called.arguments), tool_name: called.name });
  }
} while (answer.tool_calls.length);
console.log(answer.content);
