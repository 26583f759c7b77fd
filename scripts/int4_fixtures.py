"""Makes small Llamas with weights of 4 bits, packed as GPTQ and AWQ pack them, for the engine's tests.

    venv/bin/python scripts/int4_fixtures.py crates/engine/tests/fixtures/int4

in the environment of `model_fixtures.py`. For each form: `NAME.json` with the configuration and `NAME.safetensors` with
the packed weights and the logits that transformers computes in f32 from the numbers they stand for.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

GROUP = 32
VOCAB = 64
TOKENS = 24
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

FORMS = {
    # Zero points of all kinds, stored less one.
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "gptq_symmetric": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    # Groups of inputs that are not neighbours, and zero points as they are.
    "gptq_scattered": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": False,
        "desc_act": True,
        "checkpoint_format": "gptq_v2",
    },
    "gptq_one_group": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def words(nibbles, order):
    """Eight numbers to a word, along the last dimension."""
    groups = nibbles.reshape(*nibbles.shape[:-1], -1, 8).astype(np.uint32)
    packed = np.zeros(groups.shape[:-1], dtype=np.uint32)
    for place, column in enumerate(order):
        packed |= groups[..., column] << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32).copy())


def quantised(rng, outputs, inputs, config):
    """A random matrix, `[outputs, inputs]`, and the tensors that it is stored as."""
    plain = list(range(8))
    size = inputs if config["group_size"] == -1 else config["group_size"]
    count = -(-inputs // size)
    quants = rng.integers(0, 16, (inputs, outputs))
    is_symmetric = config.get("sym", False)
    zeros = np.full((count, outputs), 8) if is_symmetric else rng.integers(1, 16, (count, outputs))
    scales = rng.uniform(0.01, 0.04, (count, outputs)).astype(np.float16)
    groups = np.arange(inputs) // size
    if config.get("desc_act"):
        groups = rng.permutation(groups)
    weights = scales[groups].astype(np.float32) * (quants - zeros[groups]).astype(np.float32)
    stored = {"scales": torch.from_numpy(scales)}
    if config["quant_method"] == "awq":
        stored["qweight"] = words(quants, AWQ_ORDER)
        stored["qzeros"] = words(zeros, AWQ_ORDER)
    else:
        stored["qweight"] = words(quants.T, plain).T.contiguous()
        less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        stored["qzeros"] = words(zeros - less, plain)
        stored["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return torch.from_numpy(np.ascontiguousarray(weights.T)), stored


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        # No whole number of blocks of 32.
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    for name, form in FORMS.items():
        rng = np.random.default_rng(5)
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().float()
        tensors = {}
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                base = key.removesuffix(".weight")
                if base.endswith("_proj"):
                    weights, stored = quantised(rng, *parameter.shape, form)
                    parameter.copy_(weights)
                    tensors.update({f"{base}.{part}": tensor for part, tensor in stored.items()})
                else:
                    deviation, mean = (0.2, 0.0) if parameter.dim() > 1 else (0.3, 1.0)
                    values = torch.from_numpy(rng.normal(mean, deviation, parameter.shape)).bfloat16()
                    parameter.copy_(values.float())
                    tensors[key] = values
            ids = torch.from_numpy(rng.integers(0, VOCAB, TOKENS))
            tensors["expected.logits"] = model(ids[None]).logits[0].float().contiguous()
        tensors["expected.ids"] = ids.int()
        save_file(tensors, folder / f"{name}.safetensors")
        settings = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
        settings["quantization_config"] = form
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        for file in folder.iterdir():
            file.chmod(0o644)


main(Path(sys.argv[1]))
