// An answer on the page.

import { speed } from "./decode.js";

/** Shows one answer's text, piece by piece and coloured by kind, with its figures. */
export class AnswerView {
  constructor(article) {
    this.text = article.querySelector(".text");
    this.facts = article.querySelector(".facts");
    this.speed = article.querySelector(".speed");
  }

  clear() {
    this.text.replaceChildren();
    this.facts.textContent = "";
    this.showSpeed(null);
  }

  /** What one step of the server brought. */
  add(answer, pieces) {
    if (!pieces.length) return;
    const step = element("span", "step");
    step.title = stepTitle(pieces);
    step.append(...pieces.map((piece) => element("span", piece.kind, piece.text)));
    this.text.append(step);
    this.showSpeed(speed(answer));
  }

  finish(answer) {
    this.facts.textContent = facts(answer);
    this.showSpeed(speed(answer));
  }

  showSpeed(value) {
    if (this.speed) this.speed.textContent = `${rounded(value)} tokens/s`;
  }
}

/** A figure with one decimal, or a dash where there is none. */
export function rounded(value, digits = 1) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

/** A finished answer in a few words. */
export function summary(answer) {
  return `${answer.later + 1} tokens at ${rounded(speed(answer))} tokens/s after the first`;
}

/** What the server says about a finished answer. */
function facts(answer) {
  const n = answer.numbers;
  if (!n) return "";
  const parts = [`${n.committed} tokens after the first in ${n.steps} steps`];
  if (n.steps) parts.push(`${rounded(n.acceptance_length, 2)} tokens per step`);
  if (n.verified) parts.push(`${n.accepted} of ${n.verified} verified guesses kept`);
  parts.push(`first token after ${rounded(n.time_to_first_token_ms, 0)} ms`);
  if (answer.finish === "length") parts.push("cut at the limit of tokens");
  return `${parts.join("; ")}.`;
}

function stepTitle(pieces) {
  const counts = new Map();
  for (const { kind } of pieces) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  return [...counts].map(([kind, count]) => `${count} ${kind}`).join(", ");
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
