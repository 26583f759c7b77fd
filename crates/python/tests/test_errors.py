"""Wrong calls, and calls from odd places: typed exceptions, never a crash."""

from __future__ import annotations

import os
import threading
from typing import Any

import cases
import numpy as np
import pytest
import torch
import warpsmith
from device import DEVICE
from warpsmith._shapes import all_types
from warpsmith._spec import Op, Variant


def test_exceptions_say_what_is_wrong() -> None:
    with pytest.raises(warpsmith.ArgumentError) as caught:
        warpsmith.rms_norm(torch.randn(4, 64), torch.randn(63))
    error = caught.value
    assert (error.op, error.argument) == ("rms_norm", "weight")
    assert "64" in str(error.expected) and "63" in str(error.got)
    assert isinstance(error, ValueError) and isinstance(error, warpsmith.WarpsmithError)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: warpsmith.rms_norm(x.double()), "`x`: expected dtype f32 or f16 or bf16, got float64"),
        (lambda x: warpsmith.attention(*[x[:, None, None]] * 3, window=(3, 0)), r"window`: expected a whole number"),
        (lambda x: warpsmith.rms_norm(x, eps="a"), "eps`: expected a number, got 'a'"),
        (lambda x: warpsmith.rms_norm(x, None, 3.0), "residual`: expected a tensor of PyTorch.*got float"),
        (lambda x: warpsmith.rms_norm(x, x[0].cpu().numpy()), "weight`: expected a tensor of PyTorch.*got ndarray"),
        (lambda x: warpsmith.rms_norm(3), "x`: expected a tensor or an array.*got int"),
        (lambda x: warpsmith.activation(x, kind=["gelu"]), "kind`: expected one of gelu"),
        (lambda x: warpsmith.sample(x, 0.5, 0), "seed`: expected a whole number or a tensor of i64, got 0.5"),
        (lambda x: warpsmith.rms_norm(x, torch.randn(64, dtype=torch.bfloat16)), "weight.*dtype f32, got bf16"),
        (lambda x: warpsmith.rms_norm(x.to(torch.complex64)), "complex"),
        (lambda x: warpsmith.rms_norm(torch.randn(())), "`x`.*shape"),
        (lambda x: warpsmith.rms_norm(x, eps=float("nan")), "eps"),
        (lambda x: warpsmith.activation(x, kind="tanh"), "kind.*one of gelu"),
        (lambda x: warpsmith.rms_norm(torch.empty((1,) * 9 + (64,))), "dimensions"),
        (lambda x: warpsmith.rms_norm_(x.expand(2, 4, 64)), "distinct"),
        (lambda x: warpsmith.gated_act(torch.randn(4, 63)), "2 \\* hidden"),
        (lambda x: warpsmith.rms_norm_(x, residual=x), "overlaps"),
        (lambda x: warpsmith.rms_norm_(x[:2], residual=x[1:3]), "overlaps"),
        (lambda x: warpsmith.rms_norm(x.cpu().numpy().astype(np.float64)), "x.*dtype"),
        (lambda x: warpsmith.rms_norm(x.cpu().numpy(), eps=float("inf")), "eps"),
    ],
)
def test_wrong_calls(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(torch.randn(4, 64))
    # And nothing is wrong afterwards.
    assert warpsmith.rms_norm(torch.randn(4, 64)).shape == (4, 64)


def test_missing_and_unknown_arguments() -> None:
    for call in (lambda: warpsmith.rms_norm(), lambda: warpsmith.rms_norm(torch.randn(4, 64), epsilon=1)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(warpsmith.ArgumentError, match="x`: expected a tensor, got nothing"):
        warpsmith.rms_norm(None)


WRONG_KINDS: dict[str, list[Any]] = {
    "float": ["a", (1.0,), [1.0], 10**400],
    "int": ["a", (3, 0), 1.5, None, 2**63, -(2**63) - 1],
    "bool": ["a", (True,), None],
    "choice": ["nothing", "", 3, None, ("gelu",)],
}


@pytest.mark.parametrize(("op", "variant"), cases.ALL, ids=cases.IDS)
@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_options_of_another_kind(op: Op, variant: Variant, arrays: str) -> None:
    if arrays == "numpy" and DEVICE != "cpu":
        pytest.skip("for tensors of the CPU")
    tensors, options = cases.make(op, variant)
    if arrays == "numpy":
        tensors = [None if tensor is None else tensor.numpy() for tensor in tensors]
    for attr in op.attrs:
        for wrong in WRONG_KINDS[attr.kind] + ([None] if attr.kind == "float" and attr.default is not None else []):
            with pytest.raises(warpsmith.ArgumentError) as caught:
                getattr(warpsmith, variant.name)(*tensors, **options | {attr.name: wrong})
            assert (caught.value.op, caught.value.argument) == (op.name, attr.name), (attr.name, wrong)


@pytest.mark.parametrize(("op", "variant"), cases.ALL, ids=cases.IDS)
@pytest.mark.parametrize("arrays", ["torch", "numpy", "traced"])
def test_types_that_no_kernel_has(op: Op, variant: Variant, arrays: str) -> None:
    """The error names the argument and the types that this op has there."""
    if arrays == "numpy" and DEVICE != "cpu":
        pytest.skip("for tensors of the CPU")
    case = cases.make(op, variant)
    for at, given in enumerate(variant.tensors):
        if case.tensors[at] is None or not case.tensors[at].is_floating_point():
            continue
        row: list[Any] = list(case.tensors)
        row[at] = row[at].double()
        call = getattr(warpsmith, variant.name)
        if arrays == "numpy":
            row = [None if tensor is None else tensor.numpy() for tensor in row]
        if arrays == "traced":
            row = [None if tensor is None else tensor.to("meta") for tensor in row]
            call = getattr(torch.ops.warpsmith, variant.name)
        with pytest.raises(warpsmith.ArgumentError) as caught:
            call(*row, **case.options)
        error, types = caught.value, all_types(op, given.arg)
        assert (error.op, error.argument) == (op.name, op.args[given.arg].name)
        assert error.expected == f"dtype {' or '.join(types)}" and error.got == "float64"


def test_sparse_and_quantized_tensors() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        warpsmith.rms_norm(torch.eye(64).to_sparse())


def test_errors_of_one_thread_do_not_show_in_another() -> None:
    seen: list[str] = []

    def work(size: int) -> None:
        for _ in range(200):
            try:
                warpsmith.rms_norm(torch.randn(4, 64), torch.randn(size))
            except warpsmith.ArgumentError as error:
                if f"[{size}]" not in str(error):
                    seen.append(str(error))

    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 5, 7, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not seen


@pytest.mark.cpu
def test_threads_at_once() -> None:
    x, weight = torch.randn(64, 512), torch.randn(512)
    expected = warpsmith.rms_norm(x, weight)
    array = x.numpy()
    wrong: list[object] = []

    def work() -> None:
        for _ in range(100):
            if not torch.equal(warpsmith.rms_norm(x, weight), expected):
                wrong.append("torch")
            if not np.array_equal(warpsmith.rms_norm(array, weight.numpy()), expected.numpy()):
                wrong.append("numpy")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_lock_is_released_while_working() -> None:
    x = np.random.default_rng(0).standard_normal((1536, 1536)).astype(np.float32)
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(None)
            done.wait(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        warpsmith.linear(x, x)
    finally:
        done.set()
        thread.join()
    assert len(ticks) > 3


@pytest.mark.cpu
def test_a_forked_child_computes() -> None:
    x = torch.randn(256, 512)
    expected = warpsmith.rms_norm(x)
    child = os.fork()
    if child == 0:
        # Not compared by PyTorch, whose threads do not survive a fork.
        good = np.array_equal(warpsmith.rms_norm(x).numpy(), expected.numpy())
        good = good and np.array_equal(warpsmith.rms_norm(x.numpy()), expected.numpy())
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_interpreter_ends_well(run_python) -> None:
    run_python(
        """
        import threading, numpy, torch, warpsmith
        kept = warpsmith.from_dlpack(numpy.zeros(3, numpy.float32))
        lent = torch.from_dlpack(kept)
        unused = kept.__dlpack__(max_version=(1, 0))
        out = warpsmith.rms_norm(torch.randn(4, 64, requires_grad=True))
        array = numpy.ones((64, 64), numpy.float32)
        def work():
            # Not on tensors of PyTorch, which itself aborts when the interpreter ends under a thread's feet.
            while True:
                warpsmith.rms_norm(array)
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        """
    )


def test_tensors_are_freed(run_python) -> None:
    run_python(
        """
        import torch, warpsmith
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        x, w = torch.randn(64, 1024), torch.randn(1024, requires_grad=True)
        def calls(count):
            for _ in range(count):
                warpsmith.rms_norm(x, w.detach(), x)
                warpsmith.rms_norm(x, w).sum().backward()
                w.grad = None
                torch.ops.warpsmith.activation(x, kind="silu")
                try:
                    warpsmith.rms_norm(x, w[:5])
                except ValueError:
                    pass
                try:
                    torch.ops.warpsmith.activation(x, kind="nothing")
                except RuntimeError:
                    pass
        calls(100)
        before = resident()
        calls(200)
        assert resident() - before < 4 << 20, resident() - before
        """
    )
