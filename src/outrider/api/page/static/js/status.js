// The stream of GET /v1/status/stream: one connection for the whole page, while the page is visible.

import { events, request } from "./api.js";

const RETRY_MS = 2000;
const HISTORY_MS = 300_000; // what the charts show
const SAMPLE_MS = 1000; // between two points of a chart

const listeners = new Set();
let controller = null;

export const history = []; // {time, ...} of the last minutes, oldest first
export const state = { newest: null, problem: "" };

// `listener(state)` is called after each event, and when the connection is lost or refused.
export function listen(listener) {
  listeners.add(listener);
  listener(state);
}

export function start() {
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : connect()));
  connect();
}

export function connect() {
  stop();
  if (!document.hidden) follow((controller = new AbortController()));
}

function stop() {
  controller?.abort();
  controller = null;
}

async function follow(own) {
  while (controller === own) {
    try {
      const response = await request("v1/status/stream", { signal: own.signal });
      for await (const event of events(response, { untilDone: false })) take(event);
      state.problem = "The server ended the connection.";
    } catch (error) {
      if (error.name === "AbortError") return;
      state.problem = error.message;
      if (error.status === 401 || error.status === 403 || error.status === 404) {
        publish();
        return; // until a key is given
      }
    }
    publish();
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(event) {
  state.newest = event;
  state.problem = "";
  const now = Date.now();
  if (!history.length || now - history.at(-1).time >= SAMPLE_MS) {
    history.push({ time: now, tokens: event.tokens_per_s, prompt: event.prompt_tokens_per_s, rows: event.rows.length,
      waiting: event.waiting, cache: event.cache_bytes, prefixes: event.prefix_cache?.bytes ?? 0 });
    while (now - history[0].time > HISTORY_MS) history.shift();
  }
  publish();
}

function publish() {
  if (state.problem) state.newest = null;
  for (const listener of listeners) listener(state);
}
