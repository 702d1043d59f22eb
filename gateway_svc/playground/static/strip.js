// The strip at the top: the model, whether it serves, its load, and how much of this page's images was reused.

import { announce, byId } from "./dom.js";
import { load, model } from "./gateway.js";

const LOOK_MS = 2500;
// Until the gateway has told its own limit.
const USUAL_MAX_BYTES = 64 * 2 ** 20;

let served = null;
let state = "";
let imageTokens = 0;
let reusedTokens = 0;
let timer = null;

// The limits of this gateway and its model on one request.
export const limits = () => ({
  maxBytes: served?.lookonce.max_body_bytes ?? USUAL_MAX_BYTES,
  maxPictures: served?.lookonce.max_images_per_prompt ?? Infinity,
});

// Resolves to the name of the model. Rejects as the gateway's interface does.
export async function modelName() {
  served ??= await model();
  return served.id;
}

// Counts the image tokens of one answer: over all answers of this page, the share that nobody had to encode for them.
export function noteReuse(found) {
  imageTokens += found.encoded + found.fetched + found.skipped;
  reusedTokens += found.fetched + found.skipped;
  if (imageTokens > 0) {
    set("reused", percent(reusedTokens / imageTokens));
  }
}

// Takes note of a failed question: the name of the model may have changed.
export function noteFailure(error) {
  if (error.status === 404) {
    served = null;
  }
}

// Asks for the model and the load at once, for example with a new key.
export function lookNow() {
  served = null;
  look();
}

export function startLooking() {
  document.addEventListener("visibilitychange", look);
  look();
}

const percent = (share) => `${Math.round(share * 100)} %`;

function set(name, text) {
  byId(`strip-${name}`).textContent = text;
}

function show(next, text) {
  byId("strip").dataset.state = next;
  set("state", text);
  if (state && state !== next) {
    announce(text);
  }
  state = next;
}

function showFailure(error) {
  // After an outage, another model may be served.
  served = null;
  for (const name of ["running", "waiting", "kv"]) {
    set(name, "–");
  }
  if (error.status === 0) {
    show("gone", "Gateway not reachable");
  } else if (error.status === 401 || error.status === 403) {
    show("locked", "API key needed");
  } else {
    show("gone", "No decoder serves");
  }
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) {
    return;
  }
  try {
    const name = await modelName();
    const now = await load();
    set("model", name);
    set("running", String(now.running_requests));
    set("waiting", String(now.waiting_requests));
    set("kv", percent(now.kv_cache_usage));
    show("serving", "Serving");
  } catch (error) {
    showFailure(error);
  }
  clearTimeout(timer);
  // Asking again would be refused again, until there is another key.
  if (state !== "locked") {
    timer = setTimeout(look, LOOK_MS);
  }
}
