"""Puts our kernels into a Hugging Face model, and removes them again.

Modules are replaced one by one, in the model they are given: nothing changes for other models. The new modules hold
the same parameters under the same names, so state dicts, optimisers and tied weights stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from warpsmith._patch import layers, loss
from warpsmith._patch.attention import NAME, register
from warpsmith._patch.report import PatchReport
from warpsmith._patch.swaps import FAMILIES, Left, replacement
from warpsmith.errors import UnsupportedError

__all__ = ["PatchReport", "patch", "unpatch"]

RECORD = "_warpsmith_patch"
#: PyTorch's attention implementations that ours replaces. Others were chosen on purpose, and stay.
REPLACED_ATTENTION = ("eager", "sdpa")


@dataclass
class Record:
    """What unpatching needs."""

    #: The modules that were replaced, by their path in the model.
    originals: dict[str, nn.Module]
    #: The classes of modules that got another, by their path.
    classes: dict[str, type[nn.Module]]
    #: The attention before, if it was replaced.
    attention: str | None
    report: PatchReport


def patch(model: nn.Module) -> PatchReport:
    """Swaps norms, MLPs, rotary positions and attention of a model from transformers for ours, in place.

    It knows Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, SmolLM3, OLMo 2, Phi-3, Gemma (1, 2 and 3) and GPT-2.
    In training, a call with ``labels`` computes the loss without storing logits: its result has none.

    Returns a report of what was swapped and what was left, and why. Modules that are not exactly what their model's
    code made them (quantised, with adapters or hooks) are left. Patching twice changes nothing.
    """
    record: Record | None = getattr(model, RECORD, None)
    if record is not None:
        return record.report
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES:
        expected = f"a model of transformers of type {', '.join(FAMILIES)}"
        got = f"{type(model).__name__} of type {family}"
        message = f"patch: argument `model`: expected {expected}, got {got}"
        raise UnsupportedError(message, op="patch", argument="model", expected=expected, got=got)

    report = PatchReport(type(model).__name__)
    originals: dict[str, nn.Module] = {}
    for path, module in list(model.named_modules()):
        if any(path.startswith(f"{outer}.") for outer in originals):
            continue
        found = replacement(module, family)
        if isinstance(found, nn.Module):
            model.set_submodule(path, found)
            originals[path] = module
            report.swapped[path] = (type(module).__name__, f"warpsmith {type(found).__name__}")
        elif isinstance(found, Left):
            report.left[path] = (type(module).__name__, found.why)
    classes = recast(model, report)
    attention = swap_attention(model, report)
    setattr(model, RECORD, Record(originals, classes, attention, report))
    return report


def recast(model: nn.Module, report: PatchReport) -> dict[str, type[nn.Module]]:
    """Gives layers classes of ours, now that their parts were swapped; returns those before, by the layers' paths."""
    before: dict[str, type[nn.Module]] = {}
    for path, module in model.named_modules():
        name = type(module).__name__
        if name not in layers.FORWARDS:
            continue
        why = layers.why_left(module)
        if why is not None:
            report.left[path] = (name, why)
            continue
        before[path] = type(module)
        module.__class__ = layers.derived(module.__class__)
        report.swapped[path] = (name, f"warpsmith {type(module).__qualname__}")
        if hasattr(module, "q_norm"):
            why = layers.why_apart(module)
            what = "norms and rotation of queries and keys"
            if why is None:
                report.swapped[f"{path}.q_norm, k_norm"] = (what, "warpsmith.qk_norm_rope")
            else:
                report.left[f"{path}.q_norm, k_norm"] = (what, why)
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        why = loss.why_left(model)
        if why is None:
            kind: Any = type(model)
            before[""], model.__class__ = kind, loss.derived(kind)
            report.swapped["loss"] = ("cross entropy of logits", "warpsmith.linear_cross_entropy in training")
        else:
            report.left["loss"] = ("cross entropy of logits", why)
    return before


def swap_attention(model: Any, report: PatchReport) -> str | None:
    """Makes the model use our attention; returns the previous setting."""
    config = model.config
    before = str(config._attn_implementation)
    why = None
    if before not in REPLACED_ATTENTION:
        why = "it was chosen for this model"
    elif getattr(config, "output_attentions", False):
        why = "the model is to return attention weights, which a fused kernel never has"
    elif getattr(config, "reorder_and_upcast_attn", False):
        why = "the model is to compute it in f32 (reorder_and_upcast_attn)"
    if why is not None:
        report.left["attention"] = (before, why)
        return None
    register()
    model.set_attn_implementation(NAME)
    report.swapped["attention"] = (before, "warpsmith.sdpa")
    return before


def unpatch(model: nn.Module) -> None:
    """Undoes :func:`patch`: restores the old modules, with the current parameters."""
    record: Record | None = getattr(model, RECORD, None)
    if record is None:
        return
    for path, kind in record.classes.items():
        model.get_submodule(path).__class__ = kind
    for path, original in record.originals.items():
        current = model.get_submodule(path)
        original._parameters.update(current._parameters)
        original._modules.update({name: m for name, m in current._modules.items() if name in original._modules})
        original.train(current.training)
        model.set_submodule(path, original)
    if record.attention is not None:
        model.set_attn_implementation(record.attention)  # type: ignore[operator]
    delattr(model, RECORD)
