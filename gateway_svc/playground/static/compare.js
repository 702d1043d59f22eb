// The tab that asks one question twice: cold, about a file that no cache knows, and warm, once more.

import { announce, byId, milliseconds, notify, swap } from "./dom.js";
import { ask } from "./gateway.js";
import { connectPicker, dataUrl, Tray } from "./pictures.js";
import { sample } from "./sample.js";
import { limits, modelName, noteFailure, noteReuse } from "./strip.js";
import { account, timeline } from "./timeline.js";
import { randomText, uncachedCopy } from "./uncached.js";

const MAX_TOKENS = 256;
// Below this ratio of two times, chance decides which is smaller.
const CLEAR_RATIO = 1.2;

let running = null;
let tray = null;

const columns = () => ["cold", "warm"].map((name) => ({ text: byId(`${name}-text`), below: byId(`${name}-below`) }));

function setBusy(isBusy) {
  const buttons = [byId("compare-ask"), byId("compare-stop")];
  swap(...(isBusy ? buttons.reverse() : buttons));
  byId("results").setAttribute("aria-busy", String(isBusy));
}

// Asks once and shows the answer in a column. Resolves to the account of the answer.
async function answered(body, column) {
  column.text.textContent = "Asking …";
  let shown = "";
  const onText = (text) => {
    shown += text;
    column.text.textContent = shown;
  };
  const answer = await ask(body, { signal: running.signal, onText });
  column.text.textContent = shown;
  const found = account(answer.usage, answer.times);
  noteReuse(found);
  column.below.replaceChildren(timeline(found));
  return found;
}

function verdict(cold, warm) {
  const times = `First text after ${milliseconds(cold.firstText)} cold, ${milliseconds(warm.firstText)} warm`;
  const ratio = cold.firstText / warm.firstText;
  if (ratio >= CLEAR_RATIO) {
    return `${times}: ${ratio.toFixed(1)} times as fast.`;
  }
  return `${times}. This time, the caches saved no time; they still saved the work.`;
}

async function bodyOf(question, copy) {
  const picture = { type: "image_url", image_url: { url: await dataUrl(copy) } };
  return {
    model: await modelName(),
    messages: [{ role: "user", content: [picture, { type: "text", text: question }] }],
    temperature: 0,
    max_completion_tokens: MAX_TOKENS,
    // Keys and values of earlier prompts are not for this pair, those of its first prompt are for its second one.
    cache_salt: randomText(),
  };
}

async function runBoth(question, copy) {
  const [cold, warm] = columns();
  for (const column of [cold, warm]) {
    column.text.textContent = "";
    column.below.replaceChildren();
  }
  byId("results").hidden = false;
  byId("results").scrollIntoView({ block: "nearest" });
  notify(byId("verdict"), "");
  const body = await bodyOf(question, copy);
  const first = await answered(body, cold);
  const second = await answered(body, warm);
  const longest = Math.max(first.end, second.end);
  cold.below.replaceChildren(timeline(first, longest));
  warm.below.replaceChildren(timeline(second, longest));
  notify(byId("verdict"), verdict(first, second));
  byId("verdict").scrollIntoView({ block: "nearest" });
  announce(byId("verdict").textContent);
}

async function submit() {
  const notice = byId("compare-notice");
  const question = byId("compare-question").value.trim();
  if (running) {
    return;
  }
  if (tray.files.length === 0 || !question) {
    notify(notice, tray.files.length ? "Write a question." : "Add a picture.");
    return;
  }
  notify(notice, "");
  running = new AbortController();
  setBusy(true);
  try {
    const copy = await uncachedCopy(tray.files[0]);
    if (copy) {
      await runBoth(question, copy);
    } else {
      notify(notice, "This tab writes a comment into a copy of the picture, which it can for PNG and JPEG only.");
    }
  } catch (error) {
    noteFailure(error);
    notify(notice, running.signal.aborted ? "You stopped the comparison." : error.message);
    for (const column of columns().filter((one) => !one.below.hasChildNodes())) {
      column.text.textContent = "Not answered.";
    }
  }
  running = null;
  setBusy(false);
}

export function stopCompare() {
  running?.abort();
}

// Sets the picture of the comparison.
export function addToCompare(files) {
  tray.add(files);
}

export function startCompare() {
  tray = new Tray({ list: byId("compare-pictures"), notice: byId("compare-notice"), limits, most: 1 });
  connectPicker(byId("compare-add"), byId("compare-file"), tray);
  byId("compare-draw").addEventListener("click", async () => tray.add([await sample()]));
  byId("compare-stop").addEventListener("click", stopCompare);
  byId("compare").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
}
