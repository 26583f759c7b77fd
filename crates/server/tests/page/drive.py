"""Drives the server's page in a headless Chromium, as somebody would use it, and checks what is to be seen.

    python3 drive.py                          against a server without a model, which answers as the checks need it
    python3 drive.py --url URL [--key KEY]    against a server that runs
    python3 drive.py --url URL --screenshot FILE.png

`--find` prints the browser that would be used, and fails if there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stand_in
from browser import Browser, Failure, Tab, find

PAGE = Path(__file__).parents[2] / "src" / "page"
READY = "document.querySelector('#state').dataset.state === 'ready'"
IDLE = "document.querySelector('#stop').hidden"
ANSWER = "document.querySelector('.turn.assistant:last-child .words')"
# What Chromium itself writes about an answer that is an error.
REFUSED = "Failed to load resource: the server responded with a status of"


def check(holds: Any, told: str) -> None:
    """Fails with these words if something does not hold."""
    if not holds:
        raise Failure(told)


def say(tab: Tab, text: str) -> None:
    """Sends a message by keyboard."""
    tab.type("#message", text)
    tab.press("Enter")


def finish(tab: Tab, url: str, refusals: int = 0) -> None:
    """Nothing was fetched from elsewhere, and nothing went wrong that should not."""
    foreign = [asked for asked in tab.requested() if not asked.startswith((url, "about:", "data:"))]
    check(not foreign, f"the page asked for {foreign}")
    complaints = [told for told in tab.complaints() if refusals == 0 or not told.startswith(REFUSED)]
    check(not complaints, f"the console says {complaints}")
    tab.close()


def chat(tab: Tab, url: str) -> None:
    """An answer streams in, formatted, with its figures; the next one continues the conversation."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "Why is the sky blue?")
    lengths = set()
    for _ in range(40):
        lengths.add(tab.js(f"{ANSWER}?.textContent.length ?? 0"))
        time.sleep(0.03)
    check(len(lengths) > 5, f"the answer came in {len(lengths)} pieces")
    tab.wait(IDLE)
    shape = tab.js(f"['strong', 'em', 'ol > li', 'li ul > li', 'p code', 'pre code', 'a']"
                   f".map(name => {ANSWER}.querySelectorAll(name).length)")  # fmt: skip
    check(shape == [1, 1, 2, 2, 0, 1, 1], f"the Markdown became {shape}")
    code = tab.js(f"{ANSWER}.querySelector('pre').textContent")
    check(code == "def ratio(red=700, blue=450):\n    return (red / blue) ** 4", f"the code is {code!r}")
    figures = tab.text(".figures-of-answer")
    for part in ("84 tokens", "tokens/s", "first after", "prompt of 200, 160 cached"):
        check(part in figures, f"the figures are {figures!r}, without {part!r}")
    spoken = tab.text("#announce")
    check(spoken.startswith("Answer: Blue light is scattered most"), f"a screen reader is told {spoken!r}")
    live = tab.js("document.querySelector('#turns').closest('[aria-live]') || "
                  "document.querySelector('#turns [aria-live], #turns [role=log]')")  # fmt: skip
    check(live is None, "each token would be spoken")
    say(tab, "And at night?")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE)
    sent = [json.loads(event["request"]["postData"])["messages"]
            for event in tab.mine("Network.requestWillBeSent") if "postData" in event["request"]]  # fmt: skip
    check([len(messages) for messages in sent] == [1, 3], f"the second request has {sent[-1]}")
    tab.click("#new-chat")
    check(tab.js("document.querySelectorAll('.turn').length") == 0, "a new chat is not empty")
    finish(tab, url)


def stop(tab: Tab, url: str) -> None:
    """The button and Esc stop an answer, and the server learns of it."""
    tab.open(url)
    tab.wait(READY)
    for way in ("button", "key"):
        say(tab, "endless")
        tab.wait(f"({ANSWER}?.textContent.length ?? 0) > 20")
        if way == "button":
            tab.click("#stop")
        else:
            tab.press("Escape")
        tab.wait(IDLE)
        length = tab.js(f"{ANSWER}.textContent.length")
        time.sleep(0.2)
        check(tab.js(f"{ANSWER}.textContent.length") == length, "the answer went on")
        check("stopped" in tab.text(".turn.assistant:last-child .figures-of-answer"), "it is not said to be stopped")
        check(tab.text("#announce").startswith("Stopped: "), f"a screen reader is told {tab.text('#announce')!r}")
    check(tab.js("document.activeElement.id") == "message", "the focus is not in the message")
    tab.wait("[...document.querySelectorAll('#finished .what')].filter(e => e.textContent == 'cancelled').length == 2")
    finish(tab, url)


