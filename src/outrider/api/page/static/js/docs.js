// The API as /openapi.json describes it: routes, the fields of their requests, and their answers.

import { h } from "./dom.js";

const document_ = await (await fetch("openapi.json")).json();
const schemas = document_.components.schemas;
const resolve = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema);

function typeOf(schema) {
  if (schema === undefined) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map(typeOf))].filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "anything"}`;
  return schema.type ?? "anything";
}

function fields(schema) {
  const { properties = {}, required = [] } = resolve(schema) ?? {};
  const names = Object.keys(properties);
  if (!names.length) return null;
  return h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Fields" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "field"), h("th", {}, "type"), h("th", {}, ""))),
    h("tbody", {}, names.map((name) => h("tr", {},
      h("td", {}, h("code", {}, name), required.includes(name) ? " (required)" : ""),
      h("td", {}, typeOf(properties[name])),
      h("td", {}, properties[name].description ?? ""))))));
}

function operation(method, path, { summary, description, requestBody, responses, security }) {
  const request = requestBody?.content["application/json"]?.schema;
  const answers = Object.entries(responses).map(([status, response]) => h("li", {}, h("code", {}, status), ` ${response.description}`));
  const answer = responses["200"]?.content?.["application/json"]?.schema;
  return h("details", { class: "card operation" },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, summary ?? ""),
      security ? h("span", { class: "muted small" }, "needs a key") : null),
    description ? h("p", {}, description) : null,
    request ? [h("h3", {}, "Request"), fields(request)] : null,
    answer ? [h("h3", {}, "Answer"), fields(answer)] : null,
    h("h3", {}, "Statuses"), h("ul", {}, answers));
}

const byTag = new Map();
for (const [path, operations] of Object.entries(document_.paths)) {
  for (const [method, found] of Object.entries(operations)) {
    const tag = found.tags?.[0] ?? "other";
    byTag.set(tag, [...(byTag.get(tag) ?? []), operation(method, path, found)]);
  }
}
for (const [tag, operations] of byTag) document.getElementById("operations").append(h("h2", {}, tag), ...operations);
