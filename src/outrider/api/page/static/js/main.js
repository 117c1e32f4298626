// Puts the page together: views, keyboard, theme, the server's state.

import { Problem, get, onKey, setUpKeyDialog } from "./api.js";
import { Chat } from "./chat.js";
import { icon } from "./dom.js";
import { Live } from "./live.js";
import { ModelPage } from "./model.js";
import * as status from "./status.js";

const RETRY_MS = 2000;
const NOTICE_MS = 6000;

const notice = document.getElementById("notice");
let noticeTimer;

function notify(text) {
  notice.textContent = text;
  notice.hidden = false;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => (notice.hidden = true), NOTICE_MS);
}

const chat = new Chat({
  notify,
  pick(name) {
    localStorage.setItem("model", name);
    showModel(name).catch((error) => notify(error.message));
  },
  // After an answer: its model is loaded now, and another one may have made room for it.
  async refresh(name) {
    try {
      const models = await listModels();
      if (chat.picker.value !== name) return; // another one was picked meanwhile
      chat.setModels(models, name);
      setModel(models.find((model) => model.id === name));
    } catch { /* the next answer tells what is wrong */ }
  },
});
const views = { chat, live: new Live(notify), model: new ModelPage() };

function show() {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "chat";
  for (const [other, view] of Object.entries(views)) view.element.hidden = other !== name;
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.getElementById("menu").hidden = name !== "chat";
  views[name].redraw?.();
}

function setModel(model) {
  for (const view of Object.values(views)) view.setModel(model);
}

async function showModel(name) {
  const model = await get(`v1/models/${encodeURIComponent(name)}`);
  if (chat.picker.value === name) setModel(model); // else another one was picked meanwhile
}

// Those that can chat. A server without one shows what it has, and says what that is for.
async function listModels() {
  const all = (await get("v1/models")).data;
  const chats = all.filter((model) => model.output_modalities.includes("text"));
  return chats.length ? chats : all;
}

// Again and again until the server answers. Without a valid key, until one is given.
async function loadModel() {
  try {
    const models = await listModels();
    const last = localStorage.getItem("model");
    const { id } = models.find((model) => model.id === last) ?? models[0];
    chat.setModels(models, id);
    await showModel(id);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) return;
    notify(error.message);
    setTimeout(loadModel, RETRY_MS);
  }
}

function showRate({ newest, problem }) {
  const rate = document.getElementById("rate");
  if (newest && rate.classList.contains("lost")) loadModel(); // another server may have come up
  rate.classList.toggle("lost", Boolean(problem));
  rate.title = problem;
  rate.textContent = newest ? `${newest.tokens_per_s.toFixed(0)} tokens/s` : problem ? "no live figures" : "";
}

function setUpTheme() {
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = getComputedStyle(root).colorScheme === "dark" || (root.dataset.theme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
  });
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, textarea, select");
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      chat.stop();
      if (!chat.drawer.hidden) chat.toggleSettings();
    } else if (event.key === "/" && !isTyping) {
      event.preventDefault();
      location.hash = "chat";
      chat.composer.focus();
    } else if (event.altKey && event.code === "KeyN") {
      event.preventDefault();
      location.hash = "chat";
      chat.open(chat.fresh());
    } else if (event.altKey && ["Digit1", "Digit2", "Digit3"].includes(event.code)) {
      event.preventDefault();
      location.hash = Object.keys(views)[Number(event.code.at(-1)) - 1];
    }
  });
}

function setUpMenu() {
  document.getElementById("menu").addEventListener("click", () => {
    chat.showSidebar(!chat.sidebar.classList.contains("open"));
  });
}

for (const [id, name] of [["menu", "menu"], ["theme", "theme"], ["api-docs", "book"]]) document.getElementById(id).append(icon(name));
document.getElementById("view").append(...Object.values(views).map((view) => view.element));
setUpKeyDialog();
setUpTheme();
setUpKeys();
setUpMenu();
addEventListener("hashchange", show);
onKey(() => {
  loadModel();
  status.connect();
});
await chat.start();
show();
loadModel();
status.listen(showRate);
status.start();
