"""Fused functions, and the backend of torch.compile, beside eager PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from device import DEVICE, generator
from models import make, tokens
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForMaskedLM
from warpsmith import _native
from warpsmith._fuse.backend import listening

INF, NAN = math.inf, math.nan
EDGES = [0.0, -0.0, 1.5, -1.5, 2.5, -0.5, INF, -INF, NAN, 1e-40, 3e38, -3.0]


def same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """The same types, shapes, strides and values, with zeros of one sign and NaN where there is NaN. GPUs contract
    products and sums to one rounding, and have other functions than the host.
    """
    if ours.device.type != "cpu" and theirs.dtype.is_floating_point:
        tolerance = max(tolerance, 8e-3 if theirs.dtype is torch.bfloat16 else 1e-3 if theirs.itemsize == 2 else 2e-6)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.numel() == 0 or ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    if ours.dtype.is_floating_point:
        zero = (theirs == 0) & (ours == 0)
        assert torch.equal(torch.signbit(ours)[zero], torch.signbit(theirs)[zero])


def beside(function: Callable[..., Any], *tensors: Any, tolerance: float = 0.0) -> None:
    """Calls a function fused and in eager PyTorch."""
    same(warpsmith.fuse(function)(*tensors), function(*tensors), tolerance)


def beside_host(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Calls a function fused, and in eager PyTorch on the CPU: to the bit, also from a GPU."""
    same(warpsmith.fuse(function)(*tensors).cpu(), function(*(tensor.cpu() for tensor in tensors)))


def edges(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(EDGES).to(dtype).repeat(3).reshape(3, len(EDGES))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


# The semantics of PyTorch.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_signed_zeros_stay(dtype: torch.dtype) -> None:
    x = edges(dtype)
    other = x.flip(1).contiguous()
    for function in (torch.maximum, torch.minimum):
        beside(function, x, other)
    for single in (torch.sign, torch.abs, torch.neg, torch.round, torch.trunc, torch.floor, torch.isnan):
        beside(single, x)
    beside(lambda a: a.clamp(-1.0, 1.0), x)
    beside(lambda a: a.amax(-1), x)
    beside(lambda a: torch.where(a > 0, a, -INF), x)
    # PyTorch's relu of -0.0 is -0.0 on the CPU and 0.0 on GPUs. Ours is that of the CPU everywhere.
    beside_host(F.relu, x)
    assert x[0, 1] == 0 and torch.signbit(warpsmith.fuse(F.relu)(x)[0, 1])


def test_activations_and_softmax_at_infinity() -> None:
    x = torch.tensor([[-INF, INF, NAN, 0.0], [-INF, -INF, -INF, -INF], [1.0, 2.0, INF, 4.0]])
    functions: list[Callable[..., Any]] = [F.silu, F.gelu, lambda a: F.gelu(a, approximate="tanh"), torch.sigmoid]
    functions += [torch.tanh, F.mish, lambda a: a.softmax(-1), lambda a: a.log_softmax(-1), lambda a: a.logsumexp(-1)]
    for function in functions:
        # In f64: PyTorch's vectorised gelu of f32 may be NaN at infinity.
        same(warpsmith.fuse(function)(x), function(x.double()).float(), 1e-6)


def test_types_combine_as_in_pytorch() -> None:
    bf16, f16 = torch.randn(3, 4).bfloat16(), torch.randn(3, 4).half()
    ints, small, bools = torch.arange(12).reshape(3, 4) + 1, torch.arange(12, dtype=torch.int32).reshape(3, 4), bf16 > 0
    beside(torch.add, bf16, f16)
    beside(torch.add, bf16, torch.tensor(0.1))
    beside(lambda x: x * 0.1, bf16)
    beside(lambda x: x * 2 + 1, ints)
    beside(lambda x: x * 0.5, small)
    beside(torch.div, ints, small + 1, tolerance=1e-7)
    beside(torch.exp, small, tolerance=1e-6)
    beside(lambda x: x.sum(-1), bools)
    beside(lambda x: x.sum(-1), small)
    beside(torch.add, bools, ~bools)
    beside(torch.mul, bools, ints)
    beside(lambda c, x, y: torch.where(c, x, y), bools, bf16, ints.float())
    beside(lambda x: x.to(torch.bfloat16).float(), torch.randn(3, 40))
    beside(lambda x: x + (2**62), ints)


def test_integers_wrap_and_bools_are_any_byte() -> None:
    beside(lambda x: x * x + x, torch.tensor([2**31 - 1, -(2**31), 7], dtype=torch.int32))
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    same(warpsmith.fuse(lambda c: torch.where(c, 1.0, -1.0))(odd), torch.tensor([-1.0, 1.0, 1.0, 1.0]))


def test_one_rounding_for_bf16() -> None:
    """Between ops nothing is rounded, so results are those of f32, rounded once."""
    x, y = torch.randn(8, 96).bfloat16(), torch.randn(8, 96).bfloat16()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b + a) * 0.3 - b

    same(warpsmith.fuse(function)(x, y), function(x.float(), y.float()).bfloat16())
    # Eager PyTorch rounds the factor to bf16 here.
    same(
        warpsmith.fuse(lambda a, b: torch.add(a, b, alpha=0.3))(x, y),
        torch.add(x.float(), y.float(), alpha=0.3).bfloat16(),
    )
    # Where a formula rounds, so do we.
    beside(lambda a, b: (a.float() * b).bfloat16() * b, x, y)


