"""Writes a small model as GGUF, in the form that llama.cpp's converter gives its family; for `model_fixtures.py`."""

import math

import gguf
import numpy as np

# Mistral and Mixtral are Llamas there.
NAMES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
# Families whose rows of queries and keys are stored so that the pairs that rope rotates are neighbours.
PERMUTED = ("llama", "mistral", "mixtral", "smollm3")

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def permute(rows, heads):
    """The order of the rows of queries and keys in GGUF: pairs that rope rotates are neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def target_name(name, family):
    bare, suffix = name.rsplit(".", 1)
    if not bare.startswith("model.layers."):
        return f"{TENSORS[bare]}.{suffix}"
    _, _, layer, part = bare.split(".", 3)
    own = TENSORS[part]
    if part == "post_attention_layernorm" and family in ("gemma3_text", "olmo2"):
        own = "post_attention_norm"
    return f"blk.{layer}.{own}.{suffix}"


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_keys(writer, config):
    family, dim = config.model_type, head_dim(config)
    rope = config.rope_parameters
    if family == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
        period = config.layer_types.index("full_attention") + 1
        writer.add_uint32("gemma3.attention.sliding_window_pattern", period)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config.vocab_size)
    if family in ("qwen3_moe", "mixtral"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "phi3":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        writer.add_sliding_window(0)


def stacked(name, tensor):
    """The tensors of all experts of a layer: the rows of gates are a tensor of their own."""
    layer = name.split(".")[2]
    if name.endswith("experts.down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": tensor}
    gate, up = tensor.chunk(2, dim=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def write_divisors(writer, model):
    config = model.config
    if config.model_type == "phi3":
        for kind in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    elif config.model_type == "llama":
        # What the angles are divided by, from the frequencies that transformers uses.
        dim = head_dim(config)
        plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        frequencies = model.model.rotary_emb.inv_freq.double().numpy()
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))


def write_matrix(writer, name, values):
    bf16 = gguf.GGMLQuantizationType.BF16
    values = np.ascontiguousarray(values, dtype=np.float32)
    writer.add_tensor(name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)


def write_gguf(model, path):
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, NAMES.get(family, family))
    write_keys(writer, config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            for target, matrices in stacked(name, tensor).items():
                write_matrix(writer, target, matrices.numpy())
            continue
        values = tensor.numpy()
        if family in PERMUTED and "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if family in PERMUTED and "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        if family == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1.0
        values = np.ascontiguousarray(values, dtype=np.float32)
        target = target_name(name, family)
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            write_matrix(writer, target, values)
    write_divisors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
