// The account of one answer: where its image tokens came from, what was computed, and where the time went.

import { make, milliseconds } from "./dom.js";

// Returns the figures of an answer's usage and times. Tokens of texts are those of the prompt that are no image's.
export function account(usage, times) {
  const images = usage.lookonce;
  const reusedText = Math.max(0, usage.prompt_tokens_details.cached_tokens - images.skipped_image_tokens);
  const textTokens = usage.prompt_tokens - images.image_tokens;
  const first = times.first ?? times.end;
  const waited = Math.min(images.queue_time_s, images.time_to_first_token_s);
  return {
    encoded: images.encoded_image_tokens,
    fetched: images.cached_image_tokens,
    skipped: images.skipped_image_tokens,
    computedText: Math.max(0, textTokens - reusedText),
    reusedText: Math.min(reusedText, textTokens),
    prefilled: usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens,
    prompt: usage.prompt_tokens,
    firstToken: images.time_to_first_token_s,
    firstText: first,
    waiting: waited,
    prompting: images.time_to_first_token_s - waited,
    travel: Math.max(0, first - images.time_to_first_token_s),
    answering: Math.max(0, times.end - first),
    end: times.end,
  };
}

// A mark in the colour of one kind of parts of a bar.
function swatch(kind) {
  return make("i", { className: `swatch ${kind}`, "aria-hidden": "true" });
}

// One figure with its name, and the colour of its part of a bar if it has one.
function figure(kind, name, value) {
  return make("div", {}, make("dt", {}, kind && swatch(kind), name), make("dd", {}, value));
}

// A bar whose parts have the widths of their values; the whole bar is `total`. Its content is also in the figures.
function bar(parts, total) {
  const row = make("div", { className: "bar", "aria-hidden": "true" });
  for (const [kind, value] of parts) {
    if (value > 0) {
      const part = make("span", { className: kind });
      part.style.width = `${(100 * value) / total}%`;
      row.append(part);
    }
  }
  return row;
}

// Returns the timeline of an answer. `longest` is the time that fills the bar, in seconds.
export function timeline(found, longest = found.end) {
  const tokens = [
    ["encoded", found.encoded],
    ["fetched", found.fetched],
    ["skipped", found.skipped],
    ["computed", found.computedText],
    ["reused", found.reusedText],
  ];
  const times = [
    ["travel", found.travel],
    ["waiting", found.waiting],
    ["prompting", found.prompting],
    ["answering", found.answering],
  ];
  return make(
    "div",
    { className: "timeline", role: "group", "aria-label": "How this answer was computed" },
    make(
      "dl",
      { className: "figures" },
      figure("encoded", "Encoded", String(found.encoded)),
      figure("fetched", "Fetched", String(found.fetched)),
      figure("skipped", "Skipped", String(found.skipped)),
      figure(null, "Prefilled", `${found.prefilled} of ${found.prompt}`),
      figure(null, "First token", milliseconds(found.firstToken)),
    ),
    make(
      "p",
      { className: "caption" },
      `Prompt of ${found.prompt} tokens, with `,
      swatch("computed"),
      `${found.computedText} of text prefilled`,
    ),
    bar(tokens, Math.max(1, found.prompt)),
    make("p", { className: "caption" }, `${milliseconds(found.end)} in all`),
    bar(times, Math.max(longest, Number.EPSILON)),
    make(
      "dl",
      { className: "times" },
      figure("travel", "Transfer", milliseconds(found.travel)),
      figure("waiting", "Wait", milliseconds(found.waiting)),
      figure("prompting", "Prompt", milliseconds(found.prompting)),
      figure("answering", "Answer", milliseconds(found.answering)),
    ),
  );
}

// The same figures as one sentence, for screen readers.
export function spoken(found) {
  return (
    `${found.encoded} image tokens encoded, ${found.fetched} fetched, ${found.skipped} skipped. ` +
    `First token after ${milliseconds(found.firstToken)}.`
  );
}
