// The conversation.

import { ApiError, postStream } from "./api.js";
import { byId, count, make, plural, setText, time } from "./dom.js";
import { Markdown } from "./markdown.js";

/** How often the figures of an answer are shown anew, in milliseconds. */
const FIGURES = 250;

export class Chat {
  #askForKey;
  #changed;
  #messages = [];
  /** Ends the answer that is being made. */
  #abort = null;
  #log = byId("log");
  #turns = byId("turns");
  #message = byId("message");

  constructor({ askForKey, changed }) {
    this.#askForKey = askForKey;
    this.#changed = changed;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#message.addEventListener("keydown", (event) => {
      // While an input method composes, Enter chooses among its proposals.
      if (event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    this.#message.addEventListener("input", () => this.#fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
  }

  /** Stops the answer. Whether there was one. */
  stop() {
    if (!this.#abort) return false;
    this.#abort.abort();
    return true;
  }

  clear() {
    this.stop();
    this.#messages = [];
    this.#log.replaceChildren();
    byId("empty").hidden = false;
    setText(byId("announce"), "");
    this.#message.focus();
  }

  #fit() {
    this.#message.style.height = "auto";
    this.#message.style.height = `${Math.min(this.#message.scrollHeight + 2, 240)}px`;
  }

  #send() {
    const text = this.#message.value.trim();
    if (!text || this.#abort || !this.#fieldsAreValid()) return;
    this.#message.value = "";
    this.#fit();
    byId("empty").hidden = true;
    // A message that got no answer is not part of the conversation: models expect that roles take turns.
    if (this.#messages.at(-1)?.role === "user") this.#messages.pop();
    this.#messages.push({ role: "user", content: text });
    this.#log.append(turn("user", "You", make("p", "words", text)));
    this.#answer();
  }

  #fieldsAreValid() {
    const wrong = ["temperature", "max-tokens", "seed"].map(byId).find((input) => !input.checkValidity());
    if (!wrong) return true;
    wrong.closest("details").open = true;
    wrong.reportValidity();
    return false;
  }

  #body() {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const system = byId("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return {
      messages: [...first, ...this.#messages],
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      seed: number("seed"),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  async #answer() {
    const answer = new Answer();
    const follows = this.#turns.scrollHeight;
    this.#log.append(answer.element);
    this.#turns.scrollTop = follows + this.#turns.scrollHeight;
    const abort = (this.#abort = new AbortController());
    this.#setBusy(true);
    let error = null;
    try {
      for await (const event of postStream("v1/chat/completions", this.#body(), abort.signal)) {
        const atEnd = this.#turns.scrollHeight - this.#turns.scrollTop - this.#turns.clientHeight < 60;
        answer.take(event);
        if (atEnd) answer.afterDrawing = () => (this.#turns.scrollTop = this.#turns.scrollHeight);
        if (answer.isFirst) this.#changed();
      }
    } catch (caught) {
      error = caught;
    }
    const stopped = abort.signal.aborted;
    // A new chat has begun meanwhile: this answer belongs to none.
    const belongs = answer.element.isConnected;
    if (this.#abort === abort) {
      this.#abort = null;
      this.#setBusy(false);
    }
    this.#changed();
    if (!belongs) return;
    answer.end(stopped ? "stopped" : null);
    if (answer.content || stopped) this.#messages.push({ role: "assistant", content: answer.content });
    if (error && !stopped) await this.#fail(answer, error);
    else setText(byId("announce"), answer.spoken(stopped));
  }

  async #fail(answer, error) {
    if (!(error instanceof ApiError)) console.error(error);
    const again = () => {
      if (this.#abort) return;
      if (answer.content) this.#messages.pop();
      answer.element.remove();
      this.#answer();
    };
    if (error.status === 401 && (await this.#askForKey())) return again();
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    answer.fail((error instanceof ApiError ? error.message : "The page failed; the console says why.") + wait, again);
    setText(byId("announce"), `Error: ${error.message}`);
  }

  #setBusy(busy) {
    const stop = byId("stop");
    const send = byId("send");
    const hadFocus = document.activeElement === (busy ? send : stop);
    stop.hidden = !busy;
    send.hidden = busy;
    this.#log.setAttribute("aria-busy", String(busy));
    // The button under the focus has gone.
    if (hadFocus) (busy ? stop : this.#message).focus();
  }
}

function turn(kind, name, ...children) {
  return make("li", `turn ${kind}`, make("h3", "who", name), ...children);
}

/** An answer on its way. */
class Answer {
  content = "";
  #reasoning = "";
  #sent = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;
  #usage = null;
  #pending = false;
  #timer;
  #ended = null;
  isFirst = false;
  afterDrawing = null;

  constructor() {
    this.words = make("div", "words markdown");
    this.thoughts = make("div", "thoughts");
    this.fold = make("details", "fold", make("summary", "", "Reasoning"), this.thoughts);
    this.fold.hidden = true;
    this.figures = make("p", "figures-of-answer quiet", "waiting for the first token");
    this.element = turn("assistant", "Model", this.fold, this.words, this.figures);
    this.markdown = new Markdown(this.words);
    this.#timer = setInterval(() => this.#showFigures(), FIGURES);
  }

  take(event) {
    const now = performance.now();
    const delta = event.choices?.[0]?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    if (event.usage) this.#usage = event.usage;
    const tokens = this.#usage?.completion_tokens ?? this.#tokens + (content || reasoning ? 1 : 0);
    this.isFirst = this.#first === null && tokens > 0;
    if (this.isFirst) {
      this.#first = now;
      this.firstTokens = tokens;
    }
    if (tokens > this.#tokens) this.#last = now;
    this.#tokens = tokens;
    if (event.choices?.[0]?.finish_reason) this.#ended = event.choices[0].finish_reason;
    if (!reasoning && !content) return;
    this.#reasoning += reasoning;
    this.content += content;
    if (!this.#pending) {
      this.#pending = true;
      requestAnimationFrame(() => this.#draw());
    }
  }

  #draw() {
    this.#pending = false;
    this.fold.hidden = this.#reasoning === "";
    setText(this.thoughts, this.#reasoning.trim());
    this.markdown.show(this.content);
    this.afterDrawing?.();
    this.afterDrawing = null;
  }

  /** Time to the first token, and tokens per second after it. */
  get pace() {
    if (this.#first === null) return null;
    const rate = ((this.#tokens - this.firstTokens) / (this.#last - this.#first)) * 1000;
    return { first: this.#first - this.#sent, rate: Number.isFinite(rate) ? rate : 0 };
  }

  #showFigures() {
    const pace = this.pace;
    if (!pace) {
      setText(this.figures, `waiting for the first token: ${time(performance.now() - this.#sent)}`);
      return;
    }
    const parts = [plural(this.#tokens, "token")];
    if (pace.rate > 0) parts.push(`${pace.rate.toFixed(pace.rate < 10 ? 1 : 0)} tokens/s`);
    parts.push(`first after ${time(pace.first)}`);
    const prompt = this.#usage?.prompt_tokens;
    if (prompt) {
      const cached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
      // Cached tokens are known when the answer has ended.
      parts.push(`prompt of ${count(prompt)}` + (this.done ? `, ${count(cached)} cached` : ""));
    }
    if (this.#ended === "length") parts.push("cut at the most tokens");
    if (this.#ended === "stopped") parts.push("stopped");
    setText(this.figures, parts.join(" · "));
  }

  end(reason) {
    clearInterval(this.#timer);
    this.done = !reason;
    if (reason) this.#ended = reason;
    this.#draw();
    if (this.#first === null) setText(this.figures, reason ?? "");
    else this.#showFigures();
  }

  fail(message, again) {
    const button = make("button", "plain", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    if (!this.content) this.figures.remove();
    const notice = make("div", "notice error", make("p", "", message), button);
    this.element.append(notice);
    notice.scrollIntoView({ block: "nearest" });
  }

  /** What a screen reader says at the end. */
  spoken(stopped) {
    const text = this.words.textContent.trim();
    return `${stopped ? "Stopped" : "Answer"}: ${text || "empty"}`;
  }
}
