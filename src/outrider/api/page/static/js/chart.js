// A small line chart of the last minutes, as SVG.

import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;
const MIN_SPAN_MS = 30_000; // of the time that a chart shows; it grows with the samples

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// `series`: [{label, name}], where `name` is a field of each sample. `format(value)` writes a value.
export class Chart {
  constructor(title, series, format) {
    Object.assign(this, { series, format });
    this.lines = series.map((_, index) => svg("polyline", { class: `line line-${index}` }));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "plot", "aria-label": `${title}: no figures yet` });
    this.picture.append(...this.lines);
    this.start = h("span", {});
    this.most = h("span", {});
    this.now = h("span", { class: "chart-now" });
    this.element = h("figure", { class: "chart card" },
      h("figcaption", {}, h("span", {}, title), this.now),
      this.picture,
      h("div", { class: "chart-foot muted small" }, this.start, this.most, h("span", {}, "now")));
    this.title = title;
  }

  update(samples) {
    if (!samples.length) return;
    const end = samples.at(-1).time;
    const span = Math.max(MIN_SPAN_MS, end - samples[0].time);
    const most = Math.max(1e-9, ...this.series.flatMap(({ name }) => samples.map((sample) => sample[name])));
    this.series.forEach(({ name }, index) => {
      const points = samples.map((sample) => {
        const x = WIDTH * (1 - (end - sample.time) / span);
        return `${x.toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 6) * (sample[name] / most)).toFixed(1)}`;
      });
      this.lines[index].setAttribute("points", points.join(" "));
    });
    const last = samples.at(-1);
    const now = this.series.map(({ label, name }) => `${label} ${this.format(last[name])}`.trim()).join(" · ");
    this.now.textContent = now;
    this.start.textContent = span < 120_000 ? `${Math.round(span / 1000)} s ago` : `${Math.round(span / 60_000)} min ago`;
    this.most.textContent = `most ${this.format(most)}`;
    this.picture.setAttribute("aria-label", `${this.title}: now ${now}, most ${this.format(most)}`);
  }
}
