"""What other libraries call the ops: from a Warpsmith benchmark row to callables that do the same work.

A row names its case as Warpsmith does, `num_tokens=8192 hidden=4096 +weight eps=0.5`: sizes and options as
`name=value`, optional arguments with a plus sign.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target" / "release" / "warpsmith"
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
}


def build() -> None:
    """Builds the binary that is measured; a machine without Cargo must have been given it."""
    if shutil.which("cargo"):
        subprocess.run(["cargo", "build", "--release", "-p", "warpsmith-cli"], cwd=ROOT, check=True)


def warpsmith(*words: str) -> list[dict]:
    """Runs the command line and returns the JSON objects it prints."""
    done = subprocess.run([BINARY, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def steps(*words: str) -> Iterator[dict]:
    """Runs the command line with `--step`: its next result is made when it is asked for."""
    with subprocess.Popen([BINARY, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        while True:
            run.stdin.write("\n")
            run.stdin.flush()
            line = run.stdout.readline()
            if not line:
                break
            if line.startswith("{"):
                yield json.loads(line)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, words)


@dataclass
class Case:
    """One row of `warpsmith bench --json`, taken apart."""

    op: str
    name: str
    dtype: str
    row: dict
    values: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    @staticmethod
    def of(row: dict) -> Case:
        case = Case(row["op"], row["case"], row["dtype"], row)
        for word in case.name.split():
            if word.startswith("+"):
                case.given.add(word[1:])
            elif "=" in word:
                name, value = word.split("=", 1)
                case.values[name] = value
        return case

    def size(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str, default: float) -> float:
        return float(self.values.get(name, default))

    def option(self, name: str, default: str) -> str:
        return self.values.get(name, default)

    def words(self, sizes: list[str]) -> list[str]:
        """The command-line words that select this case alone."""
        words = [self.op, "--dtype", self.dtype]
        words += ["--shape", *(f"{name}={self.values[name]}" for name in sizes)]
        for name in self.values:
            if name not in sizes:
                words += ["--set", f"{name}={self.values[name]}"]
        for name in sorted(self.given):
            words += ["--with", name]
        return words


@dataclass
class Work:
    """One op on one set of tensors. `fresh` makes another set; `calls` are given the tensors of a set."""

    fresh: Callable[[], tuple]
    calls: dict[str, Callable]
    # Functions torch.compile can improve on; the others are single library kernels.
    compile: Callable | None = None


def of(case: Case, device: str) -> Work | None:
    """The same work in other libraries, or `None` if no library has it."""
    maker = MAKERS.get(case.op)
    return maker(case, device) if maker else None


def flashinfer(device: str):
    """The library, if it is installed and has a GPU to run on."""
    if device == "cpu":
        return None
    try:
        import flashinfer as library
    except ImportError:
        return None
    return library


def _normal(case: Case, device: str) -> Callable[..., torch.Tensor]:
    dtype = DTYPES[case.dtype]
    return lambda *shape: torch.randn(*shape, device=device).to(dtype)


def _rows(case: Case) -> tuple[int, int]:
    return case.size("num_tokens"), case.size("hidden")


def _norm(case: Case, device: str) -> Work:
    rms = case.op.startswith("rms_norm")
    rows, hidden = _rows(case)
    eps = case.number("eps", 1e-6 if rms else 1e-5)
    normal = _normal(case, device)

    def norm(x, w, b):
        return F.rms_norm(x, (hidden,), w, eps) if rms else F.layer_norm(x, (hidden,), w, b, eps)

    def fresh():
        weight = normal(hidden) if "weight" in case.given else None
        bias = normal(hidden) if "bias" in case.given else None
        residual = normal(rows, hidden) if "residual" in case.given else None
        return normal(rows, hidden), weight, bias, residual

    def call(x, w, b, residual):
        if residual is None:
            return norm(x, w, b)
        total = x + residual
        return norm(total, w, b), total

    calls = {"torch": call}
    library = flashinfer(device)
    if library and rms and case.dtype != "f32" and "weight" in case.given:
        if "residual" in case.given:
            # In place: the sum replaces the residual, the result replaces x.
            calls["flashinfer"] = lambda x, w, b, r: library.norm.fused_add_rmsnorm(x, r, w, eps)
        else:
            calls["flashinfer"] = lambda x, w, b, r: library.norm.rmsnorm(x, w, eps)
    return Work(fresh, calls, call)


def _gradient(case: Case, device: str, forward: Callable, make: Callable[[], tuple]) -> Work:
    """The backward pass of `forward` alone: autograd on a graph that was built before."""

    def calls_of(function: Callable) -> Callable:
        graphs: dict[int, tuple] = {}

        def call(dout, *inputs):
            key = id(dout)
            if key not in graphs:
                leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
                iterator = iter(leaves)
                graphs[key] = (
                    function(*(None if x is None else next(iterator) for x in inputs)),
                    leaves,
                )
            out, leaves = graphs[key]
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return call

    calls = {"torch": calls_of(forward)}
    if device != "cpu":
        from torch._functorch import config

        # A retained graph must not give its buffers away.
        config.donated_buffer = False
        calls["torch.compile"] = calls_of(torch.compile(forward, dynamic=False))
    return Work(make, calls)


def _norm_backward(case: Case, device: str) -> Work | None:
    if "dsum" in case.given:
        return None
    rms = case.op.startswith("rms_norm")
    rows, hidden = _rows(case)
    eps = case.number("eps", 1e-6 if rms else 1e-5)
    normal = _normal(case, device)

    def forward(x, w, b):
        return F.rms_norm(x, (hidden,), w, eps) if rms else F.layer_norm(x, (hidden,), w, b, eps)

    def make():
        weight = normal(hidden) if "weight" in case.given else None
        bias = normal(hidden) if "dbias" in case.given else None
        return normal(rows, hidden), normal(rows, hidden), weight, bias

    return _gradient(case, device, forward, make)


def _softmax(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    scale = case.number("scale", 1.0)

    def call(x):
        return torch.softmax(x if scale == 1.0 else x * scale, -1)

    return Work(lambda: (normal(rows, hidden),), {"torch": call}, call)


def _softmax_backward(case: Case, device: str) -> Work | None:
    if case.number("scale", 1.0) != 1.0:
        return None
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    dtype = DTYPES[case.dtype]

    def make():
        return torch.softmax(normal(rows, hidden), -1), normal(rows, hidden)

    def call(y, dout):
        return torch.ops.aten._softmax_backward_data(dout, y, -1, dtype)

    def formula(y, dout):
        product = y * dout
        return product - y * product.sum(-1, keepdim=True)

    return Work(make, {"torch": call}, formula)


def _activation(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    call = ACTIVATIONS[case.option("kind", "gelu")]
    return Work(lambda: (normal(rows, hidden),), {"torch": call}, call)


def _activation_backward(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    forward = ACTIVATIONS[case.option("kind", "gelu")]
    return _gradient(case, device, forward, lambda: (normal(rows, hidden), normal(rows, hidden)))


def _gelu(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACTIVATIONS["gelu_tanh" if case.option("approximate", "none") == "tanh" else "gelu"]


def _add_gelu(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    gelu = _gelu(case)

    def call(x, bias):
        return gelu(x + bias)

    return Work(lambda: (normal(rows, hidden), normal(hidden)), {"torch": call}, call)


def _add_gelu_backward(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    gelu = _gelu(case)

    def make():
        return normal(rows, hidden), normal(rows, hidden), normal(hidden)

    return _gradient(case, device, lambda x, bias: gelu(x + bias), make)


def _mul_add(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)

    def call(a, b, c):
        return a * b + c

    return Work(
        lambda: tuple(normal(rows, hidden) for _ in range(3)),
        {"torch": call, "torch.addcmul": lambda a, b, c: torch.addcmul(c, a, b)},
        call,
    )


def _mul_add_backward(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)

    def call(dout, a, b):
        return tuple(dout * other for name, other in (("da", b), ("db", a)) if name in case.given)

    return Work(lambda: tuple(normal(rows, hidden) for _ in range(3)), {"torch": call}, call)


def _halves(case: Case) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    if case.option("layout", "split") == "interleaved":
        return lambda x: (x[..., 0::2], x[..., 1::2])
    return lambda x: x.chunk(2, -1)


def _gated_act(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    kind = case.option("act", "silu")
    activation, halves = ACTIVATIONS[kind], _halves(case)

    def call(x):
        gate, up = halves(x)
        return activation(gate) * up

    calls = {"torch": call}
    library = flashinfer(device)
    names = {
        "silu": "silu_and_mul",
        "gelu": "gelu_and_mul",
        "gelu_tanh": "gelu_tanh_and_mul",
    }
    if library and case.dtype != "f32" and kind in names and case.option("layout", "split") == "split":
        calls["flashinfer"] = getattr(library, names[kind])
    return Work(lambda: (normal(rows, 2 * hidden),), calls, call)


def _gated_act_backward(case: Case, device: str) -> Work:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    activation, halves = ACTIVATIONS[case.option("act", "silu")], _halves(case)

    def forward(x):
        gate, up = halves(x)
        return activation(gate) * up

    return _gradient(case, device, forward, lambda: (normal(rows, hidden), normal(rows, 2 * hidden)))


def _rotated(x, positions, frequencies, interleaved: bool):
    """Keys as models rotate them: angles in f32, factors in the type of the keys."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    left, right = a * cos - b * sin, b * cos + a * sin
    return torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)


