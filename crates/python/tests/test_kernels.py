"""Kernels of users: checked, refused where they are wrong, and ops of PyTorch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE

PREPARE = """
#define BLOCK 128
"""
ADD = """
extern "C" __global__ void add(const float* x, const float* y, float scale, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + scale * y[i];
}
"""


def reference(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return x + scale * y


def declare_add(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def launch(x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor) -> warpsmith.Launch:
    return warpsmith.Launch(grid=(-(-x.numel() // 128),), block=(128,), args=(x, y, scale, out, x.numel()))


def cases() -> list[Any]:
    torch.manual_seed(0)
    return [(torch.randn(n), torch.randn(n), 0.5) for n in (1, 127, 1000)]


def make(source: Any, name: str = "add", **options: Any) -> Any:
    def declared(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.empty_like(x)

    declared.__name__ = name
    options = {"reference": reference, "cases": cases()} | options
    return warpsmith.kernel(source=source, **options)(declared)


def good(x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    torch.add(x, y, alpha=scale, out=out)


def test_a_good_kernel_is_an_op() -> None:
    add = make(good)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(add(x, y, 2.0), x + 2 * y)
    assert f"checked on: {DEVICE}" in repr(add)
    torch.library.opcheck(add.op, (x, y, 2.0))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: add(x, y, 2.0) * 3, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), (x + 2 * y) * 3)
    ours, theirs = add.bench(x, y, 2.0, warmup=1, iters=3)
    assert ours.median > 0 and "reference" in theirs.name
    assert torch.ops.warpsmith_user.add(x, y, 1.0).shape == (3, 5)


def refused(source: Any, **options: Any) -> warpsmith.KernelError:
    with pytest.raises(warpsmith.KernelError) as caught:
        make(source, **options)
    return caught.value


def test_a_wrong_element_is_named() -> None:
    def wrong(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x, y, scale, out)
        if out.numel() > 500:
            out[500] += 1
            out[700] = 0

    error = refused(wrong)
    x, y, scale = cases()[2]
    expected = (x[500].double() + scale * y[500].double()).item()
    assert (error.op, error.case, error.output, error.index) == ("add", 2, 0, (500,))
    assert error.expected == pytest.approx(expected) and error.got == pytest.approx(expected + 1, rel=1e-5)
    assert "2 of 1000 elements of output 0 are wrong; first at [500]: expected" in str(error)


def test_elements_left_out_are_found() -> None:
    def lazy(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x[:126], y[:126], scale, out[:126])

    error = refused(lazy)
    assert error.index == (126,) and error.case == 1 and error.got != error.got, "it is still NaN"


@pytest.mark.parametrize(
    ("shift", "where"), [(-1, "1 byte before it"), (0, "1 byte after it"), (3, "9 bytes after it")]
)
def test_writing_outside_is_found(shift: int, where: str) -> None:
    def outside(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        if shift == 3:
            out.as_strided((1,), (1,), out.storage_offset() + out.numel() + 2).fill_(1.0)
        else:
            out.as_strided((out.numel() + 1,), (1,), out.storage_offset() + shift).fill_(1.0)
        good(x, y, scale, out)

    assert where in str(refused(outside))


def test_writing_to_an_input_is_found() -> None:
    def greedy(x: torch.Tensor, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x, y, scale, out)
        x[0] = 7

    assert "it wrote to its argument 0; first at [0]" in str(refused(greedy, precision=10.0))

    def sly(x: torch.Tensor, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x, y, scale, out)
        x[1] = -x[1]

    # Equal as numbers.
    cases = [(torch.zeros(4), torch.ones(4), 2.0)]
    assert "it wrote to its argument 0; first at [1]" in str(refused(sly, cases=cases))


def test_other_bits_the_next_time_are_found() -> None:
    calls = []

    def fickle(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x, y, scale, out)
        calls.append(None)
        if len(calls) > 1:
            out[-1] = torch.nextafter(out[-1], torch.tensor(torch.inf))

    error = refused(fickle)
    assert "two runs differ" in str(error) and error.index == (0,)


@pytest.mark.cpu
def test_runs_at_once_are_checked() -> None:
    scratch = torch.empty(1000)
    turn = threading.Barrier(3, timeout=20)

    def shared(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        # Memory that all calls share: fine alone, wrong beside another.
        part = scratch[: len(x)]
        good(x, y, scale, part)
        turn.wait()
        part += 1
        turn.wait()
        out.copy_(part - 1)

    assert refused(shared, streams=3, cases=cases()[:1]).index == (0,)


def test_precision() -> None:
    def rough(x: Any, y: Any, scale: float, out: torch.Tensor) -> None:
        good(x, y, scale, out)
        out.mul_(1 + 1e-3)

    refused(rough)
    make(rough, precision=1e-2)
    half = [(x.bfloat16(), y.bfloat16(), scale) for x, y, scale in cases()]
    make(lambda x, y, scale, out: out.copy_(x + scale * y), cases=half)


def test_whole_numbers_and_several_outputs() -> None:
    def fill(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        low.copy_(x // 2)
        high.copy_(x - x // 2)

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    options = {"reference": lambda x: (x // 2, x - x // 2), "cases": [lambda: (torch.arange(9),)]}
    found = warpsmith.kernel(source=fill, **options)(halves)(torch.tensor([7]))
    assert [t.item() for t in found] == [3, 4]

    def off(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        fill(x, low, high)
        high[4] += 1

    with pytest.raises(warpsmith.KernelError, match=r"output 1 are wrong; first at \[4\]: expected 2, got 3"):
        warpsmith.kernel(source=off, **options)(halves)


def test_wrong_declarations() -> None:
    with pytest.raises(warpsmith.KernelError, match="is declared"):
        make(good, reference=lambda x, y, scale: x[:0])
    for options in ({"streams": 0}, {"cases": []}):
        with pytest.raises(warpsmith.ArgumentError):
            make(good, **options)
    with pytest.raises(warpsmith.ArgumentError, match="source"):
        make(3)
    with pytest.raises(warpsmith.ArgumentError, match="launch"):
        make(ADD)


def has_compiler() -> bool:
    return any(finding.what == "cuda compiler" and finding.state == "ok" for finding in warpsmith.doctor())


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no CUDA compiler")


@needs_compiler
def test_cuda_source_is_compiled_without_a_gpu() -> None:
    add = make(PREPARE + ADD, launch=launch)
    size, log = add.code.native.compile("90a")
    assert size > 500 and "add" in log
    x, y = torch.randn(7), torch.randn(7)
    torch.testing.assert_close(add(x, y, 2.0), x + 2 * y)


@needs_compiler
def test_the_compiler_is_quoted() -> None:
    with pytest.raises(warpsmith.CompileError, match=r"add.cu\(4\): error: identifier \"z\" is undefined"):
        make(ADD.replace("scale * y[i]", "scale * z[i]"), launch=launch)
    with pytest.raises(warpsmith.ArgumentError, match="source"):
        make("__global__ void add() {}", launch=launch)


@needs_compiler
def test_arguments_of_cuda_kernels() -> None:
    import ctypes

    code = make(ADD, launch=launch).code
    x = torch.zeros(3)
    assert code.bits(0, x) == (x.data_ptr(), 8)
    assert code.bits(0, 1.0) == (0x3F800000, 4) and code.bits(0, -1) == (0xFFFFFFFF, 4)
    assert code.bits(0, ctypes.c_int64(-1)) == (2**64 - 1, 8) and code.bits(0, True) == (1, 1)
    for wrong in (2**31, "x", None):
        with pytest.raises(warpsmith.ArgumentError, match=r"launch.args\[3\]"):
            code.bits(3, wrong)


@needs_compiler
@pytest.mark.skipif(not warpsmith.available("cuda"), reason="there is no GPU")
def test_cuda_kernels_on_a_gpu() -> None:
    on_gpu = [tuple(t.cuda() if isinstance(t, torch.Tensor) else t for t in case) for case in cases()]
    add = make(ADD, launch=launch, cases=on_gpu, streams=3)
    x, y = on_gpu[2][:2]
    torch.testing.assert_close(add(x, y, 2.0), x + 2 * y)
    assert add.checked == {"cuda"}
    with pytest.raises(warpsmith.KernelError, match=r"first at \[1\]"):
        make(ADD.replace("x[i] +", "x[i & ~1] +"), launch=launch, cases=on_gpu[1:])
    with pytest.raises(warpsmith.KernelError, match="after it"):
        make(ADD.replace("i < n", "i < n + 1"), launch=launch, cases=on_gpu[1:2])
    with pytest.raises(warpsmith.ArgumentError, match="one for each parameter"):
        short = lambda *args: warpsmith.Launch((8,), (128,), args=launch(*args).args[:-1])  # noqa: E731
        make(ADD, launch=short, cases=on_gpu)


def test_triton_functions(run_python: Any) -> None:
    pytest.importorskip("triton")
    out = run_python(TRITON, TRITON_INTERPRET="1")
    assert out.splitlines() == ["[0.0, 3.0, 6.0]", "4 4.0 (4,)"]


TRITON = """
import linecache, sys
PROGRAM = '''
import torch, triton, warpsmith
import triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, PLANTED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = at < n
    total = tl.load(x + at, mask=seen) + tl.load(y + at, mask=seen)
    if PLANTED:
        total = tl.where(at == 4, 4.0, total)
    tl.store(out + at, total, mask=seen)

def make(planted):
    def launch(x, y, out):
        options = {"PLANTED": planted, "BLOCK": 64}
        return warpsmith.Launch(grid=(triton.cdiv(x.numel(), 64),), args=(x, y, out, x.numel()), options=options)

    @warpsmith.kernel(
        source=add_kernel, reference=lambda x, y: x + y, launch=launch,
        cases=[(torch.arange(100.0), 2 * torch.arange(100.0))],
    )
    def triton_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    return triton_add

add = make(False)
print(add(torch.arange(3.0), 2 * torch.arange(3.0)).tolist())
try:
    make(True)
except warpsmith.KernelError as error:
    print(error.index[0], error.got, error.index)
'''
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "program.py")
    with open(path, "w") as file:
        file.write(PROGRAM)
    sys.path.insert(0, folder)
    import program
"""


@needs_compiler
def test_a_kernel_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "add.cu"
    with pytest.raises(warpsmith.ArgumentError, match=r"load_kernel.*path.*add\.cu"):
        warpsmith.load_kernel(path, launch=launch, reference=reference, cases=cases())
    path.write_text("no CUDA")
    load = warpsmith.load_kernel(path, launch=launch, reference=reference, cases=cases())

    def added(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.empty_like(x)

    with pytest.raises(warpsmith.WarpsmithError):
        load(added)
    path.write_text(ADD)
    add = warpsmith.load_kernel(path, launch=launch, reference=reference, cases=cases())(added)
    x, y = torch.randn(7), torch.randn(7)
    torch.testing.assert_close(add(x, y, 2.0), x + 2 * y)
