"""Kernels of users as further kernels of the library's ops: checked, timed, adopted where they win, and taken back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE
from test_kernels import needs_compiler

#: A product that takes the library more than a hundred microseconds; to copy its result takes far less.
LARGE = (128, 256, 512) if DEVICE == "cpu" else (2048, 2048, 2048)
SMALL = (4, 32, 16)


@pytest.fixture(autouse=True)
def keep_ops_as_they_are() -> Iterator[None]:
    from warpsmith._kernels.candidate import _candidates

    # Threads that wait for one another make times what other work on the machine makes them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for candidate in list(_candidates.values()):
        candidate.remove()


def product(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, inner, device=DEVICE), torch.randn(columns, inner, device=DEVICE) / 16


Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Says how long a user's kernel takes from now on, in seconds, where one of the library's takes a second."""

    def set_to(seconds: float) -> None:
        def bench(call: Any, *args: Any, **_: Any) -> Any:
            call(*args)
            is_builtin = "_warpsmith_kernels" in str(call)
            return SimpleNamespace(median=1.0 if is_builtin else seconds)

        monkeypatch.setattr("warpsmith._kernels.candidate.bench", bench)

    set_to(0.5)
    return set_to


class Copied:
    """A kernel of ``linear`` that wins without merit: it copies a result computed before, and counts its calls."""

    def __init__(self, sizes: tuple[int, int, int] = SMALL) -> None:
        self.x, self.w = product(*sizes)
        self.answer = warpsmith.linear(self.x, self.w)
        self.calls = 0

        @warpsmith.kernel(op="linear", cases=[(self.x, self.w)])
        def copied(x: Any, w: Any, *rest: Any) -> None:
            self.calls += 1
            rest[-1].copy_(self.answer)

        self.kernel = copied

    def was_called(self, call: Callable[[], Any]) -> bool:
        before = self.calls
        call()
        return self.calls > before


def test_a_faster_kernel_computes_the_calls_it_was_measured_on() -> None:
    copied = Copied(LARGE)
    x, w = copied.x, copied.w
    (found,) = copied.kernel.comparisons
    assert found.adopted and found.seconds < found.builtin[found.fastest], found
    assert "adopted" in repr(copied.kernel) and found.fastest in repr(copied.kernel)
    other = torch.randn_like(x)
    assert copied.was_called(lambda: warpsmith.linear(other, w)), "other tensors of the same form"
    assert torch.equal(warpsmith.linear(other, w), copied.answer)
    assert copied.was_called(lambda: torch.ops.warpsmith.linear(x, w))
    assert copied.was_called(lambda: torch.ops.warpsmith.linear(x, w, act="none"))
    for call in (
        lambda: warpsmith.linear(x[:-1], w),
        lambda: warpsmith.linear(x, w, act="gelu"),
        lambda: warpsmith.linear(x, w, bias=w[:, 0].contiguous()),
        lambda: warpsmith.linear(x, w, residual=copied.answer),
        lambda: warpsmith.linear(x.bfloat16(), w.bfloat16()),
        lambda: warpsmith.linear(x.T.contiguous().T, w),
        lambda: warpsmith.linear(torch.randn(x.numel() + 1, device=DEVICE)[1:].view_as(x), w),
        lambda: warpsmith.linear(x.cpu().numpy(), w.cpu().numpy()),
    ):
        assert not copied.was_called(call), "another problem"
    torch.testing.assert_close(warpsmith.linear(x[:-1], w), torch.nn.functional.linear(x[:-1], w), atol=1e-4, rtol=1e-4)


def test_it_has_the_op_s_gradient_and_is_compiled_as_the_op_is(clock: Clock) -> None:
    copied = Copied()
    x, w = copied.x, copied.w.clone().requires_grad_()
    for call in (warpsmith.linear, torch.ops.warpsmith.linear):
        assert copied.was_called(lambda call=call: call(x, w).sum().backward())
        torch.testing.assert_close(w.grad, x.sum(0).expand_as(w), atol=1e-3, rtol=1e-4)
        w.grad = None
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: warpsmith.linear(x, w) * 2, backend="aot_eager", fullgraph=True)
    assert copied.was_called(lambda: compiled(x, copied.w))
    assert torch.equal(compiled(x, copied.w), copied.answer * 2)


