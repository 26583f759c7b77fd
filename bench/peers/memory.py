"""Norms, softmax, activations, rotary embeddings and casts in other libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .common import ACTIVATIONS, DTYPES, Case, Work, flashinfer, random_like, row_sizes


def norm(case: Case, device: str) -> Work:
    rms = case.op.startswith("rms_norm")
    rows, hidden = row_sizes(case)
    eps = case.number("eps", 1e-6 if rms else 1e-5)
    normal = random_like(case, device)

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


def gradient(case: Case, device: str, forward: Callable, make: Callable[[], tuple]) -> Work:
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


def norm_backward(case: Case, device: str) -> Work | None:
    if "dsum" in case.given:
        return None
    rms = case.op.startswith("rms_norm")
    rows, hidden = row_sizes(case)
    eps = case.number("eps", 1e-6 if rms else 1e-5)
    normal = random_like(case, device)

    def forward(x, w, b):
        return F.rms_norm(x, (hidden,), w, eps) if rms else F.layer_norm(x, (hidden,), w, b, eps)

    def make():
        weight = normal(hidden) if "weight" in case.given else None
        bias = normal(hidden) if "dbias" in case.given else None
        return normal(rows, hidden), normal(rows, hidden), weight, bias

    return gradient(case, device, forward, make)


def softmax(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    scale = case.number("scale", 1.0)

    def call(x):
        return torch.softmax(x if scale == 1.0 else x * scale, -1)

    return Work(lambda: (normal(rows, hidden),), {"torch": call}, call)


def softmax_backward(case: Case, device: str) -> Work | None:
    if case.number("scale", 1.0) != 1.0:
        return None
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    dtype = DTYPES[case.dtype]

    def make():
        return torch.softmax(normal(rows, hidden), -1), normal(rows, hidden)

    def call(y, dout):
        return torch.ops.aten._softmax_backward_data(dout, y, -1, dtype)

    def formula(y, dout):
        product = y * dout
        return product - y * product.sum(-1, keepdim=True)

    return Work(make, {"torch": call}, formula)


def activation(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    call = ACTIVATIONS[case.option("kind", "gelu")]
    return Work(lambda: (normal(rows, hidden),), {"torch": call}, call)


def activation_backward(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    forward = ACTIVATIONS[case.option("kind", "gelu")]
    return gradient(case, device, forward, lambda: (normal(rows, hidden), normal(rows, hidden)))


def _gelu(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACTIVATIONS["gelu_tanh" if case.option("approximate", "none") == "tanh" else "gelu"]


def add_gelu(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    gelu = _gelu(case)

    def call(x, bias):
        return gelu(x + bias)

    return Work(lambda: (normal(rows, hidden), normal(hidden)), {"torch": call}, call)


def add_gelu_backward(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    gelu = _gelu(case)

    def make():
        return normal(rows, hidden), normal(rows, hidden), normal(hidden)

    return gradient(case, device, lambda x, bias: gelu(x + bias), make)


def mul_add(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)

    def call(a, b, c):
        return a * b + c

    return Work(
        lambda: tuple(normal(rows, hidden) for _ in range(3)),
        {"torch": call, "torch.addcmul": lambda a, b, c: torch.addcmul(c, a, b)},
        call,
    )


def mul_add_backward(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)

    def call(dout, a, b):
        return tuple(dout * other for name, other in (("da", b), ("db", a)) if name in case.given)

    return Work(lambda: tuple(normal(rows, hidden) for _ in range(3)), {"torch": call}, call)


def _halves(case: Case) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    if case.option("layout", "split") == "interleaved":
        return lambda x: (x[..., 0::2], x[..., 1::2])
    return lambda x: x.chunk(2, -1)


def gated_act(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
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


def gated_act_backward(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
    activation, halves = ACTIVATIONS[case.option("act", "silu")], _halves(case)

    def forward(x):
        gate, up = halves(x)
        return activation(gate) * up

    return gradient(case, device, forward, lambda: (normal(rows, hidden), normal(rows, 2 * hidden)))


def rotated(x, positions, frequencies, interleaved: bool):
    """Keys as models rotate them: angles in f32, factors in the type of the keys."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    left, right = a * cos - b * sin, b * cos + a * sin
    return torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)


def rope(case: Case, device: str) -> Work | None:
    if "cos" in case.given or case.option("rotary_dim", "0") != "0":
        return None
    tokens, heads, dim = (case.size(name) for name in ("num_tokens", "num_heads", "head_dim"))
    normal = random_like(case, device)
    interleaved = case.option("layout", "half") == "interleaved"
    theta = case.number("theta", 10000.0)
    backward = case.op.endswith("_backward")
    frequencies = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)

    def fresh():
        return normal(tokens, heads, dim), torch.arange(tokens, device=device)

    def call(x, positions):
        return rotated(x, -positions if backward else positions, frequencies, interleaved)

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


def cast(case: Case, device: str) -> Work | None:
    rows, hidden = row_sizes(case)
    normal = random_like(case, device)
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


def copy(case: Case, device: str) -> Work | None:
    if case.dtype not in DTYPES:
        return None
    normal = random_like(case, device)
    shape = [case.size(name) for name in ("batch", "rows", "cols")]
    swapped = case.option("order", "kept") == "swapped"

    def call(x):
        return (x.transpose(1, 2) if swapped else x).clone(memory_format=torch.contiguous_format)

    return Work(lambda: (normal(*shape),), {"torch": call})


def embedding(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    vocab = case.size("vocab")
    normal = random_like(case, device)

    def fresh():
        return torch.randint(vocab, (rows,), device=device), normal(vocab, hidden)

    return Work(fresh, {"torch": F.embedding})


def embedding_backward(case: Case, device: str) -> Work:
    rows, hidden = row_sizes(case)
    vocab = int(case.option("vocab", "32768"))
    normal = random_like(case, device)

    def fresh():
        return normal(rows, hidden), torch.randint(vocab, (rows,), device=device)

    def call(dout, ids):
        return torch.ops.aten.embedding_dense_backward(dout, ids, vocab, -1, False)

    return Work(fresh, {"torch": call})