def _rope(case: Case, device: str) -> Work | None:
    if "cos" in case.given or case.option("rotary_dim", "0") != "0":
        return None
    tokens, heads, dim = (case.size(name) for name in ("num_tokens", "num_heads", "head_dim"))
    normal = _normal(case, device)
    interleaved = case.option("layout", "half") == "interleaved"
    theta = case.number("theta", 10000.0)
    backward = case.op.endswith("_backward")
    frequencies = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)

    def fresh():
        return normal(tokens, heads, dim), torch.arange(tokens, device=device)

    def call(x, positions):
        return _rotated(x, -positions if backward else positions, frequencies, interleaved)

    calls = {"torch": call}
    library = flashinfer(device)
    if library and case.dtype != "f32" and not backward:
        # It wants queries and keys: the last head stands for the keys.
        def rotate(x, positions):
            library.rope.apply_rope_pos_ids_inplace(
                x[:, :-1],
                x[:, -1:],
                positions.int(),
                interleave=interleaved,
                rope_theta=theta,
            )

        calls["flashinfer"] = rotate
    return Work(fresh, calls, call)


def _cast(case: Case, device: str) -> Work | None:
    rows, hidden = _rows(case)
    normal = _normal(case, device)
    to = DTYPES[case.option("to", "f32")]
    scaled = "scale" in case.given
    inverse = case.option("inverse", "false") == "true"
    count = int(case.values.get("num_scales", 1))
    limit = torch.finfo(to).max

    def fresh():
        scale = torch.rand((count, 1) if count > 1 else (1,), device=device) + 0.5
        return normal(rows, hidden), scale

    def call(x, scale):
        if scaled:
            x = x.float() / scale if inverse else x.float() * scale
        if to.itemsize == 1:
            x = x.float().clamp(-limit, limit)
        return x.to(to)

    return Work(fresh, {"torch": call}, call)