def test_strides() -> None:
    x = torch.randn(4, 5, 6)
    beside(lambda a: a * 2 + 1, x.permute(2, 0, 1))
    beside(lambda a, b: a + b, x.transpose(0, 2), torch.randn(6, 5, 4))
    beside(lambda a: a * 2 + 1, x[:, ::2, 1:])
    beside(lambda a, b: a * b[:, None], x, torch.randn(4, 6))
    beside(lambda a: (a * 2).sum(0), x)
    beside(lambda a: (a * 2).sum((0, 1)), x, tolerance=1e-5)
    beside(lambda a: (a * 2).mean(1), x, tolerance=1e-6)
    # Expanded ones become dense.
    expanded = torch.randn(1, 6).expand(5, 6)
    assert warpsmith.fuse(lambda a: a * 2 + 1)(expanded).stride() == (6, 1)


def test_empty_tensors() -> None:
    empty = torch.empty(3, 0)
    beside(lambda a: (a + 1).sum(-1), empty)
    beside(lambda a: (a + 1).mean(-1), empty)
    beside(lambda a: a * 2 + 1, torch.empty(0, 4))
    with pytest.raises((RuntimeError, IndexError)):
        warpsmith.fuse(lambda a: (a + 1).amax(-1))(empty)


def test_gradients_at_ties_and_edges() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 2.0, -0.0]], requires_grad=True)
    y = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 2.0, 5.0]], requires_grad=True)
    functions: list[Callable[..., Any]] = [
        lambda a, b: torch.maximum(a, b),
        lambda a, b: a.amax(-1) * b.sum(-1),
        lambda a, b: a.clamp(-1.0, 1.0) * b,
        lambda a, b: F.relu(a) + b.abs(),
        lambda a, b: torch.where(a > 0, a, b) * 2,
        lambda a, b: a.detach() * b + a,
    ]
    for function in functions:
        ours = torch.autograd.grad(warpsmith.fuse(function)(x, y).sum(), (x, y))
        theirs = torch.autograd.grad(function(x, y).sum(), (x, y), materialize_grads=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


# The decorator.


@warpsmith.fuse
def gated(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, scale: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Documented."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight
    return F.silu(gate) * y * scale, y.softmax(-1)


def test_a_function_is_traced_once_for_all_sizes() -> None:
    before = len(gated._compiled)
    for rows, columns in ((4, 96), (7, 33), (2, 640)):
        x, gate = torch.randn(rows, columns, requires_grad=True), torch.randn(rows, columns)
        weight = torch.randn(columns, requires_grad=True)
        ours, theirs = gated(x, weight, gate), gated.__wrapped__(x, weight, gate)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, 1e-5)
        given = torch.randn_like(x)
        for one, other in zip(
            torch.autograd.grad((ours[0], ours[1]), (x, weight), (given, given)),
            torch.autograd.grad((theirs[0], theirs[1]), (x, weight), (given, given)),
            strict=True,
        ):
            same(one, other, 1e-4)
    assert len(gated._compiled) == before + 1
    assert gated.__doc__ == "Documented."
    assert "kernel 0: rows" in gated.plan(x, weight, gate)
    # A constant is part of the trace.
    other_scale = gated(x, weight, gate, scale=2.0)[0]
    same(other_scale, gated.__wrapped__(x, weight, gate, scale=2.0)[0], 1e-5)


def test_sizes_that_are_asked_for_are_traced_each() -> None:
    @warpsmith.fuse
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1 if x.shape[0] > 4 else x * 3 - 1

    for rows in (3, 6, 4, 8):
        x = torch.randn(rows, 5)
        same(function(x), function.__wrapped__(x), 1e-6)


def test_constants_are_told_apart_by_their_type() -> None:
    """Also within tuples, where numbers of different types and zeros of both signs are equal too."""
    times = warpsmith.fuse(lambda x, by: x * by[0])
    for x in (torch.arange(-3, 4, device="cpu"), torch.randn(7)):
        for by in ((2,), (2.0,), (True,), (1,), (0.0,), (-0.0,)):
            same(times(x, by), times.__wrapped__(x, by))


FACTOR: float = 2.0


class Scaled:
    """A function with numbers of its own."""

    shift = 1.0

    def __init__(self) -> None:
        self.factor: float = 2.0

    @warpsmith.fuse
    def plus(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * self.factor + self.shift

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * self.factor

    __call__ = times


def test_numbers_that_a_function_reads_are_part_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    x, local, own, settings = torch.randn(4, 8), 2.0, Scaled(), SimpleNamespace(factor=2.0)
    functions = [
        (warpsmith.fuse(lambda x: x.exp() * FACTOR), lambda: x.exp() * FACTOR),
        (warpsmith.fuse(lambda x: x.exp() * local), lambda: x.exp() * local),
        (warpsmith.fuse(lambda x: x.exp() * settings.factor), lambda: x.exp() * settings.factor),
        (warpsmith.fuse(lambda x: next(x.exp() * scale for scale in (FACTOR,))), lambda: x.exp() * FACTOR),
        (warpsmith.fuse(own.times), lambda: own.times(x)),
        (warpsmith.fuse(own), lambda: own(x)),
    ]

    def all_follow() -> None:
        for fused, plain in functions:
            same(fused(x), plain(), 1e-6)
        same(own.plus(x), x.exp() * own.factor + own.shift, 1e-6)

    all_follow()
    traces = [len(fused._compiled) for fused, _ in functions]
    all_follow()
    assert [len(fused._compiled) for fused, _ in functions] == traces
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    local, own.factor, settings.factor = 4.0, 5.0, 6.0
    all_follow()
    own.shift = 7.0
    all_follow()
    monkeypatch.setattr(Scaled, "shift", 9.0)
    del own.shift
    all_follow()


def test_autocast_and_the_default_type_are_part_of_the_trace() -> None:
    # One of the ops that autocast computes in f32, on both kinds of devices.
    fused = warpsmith.fuse(lambda a, b: F.mse_loss(a, b, reduction="none") * 2)
    a, b = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    kind = torch.device(DEVICE).type
    for _ in range(2):
        assert fused(a, b).dtype is torch.bfloat16
        with torch.autocast(kind, torch.bfloat16):
            same(fused(a, b), fused.__wrapped__(a, b), 1e-6)
            assert fused(a, b).dtype is torch.float32
    thirds, whole = warpsmith.fuse(lambda x: x / 3), torch.arange(5, device="cpu")
    same(thirds(whole), whole / 3, 1e-6)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(warpsmith.UnsupportedError, match="float64"):
            thirds(whole)
    finally:
        torch.set_default_dtype(torch.float32)


def test_memory_that_does_not_hold_the_values() -> None:
    """Lazy negatives, as of the imaginary part of a conjugate; and zeros without memory."""
    x = torch.randn(4, 8)
    negative, zeros = torch._neg_view(x), torch._efficientzerotensor(4, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2 + x

    for ours in (warpsmith.fuse(function), torch.compile(function, backend="warpsmith")):
        for given in (x, negative, zeros):
            same(ours(given), function(given), 1e-6)
            assert not ours(given).is_neg()

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        # Its gradient reaches the function as a lazy negative.
        value = (torch.complex(torch.zeros_like(leaf), function(leaf)).conj() * (1 + 2j)).real.sum()
        return torch.autograd.grad(value, leaf)[0]

    for ours in (warpsmith.fuse(function), torch.compile(function, backend="warpsmith")):
        same(gradient(ours), gradient(function), 1e-5)


def test_inside_of_other_transforms_it_is_the_function_itself() -> None:
    fused = warpsmith.fuse(lambda a, b: (a * b + 1).sigmoid() * a)
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    expected = fused.__wrapped__(x, y)
    same(torch.vmap(fused)(x, y), expected)
    same(torch.func.grad(lambda a: fused(a, y).sum())(x), torch.func.grad(lambda a: fused.__wrapped__(a, y).sum())(x))
    same(torch.compile(lambda a, b: fused(a, b) * 2, backend="eager", fullgraph=True)(x, y), expected * 2)
    assert not fused._compiled
    # Zeros of both signs are constants of their own.
    divide = warpsmith.fuse(lambda a, zero: a.abs() / zero)
    assert divide(x, 0.0)[0, 0] == INF and divide(x, -0.0)[0, 0] == -INF


def test_what_cannot_be_fused_is_named() -> None:
    x = torch.randn(3, 3)
    with pytest.raises(warpsmith.UnsupportedError, match=r"`mm` \(aten.mm.default\)"):
        warpsmith.fuse(lambda a: a @ a + 1)(x)
    with pytest.raises(warpsmith.UnsupportedError, match="writes an argument"):
        warpsmith.fuse(lambda a: a.add_(1))(x)
    with pytest.raises(warpsmith.UnsupportedError, match="no argument of it"):
        warpsmith.fuse(lambda a: a + x)(x)
    with pytest.raises(warpsmith.UnsupportedError, match="returns a float"):
        warpsmith.fuse(lambda a: 2.0)(x)
    with pytest.raises(warpsmith.ArgumentError, match="a constant, got list"):
        warpsmith.fuse(lambda a, b: a + b[0])(x, [x])


@pytest.mark.cpu
def test_the_native_graph() -> None:
    source = {
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["B", 4]}],
        "nodes": [{"name": "y", "op": "mul", "args": ["x", 2.0]}, {"name": "z", "op": "sum", "args": ["y"]}],
        "outputs": ["y", "z"],
    }
    graph = _native.FusedGraph(json.dumps(source))
    assert graph.inputs == ["x"] and graph.outputs == ["y", "z"] and graph.kernels == 1
    assert graph.forms([[3, 4]]) == [("f32", [3, 4]), ("f32", [3, 1])]
    x, y, z = torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 1)
    place = [(t.data_ptr(), "f32", list(t.shape), list(t.stride())) for t in (x, y, z)]
    graph.call(place[:1], place[1:])
    same(y, x * 2)
    same(z, (x * 2).sum(-1, keepdim=True), 1e-6)
    with pytest.raises(warpsmith.ArgumentError, match="argument `x`: expected shape"):
        graph.forms([[3, 5]])
    with pytest.raises(warpsmith.ArgumentError, match="memory of its own"):
        graph.call(place[:1], [place[0], place[2]])
    with pytest.raises(warpsmith.ArgumentError, match="did you mean"):
        _native.FusedGraph(
            json.dumps(source | {"nodes": [{"name": "y", "op": "sigmod", "args": ["x"]}], "outputs": ["y"]})
        )
    call = _native.FusedCall(graph, "call", [[0, 1]], [([0, 1], [0, 1]), ([0], [0])])
    assert [tuple(one.shape) for one in call(x)] == [(3, 4), (3,)]
    with pytest.raises(TypeError, match=r"expected a tensor of torch.float32 on the CPU, got one of torch.float64"):
        call(x.double())
    with pytest.raises(TypeError, match="takes 1 tensors, got 2"):
        call(x, x)


