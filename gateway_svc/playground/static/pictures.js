// Pictures that a question is about: added, shown, removed. A picture is sent as the file that it is, byte by byte.

import { announce, make, megabytes, notify } from "./dom.js";

// Signs of base64 for one byte, and room for the rest of a request.
const GROWTH = 4 / 3;
const ROOM = 100_000;

// Kinds of files that browsers name in no way of their own.
const KNOWN_ENDINGS = /\.(avif|bmp|gif|heic|heif|jpe?g|png|tiff?|webp)$/i;

const isPicture = (file) => file.type.startsWith("image/") || KNOWN_ENDINGS.test(file.name);

// The bytes that a request with these files has at least.
export const sentBytes = (files) => files.reduce((sum, file) => sum + file.size * GROWTH, ROOM);

// Resolves to the file as a data URL. The type is only a label; the service looks at the bytes.
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.replace(/^data:[^,]*,/, `data:${file.type || "image/png"};base64,`));
    reader.onerror = () =>
      reject(new Error(`“${file.name}” cannot be read any more: it has changed or is gone. Begin a new chat with it.`));
    reader.readAsDataURL(file);
  });
}

// A small view of a picture. Browsers that cannot show its format get its name.
export function thumbnail(file) {
  const url = URL.createObjectURL(file);
  const image = make("img", { src: url, alt: file.name });
  image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
  image.addEventListener("error", () => {
    URL.revokeObjectURL(url);
    image.replaceWith(make("span", { className: "no-view" }, file.name));
  });
  return image;
}

// The pictures of the next question.
export class Tray {
  // `limits` returns {maxBytes, maxPictures} of a request; of more than `most` pictures, the last ones stay.
  constructor({ list, notice, limits, most = Infinity }) {
    this.files = [];
    this.list = list;
    this.notice = notice;
    this.limits = limits;
    this.most = most;
  }

  // Adds files, and says of each that it does not take why.
  add(files) {
    const refused = [];
    for (const file of files) {
      const reason = this.refusal(file);
      if (reason) {
        refused.push(reason);
      } else {
        this.files = [...this.files, file].slice(-this.most);
      }
    }
    notify(this.notice, refused.join(" "));
    this.show();
    announce(`${this.files.length} ${this.files.length === 1 ? "picture" : "pictures"} with the question.`);
  }

  refusal(file) {
    const name = `“${file.name}”`;
    if (!isPicture(file)) {
      return `${name} is no picture, so it was not added.`;
    }
    if (file.size === 0) {
      return `${name} is empty, so it was not added.`;
    }
    const kept = this.most === 1 ? [] : this.files;
    if (kept.length >= this.limits().maxPictures) {
      return `A question takes at most ${this.limits().maxPictures} pictures, so ${name} was not added.`;
    }
    if (sentBytes([...kept, file]) > this.limits().maxBytes) {
      const most = megabytes(Math.max(0, (this.limits().maxBytes - sentBytes(kept)) / GROWTH));
      return `${name} has ${megabytes(file.size)} and there is room for ${most}, so it was not added. Pictures are never shrunk here.`;
    }
    return "";
  }

  remove(file) {
    this.files = this.files.filter((one) => one !== file);
    notify(this.notice, "");
    this.show();
    announce(`${file.name} removed.`);
  }

  // Returns the files and empties the tray.
  take() {
    const { files } = this;
    this.files = [];
    this.show();
    return files;
  }

  show() {
    const items = this.files.map((file) => {
      const remove = make("button", { type: "button", className: "remove", "aria-label": `Remove ${file.name}` }, "×");
      remove.addEventListener("click", () => {
        this.remove(file);
        const form = this.list.parentElement;
        (this.list.querySelector("button") ?? form.querySelector("textarea, input[type=text]")).focus();
      });
      return make("li", { title: `${file.name}, ${megabytes(file.size)}` }, thumbnail(file), remove);
    });
    this.list.replaceChildren(...items);
    this.list.hidden = items.length === 0;
  }
}

// Lets a button open a file dialog that adds to a tray.
export function connectPicker(button, input, tray) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    tray.add(input.files);
    // The same file can be chosen again.
    input.value = "";
  });
}