def _linear_epilogue(case: Case) -> Callable[..., torch.Tensor]:
    """What follows the product: activation, gate, scale, residual."""
    activation = ACTIVATIONS.get(case.option("act", "none"), lambda x: x)
    gate, scale = case.option("gate", "none"), case.number("scale", 1.0)

    def finish(z, residual):
        if gate == "halves":
            g, up = z.chunk(2, -1)
            y = activation(g) * up
        elif gate == "interleaved":
            y = activation(z[..., 0::2]) * z[..., 1::2]
        else:
            y = activation(z)
        y = y if scale == 1.0 else y * scale
        return y if residual is None else residual + y

    return finish


def _linear(case: Case, device: str) -> Work | None:
    m, n, k, batch = (case.size(name) for name in ("m", "n", "k", "batch"))
    rows = n if case.option("gate", "none") == "none" else 2 * n
    eight_bit = case.dtype.startswith("f8")
    to = case.option("to", "auto")
    out = DTYPES["bf16" if eight_bit else case.dtype] if to == "auto" else DTYPES[to]
    if batch != 1 or (not eight_bit and out != DTYPES[case.dtype]):
        return None
    normal, finish = _normal(case, device), _linear_epilogue(case)

    def maybe(name, *shape):
        return normal(*shape).to(out) if name in case.given else None

    if eight_bit:
        # Only the GPU library has it, for scales of a tensor or a row.
        if device == "cpu" or case.option("scaling", "tensor") == "block" or "x_scale" not in case.given:
            return None
        by_row = case.option("scaling", "tensor") == "row"

        def fresh():
            shapes = ((m, 1), (1, rows)) if by_row else ((), ())
            scales = [torch.rand(shape, device=device) + 0.5 for shape in shapes]
            return normal(m, k), normal(rows, k), maybe("bias", rows), maybe("residual", m, n), *scales

        def call(x, w, bias, residual, x_scale, w_scale):
            z = torch._scaled_mm(x, w.t(), scale_a=x_scale, scale_b=w_scale, bias=bias, out_dtype=out)
            return finish(z, residual)

        # Without adding partial sums in f32 in between, as Warpsmith by default.
        def fast(x, w, bias, residual, x_scale, w_scale):
            z = torch._scaled_mm(
                x, w.t(), scale_a=x_scale, scale_b=w_scale, bias=bias, out_dtype=out, use_fast_accum=True
            )
            return finish(z, residual)

        return Work(fresh, {"torch": call, "torch, fast sums": fast})

    tf32 = case.option("precision", "auto") == "tf32"

    def fresh():
        return normal(m, k), normal(rows, k), maybe("bias", rows), maybe("residual", m, n)

    def call(x, w, bias, residual):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return finish(F.linear(x, w, bias), residual)

    def compiled(x, w, bias, residual):
        return finish(F.linear(x, w, bias), residual)

    calls, act = {"torch": call}, case.option("act", "none")
    if act in ("gelu", "relu") and rows == n and case.given == {"bias"} and device != "cpu":
        # The epilogue of cuBLASLt; its GELU is the tanh approximation.
        calls["cublaslt"] = lambda x, w, bias, _: torch._addmm_activation(bias, x, w.t(), use_gelu=act == "gelu")
    # Compiling a plain product only finds the same library again.
    fused = act != "none" or rows != n or "residual" in case.given
    return Work(fresh, calls, compiled if fused else None)


