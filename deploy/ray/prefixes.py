"""Which replica has the beginning of a prompt in its cache, as far as can be told from outside."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Bytes of text that are compared at once: about the tokens of a few pages.
BLOCK = 256
# The most blocks of a prompt that count. Prompts that agree in so many are routed alike.
MOST_BLOCKS = 512


def blocks_of(body: bytes, tenant: str) -> list[bytes]:
    """The names of a prompt's leading blocks, each of which depends on all before it.

    Whoever has another key shares no prefix with others: the server keeps them apart in its cache too.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    # In the order in which chat templates write them.
    parts = [
        fields.get(name) for name in ("model", "cache_salt", "tools", "instructions", "prompt", "input", "messages")
    ]
    text = "\0".join(_text(part) for part in parts).encode(errors="replace")
    name = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    names = []
    # A block that is not full may go on in the next request: it says nothing yet, unless it is the only one.
    whole = max(len(text) // BLOCK, 1)
    for i in range(min(whole, MOST_BLOCKS)):
        name = hashlib.blake2b(name + text[i * BLOCK : (i + 1) * BLOCK], digest_size=16).digest()
        names.append(name)
    return names


def _text(part: Any) -> str:
    """What stands in a part of a request, as text of which prefixes stay prefixes."""
    if part is None:
        return ""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "\1".join(_text(item) for item in part)
    if isinstance(part, dict):
        return "\2".join(f"{key}\3{_text(value)}" for key, value in part.items())
    return json.dumps(part)


class Prefixes:
    """Remembers the replicas that were sent each block, the most recently used ones."""

    def __init__(self, most_blocks: int = 200_000) -> None:
        self._most = most_blocks
        self._known: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def matches(self, blocks: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """How many leading blocks each of the replicas has been sent."""
        left = set(replicas)
        found = dict.fromkeys(left, 0)
        for block in blocks:
            known = self._known.get(block)
            left = left.intersection(known) if known else set()
            if not left:
                break
            for replica in left:
                found[replica] += 1
        return found

    def size(self, replica: str) -> int:
        """How many blocks a replica has been sent."""
        return self._sizes[replica]

    def add(self, blocks: Sequence[bytes], replica: str) -> None:
        """A replica is sent these blocks."""
        # From the end, so that the beginning, which others share, is forgotten last.
        for block in reversed(blocks):
            known = self._known.setdefault(block, {})
            self._sizes[replica] += replica not in known
            known[replica] = None
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            _, replicas = self._known.popitem(last=False)
            self._sizes.subtract(replicas.keys())

    def forget(self, replica: str) -> None:
        """A replica has ended, and its cache with it."""
        for block in [block for block, replicas in self._known.items() if replica in replicas]:
            del self._known[block][replica]
            if not self._known[block]:
                del self._known[block]
        del self._sizes[replica]


def choose(
    matches: dict[str, int], loads: Callable[[str], int], sizes: Callable[[str], int], imbalance: int
) -> list[str]:
    """The replicas, best first: the one that has most of the prompt, unless it has so many more requests than another
    that computing the prompt again is faster than waiting. A new prompt goes where there is least to do, and then where
    the least is cached."""
    by_load = sorted(matches, key=lambda replica: (loads(replica), sizes(replica), replica))
    if not by_load:
        return []
    least = loads(by_load[0])
    near = [replica for replica in by_load if matches[replica] > 0 and loads(replica) - least <= imbalance]
    # Of equals the one with fewer requests, as they were sorted.
    near.sort(key=lambda replica: -matches[replica])
    return near + [replica for replica in by_load if replica not in near]
