// One answer: its request, its stream, and what is known of it.

import { stream } from "./api.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

/**
 * Decode one answer into a view and return it.
 *
 * `wish` has `mode`, `prompt` and the fields the request shall carry as they are. Times are milliseconds of
 * performance.now(); `later` counts the tokens after the first.
 */
export async function decode(wish, view, signal) {
  const answer = { text: "", firstAt: null, lastAt: null, later: 0, numbers: null, finish: null };
  view.clear();
  for await (const body of stream(PATHS[wish.mode], requestBody(wish), signal)) {
    signal.throwIfAborted();
    const pieces = body.dspark?.pieces ?? [];
    add(answer, body, pieces, performance.now());
    view.add(answer, pieces);
  }
  view.finish(answer);
  return answer;
}

/** Tokens per second after the first token, as they reached this page; null before there are any. */
export function speed(answer) {
  const seconds = (answer.lastAt - answer.firstAt) / 1000;
  return seconds > 0 && answer.later > 0 ? answer.later / seconds : null;
}

function requestBody({ mode, prompt, ...fields }) {
  const asked = mode === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return { ...fields, ...asked, dspark: { pieces: true } };
}

function add(answer, body, pieces, now) {
  answer.text += pieces.map((piece) => piece.text).join("");
  answer.finish = body.choices[0]?.finish_reason ?? answer.finish;
  if (pieces.length || answer.finish) answer.lastAt = now;
  if (pieces.length && answer.firstAt === null) answer.firstAt = now;
  else answer.later += pieces.length; // nearly: a token may add no text, until the server says
  if ("steps" in (body.dspark ?? {})) {
    answer.numbers = body.dspark;
    answer.later = body.dspark.committed;
  }
}