def test_it_can_be_seen_and_taken_back(clock: Clock) -> None:
    copied = Copied()
    x, w = copied.x, copied.w
    explained = warpsmith.explain("linear", x, w)
    assert explained.kernel == "copied" and "fastest" in explained.reason
    library = dict(explained.others)
    assert any("the library's choice" in why for why in library.values())
    other = warpsmith.explain("linear", x[:-1], w)
    assert other.kernel != "copied" and "not measured" in dict(other.others)["copied"]
    copied.kernel.remove()
    assert not copied.was_called(lambda: warpsmith.linear(x, w))
    assert "copied" not in (again := warpsmith.explain("linear", x, w)).kernel + repr(again.others)
    assert "not yet measured" in repr(copied.kernel)
    # And measured once more.
    assert copied.kernel.measure()[0].adopted
    assert copied.was_called(lambda: warpsmith.linear(x, w))


def test_a_slower_kernel_is_not_adopted() -> None:
    x, w = product(*SMALL)
    calls = []

    @warpsmith.kernel(op="linear", cases=[(x, w, {"act": "relu"})])
    def slow(x: Any, w: Any, *rest: Any) -> None:
        calls.append(None)
        time.sleep(0.02)
        torch.clamp(x @ w.T, min=0, out=rest[-1])

    (found,) = slow.comparisons
    assert not found.adopted and found.seconds > found.builtin[found.fastest]
    assert "not adopted" in repr(slow)
    explained = warpsmith.explain("linear", x, w, act="relu")
    assert explained.kernel != "slow" and "not the fastest" in dict(explained.others)["slow"]
    del calls[:]
    warpsmith.linear(x, w, act="relu")
    assert not calls
    # Whoever wants it can still call it.
    torch.testing.assert_close(slow(x, w, act="relu"), warpsmith.linear(x, w, act="relu"), atol=1e-4, rtol=1e-4)
    assert calls


def test_the_better_of_two_stays(clock: Clock) -> None:
    copied = Copied()
    clock(2.0)

    @warpsmith.kernel(op="linear", cases=[(copied.x, copied.w)])
    def slower(x: Any, w: Any, *rest: Any) -> None:
        torch.matmul(x, w.T, out=rest[-1])

    assert not slower.comparisons[0].adopted
    assert copied.was_called(lambda: warpsmith.linear(copied.x, copied.w))


def test_an_interrupted_measurement_changes_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied()
    calls = 0

    def interrupted(call: Any, *args: Any, **_: Any) -> Any:
        nonlocal calls
        call(*args)
        calls += 1
        raise KeyboardInterrupt

    monkeypatch.setattr("warpsmith._kernels.candidate.bench", interrupted)
    # Another kernel, one of the same name, and the same one again.
    with pytest.raises(KeyboardInterrupt):

        @warpsmith.kernel(op="linear", cases=[(copied.x, copied.w)])
        def another(x: Any, w: Any, *rest: Any) -> None:
            torch.matmul(x, w.T, out=rest[-1])

    with pytest.raises(KeyboardInterrupt):
        Copied()
    with pytest.raises(KeyboardInterrupt):
        copied.kernel.measure()
    assert calls == 3
    assert copied.was_called(lambda: warpsmith.linear(copied.x, copied.w))
    assert warpsmith.explain("linear", copied.x, copied.w).kernel == "copied"
    # One that wins its first case and is interrupted in the second has won nothing.
    clock(0.1)
    from warpsmith._kernels import candidate

    timed = candidate.bench
    x, w = product(2, 32, 16)

    def second(call: Any, *args: Any, **options: Any) -> Any:
        if args[0].shape == x.shape:
            raise KeyboardInterrupt
        return timed(call, *args, **options)

    monkeypatch.setattr("warpsmith._kernels.candidate.bench", second)
    with pytest.raises(KeyboardInterrupt):

        @warpsmith.kernel(op="linear", cases=[(copied.x, copied.w), (x, w)])
        def fastest(x: Any, w: Any, *rest: Any) -> None:
            torch.matmul(x, w.T, out=rest[-1])

    assert copied.was_called(lambda: warpsmith.linear(copied.x, copied.w))
    assert "fastest" not in dict(warpsmith.explain("linear", copied.x, copied.w).others)


