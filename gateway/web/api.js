// Talks to this server: adds the key, reads event streams, turns errors into ApiError.

const KEY = "tandem.key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// A seed has 64 bits, more than a number here can hold: it stays the text that was sent.
const keepSeeds = (name, value, context) => (name === "seed" && context?.source ? context.source : value);

export const parse = (text) => JSON.parse(text, keepSeeds);

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (options.body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // An answer that is no JSON says what its status says.
  }
  throw new ApiError(answer.status, error.message ?? `HTTP ${answer.status}`, error.code);
}

export async function get(path) {
  return parse(await (await send(path)).text());
}

export async function post(path, body) {
  return parse(await (await send(path, { method: "POST", body: JSON.stringify(body) })).text());
}

/** Yields {event, data} of a server-sent event stream; data is text. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("data: ")) data.push(line.slice(6));
          else if (line.startsWith("event: ")) event = line.slice(7);
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* stream(path, { body, signal } = {}) {
  const options = { signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  yield* eventsOf(await send(path, options));
}