def _linear_backward(case: Case, device: str) -> Work | None:
    if not {"dx", "dw"} <= case.given:
        return None
    m, n, k = (case.size(name) for name in ("m", "n", "k"))
    normal, finish = _normal(case, device), _linear_epilogue(case)

    def forward(x, w, bias):
        return finish(F.linear(x, w, bias), None)

    def make():
        # Also for the products of the backward pass, which are computed later.
        torch.backends.cuda.matmul.allow_tf32 = case.option("precision", "auto") == "tf32"
        bias = normal(n) if "dbias" in case.given else None
        return normal(m, n), normal(m, k), normal(n, k), bias

    return _gradient(case, device, forward, make)


def _kv_store(case: Case, device: str) -> Work | None:
    if "cos" in case.given or case.option("rotary_dim", "0") != "0":
        return None
    names = ("num_tokens", "num_kv_heads", "head_dim", "page_size", "num_pages")
    tokens, heads, dim, page_size, pages = (case.size(name) for name in names)
    normal = _normal(case, device)
    to = DTYPES.get(case.option("to", "auto"), DTYPES[case.dtype])
    rope, eight_bit = "positions" in case.given, to.itemsize == 1
    interleaved = case.option("layout", "half") == "interleaved"
    theta, limit = case.number("theta", 10000.0), torch.finfo(to).max
    frequencies = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    # Torch cannot index 8-bit floats; bytes are moved in their place.
    stored = torch.uint8 if eight_bit else to

    def fresh():
        slots = torch.randperm(pages * page_size, device=device)[:tokens]
        caches = [torch.zeros(pages * page_size, heads, dim, device=device, dtype=stored) for _ in range(2)]
        scale = torch.rand(1, device=device) + 0.5
        return (
            normal(tokens, heads, dim),
            normal(tokens, heads, dim),
            slots,
            torch.arange(tokens, device=device),
            scale,
            *caches,
        )

    def cast(x, scale):
        return (x.float() / scale).clamp(-limit, limit).to(to).view(torch.uint8) if eight_bit else x

    def call(k, v, slots, positions, scale, k_cache, v_cache):
        if rope:
            k = _rotated(k, positions, frequencies, interleaved)
        k_cache[slots] = cast(k, scale)
        v_cache[slots] = cast(v, scale)

    calls = {"torch": call}
    library = flashinfer(device)
    if library and not rope and not eight_bit and case.dtype != "f32":
        # It finds a token's page by request and position: one request whose pages are in random order.
        count = -(-tokens // page_size)
        indices = torch.randperm(pages, device=device)[:count].int()
        indptr = torch.tensor([0, count], device=device, dtype=torch.int32)
        last = torch.tensor([tokens - (count - 1) * page_size], device=device, dtype=torch.int32)
        batch = torch.zeros(tokens, device=device, dtype=torch.int32)
        at = torch.arange(tokens, device=device, dtype=torch.int32)

        def append(k, v, slots, positions, scale, k_cache, v_cache):
            paged = tuple(cache.view(pages, page_size, heads, dim) for cache in (k_cache, v_cache))
            library.append_paged_kv_cache(k, v, batch, at, paged, indices, indptr, last)

        calls["flashinfer"] = append
    return Work(fresh, calls, call)


def _kv_copy(case: Case, device: str) -> Work:
    names = ("num_pairs", "num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim")
    pairs, layers, pages, page_size, heads, dim = (case.size(name) for name in names)
    eight_bit = DTYPES[case.dtype].itemsize == 1
    dtype = torch.uint8 if eight_bit else DTYPES[case.dtype]

    def fresh():
        chosen = torch.randperm(pages, device=device)[: 2 * pairs]
        cache = torch.zeros(layers, pages, page_size, heads, dim, device=device, dtype=dtype)
        return cache, chosen[:pairs], chosen[pairs:]

    def call(cache, source, target):
        cache[:, target] = cache[:, source]

    def copy(cache, source, target):
        cache.index_copy_(1, target, cache.index_select(1, source))

    return Work(fresh, {"torch": call, "torch.index_copy_": copy}, call)


def _merge_states(case: Case, device: str) -> Work | None:
    if "counts" in case.given:
        return None
    tokens, parts, heads, dim = (case.size(name) for name in ("num_tokens", "num_parts", "num_heads", "head_dim"))
    normal = _normal(case, device)
    to = DTYPES.get(case.option("to", "auto"), DTYPES[case.dtype])

    def fresh():
        return normal(parts, tokens, heads, dim), torch.randn(parts, tokens, heads, device=device)

    def call(outs, lses):
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse)
        return (weights[..., None] * outs.float()).sum(0).to(to), lse

    calls = {"torch": call}
    library = flashinfer(device)
    if library and to == DTYPES[case.dtype] and parts == 2:
        calls["flashinfer"] = lambda outs, lses: library.merge_state(outs[0], lses[0], outs[1], lses[1])
    return Work(fresh, calls, call)


