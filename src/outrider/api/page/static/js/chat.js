// The chat: a list of conversations, the messages of one of them, and the box to write in.

import { Composer } from "./composer.js";
import { add, choose, newConversation, path, siblings, titleOf } from "./conversation.js";
import { get } from "./api.js";
import { h, icon, iconButton } from "./dom.js";
import { receive } from "./answering.js";
import { MessageView } from "./message.js";
import { DEFAULTS, chatBody, settingsForm } from "./params.js";
import * as store from "./store.js";

// The first one is answered reliably even by the default model, which is tiny (docs/MODELS.md, "Which values are sampled with").
const SUGGESTIONS = [
  "What is the capital of Japan?",
  "Write a Python function that checks whether a word is a palindrome.",
  "Explain how bees make honey in three sentences.",
  "Write a short story about a lighthouse.",
];
const DRAW_MS = 60; // between two drawings of an answer that is being written; chosen by hand
const SAVE_MS = 1000; // between two times that it is stored
const LOOK_MS = 1000; // between two looks at the state of a model that an answer waits for

// `actions`: notify(text), pick(model), refresh(model).
export class Chat {
  constructor(actions) {
    this.actions = actions;
    this.model = null; // the answer of GET /v1/models/{name}
    this.hasSeveralModels = false;
    this.conversations = [];
    this.current = null;
    this.running = new Map(); // by conversation: the AbortController of the answer that is being written
    this.views = new Map(); // by message: of the current conversation
    this.list = h("ul", { class: "conversation-list" });
    this.log = h("div", { class: "messages", role: "log", "aria-label": "Conversation" });
    this.scroller = h("div", { class: "scroll", tabindex: "-1" }, this.log);
    this.composer = new Composer({
      send: (text, images) => this.send(text, images),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
      notify: actions.notify,
    });
    this.drawer = h("aside", { class: "drawer", "aria-label": "Settings", hidden: true });
    this.sidebar = h("aside", { class: "sidebar", id: "conversations", "aria-label": "Conversations" },
      h("button", { class: "button wide", type: "button", id: "new-conversation", onclick: () => this.open(this.fresh()) },
        icon("plus"), "New conversation"),
      this.list);
    this.settingsButton = iconButton("sliders", "Settings of this conversation", () => this.toggleSettings(),
      { id: "settings", "aria-expanded": "false" });
    this.picker = h("select", { class: "model-picker", "aria-label": "Model", hidden: true,
      onchange: () => actions.pick(this.picker.value) });
    this.element = h("section", { class: "chat", "aria-label": "Chat" }, this.sidebar,
      h("div", { class: "chat-main" }, this.scroller,
        h("div", { class: "composer-area" }, this.composer.element,
          h("div", { class: "composer-hint muted small" }, this.settingsButton, this.picker,
            h("span", { class: "wide-only keys" }, "Enter sends · Shift+Enter: new line · Esc stops · ↑ edits · Alt+N: new conversation")))),
      this.drawer);
    this.acceptDrops();
    this.current = this.fresh(); // until the stored conversations are loaded
  }

  async start() {
    let stored = [];
    try {
      stored = await store.loadAll();
    } catch {
      this.actions.notify("This browser does not store conversations: they last until the page is closed.");
    }
    const isUsed = path(this.current).length > 0; // somebody was faster than the storage
    stored = stored.filter((conversation) => conversation.id !== this.current.id);
    for (const conversation of stored) endInterrupted(conversation);
    this.conversations.push(...stored);
    this.open(isUsed ? this.current : this.conversations[0] ?? this.current);
  }

  // The picker is shown if the server has several models.
  setModels(models, current) {
    this.hasSeveralModels = models.length > 1;
    this.picker.hidden = !this.hasSeveralModels;
    this.picker.replaceChildren(...models.map(({ id, state }) => (
      h("option", { value: id, selected: id === current }, state === "loaded" ? id : `${id} (${state.replace("_", " ")})`))));
  }

