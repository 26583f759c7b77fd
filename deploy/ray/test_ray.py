"""Two replicas on this machine, with `warpsmith serve` and its default model.

    python test_ray.py [--program target/release/warpsmith] [--model FILE]

In an environment with requirements.txt; `make test-ray` makes one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent
# The workers import the application too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(HERE))

import ray  # noqa: E402
import yaml  # noqa: E402
from prefixes import BLOCK, Prefixes, blocks_of, choose  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402
from warpsmith_ray import Arguments, app  # noqa: E402

PORT = 18431
URL = f"http://127.0.0.1:{PORT}"
KEYS = ("first", "second")


def check(holds: Any, told: str) -> None:
    """Fails with these words if something does not hold."""
    if not holds:
        raise AssertionError(told)


def prompt(topic: int) -> list[dict[str, str]]:
    """A chat that begins like others about the same topic, and like no other."""
    rules = " ".join(f"Rule {i} of topic {topic}: answer in few words." for i in range(24))
    return [{"role": "system", "content": rules}]


def asking(topic: int, question: str, **fields: Any) -> dict[str, Any]:
    """A request about a topic."""
    return {
        "messages": [*prompt(topic), {"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
    } | fields


def test_blocks() -> None:
    """Prompts share blocks as long as they share text, and with another key none."""
    body = lambda question, **fields: json.dumps(asking(1, question, **fields)).encode()  # noqa: E731
    one, two = blocks_of(body("Why?"), "a"), blocks_of(body("Why not? " * 200), "a")
    check(len(one) > 2 and two[: len(one) - 1] == one[:-1] and len(two) > len(one), "the common blocks differ")
    check(blocks_of(body("Why?", temperature=1, stream=True), "a") == one, "options change the blocks")
    for other in (blocks_of(body("Why?"), "b"), blocks_of(body("Why?", cache_salt="x"), "a")):
        check(not set(other) & set(one), "tenants share blocks")
    check(blocks_of(b"no JSON", "a") == blocks_of(b"[1]", "a") == [], "what is no request has blocks")
    check(len(blocks_of(json.dumps({"prompt": [1, 2]}).encode(), "a")) == 1, "a short prompt has one block")
    check(len(blocks_of(json.dumps({"prompt": "x" * 3 * BLOCK}).encode(), "a")) == 3, "blocks are not counted")
    check(blocks_of(json.dumps({"prompt": "\ud800"}).encode(), "a") != [], "half of a character")


def test_choice() -> None:
    """The longest match wins, unless its replica has too much to do; what has ended is forgotten."""
    prefixes = Prefixes(most_blocks=6)
    blocks = [bytes([i]) for i in range(5)]
    prefixes.add(blocks[:2], "a")
    prefixes.add(blocks[:4], "b")
    check(prefixes.matches(blocks, "abc") == {"a": 2, "b": 4, "c": 0}, "matches are counted wrong")
    loads = {"a": 0, "b": 3, "c": 0}
    order = lambda most: choose(prefixes.matches(blocks, "abc"), loads.__getitem__, prefixes.size, most)  # noqa: E731
    check(order(4) == ["b", "a", "c"], "the longest is not first")
    check(order(2) == ["a", "c", "b"], "load does not count")
    check(choose(dict.fromkeys("abc", 0), loads.__getitem__, prefixes.size, 9) == ["c", "a", "b"], "a new one")
    check(choose({}, loads.__getitem__, prefixes.size, 2) == [], "nobody is somebody")
    prefixes.add([b"x", b"y", b"z"], "c")
    check(len(prefixes) == 6 and prefixes.matches(blocks, "b") == {"b": 3}, "not the end is forgotten first")
    check([prefixes.size(name) for name in "abc"] == [2, 3, 3], "sizes are counted wrong")
    prefixes.forget("b")
    check(prefixes.size("b") == 0, "a replica that ended has blocks")
    check(prefixes.matches(blocks, "ab") == {"a": 2, "b": 0}, "a replica that ended is remembered")


def test_config() -> None:
    """The file names what there is, and no argument is left out of the guide."""
    schema = ServeDeploySchema.model_validate(yaml.safe_load((HERE / "serve.yaml").read_text()))
    (application,) = schema.applications
    check(application.import_path == "warpsmith_ray:app", f"it imports {application.import_path}")
    arguments = Arguments(**application.args)
    check(arguments.max_ongoing_requests >= 256 + int(arguments.flags[1]), "requests wait in Ray")
    guide = (HERE.parents[1] / "docs/scaling.md").read_text()
    missing = [name for name in Arguments.model_fields if f"`{name}`" not in guide]
    check(not missing, f"docs/scaling.md does not explain {missing}")
    told = subprocess.run([PROGRAM, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    unknown = [word for word in arguments.flags if word.startswith("--") and f"{word} " not in told]
    check(not unknown, f"`{PROGRAM} serve` does not know {unknown}")
    try:
        Arguments(**application.args, speed=3)
    except ValueError as error:
        check("speed" in str(error), f"a wrong argument is not named: {error}")
    else:
        raise AssertionError("a wrong argument is taken")


async def post(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """Status, replica and body of an answer."""
    async with session.post(f"{URL}/v1/chat/completions", json=body) as answer:
        return answer.status, answer.headers.get("x-warpsmith-replica", ""), await answer.json()


def cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were cached."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_routing(session: aiohttp.ClientSession) -> None:
    """A prompt goes where its beginning was computed, and new ones where there is least to do."""
    homes = {}
    for topic in range(4):
        status, homes[topic], answer = await post(session, asking(topic, "First?"))
        check(status == 200 and homes[topic], f"{status} {answer}")
        check(cached(answer) == 0, f"topic {topic} was cached before it came")
    check(len(set(homes.values())) == 2, f"new prompts all went to one replica: {homes}")
    answers = await asyncio.gather(*(post(session, asking(10 + i, "Why?", max_tokens=24)) for i in range(4)))
    spread = Counter(replica for _, replica, _ in answers)
    check(len(spread) == 2, f"all went to one replica: {spread}")
    homes |= {10 + i: replica for i, (_, replica, _) in enumerate(answers)}
    for topic in homes:
        status, replica, answer = await post(session, asking(topic, f"Question {time.time()}?"))
        check(status == 200 and replica == homes[topic], f"topic {topic} went to {replica} and not to {homes[topic]}")
        check(cached(answer) > 100, f"only {cached(answer)} tokens of topic {topic} were cached")
    # Another key has another cache.
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS[1]}"}) as other:
        _, _, answer = await post(other, asking(0, "First?"))
        check(cached(answer) == 0, "another key found what was cached")


async def test_streams(session: aiohttp.ClientSession) -> None:
    """Parts come as they are made, and a client that leaves ends its request."""
    times, text = [], b""
    async with session.post(
        f"{URL}/v1/chat/completions", json=asking(0, "Count.", max_tokens=40, stream=True)
    ) as answer:
        check(answer.headers["content-type"].startswith("text/event-stream"), f"{answer.headers}")
        async for part in answer.content.iter_any():
            times.append(time.monotonic())
            text += part
    check(text.endswith(b"data: [DONE]\n\n") and len(times) > 5, f"{len(times)} parts end with {text[-80:]!r}")
    check(times[-1] - times[0] > 0.02, "all parts came at once")
    endless = asking(0, "Count.", max_tokens=1500, ignore_eos=True, stream=True)
    answer = await session.post(f"{URL}/v1/chat/completions", json=endless)
    await answer.content.readany()
    check(await running(session) == 1, "nothing runs")
    answer.close()
    end = time.monotonic() + 5
    while await running(session):
        check(time.monotonic() < end, "the request of a client that left goes on")
        await asyncio.sleep(0.05)


async def test_errors(session: aiohttp.ClientSession) -> None:
    """What a server refuses is refused in its words; what is about one server is not there."""
    status, _, answer = await post(session, {"messages": []})
    check(status == 400 and "messages" in answer["error"]["message"], f"{status} {answer}")
    async with aiohttp.ClientSession() as nobody:
        status, _, answer = await post(nobody, asking(0, "May I?"))
        check(status == 401, f"without a key: {status} {answer}")
    status, _, answer = await post(session, asking(0, "x" * 300_000))
    check(status == 413, f"a long body: {status} {answer}")
    for path, expected in (("/health", 200), ("/v1/models", 200), ("/metrics", 404), ("/", 404), ("/nothing", 404)):
        async with session.get(f"{URL}{path}") as response:
            check(response.status == expected, f"{path} answers {response.status}")


async def test_death(session: aiohttp.ClientSession) -> None:
    """A server that dies is replaced, and meanwhile the other one serves."""
    victim = servers()[0]
    os.kill(victim, signal.SIGKILL)
    end, failures = time.monotonic() + 90, 0
    while True:
        status, _, _ = await post(session, asking(int(time.time()), "Are you there?"))
        failures += status != 200
        check(status in (200, 503), f"a dead server gives {status}")
        now = servers()
        if victim not in now and len(now) == 2:
            break
        check(time.monotonic() < end, f"it was not replaced: {now}")
        await asyncio.sleep(0.2)
    end, first = time.monotonic() + 90, 50
    while True:
        # New prompts each time: those that were answered before have their home, which may be the other replica.
        topics, first = range(first, first + 4), first + 4
        answers = await asyncio.gather(*(post(session, asking(topic, "Why?", max_tokens=24)) for topic in topics))
        if {status for status, _, _ in answers} == {200} and len({replica for _, replica, _ in answers}) == 2:
            return
        told = [(status, replica) for status, replica, _ in answers]
        check(time.monotonic() < end, f"the new replica does not serve: {told}")
        await asyncio.sleep(0.5)


PROGRAM = ""


def servers() -> list[int]:
    """The processes of the servers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if os.fsencode(PROGRAM) in words[:2] and b"serve" in words[:3] and b"--port" in words and stat[0] != "Z":
            found.append(int(folder.name))
    return sorted(found)


