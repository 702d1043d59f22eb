// The tab for conversations: questions with pictures, answers as they come, and a timeline under each answer.

import { announce, byId, make, notify, swap } from "./dom.js";
import { ask } from "./gateway.js";
import { connectPicker, dataUrl, sentBytes, thumbnail, Tray } from "./pictures.js";
import { sample } from "./sample.js";
import { limits, modelName, noteFailure, noteReuse } from "./strip.js";
import { account, spoken, timeline } from "./timeline.js";

// Distance from the end of the page within which it follows an answer, pixels.
const NEAR_END = 120;

// The answers so far, oldest first: {question, files, answer, state}. States are running, done, stopped and failed.
let turns = [];
let running = null;
let tray = null;

// What the model has to know of a conversation: turns with an answer, also an incomplete one.
const heard = (before) => before.filter((turn) => turn.answer.trim() && turn.state !== "running");

async function userMessage({ question, files }) {
  const urls = await Promise.all(files.map(dataUrl));
  const pictures = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: question ? [...pictures, { type: "text", text: question }] : pictures };
}

async function conversation(turn) {
  const messages = [];
  for (const earlier of heard(turns.slice(0, turns.indexOf(turn)))) {
    messages.push(await userMessage(earlier), { role: "assistant", content: earlier.answer });
  }
  return [...messages, await userMessage(turn)];
}

function showTurn(turn) {
  turn.reasoning = make("p", { className: "reasoning-text" });
  turn.thoughts = make("details", { hidden: true }, make("summary", {}, "Reasoning"), turn.reasoning);
  turn.text = make("p", { className: "answer-text" });
  turn.note = make("p", { className: "note", hidden: true });
  turn.below = make("div");
  turn.article = make("article", { className: "answer", "aria-label": "Answer" }, turn.thoughts, turn.text, turn.note, turn.below);
  const pictures = turn.files.length ? make("div", { className: "shown" }, ...turn.files.map(thumbnail)) : null;
  const question = turn.question ? make("p", {}, turn.question) : null;
  byId("turns").append(
    make("li", {}, make("div", { className: "question" }, pictures, question), turn.article),
  );
}

function follow(change) {
  const page = document.documentElement;
  const isNear = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END;
  change();
  if (isNear) {
    page.scrollTop = page.scrollHeight;
  }
}

function setBusy(isBusy) {
  const buttons = [byId("ask"), byId("stop")];
  swap(...(isBusy ? buttons.reverse() : buttons));
  byId("new").disabled = isBusy || turns.length === 0;
  for (const retry of document.querySelectorAll(".retry")) {
    retry.disabled = isBusy;
  }
}

function showEnd(turn, found) {
  if (found) {
    noteReuse(found);
    turn.below.replaceChildren(timeline(found));
  }
  if (turn.state === "failed") {
    const retry = make("button", { type: "button", className: "retry" }, "Try again");
    retry.addEventListener("click", () => run(turn));
    turn.below.replaceChildren(retry);
  }
}

const NOTES = {
  stopped: "You stopped this answer.",
  length: "The answer ends here because it has reached its largest length.",
  abort: "The service ended this answer.",
};

async function run(turn) {
  if (running) {
    return;
  }
  running = new AbortController();
  Object.assign(turn, { answer: "", state: "running" });
  turn.text.textContent = "";
  turn.reasoning.textContent = "";
  turn.thoughts.hidden = true;
  turn.below.replaceChildren();
  notify(turn.note, "");
  turn.article.setAttribute("aria-busy", "true");
  setBusy(true);
  let found = null;
  try {
    const body = { model: await modelName(), messages: await conversation(turn) };
    const answer = await ask(body, {
      signal: running.signal,
      onText: (text) => {
        turn.answer += text;
        follow(() => turn.text.append(text));
      },
      onReasoning: (text) => {
        turn.thoughts.hidden = false;
        follow(() => turn.reasoning.append(text));
      },
    });
    turn.state = "done";
    found = account(answer.usage, answer.times);
    notify(turn.note, NOTES[answer.finish] ?? "");
    announce(`Answer: ${turn.answer} ${spoken(found)}`);
  } catch (error) {
    noteFailure(error);
    turn.state = running.signal.aborted ? "stopped" : "failed";
    const text = running.signal.aborted ? NOTES.stopped : error.message;
    notify(turn.note, turn.answer || turn.state === "failed" ? text : `${text} The model does not hear of this question.`);
    announce(text);
  }
  turn.note.classList.toggle("error", turn.state === "failed");
  turn.article.removeAttribute("aria-busy");
  running = null;
  follow(() => showEnd(turn, found));
  setBusy(false);
}

function submit() {
  const field = byId("question");
  const question = field.value.trim();
  const notice = byId("chat-notice");
  if (running) {
    notify(notice, "An answer is on its way. Wait for its end, or stop it with Escape.");
    return;
  }
  if (!question && tray.files.length === 0) {
    notify(notice, "Write a question, or add a picture.");
    field.focus();
    return;
  }
  const all = [...heard(turns).flatMap((turn) => turn.files), ...tray.files];
  if (sentBytes(all) > limits().maxBytes) {
    notify(notice, "The pictures of this conversation are too large for one request. Begin a new conversation.");
    return;
  }
  if (all.length > limits().maxPictures) {
    notify(notice, `A conversation takes at most ${limits().maxPictures} pictures. Begin a new one.`);
    return;
  }
  notify(notice, "");
  const turn = { question, files: tray.take(), answer: "", state: "running" };
  field.value = "";
  turns.push(turn);
  byId("welcome").hidden = true;
  showTurn(turn);
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  run(turn);
}

export function stopChat() {
  running?.abort();
}

// Adds pictures to the next question.
export function addToChat(files) {
  tray.add(files);
  byId("question").focus();
}

export function startChat() {
  tray = new Tray({ list: byId("chat-pictures"), notice: byId("chat-notice"), limits });
  connectPicker(byId("add"), byId("chat-file"), tray);
  connectPicker(byId("photograph"), byId("chat-camera"), tray);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  byId("stop").addEventListener("click", stopChat);
  byId("draw").addEventListener("click", async () => addToChat([await sample()]));
  byId("new").addEventListener("click", () => {
    turns = [];
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    notify(byId("chat-notice"), "");
    setBusy(false);
    announce("New conversation.");
    byId("question").focus();
  });
  setBusy(false);
}