def errors(tab: Tab, url: str) -> None:
    """Errors are shown in the API's words, before and in an answer, and can be tried again."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "busy")
    told = tab.wait("document.querySelector('.turn .notice p')?.textContent")
    check(told == "too many requests are waiting; try again later Try again in 1 s.", f"429 shows {told!r}")
    tab.click(".turn .notice button")
    tab.wait("document.querySelector('.turn .notice') !== null")
    say(tab, "break")
    tab.wait(f"{IDLE} && document.querySelectorAll('.turn .notice').length == 2")
    told = tab.text(".turn.assistant:last-child .notice p")
    check(told == "the model gave logits that are not numbers", f"an error in the stream shows {told!r}")
    check(tab.js(f"{ANSWER}.textContent") == "This will", "what came before the error is gone")
    say(tab, "think")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE)
    fold = "document.querySelector('.turn.assistant:last-child details')"
    check(tab.js(f"[{fold}.open, {fold}.hidden]") == [False, False], "the reasoning is not folded")
    check("so I think" in tab.js(f"{fold}.textContent"), "the reasoning is not there")
    check(tab.js(f"{ANSWER}.textContent") == "I have thought.", "the reasoning is in the answer")
    for field, value in (("temperature", "3"), ("max-tokens", "0"), ("seed", "1.5")):
        tab.js(f"document.querySelector('.settings').open = true; document.querySelector('#{field}').value = '{value}'")
        before = tab.js("document.querySelectorAll('.turn').length")
        say(tab, "think")
        check(tab.js("document.querySelectorAll('.turn').length") == before, f"{field} {value} was sent")
        tab.js(f"document.querySelector('#{field}').value = ''")
    finish(tab, url, refusals=2)


def hostile(tab: Tab, url: str) -> None:
    """What the model writes stays text."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "hostile")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE, 30)
    check(tab.js("window.hacked") is None, "a script of the model has run")
    elements = "img, script, svg, iframe, a[href^=javascript], a[href^=data]"
    found = tab.js(f"{ANSWER}.querySelectorAll('{elements}').length")
    check(found == 0, "the model's text became elements")
    check("<script>window.hacked" in tab.text(".turn.assistant:last-child"), "the text is not shown")
    policy = tab.js("fetch('.').then(answer => answer.headers.get('content-security-policy'))")
    check("default-src 'self'" in policy and "unsafe" not in policy, f"the policy is {policy}")
    check(tab.js("document.querySelectorAll('[style*=\"url\"], script:not([src]), style').length") == 0, "inline code")
    finish(tab, url)


def locked(tab: Tab, url: str, key: str = "secret") -> None:
    """A server with a key is asked for with one, and the key stays in the tab."""
    tab.open(url)
    tab.wait("document.querySelector('#key-dialog').open")
    check(tab.js("document.activeElement.id") == "asked-key", "the focus is not in the dialog")
    tab.call("Input.insertText", {"text": "wrong"})
    tab.press("Enter")
    tab.wait("document.querySelector('#key-dialog').open && document.querySelector('#asked-key').value == ''")
    tab.wait("document.querySelector('#key-dialog-text').textContent.includes('did not accept')")
    tab.press("Escape")
    tab.wait("document.querySelector('#trouble').textContent.includes('API key')")
    say(tab, "think")
    tab.wait("document.querySelector('#key-dialog').open")
    tab.call("Input.insertText", {"text": key})
    tab.press("Enter")
    tab.wait(f"{IDLE} && {READY} && ({ANSWER}?.textContent.length ?? 0) > 3", 30)
    check(tab.js("document.querySelectorAll('.turn').length") == 2, "the message was not sent once")
    stored = tab.js("[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]")
    check(key not in stored[0] + stored[2] and key in stored[1], f"the key is kept in {stored}")
    check(all(key not in asked for asked in tab.requested()), "the key is in an address")
    tab.open(url)
    tab.wait(READY)
    check(not tab.js("document.querySelector('#key-dialog').open"), "it asks again after a reload")
    finish(tab, url, refusals=3)


