"""Makes the small LoRA adapters that the engine's tests compare with PEFT.

    python -m venv venv && venv/bin/pip install torch==2.11.0 transformers peft
    venv/bin/python scripts/adapter_fixtures.py crates/engine/tests/fixtures

Each is a folder as PEFT saves it, for one of the models of `model_fixtures.py`, and `expected.safetensors` with the
token ids of a sequence and the logits that PEFT computes for it in f32.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

APART = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Folder, model, and what is not the default.
ADAPTERS = [
    ("llama_all", "llama", {"r": 4, "lora_alpha": 6, "target_modules": APART}),
    (
        "llama_some",
        "llama",
        {
            "r": 2,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"v_proj": 3},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    ("phi3_all", "phi3", {"r": 3, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    ("gpt2_all", "gpt2", {"r": 3, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
]


def main(folder):
    for name, base, settings in ADAPTERS:
        torch.manual_seed(3)
        source = folder / "models" / base
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        for key, weight in model.named_parameters():
            # Numbers of bf16, so that the file has exactly what was computed with.
            if "lora_" in key:
                weight.data = (torch.randn_like(weight) * 0.3).bfloat16().float()
        ids = load_file(source / "expected.safetensors")["ids"]
        with torch.no_grad():
            logits = model(ids[None].long()).logits[0].float()
        out = folder / "adapters" / name
        model.save_pretrained(out)
        tensors = {key: value.bfloat16() for key, value in load_file(out / "adapter_model.safetensors").items()}
        save_file(tensors, out / "adapter_model.safetensors")
        save_file({"ids": ids, "logits": logits.contiguous()}, out / "expected.safetensors")
        config = json.loads((out / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        (out / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        (out / "README.md").unlink()
        for file in out.iterdir():
            file.chmod(0o644)


main(Path(sys.argv[1]))
