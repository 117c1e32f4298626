// One message of a conversation as elements. `update` draws it again after it has changed.

import { copyButton, h, icon, iconButton } from "./dom.js";
import { rendered } from "./markdown.js";
import { TokenView } from "./tokens.js";

// `actions`: what the buttons do: edit(text), regenerate(), choose(step), answerCalls(results).
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = h("div", { class: "message-body" });
    this.tools = h("div", { class: "message-tools" });
    this.element = h("article", { class: `message ${message.role}`, "aria-label": LABELS[message.role] }, this.body, this.tools);
    this.showsTokens = true; // if the answer came with its tokens' origins
    this.showsReasoning = null; // until the visitor folds or unfolds it
    this.tokens = null;
  }

  // `place`: {index, count} among the message's siblings. `isLast`: no message follows.
  update({ place, isLast, isRunning }) {
    Object.assign(this, { place, isLast, isRunning });
    this.element.setAttribute("aria-busy", String(isRunning));
    this.body.replaceChildren(...this.parts());
    this.tools.replaceChildren(...this.buttons());
  }

  parts() {
    const { message } = this;
    if (message.role === "user") return [...this.pictures(), h("div", { class: "plain-text" }, message.text)];
    if (message.role === "tool") return [h("div", { class: "plain-text mono" }, message.text)];
    const parts = [];
    if (message.reasoning) parts.push(this.reasoning());
    if (this.showsTokens && message.origins) parts.push(this.tokenView());
    else if (message.text) parts.push(h("div", { class: "markdown" }, rendered(message.text)));
    parts.push(...(message.calls ?? []).map(callCard));
    if (this.isRunning && !message.text && !message.reasoning && !message.calls?.length) {
      const reason = message.isLoading ? `${message.model ?? "the model"} is being loaded` : "waiting for the first token";
      parts.push(h("p", { class: "waiting muted" }, h("span", { class: "dot" }), reason));
    }
    if (message.error) parts.push(h("p", { class: "problem", role: "alert" }, message.error));
    if (message.finish === "length") parts.push(h("p", { class: "muted small" }, "Cut off at the limit of tokens."));
    if (message.stopped) parts.push(h("p", { class: "muted small" }, "Stopped."));
    if (this.isLast && !this.isRunning && message.calls?.length) parts.push(this.resultForm());
    return parts;
  }

  pictures() {
    const images = this.message.images ?? [];
    return images.length ? [h("div", { class: "pictures" }, images.map((src) => h("img", { src, alt: "Attached picture" })))] : [];
  }

  reasoning() {
    const isThinking = this.isRunning && !this.message.text;
    const details = h("details", { class: "reasoning", open: this.showsReasoning ?? isThinking },
      h("summary", { onclick: () => (this.showsReasoning = !details.open) }, isThinking ? "Thinking…" : "Thoughts"),
      h("div", { class: "plain-text" }, this.message.reasoning));
    return details;
  }

  tokenView() {
    this.tokens ??= new TokenView();
    this.tokens.update(this.message.origins);
    return this.tokens.element;
  }

  buttons() {
    const { message, actions, isRunning } = this;
    if (isRunning || message.role === "tool") return [];
    const buttons = [copyButton(() => message.text, "Copy message")];
    if (message.role === "user") buttons.push(iconButton("edit", "Edit and ask again", () => this.edit()));
    else buttons.push(iconButton("redo", "Answer again", () => actions.regenerate()));
    if (message.origins) {
      buttons.push(iconButton("tokens", "Show how each token was won", () => {
        this.showsTokens = !this.showsTokens;
        this.update(this);
      }, { "aria-pressed": String(this.showsTokens) }));
    }
    if (this.place.count > 1) buttons.push(this.branches());
    if (message.usage) buttons.push(h("span", { class: "muted small" }, figures(message)));
    return buttons;
  }

  branches() {
    const { index, count } = this.place;
    return h("span", { class: "branches" },
      iconButton("left", "Branch before", () => this.actions.choose(-1), { disabled: index === 0 }),
      `${index + 1} / ${count}`,
      iconButton("right", "Branch after", () => this.actions.choose(1), { disabled: index === count - 1 }));
  }

  edit() {
    const input = h("textarea", { rows: "3", "aria-label": "Edit the message" });
    input.value = this.message.text;
    const send = () => input.value.trim() && this.actions.edit(input.value);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      }
      if (event.key === "Escape") this.update(this);
    });
    this.body.replaceChildren(input);
    this.tools.replaceChildren(
      h("button", { class: "button primary", type: "button", onclick: send }, "Ask again"),
      h("button", { class: "button", type: "button", onclick: () => this.update(this) }, "Cancel"));
    input.focus();
  }

  resultForm() {
    const inputs = this.message.calls.map((call) => h("input", { type: "text", "aria-label": `Result of ${call.name}`,
      placeholder: `Result of ${call.name}`, required: true }));
    return h("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      this.actions.answerCalls(inputs.map((input) => input.value));
    } }, inputs, h("button", { class: "button", type: "submit" }, "Send results"));
  }
}

const LABELS = { user: "You", assistant: "Answer", tool: "Result of a tool", system: "System" };

function callCard(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* still being written */ }
  return h("div", { class: "call" }, h("div", { class: "call-name" }, icon("play"), `${call.name}`), h("pre", { tabindex: "0" }, text));
}

function figures({ usage, seconds, model }) {
  const details = usage.completion_tokens_details;
  const drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
  const parts = [...(model ? [model] : []), `${usage.completion_tokens} tokens`];
  if (seconds > 0.1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
  if (drafted) parts.push(`${Math.round((100 * details.accepted_prediction_tokens) / drafted)} % of drafts accepted`);
  if (usage.prompt_tokens_details.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} prompt tokens cached`);
  return parts.join(" · ");
}
