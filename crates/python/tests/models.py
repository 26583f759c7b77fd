"""Tiny models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
from device import generator
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMES = ("qwen3", "llama", "gpt2")


def make(name: str, **options: Any) -> Any:
    """A model, with norms that are not all ones."""
    torch.manual_seed(0)
    llama = SIZES | {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 64}
    llama |= {"bos_token_id": 0, "eos_token_id": 95, "pad_token_id": 1}
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**llama | options))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**llama | options))
    else:
        gpt2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
        gpt2 |= {"bos_token_id": 0, "eos_token_id": 95, "pad_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(**gpt2 | options))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or ".ln_" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    """Token numbers."""
    return torch.randint(2, 95, (rows, length), generator=generator(3))