# The backend of torch.compile.


def programs(function: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """The result of a function, and what was compiled for it."""
    found: list[Any] = []
    with listening(lambda kind, program: found.append((kind, program))):
        result = function()
    return result, found


def bert() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", **sizes, intermediate_size=160, max_position_embeddings=64)
    return AutoModelForMaskedLM.from_config(config).eval()


def vit() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 160}
    config = AutoConfig.for_model("vit", **sizes, image_size=32, patch_size=8)
    return AutoModelForImageClassification.from_config(config).eval()


def model_and_inputs(name: str) -> tuple[Any, dict[str, Any]]:
    """A model of one of five families, and what it is called with."""
    if name == "vit":
        pixels = torch.randn(8, 3, 32, 32, generator=generator(5))
        return vit(), {"pixel_values": pixels, "labels": torch.arange(8) % 2}
    ids = tokens(2, 33)
    small = {"n_layer": 1} if name == "gpt2" else {"hidden_size": 128, "num_hidden_layers": 1}
    return bert() if name == "bert" else make(name, **small), {"input_ids": ids, "labels": ids}


#: What must be among the ops that are fused in inference, and among those of the library in inference and in training.
FUSED = {"llama": "rotate_half", "qwen3": "rotate_half", "gpt2": "native_layer_norm", "bert": "embedding", "vit": "add"}
OF_LIBRARY = {name: ("attention", "cross_entropy") for name in FUSED}
if DEVICE == "cpu":
    OF_LIBRARY |= {name: ("attention", "cross_entropy", "linear") for name in ("bert", "vit")}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "vit"])
