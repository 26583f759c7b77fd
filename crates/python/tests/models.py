"""Tiny models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
from device import generator
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
#: The families that all tests go through.
NAMES = ("qwen3", "llama", "gpt2")
#: Those whose parts are the same, or nearly, and what a small model of them needs.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 4, "final_logit_softcapping": 5.0},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make(name: str, **options: Any) -> Any:
    """A model, with norms that are not all ones."""
    torch.manual_seed(0)
    llama = SIZES | {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 64}
    llama |= {"bos_token_id": 0, "eos_token_id": 95, "pad_token_id": 1}
    given = OTHERS.get(name, {}) | options
    if name == "gpt2":
        gpt2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
        gpt2 |= {"bos_token_id": 0, "eos_token_id": 95, "pad_token_id": 1}
        config = AutoConfig.for_model(name, **gpt2 | given)
    else:
        config = AutoConfig.for_model(name, **llama | given)
    model = AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or ".ln_" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    """Token numbers."""
    return torch.randint(2, 95, (rows, length), generator=generator(3))
