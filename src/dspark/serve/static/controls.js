// What the user asks for.

const byId = (id) => document.getElementById(id);

/** The form's fields as a request has them; what is left empty is left out, so that the server's default holds. */
export function readWish(model) {
  const fields = { model, mode: byId("mode").value, prompt: byId("prompt").value };
  for (const [name, id] of [["temperature", "temperature"], ["seed", "seed"], ["max_tokens", "max-tokens"]]) {
    const written = byId(id).value.trim();
    if (written) fields[name] = asNumber(written);
  }
  for (const name of ["proposer", "policy"]) fields[name] = byId(name).value;
  return fields;
}

/** The same, for a race: always with a seed, which the form then shows, and with the server's proposer. */
export function readRace(state) {
  if (!byId("seed").value.trim()) byId("seed").value = crypto.getRandomValues(new Uint32Array(1))[0];
  return { ...readWish(state.model), proposer: state.proposer };
}

/** Offer what the server has; what the user chose before stays chosen. */
export function showOffers(state) {
  setOptions(byId("proposer"), [...new Set([state.proposer, "none"])]);
  setOptions(byId("policy"), [state.policy]);
}

/** What is no number goes to the server as it is, which says what is wrong with it. */
function asNumber(written) {
  const number = Number(written);
  const exact = Number.isInteger(number) ? Number.isSafeInteger(number) : Number.isFinite(number);
  return exact ? number : written;
}

function setOptions(select, names) {
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}