def test_five_families(name: str) -> None:
    """Logits without gradients, then the loss and the gradients, and what was recognised."""
    model, given = model_and_inputs(name)
    compiled = torch.compile(model, backend="warpsmith")
    with torch.no_grad():
        ours, found = programs(lambda: compiled(**given))
        theirs = model(**given)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss)
    fused = {str(node.target) for _, program in found for kernel in program.kernels for node in kernel.nodes}
    eager = {op for _, program in found for op in program.eager()}
    assert any(FUSED[name] in op for op in fused), sorted(fused)
    for op in OF_LIBRARY[name]:
        assert f"_warpsmith.{op}.default" in eager, sorted(eager)
    assert not any("scaled_dot_product" in op for op in eager), sorted(eager)

    ours, forward = programs(lambda: compiled(**given))
    _, backward = programs(ours.loss.backward)
    grads = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    theirs = model(**given)
    theirs.loss.backward()
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=key)
    eager = {op for _, program in forward + backward for op in program.eager()}
    assert {"_warpsmith.cross_entropy.default", "_warpsmith.cross_entropy_backward.default"} <= eager
    if name != "vit":
        # Those of the others have a padding row.
        assert ("_warpsmith.embedding_backward.default" in eager) == (name in ("gpt2", "bert")), sorted(eager)
        assert all("embedding" not in op or "backward" in op for op in eager), sorted(eager)
    for found in (forward, backward):
        assert sum(len(program.kernels) for _, program in found) >= 1


