// The live batch: one lane for each row of the running step, from the status stream.

import { bytes, h, icon } from "./dom.js";
import { runDemo } from "./demo.js";
import { listen } from "./status.js";

const COLUMN = 8; // pixels of one step in a lane
const CELL = 5; // pixels of one token
const MAX_STRIDES = 400; // steps that a lane remembers
const LINGER_MS = 1500; // a lane stays so long after its row has ended

// The colours of the lanes are those of the legend, which follows the theme.
const KINDS = { own: "the model's own token", accepted: "accepted draft", rejected: "rejected draft" };

export class Live {
  constructor(notify) {
    this.notify = notify;
    this.model = null;
    this.lanes = new Map(); // by sequence
    this.demo = null;
    this.swatches = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, h("span", { class: `swatch lane-${kind}` })]));
    this.button = h("button", { class: "button primary", type: "button", id: "demo", disabled: true, onclick: () => this.toggleDemo() },
      icon("play"), "Start demo requests");
    this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, h("strong", {}, "–")]));
    this.problem = h("p", { class: "problem", role: "status", hidden: true });
    this.empty = h("p", { class: "muted empty" }, "No request runs. Ask something in the chat, or start the demo requests.");
    this.laneList = h("ol", { class: "lanes", "aria-label": "Rows of the running step" });
    this.bars = h("div", { class: "bars" });
    this.element = h("section", { class: "page", tabindex: "0", "aria-labelledby": "live-title" },
      h("div", { class: "page-head" }, h("h1", { id: "live-title" }, "Live batch"), this.button),
      h("p", { class: "muted" }, "All rows share one step. Each row drafts at its own depth; what the model accepts is kept, the rest is rolled back."),
      this.problem,
      h("dl", { class: "figures" }, FIGURES.map(([name, label]) => h("div", {}, h("dt", {}, label), h("dd", {}, this.figures[name])))),
      h("div", { class: "legend" }, Object.entries(KINDS).map(([kind, label]) => h("span", {}, this.swatches[kind], label))),
      this.empty, this.laneList, this.bars);
    listen((state) => this.show(state));
  }

  setModel(model) {
    this.model = model;
    this.button.disabled = false;
  }

  show({ newest, problem }) {
    this.problem.hidden = !problem;
    this.problem.textContent = problem;
    const event = newest ?? { rows: [] };
    if (newest) for (const [name, , text] of FIGURES) this.figures[name].textContent = text(newest);
    this.takeRows(event.rows);
    this.empty.hidden = this.lanes.size > 0 || Boolean(problem);
    if (newest) this.bars.replaceChildren(...memoryBars(newest));
    if (!this.element.hidden) this.redraw();
  }

  takeRows(rows) {
    const now = Date.now();
    for (const row of rows) {
      if (!this.lanes.has(row.sequence)) {
        const lane = new Lane(row.sequence);
        this.lanes.set(row.sequence, lane);
        this.laneList.append(lane.element);
      }
      this.lanes.get(row.sequence).take(row, now);
    }
    for (const [sequence, lane] of this.lanes) {
      if (now - lane.seen > LINGER_MS) {
        lane.element.remove();
        this.lanes.delete(sequence);
      } else {
        lane.element.classList.toggle("ended", now - lane.seen > 300);
      }
    }
  }

  // Also called when the view is opened.
  redraw() {
    const colours = Object.fromEntries(Object.entries(this.swatches).map(([kind, swatch]) => (
      [kind, getComputedStyle(swatch).backgroundColor])));
    for (const lane of this.lanes.values()) lane.draw(colours);
  }

  async toggleDemo() {
    if (this.demo) {
      this.demo.abort();
      return;
    }
    this.demo = new AbortController();
    try {
      await runDemo(this.model, this.demo.signal, (number) => {
        this.button.replaceChildren(icon("stop"), `Stop ${number} demo requests`);
      });
    } catch (error) {
      this.notify(error.message);
    }
    this.demo = null;
    this.button.replaceChildren(icon("play"), "Start demo requests");
  }
}

