// The gateway's interface, as this page uses it: the model, the load, and answers as streams.

const KEY_NAME = "lookonce-key";

// Addresses are relative, so that the page also works behind a proxy that adds a path.
const address = (path) => new URL(path, document.baseURI);

export class GatewayError extends Error {
  // `status` is the HTTP status; 0: the gateway could not be reached, or the answer broke off.
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key lives as long as the browser's tab. No other page can read it, and nothing else is stored.
export const key = {
  get: () => sessionStorage.getItem(KEY_NAME) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY_NAME, value) : sessionStorage.removeItem(KEY_NAME)),
};

function headers() {
  if (/[^ -~]/.test(key.get())) {
    throw new GatewayError("This key has characters that no key has. Choose “API key” above.", 401);
  }
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

const ADVICE = {
  401: "The gateway needs a key, or does not know this one. Choose “API key” above.",
  403: "This key may not do that.",
  413: "The request is too large for this gateway.",
  429: "The service is full at the moment; try again shortly.",
};

// A message of the service as a sentence.
function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?…)]$/.test(text) ? text : `${text}.`;
}

async function failure(response) {
  let told = "";
  try {
    told = sentence((await response.json()).error.message);
  } catch {
    told = `The gateway answered with the status ${response.status}.`;
  }
  const advice = ADVICE[response.status];
  return new GatewayError(advice ? `${advice} ${told}` : told, response.status);
}

async function fetched(path, options = {}) {
  const all = { ...headers(), ...options.headers };
  let response;
  try {
    response = await fetch(address(path), { ...options, headers: all });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new GatewayError("The gateway does not answer. Nothing is lost; try again when it is back.", 0);
  }
  if (!response.ok) {
    throw await failure(response);
  }
  return response;
}

// The served model and its limits.
export async function model() {
  const listed = await (await fetched("v1/models")).json();
  return listed.data[0];
}

// The load of one decoder.
export async function load() {
  return (await fetched("playground/load")).json();
}

const broken = () => new GatewayError("The connection broke in the middle of the answer.", 0);
const unreadable = () => new GatewayError("The gateway's answer cannot be read; a proxy may have changed it.", 0);

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw unreadable();
  }
}

// Yields the data of each event of a stream, until its end.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : broken();
    }
    if (piece.done) {
      throw broken();
    }
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data: "))) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") {
        return;
      }
      yield parsed(data);
    }
  }
}

// Asks for an answer, calls `onText` with each piece of its text and `onReasoning` with each piece of the reasoning
// before it, and returns {finish, usage, times}. Times are those of this browser, in seconds since the question.
export async function ask(body, { signal, onText, onReasoning = () => {} }) {
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  const response = await fetched("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const answer = { finish: null, usage: null, times: { first: null, end: null } };
  for await (const event of events(response)) {
    if (event?.error) {
      throw new GatewayError(sentence(String(event.error.message)), response.status);
    }
    const choice = event?.choices?.[0];
    if (choice?.delta?.reasoning_content) {
      answer.times.first ??= since();
      onReasoning(choice.delta.reasoning_content);
    }
    if (choice?.delta?.content) {
      answer.times.first ??= since();
      onText(choice.delta.content);
    }
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.usage = event?.usage ?? answer.usage;
  }
  if (!answer.usage?.lookonce) {
    throw unreadable();
  }
  answer.times.end = since();
  return answer;
}
