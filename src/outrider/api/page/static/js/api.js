// Requests to the server: the API key, errors, and server-sent events.

const KEY = "outrider-api-key";
const SENDABLE = /^[\x20-\x7e]*$/; // in a header

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 0: the server was not reached
  }
}

// Paths are relative to the page, so that the page also works below a path of a proxy.
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.");
  }
  if (response.ok) return response;
  const problem = new Problem(await messageOf(response), response.status);
  if (response.status === 401 && key === sessionStorage.getItem(KEY)) askForKey(problem.message); // not of an older key
  throw problem;
}

export async function get(path) {
  return (await request(path)).json();
}

export function post(path, body, options = {}) {
  return request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    ...options,
  });
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// The JSON of each event, until "[DONE]". Raises Problem if the connection ends before (`untilDone`).
export async function* events(response, { untilDone = true } = {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The connection to the server was lost.");
    }
    if (part.done) {
      if (untilDone) throw new Problem("The connection to the server was lost.");
      return;
    }
    text += part.value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const event = text.slice(0, end);
      if (!event.startsWith("data: ")) continue; // a keep-alive comment
      if (event === "data: [DONE]") return;
      yield JSON.parse(event.slice("data: ".length));
    }
  }
}

// -- the key --------------------------------------------------------------------------------------------

let whenGiven = () => {};

export function onKey(listener) {
  whenGiven = listener;
}

function askForKey(reason) {
  const dialog = document.getElementById("key-dialog");
  if (dialog.open) return; // of another request: what it says now may be newer
  document.getElementById("key-problem").textContent = sessionStorage.getItem(KEY) === null ? "" : reason;
  dialog.showModal();
}

export function setUpKeyDialog() {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key-input");
  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    input.value = "";
    if (!SENDABLE.test(key)) {
      document.getElementById("key-problem").textContent = "This is no key: it has characters that cannot be sent.";
      return;
    }
    sessionStorage.setItem(KEY, key);
    dialog.close();
    whenGiven();
  });
}
