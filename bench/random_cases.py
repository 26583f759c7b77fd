"""Random cases of ops, in the ranges that models have: the same for the same seed, on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import peers

FAMILIES: dict[str, list[str]] = {
    "norms": ["rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"],
    "softmax": ["softmax", "softmax", "softmax_backward"],
    "elementwise": [
        *("activation", "add_gelu", "mul_add", "gated_act", "cast", "rope"),
        *("activation_backward", "add_gelu_backward", "mul_add_backward", "gated_act_backward", "rope_backward"),
    ],
    "linear": ["linear"],
    "linear_backward": ["linear_backward"],
    "attention": ["attention"],
    "paged_attention": ["paged_attention"],
}
VOCABULARIES = [32000, 32768, 49152, 50257, 65024, 100277, 102400, 128256, 151936, 152064, 200064, 256000, 262144]
HEAD_DIMS = [64, 80, 96, 128, 128, 128, 192, 256]
DEFAULTS = {
    *((op, "kind", "gelu") for op in ("activation", "activation_backward")),
    *((op, "approximate", "none") for op in ("add_gelu", "add_gelu_backward")),
    *((op, "act", "silu") for op in ("gated_act", "gated_act_backward")),
    *((op, "layout", "split") for op in ("gated_act", "gated_act_backward")),
    ("cast", "to", "f32"),
}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1}


@dataclass(frozen=True)
class Limits:
    """How large a case may be: bytes of its tensors, and operations of its matrix products by bytes of an element."""

    bytes: float
    operations: dict[int, float]


LIMITS = {
    "cuda": Limits(2e9, {2: 3e12, 4: 2.5e11}),
    "cpu": Limits(6e7, {2: 1e10, 4: 3e9}),
}


@dataclass
class Drawn:
    """One case: what `bench --stdin` and the peers are told."""

    op: str
    dtype: str
    sizes: dict[str, int]
    options: dict[str, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    layout: str = "contiguous"
    kv_lens: list[int] = field(default_factory=list)

    def __post_init__(self):
        # As in Warpsmith's names, what is not said is the default.
        self.options = {name: value for name, value in self.options.items() if (self.op, name, value) not in DEFAULTS}

    @property
    def family(self) -> str:
        return next(name for name, ops in FAMILIES.items() if self.op in ops)

    @property
    def name(self) -> str:
        """As Warpsmith names it."""
        words = [f"{name}={value}" for name, value in self.sizes.items()] + [f"+{name}" for name in self.given]
        words += [f"{name}={value}" for name, value in self.options.items()]
        words += ["kv_lens=" + "/".join(map(str, self.kv_lens))] if self.kv_lens else []
        return " ".join(words + ([self.layout] if self.layout != "contiguous" else []))

    def __str__(self) -> str:
        return f"{self.op} [{self.name} {self.dtype}]"

    def request(self, do: str) -> dict:
        """What `bench --stdin` is asked."""
        asked = dict(do=do, op=self.op, dtype=self.dtype, layout=self.layout, kv_lens=self.kv_lens)
        asked["with"] = self.given
        asked["sizes"] = [f"{name}={value}" for name, value in self.sizes.items()]
        asked["options"] = [f"{name}={value}" for name, value in self.options.items()]
        return asked

    def case(self) -> peers.Case:
        """What the peers are told."""
        return peers.Case.of(dict(op=self.op, case=self.name, dtype=self.dtype))


class Draw:
    """Random choices for one case. They use nothing but `random()`, whose numbers no version of Python may change."""

    def __init__(self, seed: str, limits: Limits, dtypes: list[str]):
        self.rng = random.Random(seed)
        self.limits = limits
        self.dtypes = dtypes

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one_of(self, items: list):
        return items[int(self.rng.random() * len(items))]

    def log(self, low: int, high: float) -> int:
        """Between the bounds, as likely to double from anywhere."""
        high = max(int(high), low)
        return min(int(math.exp(self.rng.random() * math.log((high + 1) / low)) * low), high)

    def size(self, low: int, high: float, steps: dict[int, float]) -> int:
        """Like `log`, but a multiple of a step drawn with its probability; of the rest, half are odd."""
        value, at = self.log(low, high), self.rng.random()
        for step, probability in steps.items():
            at -= probability
            if at < 0:
                return max(value // step, 1) * step
        return max(value | 1, 1) if self.chance(0.5) else value

    def dtype(self) -> str:
        return self.one_of(self.dtypes)

    def hidden(self) -> int:
        return self.size(128, 20_000, {128: 0.4, 8: 0.2})

    def rows(self, row_bytes: float) -> int:
        return self.log(1, min(300_000, self.limits.bytes / row_bytes))

    def layout(self, strange: list[str], probability: float = 0.2) -> str:
        return self.one_of(strange) if self.chance(probability) else "contiguous"


def norm(draw: Draw, op: str) -> Drawn:
    dtype, hidden = draw.dtype(), draw.hidden()
    layer, backward = op.startswith("layer"), op.endswith("backward")
    given = []
    if backward:
        # Autograd computes the gradients of all parameters.
        given = ["weight", "dweight"] + ["dbias"] * layer
    elif draw.chance(0.85):
        given = ["weight"] + ["bias"] * (layer and draw.chance(0.7))
    fused = not backward and draw.chance(0.4)
    given += ["residual", "sum"] if fused else []
    rows = draw.rows((3 if backward else 4 if fused else 2) * hidden * BYTES[dtype])
    layout = draw.layout(["misaligned", "padded"])
    return Drawn(op, dtype, dict(num_tokens=rows, hidden=hidden), given=given, layout=layout)


def softmax(draw: Draw, op: str) -> Drawn:
    dtype = draw.dtype()
    kind, backward = draw.rng.random(), op.endswith("backward")
    if kind < 0.25:
        hidden = draw.one_of(VOCABULARIES)
    elif kind < 0.35:
        hidden = draw.log(32_000, 262_144)
    else:
        hidden = draw.hidden()
    rows = draw.rows((3 if backward else 2) * hidden * BYTES[dtype])
    options = {"scale": "0.125"} if not backward and draw.chance(0.2) else {}
    layout = draw.layout(["misaligned", "padded"])
    return Drawn(op, dtype, dict(num_tokens=rows, hidden=hidden), options, layout=layout)


def elementwise(draw: Draw, op: str) -> Drawn:
    dtype, hidden, backward = draw.dtype(), draw.hidden(), op.endswith("backward")
    options, given, tensors = {}, [], 2 + backward
    if op.startswith("activation"):
        options["kind"] = draw.one_of(["gelu", "gelu_tanh", "silu", "relu", "mish"])
    elif op.startswith("add_gelu"):
        options["approximate"] = draw.one_of(["none", "tanh"])
        given = ["dbias"] if backward else []
    elif op.startswith("mul_add"):
        tensors, given = 4 + backward, ["da", "db"] if backward else []
    else:
        options["act"] = draw.one_of(["silu", "silu", "gelu", "gelu_tanh", "relu"])
        options["layout"] = "interleaved" if draw.chance(0.25) else "split"
        tensors = 5 if backward else 3
    rows = draw.rows(tensors * hidden * BYTES[dtype])
    layout = draw.layout(["misaligned", "padded", "padded", "transposed"])
    return Drawn(op, dtype, dict(num_tokens=rows, hidden=hidden), options, given, layout)


def cast(draw: Draw, op: str) -> Drawn:
    dtype, hidden = draw.dtype(), draw.hidden()
    to = draw.one_of([other for other in ("f32", "bf16", "f16", "f8e4m3", "f8e4m3", "f8e5m2") if other != dtype])
    rows = draw.rows(hidden * (BYTES[dtype] + BYTES[to]))
    scaled = BYTES[to] == 1 and draw.chance(0.8)
    scales = rows if scaled and draw.chance(0.5) else 1
    options = {"to": to} | ({"inverse": "true"} if scaled and draw.chance(0.5) else {})
    sizes = dict(num_tokens=rows, hidden=hidden, num_scales=scales)
    return Drawn(op, dtype, sizes, options, ["scale"] * scaled, draw.layout(["misaligned", "padded"]))


def rope(draw: Draw, op: str) -> Drawn:
    dtype, dim, heads = draw.dtype(), draw.one_of(HEAD_DIMS), draw.log(1, 64)
    rows = draw.rows(2 * heads * dim * BYTES[dtype])
    options = {"layout": "interleaved"} if draw.chance(0.3) else {}
    sizes = dict(num_tokens=rows, num_heads=heads, head_dim=dim)
    return Drawn(op, dtype, sizes, options, layout=draw.layout(["misaligned", "padded", "heads-first"]))


def product_sizes(draw: Draw, dtype: str, work: float) -> tuple[int, int, int]:
    """Rows, columns and the length of the sums of a product, `work` times."""
    size = BYTES[dtype]
    most, memory = draw.limits.operations[size] / work, draw.limits.bytes / size
    aligned = {128: 0.3, 8: 0.5}
    k = draw.size(128, min(16_384, memory / 512), aligned)
    if draw.chance(0.08):
        n = draw.one_of(VOCABULARIES)
        k = min(k, max(int(memory / 3 / n) // 8 * 8, 128))
    else:
        n = draw.size(128, min(30_000, memory / 3 / k), aligned)
    rows = min(16_384, most / (2 * n * k), memory / 3 / max(n, k))
    m = draw.log(1, rows)
    if draw.chance(0.3):
        m = 1 << (m.bit_length() - 1)
    return m, n, k


def linear(draw: Draw, op: str) -> Drawn:
    dtype = draw.dtype()
    gated = draw.chance(0.12)
    m, n, k = product_sizes(draw, dtype, 1 + gated)
    options: dict[str, str] = {}
    act = draw.one_of(["none", "none", "none", "gelu", "gelu_tanh", "silu", "relu"])
    if gated:
        options["act"] = draw.one_of(["silu", "gelu"])
        options["gate"] = draw.one_of(["halves", "interleaved"])
    elif act != "none":
        options["act"] = act
    given = [name for name, probability in (("bias", 0.4), ("residual", 0.15)) if draw.chance(probability)]
    if dtype == "f32" and draw.chance(0.5):
        options["precision"] = "tf32"
    sizes = dict(m=m, n=n, k=k, batch=1)
    return Drawn(op, dtype, sizes, options, given, draw.layout(["misaligned", "padded"], 0.12))


def linear_backward(draw: Draw, op: str) -> Drawn:
    dtype = draw.dtype()
    m, n, k = product_sizes(draw, dtype, 2)
    given, options = ["dx", "dw"] + ["dbias"] * draw.chance(0.5), {}
    if draw.chance(0.25):
        given.insert(0, "z")
        options["act"] = draw.one_of(["gelu", "silu", "relu"])
    if dtype == "f32" and draw.chance(0.5):
        options["precision"] = "tf32"
    return Drawn(op, dtype, dict(m=m, n=n, k=k), options, given, draw.layout(["misaligned", "padded"], 0.12))


def heads(draw: Draw) -> tuple[int, int, int]:
    """Query heads, KV heads, and the elements of a head."""
    kv_heads, group = draw.log(1, 16), draw.log(1, 16)
    return kv_heads * min(group, 128 // kv_heads), kv_heads, draw.one_of(HEAD_DIMS)


def attention(draw: Draw, op: str) -> Drawn:
    dtype = draw.dtype()
    num_heads, kv_heads, dim = heads(draw)
    size = BYTES[dtype]
    pairs = draw.limits.operations[size] / (4 * num_heads * dim)
    # Bytes of a key and its value; queries and results have at most as many as all heads have.
    keys = draw.limits.bytes / (2 * kv_heads * dim * size)
    queries = draw.limits.bytes / (4 * num_heads * dim * size)
    kind = draw.rng.random()
    options = {}
    if kind < 0.65:
        q_len = kv_len = draw.log(16, min(16_384, math.sqrt(pairs), keys, queries))
        if draw.chance(0.7):
            options["causal"] = "true"
    elif kind < 0.85:
        q_len, kv_len = 1, draw.log(1, min(60_000, keys))
    else:
        q_len = draw.log(2, min(4096, queries, pairs))
        kv_len = draw.log(1, min(16_384, keys, pairs / q_len))
    most = min(64, pairs / (q_len * kv_len), keys / kv_len, queries / q_len)
    sizes = dict(batch=draw.log(1, most), q_len=q_len, kv_len=kv_len)
    sizes |= dict(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim)
    return Drawn(op, dtype, sizes, options, layout=draw.layout(["heads-first", "heads-first", "padded"]))


def paged_attention(draw: Draw, op: str) -> Drawn:
    dtype = draw.dtype()
    num_heads, kv_heads, dim = heads(draw)
    keys = draw.limits.bytes / (2 * kv_heads * dim * BYTES[dtype])
    requests = draw.log(1, 256)
    longest = min(60_000, keys)
    lengths = [draw.log(1, longest) for _ in range(1 if draw.chance(0.35) else 2 + int(7 * draw.rng.random()))]
    total = sum(lengths) / len(lengths)
    requests = max(min(requests, int(keys / total)), 1)
    lengths = lengths[:requests]
    sizes = dict(requests=requests, q_len=1, kv_len=max(lengths), num_heads=num_heads, num_kv_heads=kv_heads)
    sizes |= dict(head_dim=dim, page_size=draw.one_of([8, 16, 16, 16, 32, 64, 128]), prefix_len=0)
    return Drawn(op, dtype, sizes, kv_lens=lengths if len(set(lengths)) > 1 else [])


MAKERS: dict[str, Callable[[Draw, str], Drawn]] = {
    **dict.fromkeys(FAMILIES["norms"], norm),
    **dict.fromkeys(FAMILIES["softmax"], softmax),
    **dict.fromkeys(FAMILIES["elementwise"], elementwise),
    **dict.fromkeys(("rope", "rope_backward"), rope),
    "cast": cast,
    "linear": linear,
    "linear_backward": linear_backward,
    "attention": attention,
    "paged_attention": paged_attention,
}


def cases(seed: int, count: int, names: list[str], device: str, dtypes: list[str]) -> list[Drawn]:
    """`count` cases of each of the named families or ops."""
    found = []
    for name in names or list(FAMILIES):
        if name not in FAMILIES and name not in MAKERS:
            raise ValueError(f"op {name!r}: expected one of {', '.join(dict.fromkeys([*FAMILIES, *MAKERS]))}")
        ops = FAMILIES.get(name, [name])
        for index in range(count):
            op = ops[index % len(ops)]
            # The place of a case among those of its op: it does not depend on what else is asked for.
            turn = index // len(ops) * ops.count(op) + ops[: index % len(ops)].count(op)
            draw = Draw(f"{seed} {op} {turn}", LIMITS[device], dtypes)
            found.append(MAKERS[op](draw, op))
    return found
