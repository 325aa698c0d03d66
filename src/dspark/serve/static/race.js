// The same seeded prompt without and with speculation.

import { decode, speed } from "./decode.js";
import { rounded } from "./view.js";

const SHOWN = 24; // characters of each text from where they part

/**
 * Decode twice, one after the other, so that neither takes computing time from the other. Returns `{equal, sentence}`.
 *
 * Plain decoding comes first; that the second run may find the prompt cached changes no speed, because speeds are
 * taken after the first token.
 */
export async function race(wish, views, signal) {
  const plain = await decode({ ...wish, proposer: "none" }, views.plain, signal);
  const fast = await decode(wish, views.fast, signal);
  const equal = plain.text === fast.text;
  return { equal, sentence: `${texts(plain.text, fast.text)} ${speeds(speed(plain), speed(fast))}` };
}

/** Are they equal, and if not, where do they part? */
export function texts(plain, fast) {
  if (plain === fast) return `The texts are equal, all ${[...plain].length} characters.`;
  let at = 0;
  while (at < plain.length && plain[at] === fast[at]) at += 1;
  const [without, withIt] = [plain, fast].map((text) => JSON.stringify(text.slice(at, at + SHOWN)));
  return (
    `The texts differ after ${at} characters: ${without} without and ${withIt} with speculation. ` +
    "Rounding may decide near ties; a server started with --exact has none."
  );
}

function speeds(plain, fast) {
  if (plain === null || fast === null) return "The answers are too short to compare speeds.";
  return (
    `With speculation ${rounded(fast)} tokens/s, without ${rounded(plain)}: ` +
    `${rounded(fast / plain, 2)} times the speed.`
  );
}
