// "How each token was won": the tokens of an answer, coloured by origin.

import { h } from "./dom.js";

export const ORIGINS = {
  head: "draft of the MTP head or draft model",
  ngram: "lookup: found earlier in the text",
  prediction: "prediction of the request",
  forced: "forced by the grammar",
  bonus: "the model's own, after accepted drafts",
  plain: "the model's own",
};

const className = ({ origin, place }) => `token ${origin}${origin === "head" ? ` place-${Math.min(place, 4)}` : ""}`;

function described({ token, origin, place, logprob }) {
  const parts = [JSON.stringify(token), ORIGINS[origin] ?? origin];
  if (place) parts.push(`place ${place}`);
  if (logprob !== undefined) parts.push(`probability ${(100 * Math.exp(logprob)).toFixed(1)} %`);
  return parts.join(" · ");
}

// `tokens`: the entries of token_origins in the server's answer. `add` takes further ones.
export class TokenView {
  constructor() {
    this.shown = 0;
    this.text = h("div", { class: "token-text" });
    this.detail = h("p", { class: "token-detail muted small", role: "status" }, "Point at a token.");
    this.counts = h("div", { class: "legend" });
    this.element = h("div", { class: "tokens" }, this.counts, this.text, this.detail);
    const show = (event) => {
      const about = event.target.closest(".token")?.title;
      if (about) this.detail.textContent = about;
    };
    this.text.addEventListener("pointerover", show);
    this.text.addEventListener("click", show);
  }

  update(tokens) {
    for (const token of tokens.slice(this.shown)) {
      this.text.append(h("span", { class: className(token), title: described(token) }, token.token));
    }
    this.shown = tokens.length;
    this.counts.replaceChildren(...this.legend(tokens));
  }

  legend(tokens) {
    const counts = new Map();
    for (const { origin } of tokens) counts.set(origin, (counts.get(origin) ?? 0) + 1);
    return Object.keys(ORIGINS).filter((origin) => counts.has(origin)).map((origin) => (
      h("span", { title: ORIGINS[origin] },
        h("span", { class: `swatch token ${origin}${origin === "head" ? " place-1" : ""}` }),
        `${origin} ${Math.round((100 * counts.get(origin)) / tokens.length)} %`)));
  }
}
