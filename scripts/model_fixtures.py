"""Makes the small random models that the engine's tests compare with transformers.

    python -m venv venv && venv/bin/pip install torch==2.11.0 transformers gguf
    venv/bin/python scripts/model_fixtures.py crates/engine/tests/fixtures/models

For each family: `config.json`, `model.safetensors` (bf16) as transformers writes them, and `expected.safetensors` with
the token ids of a sequence, the logits that transformers computes for it in f32, and the tokens with which it greedily
continues it. All but two are also written as GGUF, in the form that llama.cpp's converter gives them: see
`model_gguf.py`.

Variants of a family differ in some keys of the configuration, and in tensors that it asks for then. `variants.json` has
the keys, and `variants.safetensors` the tensors and the logits of some of the tokens.
"""

import json
import re
import sys
from pathlib import Path

import torch
from model_gguf import write_gguf
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

TOKENS = 48
VOCAB = 96
# Every so many tokens of a variant have logits in its file.
STEP = 9
# How many tokens continue the sequence.
GREEDY = 12
# Where it is not 7: with most others, transformers itself is off by more than 5 % in bf16, because scores are large.
# Those of mixtures have router logits that are far apart: else tokens would go to other experts in bf16.
SEEDS = {"phi3": 18, "qwen3_moe": 81, "mixtral": 69}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
# Divisors of the frequencies of Phi-3's 12 pairs.
SHORT = [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.2, 2.5, 3.0]
LONG = [1.0, 1.3, 1.8, 2.5, 3.5, 5.0, 7.0, 9.0, 12.0, 16.0, 20.0, 24.0]


def longrope(**more):
    factors = {"short_factor": SHORT, "long_factor": LONG}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors, **more}


def gemma_rope(full):
    local = {"rope_type": "default", "rope_theta": 10000.0}
    return {"full_attention": {"rope_theta": 1000000.0, **full}, "sliding_attention": local}


VARIANTS = {
    "llama": {
        "biases": {"attention_bias": True, "mlp_bias": True},
        "gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        "yarn": {"rope_parameters": YARN},
    },
    "qwen2": {
        "windows": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "layer_types": [FULL, SLIDING],
        },
        "yarn": {"rope_parameters": YARN},
    },
    "qwen3": {
        "biases": {"attention_bias": True},
        "relu": {"hidden_act": "relu"},
        "windows": {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL]},
    },
    "mistral": {
        "no_window": {"sliding_window": None},
        "narrow": {"sliding_window": 2},
        "yarn": {
            "rope_parameters": {
                **YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            }
        },
        "amplified": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    },
    "qwen3_moe": {
        "not_normalized": {"norm_topk_prob": False},
        "one": {"num_experts_per_tok": 1},
        "all": {"num_experts_per_tok": 6},
        "dense_layer": {"mlp_only_layers": [1]},
        "every_second": {"decoder_sparse_step": 2},
        "windows": {"use_sliding_window": True, "sliding_window": 7},
        "biases": {"attention_bias": True},
    },
    "mixtral": {
        "window": {"sliding_window": 9},
        "one": {"num_experts_per_tok": 1},
        "gelu": {"hidden_act": "gelu"},
    },
    "gemma3_text": {
        "biases": {"attention_bias": True},
        "capped": {"final_logit_softcapping": 3.0},
        "divided": {"query_pre_attn_scalar": 100},
        "silu": {"hidden_activation": "silu"},
        "full": {"layer_types": [FULL, FULL, FULL]},
        "local_last": {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 20},
        "yarn": {"rope_parameters": gemma_rope({**YARN, "rope_theta": 1000000.0})},
    },
    "phi3": {
        "plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "window": {"sliding_window": 11},
        "amplified": {"rope_parameters": longrope(attention_factor=0.8)},
        # So long that the sequence is a short context. The test opens it with one.
        "short": {"original_max_position_embeddings": 64},
    },
    "smollm3": {
        "biases": {"attention_bias": True, "mlp_bias": True},
        "all_rotated": {"no_rope_layers": [1, 1, 1, 1]},
        "others": {"no_rope_layers": [0, 1, 0, 1]},
        "windows": {"use_sliding_window": True, "sliding_window": 7, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
    },
    "olmo2": {
        "biases": {"attention_bias": True},
        "gelu": {"hidden_act": "gelu"},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    },
    "gpt2": {
        "unscaled": {"scale_attn_weights": False},
        "by_layer": {"scale_attn_by_inverse_layer_idx": True},
        "both": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        "gelu": {"activation_function": "gelu"},
        "relu": {"activation_function": "relu"},
    },
}