  setModel(model) {
    this.model = model;
    this.composer.setReadsImages(model.input_modalities.includes("image"));
    if (!path(this.current).length) this.draw(); // the greeting names the model
  }

  // -- conversations ------------------------------------------------------------------------------------

  fresh() {
    return newConversation({ ...DEFAULTS, ...this.current?.settings });
  }

  open(conversation) {
    this.current = conversation;
    this.views.clear();
    this.draw();
    this.drawList();
    if (!this.drawer.hidden) this.drawSettings();
    this.showSidebar(false);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    if (matchMedia("(min-width: 720px)").matches) this.composer.focus();
  }

  // On a phone, where the list lies over the messages.
  showSidebar(isOpen) {
    this.sidebar.classList.toggle("open", isOpen);
    document.getElementById("menu").setAttribute("aria-expanded", String(isOpen));
  }

  async keep(conversation) {
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.drawList();
    await store.save(conversation).catch(() => {});
  }

  async remove(conversation) {
    this.running.get(conversation)?.abort();
    this.conversations = this.conversations.filter((other) => other !== conversation);
    await store.remove(conversation.id).catch(() => {});
    if (this.current === conversation) this.open(this.conversations[0] ?? this.fresh());
    else this.drawList();
  }

  drawList() {
    this.list.replaceChildren(...this.conversations.map((conversation) => h("li", {},
      h("button", { type: "button", class: "conversation", "aria-current": conversation === this.current ? "true" : null,
        onclick: () => this.open(conversation) }, conversation.title),
      iconButton("trash", `Delete “${conversation.title}”`, () => this.remove(conversation)))));
  }

  // -- messages -----------------------------------------------------------------------------------------

