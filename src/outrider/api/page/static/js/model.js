// What is loaded, and its figures: acceptance by place, and charts of the last minutes.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { bytes, h } from "./dom.js";
import { memoryBars } from "./live.js";
import { history, listen, state } from "./status.js";

const round = (value) => value.toFixed(value < 10 ? 1 : 0);

export class ModelPage {
  constructor() {
    this.facts = h("dl", { class: "facts card" });
    this.places = h("div", { class: "card places" });
    this.bars = h("div", { class: "card bars" });
    this.models = h("div", { class: "card", hidden: true });
    this.problem = h("p", { class: "problem", role: "status", hidden: true });
    this.charts = [
      new Chart("Tokens a second", [{ label: "", name: "tokens" }, { label: "prompts", name: "prompt" }], round),
      new Chart("Rows", [{ label: "running", name: "rows" }, { label: "waiting", name: "waiting" }], (value) => value.toFixed(0)),
      new Chart("Caches", [{ label: "rows", name: "cache" }, { label: "prefixes", name: "prefixes" }], bytes),
    ];
    this.element = h("section", { class: "page", tabindex: "0", "aria-labelledby": "model-title" },
      h("h1", { id: "model-title" }, "Model"), this.problem, this.facts, this.models,
      h("div", { class: "cards" }, this.places, this.bars, this.charts.map((chart) => chart.element)));
    listen((changed) => this.show(changed));
  }

  async setModel(model) {
    this.model = model;
    const rows = [["Name", model.id], ["Context", model.max_model_len && `${model.max_model_len.toLocaleString("en")} tokens`],
      ["Reads", model.input_modalities.join(" and ")]];
    const defaults = Object.entries(model.default_sampling_params ?? {});
    if (defaults.length) rows.push(["Sampling by default", defaults.map(([name, value]) => `${name} ${value}`).join(", ")]);
    this.drawFacts(rows);
    try {
      const { model: loaded, models } = await get("v1/status");
      this.drawModels(models);
      if (loaded?.name !== model.id || this.model !== model) return;
      rows.push(["Loaded from", loaded.path], ["Computes in", `${loaded.dtype} on ${loaded.device}`],
        ["Drafts", loaded.head ? `MTP head ${loaded.head}`
          : loaded.draft_model ? `draft model ${loaded.draft_model}` : loaded.drafter]);
      this.drawFacts(rows);
    } catch { /* a user's key: the operator's facts stay hidden, and the stream says so */ }
  }

  drawFacts(rows) {
    this.facts.replaceChildren(...rows.filter(([, value]) => value).map(([name, value]) => (
      h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  }

  // Of a server with several models: which are loaded, and what they take of the memory.
  drawModels(models) {
    this.models.hidden = models.length < 2;
    const head = h("tr", {}, ["Model", "State", "Memory", "Requests"].map((name) => h("th", { scope: "col" }, name)));
    const rows = models.map((model) => h("tr", {}, h("td", {}, [model.name, ...model.aliases].join(", ")), h("td", {}, stateOf(model)),
      h("td", {}, model.reserved_bytes ? bytes(model.reserved_bytes) : "–"), h("td", {}, String(model.requests))));
    this.models.replaceChildren(h("h2", {}, "Models of this server"), h("table", { class: "models" }, h("thead", {}, head), h("tbody", {}, rows)));
  }

  redraw() {
    this.show(state);
    if (!this.models.hidden) get("v1/status").then(({ models }) => this.drawModels(models)).catch(() => {});
  }

  show({ newest, problem }) {
    this.problem.hidden = !problem;
    this.problem.textContent = problem;
    if (!newest || this.element.hidden) return;
    this.places.replaceChildren(h("h2", {}, "Drafts accepted, by place"), ...placeBars(newest));
    this.bars.replaceChildren(h("h2", {}, "Memory"), ...memoryBars(newest));
    for (const chart of this.charts) chart.update(history);
  }
}

function stateOf({ state, stage, progress, pinned, failure, unloads_in_s: left }) {
  const done = progress === null ? "" : `, ${Math.round(100 * progress)} %`;
  const parts = [stage ? `${stage}${done}` : state.replace("_", " ")];
  if (pinned) parts.push("pinned");
  if (left !== null) parts.push(`unloaded in ${Math.ceil(left)} s`);
  if (failure) parts.push(failure);
  return parts.join(" · ");
}

function placeBars({ drafted_by_position: drafted, accepted_by_position: accepted }) {
  const used = drafted.map((number, index) => [index + 1, number, accepted[index]]).filter(([, number]) => number);
  if (!used.length) return [h("p", { class: "muted" }, "No draft was made yet.")];
  return used.map(([place, number, right]) => {
    const share = Math.round((100 * right) / number);
    const fill = h("span", { class: "fill" });
    fill.style.width = `${share}%`;
    return h("div", { class: "memory" }, h("span", {}, `${place}`), h("span", { class: "bar" }, fill),
      h("span", {}, `${share} % of ${number.toLocaleString("en")}`));
  });
}
