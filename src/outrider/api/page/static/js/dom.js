// Builds elements. Text always becomes a text node, so no string is ever read as HTML here.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  theme: "M12 3a9 9 0 1 0 9 9a7 7 0 0 1-9-9z",
  plus: "M12 5v14M5 12h14",
  trash: "M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  redo: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  send: "M12 20V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M9 9.5h.01",
  sliders: "M4 8h10M18 8h2M4 16h2M10 16h10M16 6v4M8 14v4",
  tokens: "M4 6h5v5H4zM12 6h8v5h-8zM4 14h8v5H4zM15 14h5v5h-5z",
  close: "M6 6l12 12M18 6L6 18",
  play: "M8 5l11 7-11 7z",
  book: "M5 4h11a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM5 17a3 3 0 0 1 3-3h11",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(svg.namespaceURI, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, properties = {}) {
  return h("button", { class: "icon-button", type: "button", "aria-label": label, title: label, onclick, ...properties },
    icon(name));
}

// A button that copies `text()` and shows a tick for a moment.
export function copyButton(text, label = "Copy", properties = {}) {
  const button = iconButton("copy", label, async () => {
    try {
      await copy(text());
      button.replaceChildren(icon("check"));
    } catch (error) {
      button.replaceChildren(icon("close"));
      button.title = error.message;
    }
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  }, properties);
  return button;
}

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "hidden-copy", "aria-hidden": "true" }); // plain http on another machine
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function bytes(number) {
  if (number >= 1e9) return `${(number / 1e9).toFixed(2)} GB`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(0)} MB`;
  return `${Math.round(number / 1e3)} kB`;
}
