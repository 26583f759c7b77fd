"""Distillation losses against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import warpsmith
from device import generator
from torch.nn import functional as F


def logits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=generator(seed))).to(dtype)


def expected(student: torch.Tensor, teacher: torch.Tensor, temperature: float, direction: str) -> torch.Tensor:
    """The loss of each row, as PyTorch has it, in f64."""
    q, p = (F.log_softmax(rows.double() / temperature, -1) for rows in (student, teacher))
    of, from_ = (p, q) if direction == "forward" else (q, p)
    return F.kl_div(from_, of, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [32, 5003])
def test_values_and_gradients(vocab: int, dtype: torch.dtype, temperature: float, direction: str) -> None:
    student, teacher = logits(6, vocab, dtype=dtype).requires_grad_(), logits(6, vocab, dtype=dtype, seed=1)
    wide = student.detach().double().requires_grad_()
    loss = warpsmith.kl_div(student, teacher, temperature=temperature, direction=direction)
    rows = expected(wide, teacher, temperature, direction)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), rows.mean(), rtol=2e-6, atol=2e-6)
    (3 * loss).backward()
    (3 * rows.mean()).backward()
    assert student.grad is not None and student.grad.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    # Half of the smallest number of f16, and what differences of logarithms lose.
    nothing = (3e-8 if dtype == torch.float16 else 0.0) + 1e-6 * float(wide.grad.abs().max())
    torch.testing.assert_close(student.grad.double(), wide.grad, rtol=tolerance, atol=nothing)


def test_the_mean_is_over_rows_that_count() -> None:
    student, teacher = logits(2, 4, 50), logits(2, 4, 50, seed=1)
    targets = torch.tensor([[1, -100, 7, 3], [-100, -100, 1000, -5]])
    rows = expected(student, teacher, 1.0, "forward")
    counted = targets != -100
    found = warpsmith.kl_div(student, teacher, targets)
    torch.testing.assert_close(found.double(), rows[counted].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        warpsmith.kl_div(student, teacher).double(),
        F.kl_div(
            F.log_softmax(student.double(), -1), F.log_softmax(teacher.double(), -1), reduction="sum", log_target=True
        )
        / 8,
        rtol=1e-5,
        atol=1e-6,
    )
    by_row = warpsmith.kl_div(student, teacher, targets, reduction="none")
    assert by_row.shape == (2, 4) and bool((by_row[~counted] == 0).all())
    with pytest.raises(warpsmith.ArgumentError, match="`targets`: expected shape"):
        warpsmith.kl_div(student, teacher, targets[0])


def test_gradients_in_place_have_the_same_bits() -> None:
    student, teacher = logits(8, 301, dtype=torch.bfloat16), logits(8, 301, dtype=torch.bfloat16, seed=1)
    options: dict[str, Any] = {"temperature": 1.5, "direction": "reverse"}
    asked = dict.fromkeys(("return_lse", "return_teacher_lse", "return_row_losses", "return_count"), True)
    _, *kept = warpsmith.kl_div(student, teacher, **options, **asked)
    dloss = torch.tensor(1.0)
    expected = warpsmith.kl_div_backward(student, teacher, *kept, dloss, **options)
    warpsmith.kl_div_backward_(student, teacher, *kept, dloss, **options)
    assert torch.equal(student, expected)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    student, teacher = logits(9, 4099), logits(9, 4099, seed=1)
    together = warpsmith.kl_div(student, teacher, reduction="none")
    alone = [warpsmith.kl_div(student[at : at + 1], teacher[at : at + 1], reduction="none") for at in range(9)]
    assert torch.equal(together, torch.cat(alone)) and torch.equal(
        together, warpsmith.kl_div(student, teacher, reduction="none")
    )


def test_columns_that_nobody_has() -> None:
    """Vocabularies are padded, and padding is masked."""
    student, teacher = logits(3, 40), logits(3, 40, seed=1)
    padded = [F.pad(rows, (0, 8), value=-torch.inf) for rows in (student, teacher)]
    padded[0].requires_grad_()
    for direction in ("forward", "reverse"):
        padded[0].grad = None
        loss = warpsmith.kl_div(*padded, direction=direction)
        torch.testing.assert_close(loss, warpsmith.kl_div(student, teacher, direction=direction), rtol=1e-6, atol=1e-6)
        loss.backward()
        assert padded[0].grad is not None and bool((padded[0].grad[:, 40:] == 0).all())
        assert bool(padded[0].grad.isfinite().all())
    assert warpsmith.kl_div(padded[0].detach(), torch.cat([teacher, logits(3, 8)], -1)).item() == torch.inf
