// The box in which a message is written, with its pictures.

import { h, icon, iconButton } from "./dom.js";

const MAX_PICTURE_BYTES = 20 * 2 ** 20; // the server's default (--max-image-bytes)

export class Composer {
  // `send(text, images)`, `stop()`, `editLast()`, `notify(text)`: what the chat does.
  constructor(actions) {
    this.actions = actions;
    this.images = [];
    this.readsImages = false;
    this.input = h("textarea", { rows: "1", id: "composer", "aria-label": "Message", placeholder: "Ask something",
      oninput: () => this.resize(), onkeydown: (event) => this.onKey(event), onpaste: (event) => this.onPaste(event) });
    this.thumbnails = h("div", { class: "pictures" });
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, "aria-label": "Pictures",
      onchange: () => this.attach(this.file.files) });
    this.pictureButton = iconButton("picture", "Attach a picture", () => this.file.click(), { hidden: true });
    this.button = h("button", { class: "icon-button send", type: "submit" });
    this.element = h("form", { class: "composer", onsubmit: (event) => this.onSubmit(event) },
      this.thumbnails, h("div", { class: "composer-row" }, this.pictureButton, this.file, this.input, this.button));
    this.setRunning(false);
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    const label = isRunning ? "Stop" : "Send";
    this.button.replaceChildren(icon(isRunning ? "stop" : "send"));
    this.button.setAttribute("aria-label", label);
    this.button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  }

  setReadsImages(readsImages) {
    this.readsImages = readsImages;
    this.pictureButton.hidden = !readsImages;
  }

  focus() {
    this.input.focus();
  }

  fill(text) {
    this.input.value = text;
    this.resize();
    this.focus();
  }

  onSubmit(event) {
    event.preventDefault();
    if (this.isRunning) {
      this.actions.stop();
      return;
    }
    const text = this.input.value.trim();
    if (!text && !this.images.length) return;
    const images = this.images;
    this.images = [];
    this.showPictures();
    this.fill("");
    this.actions.send(text, images);
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.isRunning) this.element.requestSubmit();
    } else if (event.key === "ArrowUp" && this.input.value === "") {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  onPaste(event) {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      this.attach(event.clipboardData.files);
    }
  }

  async attach(files) {
    for (const file of files) {
      if (!this.readsImages) this.actions.notify("This model reads text only: the picture was not attached.");
      else if (!file.type.startsWith("image/")) this.actions.notify(`${file.name} is not a picture.`);
      else if (file.size > MAX_PICTURE_BYTES) this.actions.notify(`${file.name} is larger than 20 MiB.`);
      else this.images.push(await dataUrl(file));
    }
    this.file.value = "";
    this.showPictures();
    this.focus();
  }

  showPictures() {
    this.thumbnails.replaceChildren(...this.images.map((src, index) => h("div", { class: "picture" },
      h("img", { src, alt: "Picture to send" }),
      iconButton("close", "Remove the picture", () => {
        this.images.splice(index, 1);
        this.showPictures();
      }))));
  }

  resize() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 240)}px`;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
