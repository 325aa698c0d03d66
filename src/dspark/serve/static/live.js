// What the server is doing now.

import { readState } from "./api.js";
import { barChart, lineChart } from "./chart.js";
import { rounded } from "./view.js";

const EVERY_MS = 1000;
const SPAN_S = 60;
const OVER_TIME = [
  ["speed-chart", "tokens_per_s", "tokens/s"],
  ["batch-chart", "batch_size", "requests per step"],
  ["verify-chart", "verify_length", "tokens per request"],
];

/** Asks the server for its state again and again while the page can be seen, and draws it. */
export class Live {
  /** `onState` and `onFault` are told what each question brought. */
  constructor(onState, onFault) {
    this.onState = onState;
    this.onFault = onFault;
    this.history = [];
    this.timer = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.poll()));
  }

  pause() {
    clearTimeout(this.timer);
  }

  async poll() {
    this.pause();
    try {
      const state = await readState();
      this.show(state);
      this.onState(state);
    } catch (error) {
      this.onFault(error);
      if (error.status === 401) return; // until there is a key
    }
    this.pause(); // another question may have been asked meanwhile
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), EVERY_MS);
  }

  show(state) {
    const now = performance.now() / 1000;
    this.history.push([now, state]);
    this.history = this.history.filter(([at]) => at >= now - SPAN_S);
    for (const [name, value] of Object.entries(figures(state))) {
      document.querySelector(`[data-figure=${name}]`).textContent = value;
    }
    for (const [id, field, label] of OVER_TIME) {
      const points = this.history.map(([at, one]) => [now - at, one[field]]);
      lineChart(document.getElementById(id), points, { span: SPAN_S, label });
    }
    barChart(document.getElementById("slot-chart"), state.slot_acceptance, { label: "% kept", across: "slot" });
    document.getElementById("window").textContent = `Every value is of the ${state.window_s} s before it.`;
  }
}

function figures(state) {
  return {
    tokens_per_s: rounded(state.tokens_per_s),
    acceptance_length: rounded(state.acceptance_length, 2),
    running: `${state.running} of ${state.max_batch}`,
    waiting: `${state.waiting}`,
    cache: `${Math.round((100 * state.kv_slots_used) / state.kv_slots)} %`,
  };
}
