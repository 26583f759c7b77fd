"""A `warpsmith serve` as a child of this process: it lives as long as this does, and not longer."""

from __future__ import annotations

import collections
import ctypes
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ADDRESS = re.compile(r"http://(\S+):(\d+)/health")
PR_SET_PDEATHSIG = 1


class Child:
    """The server, on a port that is free."""

    def __init__(self, program: str, flags: Sequence[str], api_keys: Sequence[str] = ()) -> None:
        # The key of this process itself, for figures. A key among the words of a command could be read by everybody on
        # the machine, so they are in a file. Without keys the server stays open, as it was asked to be.
        self.key = secrets.token_urlsafe(32) if api_keys else None
        self._folder = tempfile.TemporaryDirectory(prefix="warpsmith-ray-")
        self._command = [program, "serve", *flags, "--host", "127.0.0.1", "--port", "0"]
        if self.key:
            file = Path(self._folder.name) / "server.toml"
            file.touch(mode=0o600)
            # JSON's strings are TOML's.
            file.write_text(f"api-key = {json.dumps([*api_keys, self.key])}\n")
            self._command += ["--config", str(file)]
        self._said: collections.deque[str] = collections.deque(maxlen=20)
        self._known = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._trouble: Exception | None = None
        self.url = ""
        # The system ends the child with the thread that started it, so that thread stays.
        self._keeper = threading.Thread(target=self._keep, name="warpsmith", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            self._trouble = error
            self._known.set()
            return
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
            if not self.url and (found := ADDRESS.search(line)):
                self.url = f"http://{found[1]}:{found[2]}"
                self._known.set()
        self._process.wait()
        self._known.set()

    @property
    def pid(self) -> int | None:
        """The number of its process."""
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def _gone(self) -> RuntimeError:
        code = self._process.poll() if self._process else None
        said = "\n".join(self._said)
        return RuntimeError(f"`{' '.join(self._command)}` ended with {code}: {self._trouble or said}")

    def headers(self) -> dict[str, str]:
        """What requests of this process have."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def wait_until_ready(self, timeout: float) -> None:
        """Returns when the first token could be made.

        Raises:
            RuntimeError: if the server ends, or is not ready in time.
        """
        end = time.monotonic() + timeout
        self._known.wait(timeout)
        while True:
            if not self.is_alive():
                self._keeper.join(1)
                raise self._gone()
            told = self.trouble()
            if told is None:
                return
            if time.monotonic() > end:
                self.close()
                raise RuntimeError(f"`warpsmith serve` was not ready within {timeout:.0f} s: {told}")
            time.sleep(0.1)

    def trouble(self) -> str | None:
        """What is wrong with it; None if it serves."""
        if not self.is_alive():
            return str(self._gone())
        if not self.url:
            return "it has not said where it listens"
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return None
        except urllib.error.HTTPError as error:
            return f"/health answers {error.code}: {error.read(300).decode(errors='replace')}"
        except OSError as error:
            return f"/health does not answer: {error}"

    def figures(self) -> dict[str, float]:
        """Its gauges, without labels."""
        request = urllib.request.Request(f"{self.url}/metrics", headers=self.headers())
        with urllib.request.urlopen(request, timeout=5) as answer:
            text = answer.read().decode()
        found = {}
        for line in text.splitlines():
            if match := re.match(r"vllm:(num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)", line):
                found[match[1]] = float(match[2])
        return found

    def close(self, patience: float = 10) -> None:
        """Ends it: running requests have this time."""
        if self._process and self.is_alive():
            self._process.terminate()
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._keeper.join(5)
        self._folder.cleanup()
