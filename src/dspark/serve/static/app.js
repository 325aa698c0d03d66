// The page: what its buttons and keys do.

import { useKey } from "./api.js";
import { readRace, readWish, showOffers } from "./controls.js";
import { decode } from "./decode.js";
import { Live } from "./live.js";
import { race } from "./race.js";
import { AnswerView, summary } from "./view.js";

const byId = (id) => document.getElementById(id);
const views = {
  single: new AnswerView(document.querySelector("#single article")),
  plain: new AnswerView(document.querySelectorAll("#double article")[0]),
  fast: new AnswerView(document.querySelectorAll("#double article")[1]),
};
let state = null; // what the server said of itself last
let running = null; // the AbortController of what is being decoded

const live = new Live(
  (heard) => {
    if (!state) showFault(null);
    state = heard;
    byId("about").textContent = `${state.model}, proposer ${state.proposer}, policy ${state.policy}`;
    byId("race").disabled = state.proposer === "none";
    byId("race").title = byId("race").disabled ? "This server was started without a proposer" : "";
    showOffers(state);
  },
  (error) => {
    state = null;
    showFault(error);
  },
);

function ask() {
  return run("Decoding …", false, async (signal) => {
    const answer = await decode(readWish(state.model), views.single, signal);
    say(`Done: ${summary(answer)}.`);
  });
}

function startRace() {
  return run("Racing: first without, then with speculation …", true, async (signal) => {
    byId("fast-heading").textContent = `With speculation (${state.proposer})`;
    for (const view of [views.plain, views.fast]) view.clear();
    const result = await race(readRace(state), views, signal);
    say(result.sentence, result.equal ? "equal" : "different");
  });
}

/** Do one thing at a time; a new one ends the one before. */
async function run(about, isRace, work) {
  running?.abort();
  const mine = (running = new AbortController());
  byId("single").hidden = isRace;
  byId("double").hidden = !isRace;
  byId("stop").disabled = false;
  showFault(null);
  say(about);
  try {
    if (!state) await live.poll();
    if (state) await work(mine.signal);
  } catch (error) {
    if (running === mine) error.name === "AbortError" ? say("Stopped.") : showFault(error);
  } finally {
    if (running === mine) {
      running = null;
      byId("stop").disabled = true;
    }
  }
}

function stop() {
  if (!running) return;
  running.abort();
  byId("prompt").focus();
}

function say(sentence, kind = "") {
  byId("status").textContent = sentence;
  byId("status").className = kind;
}

/** Show what went wrong in the server's words, and ask for the key where that is what is missing; null: all is well. */
function showFault(error) {
  if (error) say("");
  byId("fault").hidden = !error;
  byId("fault").textContent = error ? error.message : "";
  byId("key-form").hidden = error?.status !== 401;
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("race").addEventListener("click", startRace);
byId("stop").addEventListener("click", stop);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  live.poll();
});
live.poll();