def port_of(pid: int) -> int:
    """Where a server listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            return int(local.rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} does not listen")


async def running(session: aiohttp.ClientSession) -> int:
    """Outputs that run in all servers, by their own word."""
    total = 0
    for pid in servers():
        async with session.get(f"http://127.0.0.1:{port_of(pid)}/metrics") as answer:
            figures = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)", await answer.text(), re.MULTILINE)
        check(len(figures) == 1, f"{len(figures)} figures of requests that run")
        total += int(float(figures[0]))
    return total


async def over_http() -> int:
    """Runs the tests that need replicas. The number that failed."""
    tests: list[Callable[[aiohttp.ClientSession], Any]] = [test_routing, test_streams, test_errors, test_death]
    failed = 0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS[0]}"}) as session:
        for test in tests:
            began = time.monotonic()
            try:
                await asyncio.wait_for(test(session), 180)
                print(f"ray: {test.__name__} ok ({time.monotonic() - began:.1f} s)", flush=True)
            except Exception as error:
                failed += 1
                print(f"ray: {test.__name__} FAILED: {error!r}", flush=True)
    return failed


def main() -> int:
    global PROGRAM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/warpsmith")
    parser.add_argument("--model")
    options = parser.parse_args()
    PROGRAM = str(Path(options.program).resolve())
    test_blocks()
    test_choice()
    test_config()
    print("ray: prefixes ok", flush=True)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        arguments = Arguments(
            model=options.model,
            program=PROGRAM,
            replicas=2,
            cpus=0,
            api_keys=list(KEYS),
            max_body_bytes=200_000,
            imbalance=4,
            flags=["--max-total-tokens", "8192", "--threads", "1"],
        )
        serve.run(app(arguments), name="warpsmith", route_prefix="/")
        failed = asyncio.run(over_http())
    finally:
        serve.shutdown()
        ray.shutdown()
    end = time.monotonic() + 20
    while left := servers():
        if time.monotonic() > end:
            print(f"ray: FAILED: servers are left behind: {left}")
            return 1
        time.sleep(0.2)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
