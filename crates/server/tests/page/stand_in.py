"""A server that answers as the real one does, without a model: the page's tests choose by the message what it does.

    python3 stand_in.py [--port PORT] [--key KEY] PAGE_FOLDER

Prints its address. The message decides: `hostile` answers with HTML, `think` reasons first, `busy` gets 429, `break`
fails in the middle, `endless` goes on until it is stopped, and anything else gets an answer in Markdown.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MARKDOWN = """Blue light is scattered **most**, by *molecules* of air:

1. Sunlight holds all colours.
2. Short waves are scattered more, as `1 / wavelength**4` says.
   - Blue comes from everywhere.
   - Red goes straight on.

```python
def ratio(red=700, blue=450):
    return (red / blue) ** 4
```

More in [an article](https://example.com/sky)."""
HOSTILE = (
    '<img src="https://example.com/x.png" onerror="window.hacked = 1"><script>window.hacked = 1</script>\n\n'
    "![pixel](https://example.com/pixel.png) [a](javascript:window.hacked=1) [b](data:text/html,x)\n\n"
    "```html\n<svg onload=window.hacked=1>\n```\n\n" + "> " * 50 + "deep\n\n" + "**" * 400
)


class Engine:
    """What the figures are about."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.lock = threading.Lock()
        self.live: dict[int, Json] = {}
        self.finished: list[Json] = []
        self.generated = 0
        self.next = 1

    def now(self) -> int:
        return round((time.monotonic() - self.start) * 1000)

    def begin(self, prompt: int, cached: int) -> Json:
        with self.lock:
            request: Json = {
                "id": self.next,
                "output": 0,
                "state": "waiting",
                "prompt_tokens": prompt,
                "cached_tokens": 0,
                "computed_tokens": 0,
                "output_tokens": 0,
                "pages": 0,
                "preemptions": 0,
                "arrived_ms": self.now(),
                "started_ms": None,
                "first_token_ms": None,
            }
            self.live[self.next] = request
            self.next += 1
        time.sleep(0.02)
        with self.lock:
            request |= {"state": "running", "cached_tokens": cached, "started_ms": self.now()}
            request["computed_tokens"] = (prompt + cached) // 2
        return request

    def token(self, request: Json) -> None:
        with self.lock:
            self.generated += 1
            request["output_tokens"] += 1
            request["first_token_ms"] = request["first_token_ms"] or self.now()
            request["computed_tokens"] = request["prompt_tokens"] + request["output_tokens"] - 1
            request["pages"] = -(-request["computed_tokens"] // 16)

    def end(self, request: Json, reason: str) -> None:
        with self.lock:
            self.live.pop(request["id"], None)
            kept = {name: value for name, value in request.items() if name not in ("state", "computed_tokens", "pages")}
            self.finished.insert(0, kept | {"reason": reason, "ended_ms": self.now()})
            del self.finished[32:]

    def state(self) -> Json:
        with self.lock:
            running = len(self.live)
            branches = [
                branch(1, 0, 160, running, 640),
                branch(2, 1, 96, 1 if running else 0, 224),
                branch(3, 2, 128, 0, 128),
                branch(4, 1, 64, max(running - 1, 0), 256),
                branch(5, 4, 112, 0, 112),
                branch(6, 4, 80, 0, 80),
                branch(7, 0, 48, 0, 48),
            ]
            used = 10 + 4 * running
            return {
                "now_ms": self.now(),
                "age_ms": 3,
                "state": "ready",
                "model": {"name": "stand-in", "device": "cpu", "dtype": "bf16", "max_model_len": 2048},
                "engine": {
                    "pages": {"total": 128, "free": 83 - 4 * running, "cached": 35, "in_use": used, "page_size": 16},
                    "tree": {"nodes": 7, "tokens": 688, "other_tokens": 0, "branches": branches},
                    "requests": list(self.live.values()),
                    "others": {"running": 0, "waiting": 0},
                    "arriving": 0,
                    "finished": self.finished,
                    "totals": {"generated_tokens": self.generated},
                },
            }


def branch(number: int, parent: int, tokens: int, users: int, subtree: int) -> Json:
    return {"id": number, "parent": parent, "tokens": tokens, "users": users, "subtree_tokens": subtree}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    folder: Path
    key: str | None = None

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def respond(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        all_headers = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def json(self, value: Json, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.respond(status, "application/json", json.dumps(value).encode(), headers)

    def error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.json({"error": {"message": message, "type": "x", "param": None, "code": None}}, status, headers)

    def is_refused(self) -> bool:
        if self.key is None or self.headers.get("Authorization") == f"Bearer {self.key}":
            return False
        self.error(401, "a valid API key is needed, as `Authorization: Bearer KEY`")
        return True

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/" or path.startswith("/page/"):
            file = self.folder / (Path(path).name or "index.html")
            if file.is_file():
                kind = f"{TYPES[file.suffix]}; charset=utf-8"
                self.respond(200, kind, file.read_bytes(), {"Content-Security-Policy": CSP})
            else:
                self.error(404, f"there is no `{path}` here")
        elif not self.is_refused():
            if path == "/debug/state":
                self.json(self.engine.state())
            else:
                self.error(404, f"there is no `{path}` here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_refused():
            return
        message = body["messages"][-1]["content"]
        if message == "busy":
            self.error(429, "too many requests are waiting; try again later", {"Retry-After": "1"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        request = self.engine.begin(prompt=180 + len(message), cached=160)
        try:
            self.stream(message, request)
            self.engine.end(request, "stop")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.engine.end(request, "cancelled")

    def stream(self, message: str, request: Json) -> None:
        time.sleep(0.2)
        self.chunk(request, {"role": "assistant", "content": ""})
        if message == "think":
            for word in pieces("The user wants me to think, so I think."):
                self.token(request, {"reasoning": word, "reasoning_content": word})
        answer = {"hostile": HOSTILE, "think": "I have thought.", "break": "This will"}.get(message, MARKDOWN)
        while True:
            for word in pieces(answer, 40 if message == "hostile" else 4):
                self.token(request, {"content": word})
            if message != "endless":
                break
        if message == "break":
            self.send({"error": {"message": "the model gave logits that are not numbers", "type": "server_error"}})
            return
        self.chunk(request, {}, "stop")
        self.send({"object": "chat.completion.chunk", "choices": [], "usage": usage(request)})
        self.write("data: [DONE]\n\n")

    def token(self, request: Json, delta: Json) -> None:
        time.sleep(0.01)
        self.engine.token(request)
        self.chunk(request, delta)

    def chunk(self, request: Json, delta: Json, finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        self.send({"object": "chat.completion.chunk", "choices": [choice], "usage": usage(request)})

    def send(self, event: Json) -> None:
        self.write(f"data: {json.dumps(event)}\n\n")

    def write(self, text: str) -> None:
        # In two parts, as networks do it.
        data = text.encode()
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


def pieces(text: str, size: int = 4) -> list[str]:
    """Text in the sizes of tokens."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def usage(request: Json) -> Json:
    return {
        "prompt_tokens": request["prompt_tokens"],
        "completion_tokens": request["output_tokens"],
        "total_tokens": request["prompt_tokens"] + request["output_tokens"],
        "prompt_tokens_details": {"cached_tokens": request["cached_tokens"]},
    }


def serve(folder: Path, port: int = 0, key: str | None = None) -> ThreadingHTTPServer:
    """Starts a server on a thread."""
    settings = {"engine": Engine(), "folder": folder, "key": key}
    server = ThreadingHTTPServer(("127.0.0.1", port), type("StandIn", (Handler,), settings))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key")
    options = parser.parse_args()
    running = serve(options.folder, options.port, options.key)
    print(f"http://127.0.0.1:{running.server_address[1]}/", flush=True)
    threading.Event().wait()
