// The panels: asks the server once a second how the engine is doing, while the page is visible, and shows it.

import { getJson } from "./api.js";
import { byId, count, draw, plural, setText, time } from "./dom.js";
import { showFinished, showRequests } from "./timeline.js";
import { showTree } from "./tree.js";

const INTERVAL = 1000;
/** Between tries while the server does not answer, at most. */
const LONGEST = 10_000;
/** Seconds of the small chart. */
const HISTORY = 60;

export class Panels {
  #askForKey;
  #timer = null;
  #asking = null;
  #failures = 0;
  #paused = false;
  /** The server wants a key, and nobody has given one. */
  #locked = false;
  #rates = [];
  #before = null;

  constructor({ askForKey }) {
    this.#askForKey = askForKey;
    byId("pause").addEventListener("click", () => this.toggle());
    document.addEventListener("visibilitychange", () => this.#plan(0));
  }

  start() {
    this.#plan(0);
  }

  /** Something has begun or ended: no need to wait for a second. */
  lookSoon() {
    if (!this.#failures) this.#plan(100);
  }

  /** Asks again with another key. */
  retry() {
    this.#locked = false;
    this.#plan(0);
  }

  toggle() {
    this.#paused = !this.#paused;
    byId("pause").setAttribute("aria-pressed", String(this.#paused));
    setText(byId("pause"), this.#paused ? "Go on" : "Pause");
    if (this.#paused) setText(byId("freshness"), "paused");
    this.#before = null;
    this.#plan(0);
  }

  #plan(delay) {
    clearTimeout(this.#timer);
    if (this.#paused || this.#locked || document.visibilityState !== "visible") return;
    this.#timer = setTimeout(() => this.#look(), delay);
  }

  async #look() {
    if (this.#asking) return;
    const signal = AbortSignal.timeout(LONGEST);
    this.#asking = getJson("debug/state", signal);
    try {
      this.#show(await this.#asking);
      this.#failures = 0;
      byId("trouble").hidden = true;
    } catch (error) {
      this.#failures++;
      this.#before = null;
      this.#tell(error);
      if (error.status === 401) {
        this.#locked = true;
        this.#askForKey();
      }
    } finally {
      this.#asking = null;
    }
    this.#plan(Math.min(INTERVAL * 2 ** Math.min(this.#failures, 4), LONGEST));
  }

  #tell(error) {
    const told = error.name === "TimeoutError" ? "The server does not answer." : error.message;
    byId("trouble").hidden = false;
    setText(byId("trouble"), told);
    this.#showState(error.status === 401 ? "locked" : "unreachable");
    setText(byId("freshness"), "");
  }

  #showState(state) {
    byId("state").dataset.state = state;
    const words = { locked: "needs a key", unreachable: "not reachable", draining: "shutting down" };
    setText(byId("state-text"), words[state] ?? state);
  }

  #show(state) {
    this.#showState(state.state);
    setText(byId("model"), state.model?.name ?? "No model yet");
    const { device, dtype, max_model_len: room } = state.model ?? {};
    setText(byId("place"), room ? `${device} · ${dtype} · up to ${count(room)} tokens` : "");
    if (state.model) document.title = `${state.model.name} · Warpsmith`;
    setText(byId("freshness"), state.age_ms > 2000 ? `as of ${time(state.age_ms)} ago` : "");
    if (!state.engine) return;
    this.#showSpeed(state);
    showPages(state.engine.pages);
    showTree(state.engine.tree, state.engine.pages.page_size);
    showRequests(state);
    showFinished(state);
  }

  #showSpeed({ now_ms: now, age_ms: age, engine }) {
    const at = now - age;
    const { generated_tokens: tokens } = engine.totals;
    if (this.#before && at > this.#before.at && tokens >= this.#before.tokens) {
      const rate = ((tokens - this.#before.tokens) / (at - this.#before.at)) * 1000;
      this.#rates.push(rate);
      this.#rates = this.#rates.slice(-HISTORY);
      setText(byId("rate"), rate >= 100 || rate === 0 ? count(rate) : rate.toFixed(1));
      drawSpark(this.#rates);
    }
    if (!this.#before || at > this.#before.at) this.#before = { at, tokens };
    const running = engine.requests.filter((request) => request.state === "running").length;
    const waiting = engine.requests.length - running;
    setText(byId("running"), count(running + engine.others.running));
    setText(byId("waiting"), count(waiting + engine.others.waiting + engine.arriving));
  }
}

function drawSpark(rates) {
  const most = Math.max(...rates, 1);
  const x = (i) => 300 - (rates.length - 1 - i) * (300 / (HISTORY - 1));
  const y = (rate) => 38 - (rate / most) * 35;
  const line = rates.map((rate, i) => `${x(i).toFixed(1)},${y(rate).toFixed(1)}`).join(" ");
  const area = `${x(0).toFixed(1)},40 ${line} 300,40`;
  const spark = byId("spark");
  spark.replaceChildren(
    draw("polygon", { points: area, class: "area" }),
    draw("polyline", { points: line, class: "line", "vector-effect": "non-scaling-stroke" }),
  );
  const mean = rates.reduce((sum, rate) => sum + rate, 0) / rates.length;
  const told = `Tokens per second over ${plural(rates.length, "look")}: ${count(mean)} on average, ${count(most)} at most`;
  spark.setAttribute("aria-label", told);
}

function showPages({ total, free, cached, in_use: used, page_size: size }) {
  const pool = byId("pool");
  const shares = { used, cached, free };
  for (const [name, pages] of Object.entries(shares)) {
    pool.querySelector(`.${name}`).style.flexGrow = total ? pages / total : 0;
  }
  const share = (pages) => `${((100 * pages) / Math.max(total, 1)).toFixed(0)} %`;
  setText(byId("pool-used"), `${count(used)} in use`);
  setText(byId("pool-cached"), `${count(cached)} cached`);
  setText(byId("pool-free"), `${count(free)} free`);
  const told =
    `${count(total)} pages of ${plural(size, "token")}: ${share(used)} in use, ` +
    `${share(cached)} cached for later requests, ${share(free)} free`;
  pool.setAttribute("aria-label", told);
  pool.title = told;
}
