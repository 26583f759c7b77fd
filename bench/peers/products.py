"""Matrix products in other libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .common import ACTIVATIONS, DTYPES, Case, Work, random_like
from .memory import gradient


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


def linear(case: Case, device: str) -> Work | None:
    m, n, k, batch = (case.size(name) for name in ("m", "n", "k", "batch"))
    rows = n if case.option("gate", "none") == "none" else 2 * n
    eight_bit = case.dtype.startswith("f8")
    to = case.option("to", "auto")
    out = DTYPES["bf16" if eight_bit else case.dtype] if to == "auto" else DTYPES[to]
    if batch != 1 or (not eight_bit and out != DTYPES[case.dtype]):
        return None
    normal, finish = random_like(case, device), _linear_epilogue(case)

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


def linear_backward(case: Case, device: str) -> Work | None:
    if not {"dx", "dw"} <= case.given:
        return None
    m, n, k = (case.size(name) for name in ("m", "n", "k"))
    normal, finish = random_like(case, device), _linear_epilogue(case)

    def forward(x, w, bias):
        return finish(F.linear(x, w, bias), None)

    def make():
        # Also for the products of the backward pass, which are computed later.
        torch.backends.cuda.matmul.allow_tf32 = case.option("precision", "auto") == "tf32"
        bias = normal(n) if "dbias" in case.given else None
        return normal(m, n), normal(m, k), normal(n, k), bias

    return gradient(case, device, forward, make)
