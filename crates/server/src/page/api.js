// The way to the server: the key, errors in the API's words, and streams of events.

const STORED = "warpsmith-key";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Where pages may store nothing, the key lasts as long as the page.
let kept = "";

export function key() {
  try {
    return sessionStorage.getItem(STORED) ?? kept;
  } catch {
    return kept;
  }
}

export function setKey(value) {
  kept = value.trim();
  try {
    if (kept) sessionStorage.setItem(STORED, kept);
    else sessionStorage.removeItem(STORED);
  } catch {
    // It is kept above.
  }
}

/** Sends a request. Paths are relative, so that the page works behind a proxy with a prefix. */
async function send(path, options = {}) {
  const headers = { ...options.headers };
  const secret = key();
  if (secret) headers.Authorization = `Bearer ${secret}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    const told = (await response.json()).error;
    if (typeof told?.message === "string") message = told.message;
  } catch {
    // No JSON: a proxy has answered, perhaps.
  }
  const after = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new ApiError(response.status, message, Number.isFinite(after) ? after : undefined);
}

export async function getJson(path, signal) {
  return (await send(path, { signal })).json();
}

/** Sends JSON and yields each event of the answer as an object. */
export async function* postStream(path, body, signal) {
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.getReader();
  let ended = false;
  try {
    for await (const data of eventsOf(reader)) {
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      let event;
      try {
        event = JSON.parse(data);
      } catch {
        throw new ApiError(0, "The server sent an event that is not JSON.");
      }
      if (event.error) throw new ApiError(event.error.status ?? 0, event.error.message ?? "The request failed.");
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection broke off.");
  } finally {
    // Frees the pages of a request that nobody reads any more.
    reader.cancel().catch(() => {});
  }
  if (!ended) throw new ApiError(0, "The connection ended before the answer did.");
}

/** The data of each server-sent event. */
async function* eventsOf(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (data.length) yield data.join("\n");
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}
