// Markdown of a model's answer as elements. The model is not trusted: markdown-it escapes HTML, and DOMPurify
// lets only these elements and attributes pass. Pictures are not loaded: their address could carry data away.

import hljs from "../vendor/highlight/core.min.js";
import bash from "../vendor/highlight/bash.min.js";
import cpp from "../vendor/highlight/cpp.min.js";
import css from "../vendor/highlight/css.min.js";
import diff from "../vendor/highlight/diff.min.js";
import go from "../vendor/highlight/go.min.js";
import java from "../vendor/highlight/java.min.js";
import javascript from "../vendor/highlight/javascript.min.js";
import json from "../vendor/highlight/json.min.js";
import python from "../vendor/highlight/python.min.js";
import rust from "../vendor/highlight/rust.min.js";
import sql from "../vendor/highlight/sql.min.js";
import typescript from "../vendor/highlight/typescript.min.js";
import xml from "../vendor/highlight/xml.min.js";
import yaml from "../vendor/highlight/yaml.min.js";
import { copyButton, h } from "./dom.js";

const LANGUAGES = { bash, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote",
  "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"];
const MAX_HIGHLIGHTED = 20_000; // characters of a code block; a longer one stays plain, so that typing stays smooth

const { markdownit, DOMPurify } = globalThis;
const markdown = markdownit({ html: false, linkify: true, highlight }).disable("image");
// Columns of tables are aligned by a class: the page's security policy forbids style attributes.
markdown.core.ruler.push("alignment", (state) => {
  for (const token of state.tokens) {
    const style = token.attrGet("style");
    if (style) token.attrs = [["class", style.replace("text-align:", "align-")]];
  }
});

function highlight(code, language) {
  if (code.length > MAX_HIGHLIGHTED || !hljs.getLanguage(language)) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

export function rendered(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["class", "href", "title", "start"],
    ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
    ALLOW_DATA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    wrap(table, h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Table" }));
  }
  for (const pre of fragment.querySelectorAll("pre")) wrap(pre, codeFrame(pre));
  return fragment;
}

function wrap(element, frame) {
  element.replaceWith(frame);
  frame.append(element);
}

function codeFrame(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  pre.tabIndex = 0; // it may scroll
  pre.setAttribute("aria-label", "Code");
  pre.setAttribute("role", "region");
  return h("div", { class: "code" },
    h("div", { class: "code-bar" }, h("span", {}, language || "text"), copyButton(() => code.textContent, "Copy code")));
}