def _attention(case: Case, device: str) -> Work | None:
    batch, q_len, kv_len = (case.size(name) for name in ("batch", "q_len", "kv_len"))
    heads, kv_heads, dim = (case.size(name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    causal = case.option("causal", "false") == "true" and q_len > 1
    others = {"window", "softcap", "scale"} & case.values.keys()
    # Elsewhere the first query is at the first key.
    if case.given or others or (causal and q_len != kv_len):
        return None
    normal = _normal(case, device)

    def fresh():
        return normal(batch, q_len, heads, dim), *(normal(batch, kv_len, kv_heads, dim) for _ in range(2))

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2)

    if device == "cpu":
        return Work(fresh, {"torch": call})

    from torch.nn.attention import SDPBackend, sdpa_kernel

    def on(backend):
        def chosen(q, k, v):
            with sdpa_kernel(backend):
                return call(q, k, v)

        return chosen

    if case.dtype == "f32":
        return Work(
            fresh, {"torch (efficient)": on(SDPBackend.EFFICIENT_ATTENTION)} if heads == kv_heads else {"torch": call}
        )
    calls = {"torch (flash)": on(SDPBackend.FLASH_ATTENTION), "torch (cudnn)": on(SDPBackend.CUDNN_ATTENTION)}
    library = flashinfer(device)
    if library and batch == 1 and q_len > 1 and dim in (64, 128, 256):

        def prefill(q, k, v):
            return library.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=causal, backend="fa3")

        calls["flashinfer (fa3)"] = prefill
    return Work(fresh, calls)