const FIGURES = [
  ["tokens", "tokens a second", (event) => event.tokens_per_s.toFixed(0)],
  ["prompt", "prompt tokens a second", (event) => event.prompt_tokens_per_s.toFixed(0)],
  ["rows", "rows", (event) => `${event.rows.length} of ${event.max_rows}`],
  ["waiting", "waiting", (event) => String(event.waiting)],
  ["hits", "cached prompt tokens", (event) => (event.prefix_cache?.hit_tokens ?? 0).toLocaleString("en")],
];

class Lane {
  constructor(sequence) {
    this.strides = []; // [drafts, committed] of each step, oldest first
    this.total = { committed: 0, accepted: 0, drafts: 0 };
    this.label = h("span", { class: "lane-state" });
    this.bar = h("span", { class: "fill" });
    this.track = h("span", { class: "bar prompt-bar", title: "Prompt that is computed" }, this.bar);
    this.canvas = h("canvas", { role: "img", "aria-label": "Steps of this row" });
    this.text = h("span", { class: "lane-text muted small" });
    this.element = h("li", { class: "lane" },
      h("div", { class: "lane-head" }, h("span", { class: "lane-name" }, `#${sequence}`), this.label, this.track),
      this.canvas, this.text);
  }

  take(row, now) {
    this.seen = now;
    this.strides.push(...row.strides);
    this.strides.splice(0, this.strides.length - MAX_STRIDES);
    this.total.committed += row.committed;
    this.total.accepted += row.accepted;
    this.total.drafts += row.accepted + row.rejected;
    const share = row.prompt_tokens ? Math.min(1, row.cells / row.prompt_tokens) : 1;
    this.bar.style.width = `${100 * share}%`;
    const isPrompt = row.state === "prompt";
    this.label.textContent = isPrompt ? "reading the prompt" : `depth ${row.depth}`;
    this.element.classList.toggle("is-prompt", isPrompt);
    const { committed, accepted, drafts } = this.total;
    const acceptance = drafts ? ` · ${Math.round((100 * accepted) / drafts)} % accepted` : "";
    this.text.textContent = isPrompt ? `${Math.min(row.cells, row.prompt_tokens)} of ${row.prompt_tokens} prompt tokens` : `${committed} tokens${acceptance}`;
    this.element.title = `${row.prompt_tokens} prompt tokens, ${committed} tokens${acceptance}`;
    this.canvas.setAttribute("aria-label", `Row ${this.label.textContent}, ${this.text.textContent}`);
  }

  draw(colours) {
    const { canvas } = this;
    const ratio = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const shown = this.strides.slice(-Math.floor(width / COLUMN));
    shown.forEach(([drafts, committed], index) => {
      const accepted = Math.max(0, Math.min(drafts, committed - 1));
      for (let level = 0; level <= drafts; level++) {
        pen.fillStyle = level === 0 ? colours.own : level <= accepted ? colours.accepted : colours.rejected;
        pen.fillRect(index * COLUMN, height - (level + 1) * CELL, COLUMN - 2, CELL - 1);
      }
    });
  }
}

export function memoryBars(event) {
  const bars = [];
  if (event.cache_budget_bytes) bars.push(memoryBar("Caches of the rows", event.cache_bytes, event.cache_budget_bytes));
  const prefixes = event.prefix_cache;
  if (prefixes?.budget_bytes) bars.push(memoryBar("Cached prefixes", prefixes.bytes, prefixes.budget_bytes));
  if (event.memory_bytes) {
    bars.push(h("div", { class: "memory" }, h("span", {}, "Memory of the process"), h("span", {}, bytes(event.memory_bytes))));
  }
  return bars;
}

function memoryBar(label, used, budget) {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${Math.min(100, (100 * used) / budget)}%`;
  return h("div", { class: "memory" }, h("span", {}, label),
    h("span", { class: "bar" }, fill), h("span", {}, `${bytes(used)} of ${bytes(budget)}`));
}
