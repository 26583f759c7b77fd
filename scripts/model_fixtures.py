"""Makes the small random models that the engine's tests compare with transformers.

    python -m venv venv && venv/bin/pip install torch==2.11.0 transformers gguf
    venv/bin/python scripts/model_fixtures.py crates/engine/tests/fixtures/models

For each family: `config.json`, `model.safetensors` (bf16) as transformers writes them, and `expected.safetensors` with
the token ids of a sequence and the logits that transformers computes for it in f32. The Llama is also written as
GGUF, with the rows of queries and keys in the order that llama.cpp's converter gives them.

Variants of a family differ in some keys of the configuration, and in tensors that it asks for then. `variants.json` has
the keys, and `variants.safetensors` the tensors and the logits of some of the tokens.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TOKENS = 48
VOCAB = 96
# Every so many tokens of a variant have logits in its file.
STEP = 9

VARIANTS = {
    "llama": {
        "biases": {"attention_bias": True, "mlp_bias": True},
        "gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    },
    "qwen3": {
        "biases": {"attention_bias": True},
        "relu": {"hidden_act": "relu"},
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
    yield (
        "gpt2",
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_inner=96, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
    )


def randomise(model):
    """Weights large enough that every part of the model matters, and exact in bf16."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.3)
            if parameter.dim() == 1 and name.endswith("weight"):
                values += 1.0
            parameter.copy_(values.bfloat16().float())


def write_variants(name, family, config, base, ids, out):
    tensors = {}
    for variant, keys in VARIANTS[name].items():
        changed = type(config)(**{**config.to_dict(), **keys})
        model = family._from_config(changed, attn_implementation="eager").eval().float()
        randomise(model)
        known = base.state_dict()
        more = {k: v for k, v in model.state_dict().items() if k not in known}
        model.load_state_dict({**known, **more})
        with torch.no_grad():
            tensors[f"{variant}.logits"] = model(ids[None]).logits[0, ::STEP].float().contiguous()
        tensors.update({f"{variant}.{k}": v.bfloat16().contiguous() for k, v in more.items()})
    save_file(tensors, out / "variants.safetensors")
    (out / "variants.json").write_text(json.dumps(VARIANTS[name], indent=1, sort_keys=True) + "\n")


def permute(rows, heads):
    """The order of the rows of queries and keys in GGUF: pairs that rope rotates are neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model, path):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        bare = name.removesuffix(".weight")
        if bare.startswith("model.layers."):
            _, _, layer, part = bare.split(".", 3)
            target = f"blk.{layer}.{names[part]}.weight"
        else:
            target = names[bare] + ".weight"
        values = tensor.numpy()
        if "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        values = np.ascontiguousarray(values, dtype=np.float32)
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(target, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    # What the angles are divided by, from the frequencies that transformers uses.
    rotary = model.model.rotary_emb
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq.double().numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        save_file({"ids": ids.int(), "logits": logits.contiguous()}, out / "expected.safetensors")
        tied = "lm_head.weight" if config.tie_word_embeddings else None
        tensors = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items() if k != tied}
        save_file(tensors, out / "model.safetensors")
        settings = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
        (out / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        write_variants(name, family, config, model, ids, out)
        if name == "llama":
            write_gguf(model, out / "model.gguf")
        for file in out.iterdir():
            file.chmod(0o644)


main(Path(sys.argv[1]))