def test_one_that_is_no_longer_the_fastest_is_given_up(clock: Clock) -> None:
    copied = Copied()
    clock(2.0)
    assert not copied.kernel.measure()[0].adopted
    assert not copied.was_called(lambda: warpsmith.linear(copied.x, copied.w))


def test_an_op_is_defined_once_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from warpsmith._torch.builtin import all_ops, builtin

    def slowly() -> Any:
        time.sleep(0.02)
        return all_ops()

    monkeypatch.setattr("warpsmith._torch.builtin.all_ops", slowly)
    barrier = threading.Barrier(8)
    found: list[Any] = []

    def ask() -> None:
        barrier.wait()
        found.append(builtin("softmax_backward"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def norm(x: Any, weight: Any, residual: Any, eps: float, out: torch.Tensor, total: torch.Tensor | None) -> None:
    """``rms_norm`` as PyTorch has it."""
    seen = x if residual is None else x + residual
    if total is not None:
        total.copy_(seen)
    wide = seen.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide if weight is None else wide * weight)


def norm_cases() -> list[Any]:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 70, device=DEVICE), torch.randn(70, device=DEVICE)
    return [(x,), (x, weight, x.clone()), (x.bfloat16(), weight.bfloat16(), {"eps": 0.1})]


def made(body: Callable[..., None], **options: Any) -> Any:
    return warpsmith.kernel(**({"op": "rms_norm", "cases": norm_cases()} | options))(body)


def test_optional_arguments_and_outputs() -> None:
    found = made(norm)
    assert [comparison.case for comparison in found.comparisons] == [0, 1, 2]
    x, weight, residual = norm_cases()[1]
    ours, theirs = found(x, weight, residual), warpsmith.rms_norm(x, weight, residual)
    for mine, library in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, library, atol=1e-5, rtol=1e-5)


def refused(body: Callable[..., None], **options: Any) -> warpsmith.KernelError:
    with pytest.raises(warpsmith.KernelError) as caught:
        made(body, **options)
    assert warpsmith.explain("rms_norm", norm_cases()[0][0]).kernel != body.__name__
    return caught.value


def test_a_planted_error_is_named() -> None:
    def planted(*args: Any) -> None:
        norm(*args)
        if args[2] is not None:
            args[-2][1, 69] += 0.01

    error = refused(planted)
    assert (error.op, error.case, error.output, error.index) == ("planted", 1, 0, (1, 69))
    assert error.got == pytest.approx(error.expected + 0.01, abs=1e-4)
    assert "output `out` is wrong" in str(error) and "first at [1, 69]" in str(error)

    def forgets_the_sum(*args: Any) -> None:
        norm(*args[:-1], None)

    error = refused(forgets_the_sum)
    assert (error.case, error.output, error.index) == (1, 1, (0, 0)) and error.got != error.got, "it is still NaN"


def test_the_tolerance_is_that_of_the_library_s_kernels() -> None:
    def rough(*args: Any) -> None:
        norm(*args)
        args[-2].mul_(1 + 1e-5)

    refused(rough)