  draw() {
    const shown = path(this.current);
    const isRunning = this.running.has(this.current);
    this.composer.setRunning(isRunning);
    if (!shown.length) {
      this.log.replaceChildren(this.greeting());
      return;
    }
    const isAtEnd = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
    this.log.replaceChildren(...shown.map((message, index) => {
      const isLast = index === shown.length - 1;
      const view = this.viewOf(message);
      const all = siblings(this.current, message);
      view.update({ place: { index: all.indexOf(message), count: all.length }, isLast, isRunning: isRunning && isLast });
      return view.element;
    }));
    if (isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  // While an answer is being written only its own message changes.
  drawLast() {
    const view = this.views.get(path(this.current).at(-1).id);
    const isAtEnd = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
    view.update(view);
    if (isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  viewOf(message) {
    if (!this.views.has(message.id)) {
      this.views.set(message.id, new MessageView(message, {
        edit: (text) => this.ask(message.parent, { role: "user", text, images: message.images }),
        regenerate: () => this.answer(message.parent),
        choose: (step) => this.chooseSibling(message, step),
        answerCalls: (results) => this.answerCalls(message, results),
      }));
    }
    return this.views.get(message.id);
  }

  greeting() {
    return h("div", { class: "greeting" },
      h("h1", {}, "What would you like to know?"),
      h("p", { class: "muted" }, this.model ? readiness(this.model) : ""),
      h("div", { class: "suggestions" }, SUGGESTIONS.map((text) => (
        h("button", { class: "suggestion", type: "button", onclick: () => this.send(text, []) }, text)))));
  }

  send(text, images) {
    this.ask(path(this.current).at(-1)?.id ?? "", { role: "user", text, images });
  }

  ask(parent, message) {
    if (this.running.has(this.current)) return;
    if (!Object.keys(this.current.messages).length) this.current.title = titleOf(message.text);
    this.answer(add(this.current, parent, message).id);
  }

  answerCalls(message, results) {
    let last = message.id;
    message.calls.forEach((call, index) => {
      last = add(this.current, last, { role: "tool", text: results[index], callId: call.id }).id;
    });
    this.answer(last);
  }

  chooseSibling(message, step) {
    const all = siblings(this.current, message);
    choose(this.current, all[all.indexOf(message) + step]);
    this.draw();
    this.keep(this.current);
  }

  editLast() {
    const last = path(this.current).filter((message) => message.role === "user").at(-1);
    if (last && !this.running.has(this.current)) this.viewOf(last).edit();
  }

  stop() {
    this.running.get(this.current)?.abort();
  }

  // A new answer to the message with the id `parent`.
  async answer(parent) {
    const conversation = this.current;
    if (this.running.has(conversation)) return;
    const message = add(conversation, parent, { role: "assistant", isUnfinished: true });
    const model = this.picker.value || undefined; // what was picked, also before the page knows more of it
    if (this.hasSeveralModels) message.model = model;
    const controller = new AbortController();
    this.running.set(conversation, controller);
    this.draw();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.keep(conversation);
    const soon = { draw: throttled(() => conversation === this.current && this.running.has(conversation) && this.drawLast(), DRAW_MS),
      save: throttled(() => this.keep(conversation), SAVE_MS) };
    const waitsForLoad = model !== undefined && !(this.model?.id === model && this.model.state === "loaded");
    const stopLooking = waitsForLoad ? watchLoad(message, model, soon.draw) : () => {};
    await receive(message, {
      settings: conversation.settings,
      messages: path(conversation).slice(0, -1),
      model,
      signal: controller.signal,
      changed: () => {
        soon.draw();
        soon.save();
      },
    });
    stopLooking();
    delete message.isUnfinished;
    this.running.delete(conversation);
    if (conversation === this.current) this.draw();
    this.keep(conversation);
    if ((this.hasSeveralModels || waitsForLoad) && model === this.model?.id) this.actions.refresh(model);
  }

  // -- settings -----------------------------------------------------------------------------------------

  toggleSettings() {
    this.drawer.hidden = !this.drawer.hidden;
    this.settingsButton.setAttribute("aria-expanded", String(!this.drawer.hidden));
    if (!this.drawer.hidden) this.drawSettings();
  }

  drawSettings() {
    const conversation = this.current;
    const changed = () => Object.keys(conversation.messages).length && this.keep(conversation);
    const body = () => chatBody(conversation.settings, path(conversation), this.model?.id);
    this.drawer.replaceChildren(
      h("div", { class: "drawer-head" }, h("h2", {}, "Settings"), iconButton("close", "Close the settings", () => this.toggleSettings())),
      settingsForm(conversation.settings, changed, body, this.model?.default_sampling_params ?? {}));
  }

  acceptDrops() {
    this.element.addEventListener("dragover", (event) => event.preventDefault());
    this.element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.composer.attach(event.dataTransfer.files);
    });
  }
}

function readiness({ id, state, output_modalities: outputs }) {
  if (!outputs.includes("text")) return `${id} makes ${outputs.join(" and ")} and does not chat: see the API description.`;
  return state === "loaded" ? `${id} is ready.` : `${id} is loaded when you ask the first question.`;
}

// Says in `message.isLoading` whether its model is still being loaded, until the returned function is called.
function watchLoad(message, model, changed) {
  let timer = null;
  const look = async () => {
    const { state } = await get(`v1/models/${encodeURIComponent(model)}`).catch(() => ({}));
    if (timer === null) return; // the answer has ended
    message.isLoading = state !== undefined && state !== "loaded";
    changed();
    timer = message.isLoading ? setTimeout(look, LOOK_MS) : null;
  };
  message.isLoading = true;
  timer = setTimeout(look, LOOK_MS);
  return () => {
    clearTimeout(timer);
    timer = null;
    delete message.isLoading;
  };
}

// The page was closed while an answer was being written.
function endInterrupted(conversation) {
  for (const message of Object.values(conversation.messages)) {
    if (message.isUnfinished) {
      delete message.isUnfinished;
      message.stopped = true;
    }
  }
}

// At most one call in `ms`, and one after the last.
function throttled(action, ms) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      action();
    }, ms);
  };
}
