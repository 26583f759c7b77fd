"""Patched models of further families against unpatched ones."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE

models = pytest.importorskip("models", reason="transformers is not installed")


@pytest.fixture(params=models.OTHERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    plain = models.make(name, **options)
    patched = copy.deepcopy(plain)
    warpsmith.patch(patched)
    return plain, patched


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_logits_with_padding(name: str) -> None:
    plain, patched = pair(name)
    ids = models.tokens(3, 11)
    close(patched(ids).logits, plain(ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :5] = 0, 0
    found, expected = (model(ids, attention_mask=mask).logits for model in (patched, plain))
    close(found[mask.bool()], expected[mask.bool()])


def test_generation(name: str) -> None:
    plain, patched = pair(name)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    ids = models.tokens(2, 6)
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(name: str, checkpointing: bool) -> None:
    plain, patched = pair(name)
    ids = models.tokens(2, 12)
    if checkpointing:
        patched.gradient_checkpointing_enable()
    for model in (plain, patched):
        model.train()(ids, labels=ids).loss.backward()
    for (one_name, one), (other_name, other) in zip(plain.named_parameters(), patched.named_parameters(), strict=True):
        assert one_name == other_name
        close(other.grad, one.grad, 1e-3)


@torch.no_grad()
def test_half_precision_is_judged_against_double(name: str) -> None:
    plain = models.make(name).bfloat16()
    patched = copy.deepcopy(plain)
    warpsmith.patch(patched)
    ids = models.tokens()
    # The products of experts in PyTorch take no numbers of f64.
    wide = torch.float32 if hasattr(plain.config, "num_experts_per_tok") else torch.float64
    expected = copy.deepcopy(plain).to(wide)(ids).logits.double()
    errors = [(model(ids).logits.double() - expected).abs().mean() for model in (plain, patched)]
    assert errors[1] <= 1.25 * errors[0], errors


def test_reports_and_unpatching(name: str) -> None:
    model = models.make(name)
    before = {path: type(module) for path, module in model.named_modules()}
    report = warpsmith.patch(model)
    kinds = {was for was, _ in report.swapped.values()}
    left = {was for was, _ in report.left.values()}
    assert (
        any(kind.endswith(("MLP", "Experts")) for kind in kinds) and report.swapped["attention"][1] == "warpsmith.sdpa"
    )
    classes = {kind.__name__ for kind in before.values() if kind.__module__.startswith("transformers.models")}
    expected = {kind for kind in classes if kind.endswith(("RMSNorm", "MLP", "Attention"))}
    assert expected <= kinds and not expected & left
    warpsmith.unpatch(model)
    assert {path: type(module) for path, module in model.named_modules()} == before


@torch.no_grad()
def test_models_can_be_pickled(name: str) -> None:
    _, patched = pair(name)
    ids = models.tokens()
    close(pickle.loads(pickle.dumps(patched)).to(DEVICE)(ids).logits, patched(ids).logits, 1e-6)


def test_layers_that_somebody_changed_are_left() -> None:
    model = models.make("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    report = warpsmith.patch(model)
    assert report.left["model.layers.0.self_attn"][1] == "its forward was replaced"
    assert "model.layers.1.self_attn" in report.swapped
