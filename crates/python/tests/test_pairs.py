"""Gradients with every option alone and with every two of them together, against formulas in f64."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

import formulas
import pytest
import torch
import warpsmith
from device import DEVICE, generator

Tensors = dict[str, torch.Tensor]
Call = Callable[..., Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def judge(ours: Call, formula: Call, inputs: Tensors, tolerance: float = 3e-4) -> None:
    """Results, and the gradients of all inputs, of a sum of all results with random factors."""
    wide = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    narrow = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    total = torch.zeros((), dtype=torch.float64)
    wide_total = total.clone()
    found, expected = (
        result if isinstance(result, tuple) else (result,) for result in (ours(**narrow), formula(**wide))
    )
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        if other.requires_grad:
            factor = random(*other.shape, seed=7 + at).double()
            total, wide_total = total + (one * factor).sum(), wide_total + (other * factor).sum()
    total.backward()
    wide_total.backward()
    for name, tensor in narrow.items():
        assert tensor.grad is not None and wide[name].grad.abs().max() > 0, name
        torch.testing.assert_close(
            tensor.grad.double(),
            wide[name].grad,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def alone_and_in_pairs(options: Collection[str], never: Collection[set[str]] = ()) -> list[Any]:
    """No option, each, and every two that go together."""
    found = [chosen for count in range(3) for chosen in combinations(options, count)]
    found = [chosen for chosen in found if not any(one <= set(chosen) for one in never)]
    return [pytest.param(chosen, id="-".join(chosen) or "plain") for chosen in found]


#: Of attention. Those that are tensors, or change them, have a line in the test.
ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 3},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.4},
    "dropout": {"dropout": 0.3, "seed": 5, "offset": 2},
    "lse": {"return_lse": True},
    "mask": {},
    "bias": {},
    "sinks": {},
    "groups": {},
    "packed": {},
    "wide_heads": {},
    "fewer_queries": {},
}


@pytest.mark.parametrize("chosen", alone_and_in_pairs(ATTENTION, [{"packed", "mask"}, {"packed", "bias"}]))
def test_attention(chosen: tuple[str, ...]) -> None:
    options = {name: value for one in chosen for name, value in ATTENTION[one].items()}
    kv_heads, dim = 2 if "groups" in chosen else 4, 80 if "wide_heads" in chosen else 32
    q_len, kv_len, batch = 5 if "fewer_queries" in chosen else 19, 19, 2
    inputs = {
        "q": random(batch, q_len, 4, dim),
        "k": random(batch, kv_len, kv_heads, dim, seed=1),
        "v": random(batch, kv_len, kv_heads, dim, seed=2),
    }
    if "bias" in chosen:
        inputs["bias"] = random(1, 4, q_len, kv_len, seed=3)
    if "sinks" in chosen:
        inputs["sinks"] = random(4, seed=4)
    if "mask" in chosen:
        own = torch.eye(kv_len, dtype=torch.bool)[kv_len - q_len :]
        # The formula has no result for queries that see nothing.
        options["mask"] = (torch.rand(batch, 1, q_len, kv_len, generator=generator(5)) < 0.8) | own

    def ours(**tensors: torch.Tensor) -> Any:
        if "packed" not in chosen:
            return warpsmith.attention(**tensors, **options)
        rows = {name: tensor.flatten(0, 1)[None] if tensor.ndim == 4 else tensor for name, tensor in tensors.items()}
        starts = {
            f"{name}_starts": torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * length
            for name, length in (("q", q_len), ("kv", kv_len))
        }
        found = warpsmith.attention(**rows, **starts, **options)
        out, lse = found if "lse" in chosen else (found, None)
        out = out[0].unflatten(0, (batch, q_len))
        return out if lse is None else (out, lse[0].unflatten(-1, (batch, q_len)).transpose(0, 1))

    judge(ours, lambda **tensors: formulas.attention(**tensors, **options), inputs)


LOSSES: dict[str, dict[str, Any]] = {
    "ignore_index": {"ignore_index": 3},
    "softcap": {"softcap": 2.0},
    "label_smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.05},
    "sum": {"reduction": "sum"},
}
TARGETS = (3, 0, -100, 36, 7, 3, 12)


@pytest.mark.parametrize("chosen", alone_and_in_pairs([*LOSSES, "each"], [{"sum", "each"}]))
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_losses(op: str, chosen: tuple[str, ...]) -> None:
    options = {name: value for one in chosen for name, value in LOSSES.get(one, {}).items()}
    if "each" in chosen:
        if op == "linear_cross_entropy":
            pytest.skip("it stores no loss of each row")
        options["reduction"] = "none"
    ignored = options.get("ignore_index", -100)
    targets = torch.tensor([ignored if target == -100 else target for target in TARGETS], device=DEVICE)
    rows = len(TARGETS)
    inputs = {"logits": 2 * random(rows, 37)}
    if op == "linear_cross_entropy":
        inputs = {"x": random(rows, 24), "w": random(37, 24, seed=1) / 2}
    judge(
        lambda **tensors: getattr(warpsmith, op)(*tensors.values(), targets, **options),
        lambda **tensors: getattr(formulas, op)(*tensors.values(), targets, **options),
        inputs,
    )


DIVERGENCE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.5},
    "reverse": {"direction": "reverse"},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "targets": {},
    "ignore_index": {"ignore_index": 3},
}


@pytest.mark.parametrize("chosen", alone_and_in_pairs(DIVERGENCE, [{"sum", "each"}]))
def test_kl_div(chosen: tuple[str, ...]) -> None:
    options = {name: value for one in chosen for name, value in DIVERGENCE[one].items()}
    teacher = random(len(TARGETS), 37, seed=1)
    given = "targets" in chosen or "ignore_index" in chosen
    targets = torch.tensor(TARGETS, device=DEVICE) if given else None
    judge(
        lambda student: warpsmith.kl_div(student, teacher, targets, **options),
        lambda student: formulas.kl_div(student, teacher.double(), targets, **options),
        {"student": 2 * random(len(TARGETS), 37)},
    )


LINEAR: dict[str, dict[str, Any]] = {
    **{act: {"act": act} for act in ("relu", "gelu", "gelu_tanh", "silu")},
    **{gate: {"gate": gate} for gate in ("halves", "interleaved")},
    "scale": {"scale": 0.6},
    "bias": {},
    "residual": {},
    "batched": {},
}
ONE_OF = [*combinations(("relu", "gelu", "gelu_tanh", "silu"), 2), ("halves", "interleaved")]


@pytest.mark.parametrize("chosen", alone_and_in_pairs(LINEAR, [set(pair) for pair in ONE_OF]))
def test_linear(chosen: tuple[str, ...]) -> None:
    options = {name: value for one in chosen for name, value in LINEAR[one].items()}
    gated, lead = "gate" in options, [2] if "batched" in chosen else []
    n = 10
    inputs = {"x": random(2, 7, 12), "w": random(*lead, n * (1 + gated), 12, seed=1) / 3}
    if "bias" in chosen:
        inputs["bias"] = random(n * (1 + gated), seed=2)
    if "residual" in chosen:
        inputs["residual"] = random(2, 7, n, seed=3)
    judge(
        lambda **tensors: warpsmith.linear(**tensors, **options),
        lambda **tensors: formulas.linear(**tensors, **options),
        inputs,
    )


@pytest.mark.parametrize("chosen", alone_and_in_pairs(("weight", "bias", "residual", "eps")))
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms(op: str, chosen: tuple[str, ...]) -> None:
    if op == "rms_norm" and "bias" in chosen:
        pytest.skip("it has no bias")
    shapes = {"weight": (24,), "bias": (24,), "residual": (6, 24)}
    inputs = {"x": random(6, 24)}
    inputs |= {name: random(*shapes[name], seed=at) for at, name in enumerate(chosen, 1) if name in shapes}
    options = {"eps": 0.3} if "eps" in chosen else {}
    judge(
        lambda **tensors: getattr(warpsmith, op)(**tensors, **options),
        lambda **tensors: getattr(formulas, op)(**tensors, **options),
        inputs,
    )
