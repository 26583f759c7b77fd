"""Kernels that are wrong in ways that are easy to miss: the check must refuse every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import warpsmith

Fill = Callable[[torch.Tensor, torch.Tensor], None]


def right(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(x.float(), -1))


def zeros(x: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()


def flat_memory(x: torch.Tensor, out: torch.Tensor) -> None:
    """As one that counts elements by the order of the shape and ignores strides."""
    torch.as_strided(out, (out.numel(),), (1,)).copy_(torch.softmax(x.float(), -1).flatten())


def reads_flat_memory(x: torch.Tensor, out: torch.Tensor) -> None:
    seen = torch.as_strided(x, x.shape, (x.shape[1], 1))
    out.copy_(torch.softmax(seen.float(), -1))


def swapped_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    right(x, out)
    out[:2] = out[:2].flip(0).clone()


def twice(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(2 * torch.softmax(x.float(), -1))


def half(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(0.5 * torch.softmax(x.float(), -1))


def only_the_first_row(x: torch.Tensor, out: torch.Tensor) -> None:
    right(x[:1], out[:1])


def zeros_after_the_first_row(x: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    right(x[:1], out[:1])


def last_element_left_out(x: torch.Tensor, out: torch.Tensor) -> None:
    right(x, out)
    out[:, -1] = 0


WRONG = [
    zeros, swapped_rows, twice, half, only_the_first_row, zeros_after_the_first_row, last_element_left_out,
]  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(300, 7) if transposed else torch.randn(7, 300)
    return (x.t() if transposed else x).to(dtype)


def own_op(fill: Fill, x: torch.Tensor) -> Any:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    return warpsmith.kernel(source=fill, reference=lambda x: torch.softmax(x, -1), cases=[(x,)])(rows)


def kernel_of_an_op(fill: Fill, x: torch.Tensor) -> Any:
    def rows(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        fill(x, out)

    return warpsmith.kernel(op="softmax", cases=[(x,)])(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", [own_op, kernel_of_an_op])
def test_the_right_one_passes(make: Any, dtype: torch.dtype, transposed: bool) -> None:
    found = make(right, case(dtype, transposed=transposed))
    if make is kernel_of_an_op:
        found.remove()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fill", WRONG)
@pytest.mark.parametrize("make", [own_op, kernel_of_an_op])
def test_wrong_ones_are_refused(make: Any, fill: Fill, dtype: torch.dtype, transposed: bool) -> None:
    with pytest.raises(warpsmith.KernelError):
        make(fill, case(dtype, transposed=transposed))


@pytest.mark.parametrize("fill", [flat_memory, reads_flat_memory])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_are_those_of_calls(fill: Fill, dtype: torch.dtype) -> None:
    own_op(fill, case(dtype, transposed=False))
    with pytest.raises(warpsmith.KernelError):
        own_op(fill, case(dtype, transposed=True))


def test_reading_flat_memory_is_found_in_kernels_of_ops() -> None:
    with pytest.raises(warpsmith.KernelError):
        kernel_of_an_op(reads_flat_memory, case(torch.bfloat16, transposed=True))


def test_writing_between_elements_is_found() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(x), 2)[:, 0]

    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * x)

    def wide(x: torch.Tensor, out: torch.Tensor) -> None:
        fill(x, out)
        out.as_strided((2,), (1,), out.storage_offset()).copy_(2 * x[0].expand(2))

    options = {"reference": lambda x: 2 * x, "cases": [(torch.randn(9),)]}
    assert warpsmith.kernel(source=fill, **options)(spread)(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(warpsmith.KernelError, match="between its elements"):
        warpsmith.kernel(source=wide, **options)(spread)


def test_outputs_that_share_memory_are_refused() -> None:
    def declared(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(1).expand(len(x))

    with pytest.raises(warpsmith.KernelError, match="share memory"):
        warpsmith.kernel(source=lambda x, out: None, reference=lambda x: x, cases=[(torch.zeros(3),)])(declared)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_honest_rounding_passes_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    """Sums that cancel, products of many terms, rows of very different sizes."""
    if dtype == torch.float16 and scale != 1.0:
        pytest.skip("f16 has no such numbers")
    torch.manual_seed(0)
    x, y = (torch.randn(33, 65) * scale).to(dtype), torch.randn(33, 65).to(dtype)
    y[::2] *= 100

    def like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), len(y))

    warpsmith.kernel(
        source=lambda x, y, out: out.copy_(x.float() * 3 - x.float() * 2.875 + y.float() * x.float()),
        cases=[(x, y), (x[0, :1], y[0, :1])],
        reference=lambda x, y: x * 3 - x * 2.875 + y * x,
    )(like)  # fmt: skip
    warpsmith.kernel(source=lambda x, y, out: out.copy_(x @ y.t()), reference=lambda x, y: x @ y.t(), cases=[(x, y)])(
        square
    )


def test_defaults_are_filled_in() -> None:
    seen: list[tuple[Any, ...]] = []

    def fill(x: torch.Tensor, scale: float, shift: float, out: torch.Tensor) -> None:
        seen.append((scale, shift))
        out.copy_(x * scale + shift)

    def reference(x: torch.Tensor, scale: float, shift: float) -> torch.Tensor:
        return x * scale + shift

    @warpsmith.kernel(source=fill, reference=reference, cases=[(torch.randn(5),), (torch.randn(5), 3.0)])
    def affine(x: torch.Tensor, scale: float = 2.0, shift: float = 1.0) -> torch.Tensor:
        return torch.empty_like(x)

    assert set(seen) == {(2.0, 1.0), (3.0, 1.0)}
    x = torch.randn(4)
    torch.testing.assert_close(affine(x), 2 * x + 1)
    torch.testing.assert_close(affine(x, shift=5.0), 2 * x + 5)
    torch.testing.assert_close(torch.ops.warpsmith_user.affine(x, 4.0), 4 * x + 1)
    ours, theirs = affine.bench(x, warmup=1, iters=2)
    assert ours.median > 0 and theirs.median > 0


def test_parameters_by_keyword_alone_are_refused() -> None:
    with pytest.raises(warpsmith.ArgumentError, match=r"`scale`.*by position"):

        @warpsmith.kernel(source=lambda *_: None, reference=lambda x, scale: x, cases=[(torch.zeros(1),)])
        def keyword(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
            return torch.empty_like(x)