def _paged_attention(case: Case, device: str) -> Work | None:
    if "k_scale" in case.given:
        return None
    requests, q_len, kv_len = case.size("requests"), case.size("q_len"), case.size("kv_len")
    heads, kv_heads, dim = case.size("num_heads"), case.size("num_kv_heads"), case.size("head_dim")
    page, prefix = case.size("page_size"), case.size("prefix_len")
    normal = _normal(case, device)
    library = flashinfer(device) if case.dtype != "f32" else None
    pages = -(-kv_len // page)
    shared = prefix // page
    own = pages - shared

    def ints(values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    def evenly(count: int) -> torch.Tensor:
        return ints(range(requests + 1)) * count

    def plans(kv: torch.Tensor) -> dict[str, object]:
        """FlashInfer's wrappers, planned for this cache; planning is not timed."""
        last = ints([(kv_len - 1) % page + 1] * requests)
        table = torch.cat(
            [ints(range(shared)).expand(requests, -1), ints(range(shared, len(kv))).view(requests, own)], 1
        )
        space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        sizes, types = (heads, kv_heads, dim, page), {"q_data_type": kv.dtype, "kv_data_type": kv.dtype}
        made = {}
        for backend in ("fa2", "fa3"):
            if q_len == 1:
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                    space, "NHD", use_tensor_cores=True, backend=backend
                )
                wrapper.plan(evenly(pages), table.flatten(), last, *sizes, **types)
            else:
                wrapper = library.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
                wrapper.plan(evenly(q_len), evenly(pages), table.flatten(), last, *sizes, causal=True, **types)
            made[f"flashinfer {backend}"] = wrapper
        if "group_starts" in case.given:
            wrapper = library.MultiLevelCascadeAttentionWrapper(2, space, "NHD")
            wrapper.plan(
                [ints([0, requests * q_len]), evenly(q_len)],
                [ints([0, shared]), evenly(own)],
                [ints(range(shared)), ints(range(shared, len(kv)))],
                [ints([page]), last],
                *sizes,
                q_data_type=kv.dtype,
            )
            made["flashinfer cascade"] = wrapper
        return made

    def fresh():
        q = normal(requests * q_len, heads, dim)
        kv = normal(shared + requests * own, 2, page, kv_heads, dim)
        if shared:
            return q, None, None, kv, plans(kv)
        # PyTorch has no pages: it gets the same keys and values side by side.
        k, v = kv.view(requests, pages, 2, page, kv_heads, dim).unbind(2)
        k, v = (x.reshape(requests, pages * page, kv_heads, dim)[:, :kv_len].transpose(1, 2) for x in (k, v))
        return q, k.contiguous(), v.contiguous(), kv, plans(kv) if library else {}

    def attend(q, k, v, *_):
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q_len, kv_len) if q_len > 1 else None
        queries = q.view(requests, q_len, heads, dim).transpose(1, 2)
        return F.scaled_dot_product_attention(queries, k, v, mask, enable_gqa=heads != kv_heads)

    calls = {} if shared else {"torch": attend}
    names = ["flashinfer fa2", "flashinfer fa3"] if library else []
    names += ["flashinfer cascade"] if library and "group_starts" in case.given else []
    calls |= {name: lambda q, k, v, kv, made, name=name: made[name].run(q, kv) for name in names}
    return Work(fresh, calls) if calls else None


MAKERS: dict[str, Callable[[Case, str], Work | None]] = {
    "rms_norm": _norm,
    "rms_norm_backward": _norm_backward,
    "layer_norm": _norm,
    "layer_norm_backward": _norm_backward,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "add_gelu": _add_gelu,
    "add_gelu_backward": _add_gelu_backward,
    "mul_add": _mul_add,
    "mul_add_backward": _mul_add_backward,
    "gated_act": _gated_act,
    "gated_act_backward": _gated_act_backward,
    "paged_attention": _paged_attention,
    "rope": _rope,
    "rope_backward": _rope,
    "cast": _cast,
    "kv_store": _kv_store,
    "kv_copy": _kv_copy,
    "merge_states": _merge_states,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "attention": _attention,
}


def tensors(found) -> Iterator[torch.Tensor]:
    """All tensors in what a call took or returned."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for item in found:
            yield from tensors(item)
