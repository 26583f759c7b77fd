"""Tracing: fake kernels, dynamic sizes, whole graphs, autocast."""

from __future__ import annotations

import cases
import pytest
import torch
import warpsmith
from device import DEVICE
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from warpsmith._spec import Op, Variant

#: Traces everything as Inductor does, but runs it op by op: Inductor itself takes a C++ compiler some seconds a graph.
TRACED = "aot_eager"
NEW = [(op, variant) for op, variant in cases.ALL if not variant.in_place]


@pytest.fixture(autouse=True)
def forget() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("op", "variant"), NEW, ids=[variant.name for _, variant in NEW])
def test_fake_results_have_the_true_form(op: Op, variant: Variant) -> None:
    tensors, options = cases.make(op, variant)
    # Transposed inputs: outputs are contiguous all the same, and the fake ones must say so.
    real = getattr(torch.ops.warpsmith, variant.name)(*tensors, **options)
    with FakeTensorMode() as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in tensors]
        fake = getattr(torch.ops.warpsmith, variant.name)(*fakes, **options)
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for one, other in pairs:
        if one is None:
            assert other is None
            continue
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_fake_strides_of_strided_inputs() -> None:
    x = torch.randn(3, 64, 6).transpose(1, 2)
    with FakeTensorMode() as mode:
        fake = torch.ops.warpsmith.rms_norm(mode.from_tensor(x))[0]
    assert fake.stride() == torch.ops.warpsmith.rms_norm(x)[0].stride() == (384, 64, 1)


def count_graphs(function, calls) -> int:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for call in calls:
        torch.testing.assert_close(compiled(*call), function(*call))
    return counter.frame_count


def test_a_dynamic_size_makes_one_graph() -> None:
    calls = []
    for rows in (5, 7, 12):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        calls.append((x, torch.randn(64)))
    assert count_graphs(lambda x, w: warpsmith.rms_norm(x, w) * 2, calls) == 1
    assert count_graphs(lambda x, w: warpsmith.gated_act(x, act="silu") + 1, calls) == 1


def test_a_dynamic_last_size_stays_dynamic() -> None:
    calls = []
    for hidden in (64, 96, 128):
        x = torch.randn(4, hidden)
        torch._dynamo.mark_dynamic(x, 1)
        calls.append((x,))
    assert count_graphs(lambda x: warpsmith.gated_act(x), calls) == 1


def test_sizes_that_depend_on_data() -> None:
    def chosen(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return warpsmith.rms_norm(x[mask], weight)

    x, weight = torch.randn(16, 64), torch.randn(64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, backend=TRACED, fullgraph=True)
        for count in (3, 9):
            mask = torch.arange(16) < count
            torch.testing.assert_close(compiled(x, mask, weight), chosen(x, mask, weight))


def test_a_wrong_shape_is_found_while_tracing() -> None:
    with pytest.raises(Exception, match="weight"):
        torch.compile(lambda x, w: warpsmith.rms_norm(x, w), backend=TRACED, fullgraph=True)(
            torch.randn(4, 64), torch.randn(63)
        )


def test_whole_graphs_with_gradients() -> None:
    def block(x, weight, up, down, residual):
        normed, total = warpsmith.rms_norm(x, weight, residual)
        gated = warpsmith.gated_act(warpsmith.linear(normed, up), act="silu")
        return warpsmith.linear(gated, down, residual=total)

    def arguments():
        torch.manual_seed(0)
        shapes = ((6, 32), (32,), (128, 32), (32, 64), (6, 32))
        return [torch.randn(shape, requires_grad=True) for shape in shapes]

    eager, compiled = arguments(), arguments()
    block(*eager).square().sum().backward()
    torch.compile(block, fullgraph=True)(*compiled).square().sum().backward()
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [TRACED, pytest.param("inductor", marks=pytest.mark.slow)])
def test_mutation_in_a_graph(backend: str) -> None:
    def store(k, v, slots, k_cache, v_cache):
        warpsmith.kv_store(k, v, slots, k_cache, v_cache)
        return k_cache.sum() + v_cache.sum()

    def caches():
        return torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)

    k, v, slots = torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.tensor([0, 3, 4, 9, -1])
    eager, compiled = caches(), caches()
    expected = store(k, v, slots, *eager)
    found = torch.compile(store, backend=backend, fullgraph=True)(k, v, slots, *compiled)
    torch.testing.assert_close(found, expected)
    assert torch.equal(eager[0], compiled[0]) and torch.equal(eager[1], compiled[1])


def test_strings_and_switches_in_a_graph() -> None:
    def both(q):
        out, lse = warpsmith.attention(q, q, q, causal=True, return_lse=True)
        return warpsmith.activation(out, kind="relu"), lse

    q = torch.randn(1, 5, 2, 32)
    torch.testing.assert_close(torch.compile(both, backend=TRACED, fullgraph=True)(q), both(q))


def test_meta_tensors() -> None:
    assert torch.ops.warpsmith.rms_norm(torch.empty(4, 64, device="meta"))[0].shape == (4, 64)
    weight = torch.empty(64, device="meta")
    with pytest.raises(RuntimeError, match=r"weight.*meta"):
        torch.ops.warpsmith.rms_norm(torch.randn(4, 64), weight)
    with pytest.raises(warpsmith.ArgumentError, match=r"weight.*meta"):
        warpsmith.rms_norm(torch.randn(4, 64), weight)


def test_autocast_follows_the_description() -> None:
    x, w, half = torch.randn(4, 64), torch.randn(32, 64), torch.randn(4, 64, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype=dtype):
            assert warpsmith.linear(x, w).dtype == dtype
            assert torch.ops.warpsmith.linear(x, w).dtype == dtype
            assert warpsmith.rms_norm(half, torch.randn(64)).dtype == torch.bfloat16
            assert warpsmith.rms_norm(half, torch.randn(64), x)[1].dtype == torch.float32
            assert warpsmith.mul_add(x, half, half).dtype == torch.float32
            assert warpsmith.mul_add(half, half, half).dtype == torch.bfloat16
            assert warpsmith.activation(half).dtype == torch.bfloat16
            q = torch.randn(1, 5, 2, 32)
            bias = torch.randn(1, 1, 5, 5)
            assert warpsmith.attention(q, q.to(dtype), q, bias=bias).dtype == dtype


def test_autocast_passes_gradients() -> None:
    x, w = torch.randn(4, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = warpsmith.linear(x, w)
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(4, 64), rtol=5e-2, atol=0.2)


def test_autocast_in_a_graph() -> None:
    def run(x, w):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return warpsmith.linear(x, w)

    x, w = torch.randn(4, 64), torch.randn(32, 64)
    found = torch.compile(run, backend=TRACED, fullgraph=True)(x, w)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, run(x, w))