def test_what_it_must_not_do_is_found() -> None:
    def outside(*args: Any) -> None:
        norm(*args)
        out = args[-2]
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)

    assert "outside output 0" in str(refused(outside))

    def greedy(x: torch.Tensor, *rest: Any) -> None:
        norm(x, *rest)
        x[0, 0] = 7

    assert "it wrote to its argument 0; first at [0, 0]" in str(refused(greedy))

    runs = []

    def fickle(*args: Any) -> None:
        norm(*args)
        runs.append(None)
        if len(runs) == 2:
            args[-2][2, 3] = torch.nextafter(args[-2][2, 3], args[-2][2, 3] + 1)

    error = refused(fickle)
    assert "two runs differ" in str(error) and error.index == (2, 3)


def test_wrong_declarations() -> None:
    for options, about in (
        ({"op": "no_such_op"}, "op"),
        ({"op": "kv_store"}, "op"),
        ({"reference": norm}, "reference"),
        ({"launch": norm}, "launch"),
        ({"precision": 1.0}, "precision"),
        ({"cases": []}, "cases"),
        ({"source": "no kernel"}, "source"),
    ):
        with pytest.raises(warpsmith.ArgumentError) as caught:
            made(norm, **options)
        assert caught.value.argument == about
    with pytest.raises(warpsmith.ArgumentError, match="reference"):
        warpsmith.kernel(source=norm, cases=[()])  # type: ignore[call-overload]

    def rms_norm_portable(*args: Any) -> None: ...

    with pytest.raises(warpsmith.ArgumentError, match="name"):
        made(rms_norm_portable)


def test_a_kernel_of_the_same_name_takes_the_place(clock: Clock) -> None:
    first = Copied()
    second = Copied()
    warpsmith.linear(first.x, first.w)
    assert second.was_called(lambda: warpsmith.linear(first.x, first.w))
    assert not first.was_called(lambda: warpsmith.linear(first.x, first.w))


NORM = """
#include "warpsmith/reduce.cuh"
extern "C" __global__ void norm_block(const float* x, float* out, float eps, int hidden) {
    __shared__ float sums[256];
    x += (long long)blockIdx.x * hidden;
    out += (long long)blockIdx.x * hidden;
    float sum = 0;
    for (int i = threadIdx.x; i < hidden; i += 256) sum += x[i] * x[i];
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    float scale = rsqrtf(sums[0] / hidden + eps);
    for (int i = threadIdx.x; i < hidden; i += 256) out[i] = x[i] * scale;
}
"""


def norm_block(x: Any, weight: Any, residual: Any, eps: float, out: Any, total: Any) -> warpsmith.Launch:
    return warpsmith.Launch(grid=(x.shape[0],), block=(256,), args=(x, out, eps, x.shape[1]))


@needs_compiler
@pytest.mark.cpu
def test_cuda_source_is_compiled_without_a_gpu() -> None:
    x = torch.randn(3, 70)
    found = made(norm_block, source=NORM, cases=[(x,)])
    assert "not yet measured" in repr(found) and not found.comparisons
    assert warpsmith.explain("rms_norm", x).kernel != "norm_block"
    with pytest.raises(warpsmith.ArgumentError, match="tensors on cuda"):
        found(x)
    with pytest.raises(warpsmith.CompileError, match="undefined"):
        made(norm_block, source=NORM.replace("x[i] * scale", "y[i]"), cases=[(x,)])


@needs_compiler
@pytest.mark.skipif(not warpsmith.available("cuda"), reason="there is no GPU")
def test_cuda_kernels_on_a_gpu() -> None:
    x = torch.randn(64, 1000, device="cuda")
    found = made(norm_block, source=NORM, cases=[(x,), (x[:1],)], streams=2)
    print(found)
    assert len(found.comparisons) == 2
    torch.testing.assert_close(found(x), warpsmith.rms_norm(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(warpsmith.rms_norm(x), torch.nn.functional.rms_norm(x, (1000,), eps=1e-6))
    with pytest.raises(warpsmith.KernelError, match=r"first at \[0, 999\]"):
        made(norm_block, source=NORM.replace("x[i] * scale", "i == 999 ? 0 : x[i] * scale"), cases=[(x,)])