def test_attention_with_gradients_of_16_bits() -> None:
    """On the CPU and on Hopper it is the library's; on other GPUs PyTorch's. The mask is gone in any case. Results are
    judged by f64.
    """
    library = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] == 9
    q, k, v = (torch.randn(2, heads, 24, 32, generator=generator(9)).bfloat16() for heads in (4, 2, 2))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Dynamo does not give `arange` the default device, so it is named, as models name it.
        at = torch.arange(24, device=q.device)
        seen = at[None, None, None, :] <= at[None, None, :, None]
        k, v = (x[:, :, None, :, :].expand(2, 2, 2, 24, 32).reshape(2, 4, 24, 32) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2)

    weights = torch.randn(q.shape, generator=generator(4)).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        compiles = dtype is torch.bfloat16
        called = torch.compile(function, backend="warpsmith") if compiles else function
        tensors = [x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        y, found = programs(lambda called=called, tensors=tensors: called(*tensors))
        if compiles:
            eager = {op for _, program in found for op in program.eager()}
            assert ("_warpsmith.attention.default" in eager) == library, sorted(eager)
            assert not any("arange" in op for op in eager), sorted(eager)
        results.append((y, *torch.autograd.grad(y, tensors, weights.to(dtype))))
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


def test_losses_of_other_kinds() -> None:
    """Those that the library has not stay PyTorch's, and all give PyTorch's results."""
    x = torch.randn(96, 64, generator=generator(2))
    whole = torch.arange(96) % 64
    labels = torch.where(whole == 3, -100, whole)
    kinds: list[tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = [
        (True, lambda x: F.cross_entropy(x.bfloat16().float(), labels, label_smoothing=0.1)),
        (True, lambda x: F.cross_entropy(x, whole, reduction="sum", ignore_index=5)),
        (True, lambda x: F.cross_entropy(x, labels, reduction="none")),
        (False, lambda x: F.cross_entropy(x, whole, weight=x[0].detach().abs())),
        (False, lambda x: F.cross_entropy(x, x.softmax(-1).detach())),
    ]
    for ours, function in kinds:
        given = x.clone().requires_grad_()
        torch._dynamo.reset()
        loss, found = programs(
            lambda function=function, given=given: torch.compile(function, backend="warpsmith")(given)
        )
        eager = {op for _, program in found for op in program.eager()}
        assert ("_warpsmith.cross_entropy.default" in eager) == ours, sorted(eager)
        (grad,) = torch.autograd.grad(loss.sum(), given)
        again = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(again).sum(), again)
        torch.testing.assert_close(loss, function(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad, expected, rtol=1e-2, atol=1e-4)


def test_sums_over_rows_join_what_is_summed() -> None:
    """Gradients of biases come from the kernels that compute what they sum, and sums of sums are one."""

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = (x * a).abs() + b
        return F.gelu(y) * a - b

    shapes = ((4, 40, 96), (96,), (96,))
    given = [torch.randn(shape, generator=generator(at)).requires_grad_() for at, shape in enumerate(shapes)]
    y = torch.compile(function, backend="warpsmith")(*given)
    _, found = programs(lambda: y.sum().backward())
    ((_, program),) = found
    assert len(program.kernels) == 1 and not any("sum" in op or "sgn" in op for op in program.eager())
    assert program.kernels[0].native.plan().count("kernel ") == 1
    expected = torch.autograd.grad(function(*given).sum(), given)
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-4)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert")]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_models_train(name: str) -> None:
    """Logits, losses and gradients of four sizes with one compilation."""
    small = {"llama": {"hidden_size": 128, "num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}
    model = bert() if name == "bert" else make(name, **small[name])
    compiled = torch.compile(model, backend="warpsmith", dynamic=True)
    counters.clear()
    kernels, graphs = 0, None
    for rows, length in ((2, 33), (3, 17), (4, 24), (2, 9)):
        ids = tokens(rows, length)
        results = []
        for one in (compiled, model):
            (output, found) = programs(lambda one=one, ids=ids: one(input_ids=ids, labels=ids))
            _, backward = programs(output.loss.backward)
            kernels += sum(len(program.kernels) for _, program in found + backward)
            grads = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
            results.append((output, grads))
            model.zero_grad(set_to_none=True)
        (ours, our_grads), (theirs, their_grads) = results
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert our_grads.keys() == their_grads.keys()
        for key, grad in their_grads.items():
            torch.testing.assert_close(
                our_grads[key], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-7, msg=key
            )
        if graphs is None:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs, "compiled anew for another size"
    assert kernels >= 2


def test_mutation_and_dropout() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(64))

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            y = torch.sigmoid(x) * self.steps.clone() + x
            self.steps.add_(x.detach().mean(0))
            cache[1:3] = y[:2].detach().exp()
            return F.dropout(torch.tanh(y) * 2 + cache.sum(), 0.3) * self.steps.clone().cos()

    results = []
    for compiles in (True, False):
        model = Model()
        called = torch.compile(model, backend="warpsmith") if compiles else model
        x = torch.randn(96, 64, generator=generator(1)).requires_grad_()
        cache = torch.zeros(4, 64)
        torch.manual_seed(7)
        if compiles:
            y, found = programs(lambda called=called, x=x, cache=cache: called(x, cache))
            assert sum(len(program.kernels) for _, program in found) >= 1
        else:
            y = called(x, cache)
        y.square().sum().backward()
        with torch.no_grad():
            again = called(x, cache)
        results.append((y, again, cache, model.steps, x.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_views_of_results_and_inputs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x.t() * 2 + 1).sin()
        return y, y.t(), y[1:], x.view(-1), y.expand(2, *y.shape)

    x = torch.randn(64, 96)
    for ours, theirs in zip(torch.compile(function, backend="warpsmith")(x), function(x), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


def test_autocast() -> None:
    layer = torch.nn.Linear(128, 64)
    compiled = torch.compile(lambda x: F.gelu(layer(x)) * 2 + 1, backend="warpsmith")
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        x = torch.randn(96, 128)
        ours, theirs = compiled(x), F.gelu(layer(x)) * 2 + 1
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_options_are_refused() -> None:
    with pytest.raises(Exception, match="backend warpsmith has no `options`"):
        torch.compile(lambda x: x + 1, backend="warpsmith", options={"fast": True})(torch.ones(3))


def test_the_plan_of_a_model() -> None:
    model = make("llama", hidden_size=128, num_hidden_layers=1)
    plan = warpsmith.OperatorFuser(model, {"input_ids": tokens(2, 33)}).plan()
    assert [graph.kind for graph in plan.graphs] == ["forward", "backward"]
    forward = plan.graphs[0]
    norm = next(kernel for kernel in forward.kernels if "rsqrt" in kernel.ops)
    assert norm.launches == 1 and norm.bytes < norm.bytes_before
    assert forward.eager["aten.linear.default"] >= 5
    assert "mean" in str(plan) and "forward:" in str(plan)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        plan = warpsmith.OperatorFuser(model, (tokens(2, 33),)).plan()
    assert [graph.kind for graph in plan.graphs] == ["inference"]


def test_the_backend_is_known_without_its_entry_point(run_python: Callable[..., str]) -> None:
    program = """
        import sys
        import warpsmith
        assert "torch._dynamo" not in sys.modules
        import torch
        print(torch.compile(lambda x: x.sin() * 2 + x, backend="warpsmith")(torch.zeros(3)).tolist())
    """
    assert run_python(program).strip() == "[0.0, 0.0, 0.0]"