def models():
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    common = {"vocab_size": VOCAB, "num_hidden_layers": 2, "head_dim": 32, "bos_token_id": 1, "eos_token_id": 2}
    yield (
        "llama",
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=64,
            intermediate_size=80,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_parameters=llama3,
            tie_word_embeddings=False,
            **common,
        ),
    )
    # Heads that are together wider than the residual stream, and a head tied to the embedding.
    yield (
        "qwen3",
        Qwen3ForCausalLM,
        Qwen3Config(
            hidden_size=48,
            intermediate_size=80,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            tie_word_embeddings=True,
            **common,
        ),
    )
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    default = {"rope_type": "default", "rope_theta": 10000.0}
    yield (
        "qwen2",
        Qwen2ForCausalLM,
        Qwen2Config(rms_norm_eps=1e-6, rope_parameters=default, tie_word_embeddings=True, **sizes, **common),
    )
    yield (
        "mistral",
        MistralForCausalLM,
        MistralConfig(rms_norm_eps=1e-5, rope_parameters=default, sliding_window=12, **sizes, **common),
    )
    yield (
        "qwen3_moe",
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            rope_parameters=default,
            **sizes,
            **common,
        ),
    )
    yield (
        "mixtral",
        MixtralForCausalLM,
        MixtralConfig(num_local_experts=4, num_experts_per_tok=2, rope_parameters=default, **sizes, **common),
    )
    yield (
        "gemma3_text",
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            query_pre_attn_scalar=32,
            sliding_window=8,
            layer_types=[SLIDING, SLIDING, FULL],
            rope_parameters=gemma_rope({"rope_type": "linear", "factor": 8.0}),
            pad_token_id=0,
            **sizes,
            **{**common, "num_hidden_layers": 3},
        ),
    )
    yield (
        "phi3",
        Phi3ForCausalLM,
        Phi3Config(
            rope_parameters=longrope(),
            original_max_position_embeddings=32,
            pad_token_id=0,
            **{**sizes, "hidden_size": 64},
            **common,
        ),
    )
    yield (
        "smollm3",
        SmolLM3ForCausalLM,
        SmolLM3Config(pad_token_id=0, **sizes, **{**common, "num_hidden_layers": 4}),
    )
    yield (
        "olmo2",
        Olmo2ForCausalLM,
        Olmo2Config(pad_token_id=0, rope_parameters=default, **sizes, **common),
    )
    yield (
        "gpt2",
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_inner=96, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
    )


def randomise(model):
    """Weights large enough that every part of the model matters, and exact in bf16."""
    generator = torch.Generator().manual_seed(SEEDS.get(model.config.model_type, 7))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.3)
            # Gemma 3 adds the one itself.
            if parameter.dim() == 1 and name.endswith("weight") and not isinstance(model, Gemma3ForCausalLM):
                values += 1.0
            parameter.copy_(values.bfloat16().float())


def as_saved(model):
    """The tensors of a model under the names that its checkpoints have: one for each expert."""
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if model.config.model_type == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    tensors = {}
    for name, tensor in model.state_dict().items():
        stacked = re.fullmatch(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
        if stacked is None:
            tensors[name.replace(".mlp.", f".{block}.")] = tensor
            continue
        layer, which = stacked.groups()
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if which == "gate_up" else (matrix,)
            for part, rows in zip(names[:2] if which == "gate_up" else names[2:], parts, strict=True):
                tensors[f"{layer}.{block}.experts.{expert}.{part}.weight"] = rows
    return tensors


def write_variants(name, family, config, base, ids, out):
    tensors = {}
    for variant, keys in VARIANTS[name].items():
        changed = type(config)(**{**config.to_dict(), **keys})
        model = family._from_config(changed, attn_implementation="eager").eval().float()
        randomise(model)
        known = base.state_dict()
        own = model.state_dict()
        more = {k: v for k, v in own.items() if k not in known}
        model.load_state_dict({**{k: v for k, v in known.items() if k in own}, **more})
        with torch.no_grad():
            tensors[f"{variant}.logits"] = model(ids[None]).logits[0, ::STEP].float().contiguous()
        tensors.update({f"{variant}.{k}": v.bfloat16().contiguous() for k, v in more.items()})
    save_file(tensors, out / "variants.safetensors")
    (out / "variants.json").write_text(json.dumps(VARIANTS[name], indent=1, sort_keys=True) + "\n")


def continued(model, ids):
    """The tokens that follow, each the most likely one, computed without a cache."""
    for _ in range(GREEDY):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return ids[-GREEDY:]


def main(folder):
    for name, family, config in models():
        torch.manual_seed(0)
        model = family._from_config(config, attn_implementation="eager").eval().float()
        randomise(model)
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        ids = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(11))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()
            greedy = continued(model, ids)
        expected = {"ids": ids.int(), "logits": logits.contiguous(), "greedy": greedy.int()}
        save_file(expected, out / "expected.safetensors")
        tied = "lm_head.weight" if config.tie_word_embeddings else None
        tensors = {k: v.bfloat16().contiguous() for k, v in as_saved(model).items() if k != tied}
        save_file(tensors, out / "model.safetensors")
        settings = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
        (out / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        write_variants(name, family, config, model, ids, out)
        if name not in ("qwen3", "gpt2"):
            write_gguf(model, out / "model.gguf")
        for file in out.iterdir():
            file.chmod(0o644)


main(Path(sys.argv[1]))
