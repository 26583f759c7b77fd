// Requests and where their time went: queue, prefill, decode.

import { byId, count, make, plural, setText, time } from "./dom.js";

/** Requests that are listed; of more, the first. */
const MOST = 40;

const ENDS = {
  stop: "stop",
  length: "length",
  cancelled: "cancelled",
  deadline: "too late",
  failed: "failed",
};

/** The three parts of a request's time until `now`. */
function partsOf(request, now) {
  const { arrived_ms: arrived, started_ms: started, first_token_ms: first, ended_ms: ended } = request;
  const end = ended ?? now;
  const begun = started ?? first ?? end;
  const spoken = first ?? end;
  return {
    queue: Math.max(begun - arrived, 0),
    prefill: Math.max(spoken - begun, 0),
    decode: first === null ? 0 : Math.max(end - first, 0),
  };
}

const total = (parts) => parts.queue + parts.prefill + parts.decode;

export function showRequests({ now_ms: now, age_ms: age, engine }) {
  const at = now - age;
  const rows = engine.requests.map((request) => ({ request, parts: partsOf(request, at) }));
  const { running, waiting } = engine.others;
  const others = running + waiting ? plural(running + waiting, "other request") : "";
  show("requests", "no-requests", rows, others || "None.", (request) => {
    const { state, prompt_tokens: prompt, computed_tokens: computed } = request;
    if (state === "waiting") return request.preemptions ? "waits again" : "waits";
    return computed < prompt ? `prefill, ${count((100 * computed) / prompt)} %` : "decodes";
  });
}

export function showFinished({ engine }) {
  const rows = engine.finished.map((request) => ({ request, parts: partsOf(request, request.ended_ms) }));
  show("finished", "no-finished", rows, "None.", (request) => ENDS[request.reason] ?? request.reason);
}

function show(id, emptyId, rows, none, stateOf) {
  const empty = byId(emptyId);
  const hidden = rows.length - MOST;
  const note = rows.length ? (hidden > 0 ? `${count(hidden)} more.` : none === "None." ? "" : `And ${none}.`) : none;
  setText(empty, note);
  empty.hidden = note === "";
  // All bars of a list have one scale.
  const longest = Math.max(...rows.map((row) => total(row.parts)), 1);
  const list = byId(id);
  const known = new Map([...list.children].map((item) => [item.dataset.name, item]));
  const items = rows.slice(0, MOST).map(({ request, parts }) => {
    const name = `${request.id}.${request.output}`;
    const item = known.get(name) ?? newItem(name);
    fill(item, request, parts, stateOf(request), longest);
    return item;
  });
  const same = items.length === list.children.length && items.every((item, i) => item === list.children[i]);
  if (!same) list.replaceChildren(...items);
}

function newItem(name) {
  const bar = make("div", "timeline", ...["queue", "prefill", "decode", "rest"].map((part) => make("span", part)));
  bar.setAttribute("role", "img");
  const item = make("li", "", make("p", "request"), bar, make("p", "sizes quiet"));
  item.dataset.name = name;
  item.querySelector(".request").append(make("strong"), make("span", "what"), make("span", "span"));
  return item;
}

function fill(item, request, parts, state, longest) {
  const [title, what, span] = item.querySelector(".request").children;
  setText(title, `#${request.id}` + (request.output ? `.${request.output}` : ""));
  setText(what, state);
  setText(span, time(total(parts)));
  const bar = item.querySelector(".timeline");
  for (const part of ["queue", "prefill", "decode"]) bar.querySelector(`.${part}`).style.flexGrow = parts[part] / longest;
  bar.querySelector(".rest").style.flexGrow = 1 - total(parts) / longest;
  const spoken = `queue ${time(parts.queue)}, prefill ${time(parts.prefill)}, decode ${time(parts.decode)}`;
  if (bar.title !== spoken) {
    bar.title = spoken;
    bar.setAttribute("aria-label", spoken);
  }
  const { prompt_tokens: prompt, cached_tokens: cached, output_tokens: output, preemptions } = request;
  const sizes = [`prompt ${count(prompt)}`];
  if (cached) sizes.push(`${count(cached)} cached`);
  sizes.push(plural(output, "token") + " out");
  if (request.pages) sizes.push(plural(request.pages, "page"));
  if (preemptions) sizes.push(`preempted ${plural(preemptions, "time")}`);
  setText(item.querySelector(".sizes"), sizes.join(" · "));
}
