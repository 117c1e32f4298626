// The settings of a conversation: the form, and the request that follows from them.

import { copyButton, h } from "./dom.js";

// Empty means: not sent, so the server's default applies.
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
];
const DEPTHS = ["auto", "0", "1", "2", "3", "4", "5", "6", "7", "8"];

export const DEFAULTS = { system: "", draft_depth: "auto", thinking: "", schema: "", tools: "", showTokens: false };

// The body of POST /v1/chat/completions. Raises an Error that names a field which is not valid JSON.
export function chatBody(settings, messages, model) {
  const body = { model, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.map(asSent));
  for (const { name } of NUMBERS) if (settings[name] !== undefined) body[name] = settings[name];
  if (settings.draft_depth !== "auto") body.draft_depth = Number(settings.draft_depth);
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  const schema = parsed(settings.schema, "JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed(settings.tools, "Tools");
  if (tools) body.tools = tools;
  if (settings.showTokens) Object.assign(body, { return_token_origins: true, logprobs: true });
  return body;
}

function parsed(text, label) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

function asSent(message) {
  if (message.role === "tool") return { role: "tool", content: message.text, tool_call_id: message.callId };
  if (message.role === "assistant") {
    const sent = { role: "assistant", content: message.text };
    if (message.calls?.length) {
      sent.tool_calls = message.calls.map(({ id, name, arguments: text }) => (
        { id, type: "function", function: { name, arguments: text } }));
    }
    return sent;
  }
  if (!message.images?.length) return { role: "user", content: message.text };
  const pictures = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...pictures, { type: "text", text: message.text }] };
}

// -- the same request elsewhere -------------------------------------------------------------------------

const base = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

export function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const lines = [`curl ${base()}/v1/chat/completions`, "-H 'Content-Type: application/json'"];
  lines.push("-H \"Authorization: Bearer $OUTRIDER_API_KEY\"", `-d '${json}'`);
  return lines.join(" \\\n  ");
}

const OF_OPENAI = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "tools", "response_format", "logprobs"];

export function asPython(body) {
  const known = Object.entries(body).filter(([name]) => OF_OPENAI.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OF_OPENAI.includes(name)));
  const lines = known.map(([name, value]) => `    ${name}=${pythonValue(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra)},`);
  return [
    "import os", "", "from openai import OpenAI", "",
    `client = OpenAI(base_url="${base()}/v1", api_key=os.environ.get("OUTRIDER_API_KEY", "none"))`,
    "completion = client.chat.completions.create(", ...lines, ")",
    "print(completion.choices[0].message.content)", "",
  ].join("\n");
}

// JSON strings and numbers are Python's too.
function pythonValue(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${pythonValue(part)}`).join(", ")}}`;
}

// -- the form -------------------------------------------------------------------------------------------

// `changed` is called after each change; `body` gives the request for the buttons that copy it. `defaults`: what
// the server uses for fields that are left empty.
export function settingsForm(settings, changed, body, defaults) {
  const set = (name, value) => {
    if (value === undefined) delete settings[name];
    else settings[name] = value;
    changed();
  };
  return h("div", { class: "settings" },
    area(settings, set, "system", "System prompt", 4, "You are a helpful assistant."),
    h("fieldset", {}, h("legend", {}, "Sampling"), h("p", { class: "muted small" }, "Empty: the model's default."),
      h("div", { class: "grid" }, NUMBERS.map((field) => number(settings, set, field, defaults)))),
    h("fieldset", {}, h("legend", {}, "Drafts and tokens"),
      select(settings, set, "draft_depth", "Draft depth", DEPTHS.map((depth) => [depth, depth])),
      h("label", { class: "switch" },
        h("input", { type: "checkbox", checked: settings.showTokens, id: "show-tokens",
          onchange: (event) => set("showTokens", event.target.checked) }),
        "Show how each token was won")),
    h("fieldset", {}, h("legend", {}, "Answer"),
      select(settings, set, "thinking", "Thinking", [["", "default"], ["on", "on"], ["off", "off"]]),
      area(settings, set, "schema", "JSON schema of the answer", 4, '{"type": "object", …}', true),
      area(settings, set, "tools", "Tools (JSON list, as in OpenAI's API)", 4, '[{"type": "function", …}]', true)),
    h("fieldset", {}, h("legend", {}, "The same request elsewhere"),
      h("div", { class: "row" },
        h("span", {}, "curl"), copyButton(() => asCurl(body()), "Copy as curl"),
        h("span", {}, "Python"), copyButton(() => asPython(body()), "Copy as Python"))));
}

function number(settings, set, { name, label, ...range }, defaults) {
  const input = h("input", { type: "number", id: `set-${name}`, value: String(settings[name] ?? ""), placeholder: String(defaults[name] ?? "default"),
    ...Object.fromEntries(Object.entries(range).map(([key, value]) => [key, String(value)])),
    onchange: () => set(name, input.value === "" || !input.checkValidity() ? undefined : Number(input.value)) });
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input);
}

function select(settings, set, name, label, options) {
  const input = h("select", { id: `set-${name}`, onchange: () => set(name, input.value) },
    options.map(([value, text]) => h("option", { value, selected: settings[name] === value }, text)));
  return h("div", { class: "field inline" }, h("label", { for: input.id }, label), input);
}

function area(settings, set, name, label, rows, placeholder, isJson = false) {
  const problem = h("p", { class: "problem small", role: "alert" });
  const input = h("textarea", { id: `set-${name}`, rows: String(rows), placeholder, spellcheck: isJson ? "false" : "true",
    class: isJson ? "mono" : "",
    oninput: () => {
      set(name, input.value);
      try {
        if (isJson) parsed(input.value, label);
        problem.textContent = "";
      } catch (error) {
        problem.textContent = error.message;
      }
    } });
  input.value = settings[name];
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, problem);
}
