// The server's HTTP API, as far as the page needs it.

/** What the server refused, in its own sentence. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Paths are relative to the page, so that it also works below a prefix of a reverse proxy; without the user name and
// password that the page's address may carry, which fetch refuses.
const home = location.origin + location.pathname;
let apiKey = "";

/** Send this key from now on; it is kept in memory only. */
export function useKey(key) {
  apiKey = key;
}

/** The body of `GET v1/dspark/state`. */
export async function readState() {
  return (await call("v1/dspark/state")).json();
}

/** Sends one request and yields the bodies of its stream. Throws ServerError, also for a fault inside the stream. */
export async function* stream(path, body, signal) {
  const options = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) throw new ServerError("The connection ended before the answer did.");
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.slice("data: ".length);
        if (data === "[DONE]") return;
        yield unlessFault(JSON.parse(data));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended by itself
  }
}

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  const sent = fetch(new URL(path, home), { ...options, headers });
  const response = await reached(sent, "The server does not answer; is it running?");
  if (!response.ok) throw new ServerError(await sentence(response), response.status);
  return response;
}

function read(reader) {
  return reached(reader.read(), "The connection broke before the answer was complete.");
}

/** A promise of the network's; a failure of the network becomes a sentence, a stop by the user stays what it is. */
async function reached(promise, otherwise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(otherwise);
  }
}

async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`; // a proxy's page, perhaps
  }
}

function unlessFault(body) {
  if (body.error) throw new ServerError(body.error.message);
  return body;
}
