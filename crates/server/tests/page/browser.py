"""A small client of Chromium's DevTools protocol, over pipes: it needs nothing but Python and the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
Json = dict[str, Any]


class Failure(Exception):
    """Something is not as it should be."""


def find() -> str | None:
    """The browser, if there is one."""
    named = os.environ.get("WARPSMITH_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with nothing in it."""

    def __init__(self, program: str) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="warpsmith-page-", ignore_cleanup_errors=True)
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()

        def place() -> None:
            # The browser reads from descriptor 3 and writes to 4. First out of the way of one another.
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            if 3 in (a, b) or 4 in (a, b):
                a, b = os.dup(a), os.dup(b)
            os.dup2(a, 3)
            os.dup2(b, 4)

        environment = {**os.environ, "HOME": self.home.name}
        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self.home.name}/profile", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            pass_fds=(3, 4),
            env=environment,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest = b""
        self.answers: dict[int, Json] = {}
        self.events: list[Json] = []
        self.next = 1

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(Exception):
            self.call("Browser.close", timeout=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.home.cleanup()

    def read(self, timeout: float) -> None:
        """Takes what has come, waiting for some at most so long."""
        if not select.select([self.into], [], [], timeout)[0]:
            return
        data = os.read(self.into, 1 << 20)
        if not data:
            raise Failure(f"the browser ended with {self.process.wait()}")
        *messages, self.rest = (self.rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self.answers[message["id"]] = message
            else:
                self.events.append(message)

    def call(self, method: str, params: Json | None = None, session: str | None = None, timeout: float = 30) -> Json:
        """Calls the browser, and waits for its answer."""
        number, self.next = self.next, self.next + 1
        message: Json = {"id": number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while number not in self.answers:
            if time.monotonic() > end:
                raise Failure(f"the browser did not answer {method} within {timeout} s")
            self.read(0.1)
        answer = self.answers.pop(number)
        if "error" in answer:
            raise Failure(f"{method}: {answer['error']['message']}")
        result: Json = answer["result"]
        return result


class Tab:
    """A page of the browser, and all that it asked for and complained about."""

    def __init__(self, browser: Browser, width: int = 1280, height: int = 800, features: Json | None = None) -> None:
        self.browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = browser.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        self.session: str = attached["sessionId"]
        self.target: str = target["targetId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        media = [{"name": name, "value": value} for name, value in (features or {}).items()]
        self.call("Emulation.setEmulatedMedia", {"features": media})
        self.resize(width, height)

    def call(self, method: str, params: Json | None = None, timeout: float = 30) -> Json:
        """Calls the browser about this page."""
        return self.browser.call(method, params, self.session, timeout)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Gives the window a size."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def close(self) -> None:
        """Closes it."""
        self.browser.call("Target.closeTarget", {"targetId": self.target})

    def open(self, url: str) -> None:
        """Loads a page."""
        self.call("Page.navigate", {"url": url})
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", params)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            told = details.get("exception", {}).get("description", details["text"])
            raise Failure(f"{expression}: {told}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 15) -> Any:
        """Waits until an expression is true."""
        end = time.monotonic() + timeout
        while not (value := self.js(expression)):
            if time.monotonic() > end:
                raise Failure(f"not within {timeout} s: {expression}")
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str, code: str | None = None, modifiers: int = 0) -> None:
        """Presses a key; modifiers are 1 for Alt, 2 for Control and 8 for Shift."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        event: Json = {"key": key, "code": code or key, "modifiers": modifiers}
        event["windowsVirtualKeyCode"] = codes.get(key, ord(key[0].upper()))
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **({"text": text} if text else {})})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def type(self, selector: str, text: str) -> None:
        """Types into a field."""
        self.js(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.call("Input.insertText", {"text": text})

    def click(self, selector: str) -> None:
        """Clicks on an element, where it is."""
        place = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", event)

    def mine(self, method: str) -> Iterator[Json]:
        """What the browser has told of this page."""
        self.browser.read(0)
        for event in self.browser.events:
            if event.get("sessionId") == self.session and event["method"] == method:
                yield event["params"]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and uncaught exceptions."""
        found = [event["exceptionDetails"]["text"] for event in self.mine("Runtime.exceptionThrown")]
        for event in self.mine("Runtime.consoleAPICalled"):
            if event["type"] in ("error", "warning", "assert"):
                found.append(str([argument.get("value", argument.get("description")) for argument in event["args"]]))
        for event in self.mine("Log.entryAdded"):
            entry = event["entry"]
            if entry["level"] in ("error", "warning"):
                found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [event["request"]["url"] for event in self.mine("Network.requestWillBeSent")]

    def screenshot(self, path: Path) -> None:
        """Writes what is to be seen."""
        shot = self.call("Page.captureScreenshot", {"format": "png"})
        path.write_bytes(base64.b64decode(shot["data"]))