def panels(tab: Tab, url: str) -> None:
    """The panels show pages, the tree, requests and their times; they can be paused, and rest in a hidden tab."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "endless")
    tab.wait("document.querySelectorAll('#requests li').length == 1")
    tab.wait("parseFloat(document.querySelector('#rate').textContent) > 5")
    check(tab.text("#running") == "1", f"{tab.text('#running')} run")
    widths = tab.js("['used', 'cached', 'free'].map(n => document.querySelector(`#pool .${n}`).offsetWidth)")
    check(all(width > 5 for width in widths), f"the bar of pages has {widths}")
    label = tab.js("document.querySelector('#pool').ariaLabel")
    check("128 pages of 16 tokens: 11 % in use, 27 % cached" in label, f"the bar says {label!r}")
    check(tab.js("document.querySelectorAll('#tree-diagram rect').length") == 7, "the tree has not all branches")
    ends = "[...document.querySelectorAll('#tree-diagram rect')].map(r => r.x.baseVal.value + r.width.baseVal.value)"
    right = tab.js(f"Math.max(...{ends}) <= document.querySelector('#tree').clientWidth + 1")
    check(right, "the tree is wider than its panel")
    nested = tab.js("document.querySelectorAll('#branches ul ul > li').length")
    check(nested == 3, f"{nested} branches are in the third level of the list")
    say_parts = tab.js("document.querySelector('#requests .timeline').ariaLabel")
    check(all(part in say_parts for part in ("queue", "prefill", "decode")), f"the bar of a request says {say_parts!r}")
    tab.press("Escape")
    tab.wait("document.querySelectorAll('#finished li').length > 0")
    tab.wait("document.querySelector('#running').textContent == '0'")
    tab.press("P", "KeyP", modifiers=9)
    check(tab.js("document.querySelector('#pause').ariaPressed") == "true", "Alt+Shift+P does not pause")
    looks = sum(asked.endswith("/debug/state") for asked in tab.requested())
    time.sleep(1.3)
    check(sum(asked.endswith("/debug/state") for asked in tab.requested()) <= looks + 1, "it goes on while paused")
    tab.click("#pause")
    tab.wait("document.querySelector('#pause').ariaPressed == 'false'")
    finish(tab, url)


REACHED = """(() => {
  const e = document.activeElement, r = e.getBoundingClientRect(), s = getComputedStyle(e);
  return { id: e.id, tag: e.tagName, text: e.textContent.slice(0, 30), visible: r.width > 0 && r.height > 0,
    outline: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 };
})()"""
CONTROLS = """[...document.querySelectorAll('a[href], button, input, textarea, summary, [tabindex="0"]')]
  .filter(e => e.checkVisibility() && !e.closest('dialog')).length"""


def accessible(tab: Tab, url: str) -> None:
    """Every control is reached by Tab, shows the focus, has a name, and text has enough contrast."""
    tab.open(url)
    tab.wait(READY)
    tab.press("Tab")
    first = tab.js(REACHED)
    check(first["text"] == "Skip to the message" and first["visible"], f"the first is {first}")
    tab.press("Enter")
    check(tab.js("document.activeElement.id") == "message", "the link does not lead to the message")
    say(tab, "Why is the sky blue?")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE)
    tab.wait("document.querySelectorAll('#finished li').length > 0")
    tab.js("document.querySelectorAll('details').forEach(e => e.open = !e.hidden)")
    tab.press("P", "KeyP", modifiers=9)
    expected = tab.js(CONTROLS)
    tab.js("document.querySelector('.skip').focus()")
    reached = [first]
    for _ in range(expected + 3):
        tab.press("Tab")
        at = tab.js(REACHED)
        if at["tag"] == "BODY" or at in reached:
            break
        reached.append(at)
    check(len(reached) == expected, f"Tab reaches {len(reached)} of {expected}: {reached}")
    dull = [at for at in reached if not at["visible"] or not at["outline"]]
    check(not dull, f"the focus is not to be seen on {dull}")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "link", "image", "img", "DisclosureTriangle", "region", "main"}
    nameless = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles
                and not node.get("name", {}).get("value")]  # fmt: skip
    check(not nameless, f"without a name: {[node['role']['value'] for node in nameless]}")
    marks = {node["role"]["value"] for node in nodes if not node.get("ignored")}
    missing = {"banner", "main", "complementary", "heading", "status"} - marks
    check(not missing, f"{missing} are missing from {sorted(marks)}")
    poor = tab.js(CONTRAST)
    check(not poor, f"too little contrast: {poor}")
    finish(tab, url)


CONTRAST = """(() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('svg, .hidden')) continue;
    const found = ratio(parts(getComputedStyle(e).color), ground(e));
    const text = walker.currentNode.data.slice(0, 20);
    if (found < 4.5) poor.add(`${e.tagName}.${e.className} ${text} ${found.toFixed(2)}`);
  }
  for (const text of document.querySelectorAll('#tree-diagram text')) {
    const found = ratio(parts(getComputedStyle(text).fill), parts(getComputedStyle(text.previousSibling).fill));
    if (found < 4.5) poor.add(`label in the tree ${found.toFixed(2)}`);
  }
  for (const mark of document.querySelectorAll('.swatch:not(.free), .dot')) {
    const found = ratio(parts(getComputedStyle(mark).backgroundColor), ground(mark.parentElement));
    if (found < 3) poor.add(`${mark.className} ${found.toFixed(2)}`);
  }
  return [...poor];
})()"""


def narrow(tab: Tab, url: str) -> None:
    """Nothing is wider than a phone, and targets are large enough for a finger."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "Why is the sky blue? " + "Rindfleischetikettierungsueberwachung" * 4)
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE)
    tab.wait("document.querySelectorAll('#finished li').length > 0")
    tab.js("document.querySelectorAll('details').forEach(e => e.open = true)")
    sizes = tab.js("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    check(sizes[0] <= sizes[1], f"the page is {sizes[0]} wide in a window of {sizes[1]}")
    beyond = tab.js("""[...document.querySelectorAll('body *')]
        .filter(e => e.checkVisibility() && !e.closest('pre, svg, .hidden'))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '#' + e.id)""")
    check(not beyond, f"{beyond} reach beyond the window")
    small = tab.js("""[...document.querySelectorAll('button, input, summary')]
        .filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 24).map(e => e.textContent || e.id)""")
    check(not small, f"{small} are too small to be touched")
    finish(tab, url)


def still(tab: Tab, url: str) -> None:
    """Nothing moves for those who do not want it, and dark is as readable as light."""
    tab.open(url)
    tab.wait(READY)
    say(tab, "think")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE)
    moving = tab.js("""[...document.querySelectorAll('*')].map(e => getComputedStyle(e))
        .filter(s => parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none').length""")
    check(moving == 0, f"{moving} elements move")
    check(tab.js("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)", "it is not dark")
    poor = tab.js(CONTRAST)
    check(not poor, f"too little contrast: {poor}")
    finish(tab, url)


def against_stand_in(browser: Browser) -> int:
    """Runs all checks. The number that failed."""
    server, guarded = stand_in.serve(PAGE), stand_in.serve(PAGE, key="secret")
    open_url, guarded_url = (f"http://127.0.0.1:{each.server_address[1]}/" for each in (server, guarded))
    dark = {"prefers-reduced-motion": "reduce", "prefers-color-scheme": "dark"}
    plan: list[tuple[Callable[[Tab, str], None], str, Any]] = [
        (chat, open_url, {}),
        (stop, open_url, {}),
        (errors, open_url, {}),
        (hostile, open_url, {}),
        (panels, open_url, {}),
        (accessible, open_url, {}),
        (narrow, open_url, {"width": 360, "height": 740}),
        (still, open_url, {"features": dark}),
        (locked, guarded_url, {}),
    ]
    failed = 0
    for test, url, settings in plan:
        began = time.monotonic()
        tab = Tab(browser, **settings)
        try:
            test(tab, url)
            print(f"page: {test.__name__} ok ({time.monotonic() - began:.1f} s)", flush=True)
        except Failure as failure:
            failed += 1
            print(f"page: {test.__name__} FAILED: {failure}; the console: {tab.complaints()}", flush=True)
    return failed


def against_server(tab: Tab, url: str, key: str | None) -> None:
    """A conversation with a real server, and what the panels show of it."""
    tab.open(url)
    if key:
        tab.wait("document.querySelector('#key-dialog').open")
        tab.call("Input.insertText", {"text": key})
        tab.press("Enter")
    tab.wait(READY, 60)
    tab.js("document.querySelector('#max-tokens').value = 48; document.querySelector('#seed').value = 7")
    system = "You answer in one sentence. " * 8
    tab.js(f"document.querySelector('#system').value = {json.dumps(system)}")
    for number, question in enumerate(("What is a page?", "And what is a tree?"), 1):
        say(tab, question)
        tab.wait(f"{IDLE} && document.querySelectorAll('.turn.assistant').length == {number}", 120)
        trouble = tab.text(".turn .notice")
        check(not trouble, f"the answer failed: {trouble}")
    figures = tab.text(".turn.assistant:last-child .figures-of-answer")
    check("cached" in figures and ", 0 cached" not in figures, f"nothing was cached for the second question: {figures}")
    tab.wait("document.querySelectorAll('#finished li').length == 2")
    tab.wait("document.querySelectorAll('#tree-diagram rect').length >= 1")
    tab.wait("document.querySelector('#pool .cached').offsetWidth > 0")
    tab.js("document.querySelector('#max-tokens').value = ''")
    say(tab, "Count as far as you can.")
    # It may have come to its end before it was stopped.
    tab.wait(f"document.querySelectorAll('#requests li').length == 1 || {IDLE}", 60)
    if not tab.js(IDLE):
        tab.press("Escape")
    tab.wait("document.querySelectorAll('#finished li').length == 3", 60)
    check(tab.js("document.querySelectorAll('#requests li').length") == 0, "what has ended is said to run")
    finish(tab, url, refusals=1 if key else 0)


SYSTEM = """You are the assistant of a library for language models. You answer questions about kernels, memory and
scheduling in a few short sentences, in plain words, and say so when you do not know an answer. You never make up
numbers. When somebody asks for code, you give a small example that runs, and explain what each of its lines does."""
OTHERS = (
    "What is a prefix cache good for?",
    "What is a prefix cache, and what does it cost?",
    "Why are keys and values stored in pages?",
)


def neighbour(url: str, question: str, key: str | None) -> None:
    """A request of somebody else, whose answer nobody reads."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = json.dumps({"messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with contextlib.suppress(OSError), urllib.request.urlopen(
        urllib.request.Request(f"{url}v1/chat/completions", body, headers), timeout=120
    ) as answer:  # fmt: skip
        answer.read()


def screenshot(tab: Tab, url: str, key: str | None, path: Path) -> None:
    """The page while it answers, beside requests that share a prefix with it."""
    tab.open(url)
    if key:
        tab.wait("document.querySelector('#key-dialog').open")
        tab.call("Input.insertText", {"text": key})
        tab.press("Enter")
    tab.wait(READY, 60)
    tab.js(f"document.querySelector('#system').value = {json.dumps(SYSTEM)}")
    tab.js("document.querySelector('#temperature').value = 0.3; document.querySelector('#seed').value = 3")
    tab.js("document.querySelector('#max-tokens').value = 120")
    say(tab, "Why is the sky blue?")
    tab.wait(f"!{IDLE}")
    tab.wait(IDLE, 120)
    for question in OTHERS:
        threading.Thread(target=neighbour, args=(url, question, key), daemon=True).start()
        time.sleep(0.4)
    say(tab, "And why is it red in the evening?")
    tab.wait(f"document.querySelectorAll('#requests li').length >= {len(OTHERS)}", 60)
    tab.wait(f"({ANSWER}?.textContent.length ?? 0) > 160 || {IDLE}", 60)
    tab.wait("document.querySelectorAll('#tree-diagram rect.shared').length > 0", 60)
    time.sleep(1.2)
    tab.screenshot(path)
    size = path.stat().st_size
    check(size < 300_000, f"{path} has {size} bytes")
    print(f"page: wrote {path}, {size} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the server to be used")
    parser.add_argument("--key", help="its API key")
    parser.add_argument("--screenshot", type=Path, help="only make a picture of it")
    parser.add_argument("--find", action="store_true", help="only print the browser")
    options = parser.parse_args()
    program = find()
    if program is None:
        print("page: there is no Chromium here (on Debian: apt install chromium)", file=sys.stderr)
        return 2
    if options.find:
        print(program)
        return 0
    browser = Browser(program)
    try:
        if options.url is None:
            return int(against_stand_in(browser) > 0)
        url = options.url.rstrip("/") + "/"
        tab = Tab(browser, 1280, 940)
        try:
            if options.screenshot:
                screenshot(tab, url, options.key, options.screenshot)
            else:
                against_server(tab, url, options.key)
                print("page: a conversation with the server ok")
        except Failure as failure:
            print(f"page: FAILED: {failure}; the console: {tab.complaints()}")
            return 1
        return 0
    finally:
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
