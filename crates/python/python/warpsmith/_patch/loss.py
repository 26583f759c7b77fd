"""The loss of transformers' language models, from hidden states and the head's weight: no logits are stored."""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from warpsmith import ops
from warpsmith.nn._linear import is_plain
from warpsmith.nn._support import fits

PREFIX = "Fused"
#: The field of a base model's result that is not in that of a language model.
LAST = "last_hidden_state"
IGNORED = -100


@cache
def derived(base: Any) -> type[nn.Module]:
    """The class of ours for one of transformers', see :func:`warpsmith._patch.layers.derived`."""
    output = output_class(base)

    # generate and trainers look at the signature.
    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not fused(self, args, kwargs):
            return base.forward(self, *args, **kwargs)
        labels, targets = kwargs.pop("labels"), kwargs.pop("shift_labels", None)
        kwargs.pop("logits_to_keep", None)
        kwargs.pop("return_dict", None)
        balanced = has_experts(base) and kwargs.get("output_router_logits")
        if has_experts(base) and balanced is None:
            balanced = kwargs["output_router_logits"] = self.config.output_router_logits
        outputs = self.base_model(*args, **kwargs)
        if targets is None:
            # Each place is to name the token after it.
            targets = F.pad(labels, (0, 1), value=kwargs.get("ignore_index", IGNORED))[..., 1:]
        hidden = outputs.last_hidden_state
        loss = loss_of(self, hidden, targets.to(hidden.device), kwargs)
        if balanced:
            aux = balance(self, base, outputs.router_logits, kwargs.get("attention_mask"))
            loss = loss + self.router_aux_loss_coef * aux
            return output(loss=loss, aux_loss=aux, **{name: outputs[name] for name in outputs if name != LAST})
        # The same fields as the base model's result, but for the last hidden state.
        return output(loss=loss, logits=None, **{name: outputs[name] for name in outputs if name != LAST})

    members = {"forward": forward, "__module__": __name__, "__qualname__": f"{PREFIX}{base.__name__}"}
    return type(base.__name__, (base,), members)


def fused(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call wants a loss and will not miss the logits."""
    if not model.training or kwargs.get("labels") is None or len(args) > 1 or hasattr(model, "_loss_function"):
        return False
    whole = isinstance(kwargs.get("logits_to_keep", 0), int) and kwargs.get("logits_to_keep", 0) == 0
    head = model.get_output_embeddings()
    as_object = kwargs.get("return_dict", getattr(model.config, "return_dict", True)) is not False
    return whole and as_object and has_loss(head) and fits("loss", head.weight)


def has_loss(head: Any) -> bool:
    """Whether the head is what the loss's kernel computes."""
    return is_plain(head) and head.bias is None


def loss_of(model: Any, hidden: torch.Tensor, targets: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The mean loss, or the sum over ``num_items_in_batch`` where gradients are accumulated."""
    head, items = model.get_output_embeddings(), kwargs.get("num_items_in_batch")
    softcap = getattr(model.config, "final_logit_softcapping", None) or 0.0
    loss: torch.Tensor = ops.linear_cross_entropy(
        hidden.flatten(0, -2),
        head.weight,
        targets.flatten(),
        ignore_index=kwargs.get("ignore_index", IGNORED),
        softcap=softcap,
        reduction="mean" if items is None else "sum",
    )
    return loss if items is None else loss / items


def has_experts(base: type[nn.Module]) -> bool:
    """Whether models of a class are mixtures of experts."""
    return base.__name__ in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")


def balance(model: Any, base: Any, logits: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
    """The loss that evens out the loads of experts, as transformers computes it over all layers."""
    function = import_module(base.__module__).load_balancing_loss_func
    found: torch.Tensor = function(logits, model.num_experts, model.num_experts_per_tok, mask)
    return found


def output_class(base: type[nn.Module]) -> Any:
    """What the model's forward returns."""
    outputs = import_module("transformers.modeling_outputs")
    if has_experts(base):
        return outputs.MoeCausalLMOutputWithPast
    crossed = base.__name__ == "GPT2LMHeadModel"
    return outputs.CausalLMOutputWithCrossAttentions if crossed else outputs.CausalLMOutputWithPast


def why_left(model: Any) -> str | None:
    """Why a model keeps its loss; ``None`` if it can be changed."""
    if "forward" in vars(model):
        return "the model's forward was replaced"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        return f"it is {model.loss_type}"
    if not has_loss(model.get_output_embeddings()):
        return "the head is more than a linear layer without a bias"
    return None


def __getattr__(name: str) -> Any:
    # Classes of models that were pickled in another process.
    of = name.removeprefix(PREFIX)
    if of == name or not of.endswith(("ForCausalLM", "LMHeadModel")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return derived(getattr(import_module("transformers"), of))
