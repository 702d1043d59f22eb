// Wires the page: tabs, the dialog for the key, pictures that are dropped or pasted, and shortcuts.

import { addToChat, startChat, stopChat } from "./chat.js";
import { addToCompare, startCompare, stopCompare } from "./compare.js";
import { byId, notify } from "./dom.js";
import { key } from "./gateway.js";
import { lookNow, startLooking } from "./strip.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
const isChat = () => tabs[0].getAttribute("aria-selected") === "true";

function select(chosen) {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    panelOf(tab).hidden = !isChosen;
  }
  chosen.focus();
}

function startTabs() {
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) {
        event.preventDefault();
        select(tabs[(index + step + tabs.length) % tabs.length]);
      }
    });
  }
}

function startKeys() {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  const save = (value) => {
    key.set(value);
    dialog.close();
    lookNow();
  };
  byId("key-button").addEventListener("click", () => {
    field.value = key.get();
    dialog.showModal();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    save(field.value.trim());
  });
  byId("key-forget").addEventListener("click", () => save(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  // The key is not left in a field that nobody sees.
  dialog.addEventListener("close", () => {
    field.value = "";
  });
}

function take(files) {
  if (byId("key-dialog").open) {
    return;
  }
  (isChat() ? addToChat : addToCompare)(files);
}

function startDrops() {
  const page = document.documentElement;
  let depth = 0;
  const end = () => {
    depth = 0;
    page.classList.remove("dropping");
  };
  document.addEventListener("dragenter", (event) => {
    event.preventDefault();
    depth += 1;
    page.classList.add("dropping");
  });
  document.addEventListener("dragleave", () => {
    depth -= 1;
    if (depth <= 0) {
      end();
    }
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    end();
    if (event.dataTransfer.files.length) {
      take(event.dataTransfer.files);
    } else {
      notify(byId(isChat() ? "chat-notice" : "compare-notice"), "Drop picture files; addresses are not fetched here.");
    }
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) {
      event.preventDefault();
      take(event.clipboardData.files);
    }
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) {
    stopChat();
    stopCompare();
  }
});
startTabs();
startKeys();
startDrops();
startChat();
startCompare();
startLooking();
