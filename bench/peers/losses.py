"""Losses over a vocabulary in other libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .common import Case, Work, random_like
from .memory import gradient

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _losses(case: Case) -> dict[str, Loss]:
    """PyTorch's loss by name, if it has one with these options: of the logits as they are, and as models have it."""
    if case.number("softcap", 0.0) != 0.0 or case.number("z_loss", 0.0) != 0.0:
        return {}
    smoothing = case.number("label_smoothing", 0.0)
    reduction = case.option("reduction", "mean")

    def loss(logits, targets):
        return F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=smoothing)

    if case.dtype == "f32":
        return {"torch": loss}
    return {"torch": loss, "torch, logits in f32": lambda logits, targets: loss(logits.float(), targets)}


def cross_entropy(case: Case, device: str) -> Work | None:
    rows, vocab = (case.size(name) for name in ("num_tokens", "vocab"))
    normal, losses = random_like(case, device), _losses(case)
    if not losses:
        return None

    def make():
        return normal(rows, vocab), torch.randint(vocab, (rows,), device=device)

    return Work(make, losses, losses["torch"])


def cross_entropy_backward(case: Case, device: str) -> Work | None:
    rows, vocab = (case.size(name) for name in ("num_tokens", "vocab"))
    normal, losses = random_like(case, device), _losses(case)
    if not losses or case.option("reduction", "mean") == "none":
        return None
    targets = torch.randint(vocab, (rows,), device=device)

    def make():
        return torch.ones((), device=device), normal(rows, vocab)

    return gradient(case, device, lambda logits: losses["torch"](logits, targets), make)


def linear_cross_entropy(case: Case, device: str) -> Work | None:
    rows, vocab, hidden = (case.size(name) for name in ("num_tokens", "vocab", "hidden"))
    normal, losses = random_like(case, device), _losses(case)
    if not losses:
        return None
    wanted = [name in case.given for name in ("dx", "dw")]

    def make():
        x, w = normal(rows, hidden).requires_grad_(wanted[0]), normal(vocab, hidden).requires_grad_(wanted[1])
        return x, w, torch.randint(vocab, (rows,), device=device)

    def with_gradients(loss: Callable) -> Callable:
        def call(x, w, targets):
            found = loss(x, w, targets)
            leaves = [tensor for tensor, asked in zip((x, w), wanted, strict=True) if asked]
            return torch.autograd.grad(found, leaves) if leaves else found

        return call

    def of_product(loss: Loss) -> Callable:
        return lambda x, w, targets: loss(F.linear(x, w), targets)

    calls = {name: with_gradients(of_product(loss)) for name, loss in losses.items()}
    if device != "cpu":
        calls["torch.compile"] = with_gradients(torch.compile(of_product(losses["torch"]), dynamic=False))
    return Work(make, calls)


def _divergence(case: Case) -> Callable[..., torch.Tensor]:
    """The loss of a student's logits against a teacher's as people write it in PyTorch."""
    inverse = 1.0 / case.number("temperature", 1.0)
    reverse = case.option("direction", "forward") == "reverse"
    reduction = {"mean": "batchmean"}.get(case.option("reduction", "mean"), "sum")

    def loss(student, teacher):
        logs = [F.log_softmax(logits * inverse, -1) for logits in (student, teacher)]
        return F.kl_div(*(reversed(logs) if reverse else logs), reduction=reduction, log_target=True)

    return loss


def kl_div(case: Case, device: str) -> Work | None:
    rows, vocab = (case.size(name) for name in ("num_tokens", "vocab"))
    if "targets" in case.given or case.option("reduction", "mean") == "none":
        return None
    normal, loss = random_like(case, device), _divergence(case)
    calls = {"torch": loss}
    if case.dtype != "f32":
        calls["torch, logits in f32"] = lambda student, teacher: loss(student.float(), teacher.float())
    return Work(lambda: (normal(rows, vocab), normal(rows, vocab)), calls, loss)


def kl_div_backward(case: Case, device: str) -> Work | None:
    rows, vocab = (case.size(name) for name in ("num_tokens", "vocab"))
    if "targets" in case.given or case.option("reduction", "mean") == "none":
        return None
    normal, loss = random_like(case, device), _divergence(case)
    teacher = normal(rows, vocab)

    def make():
        return torch.ones((), device=device), normal(rows, vocab)

    return gradient(case, device, lambda student: loss(student, teacher), make)
