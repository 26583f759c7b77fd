#!/usr/bin/env python3
"""Times whole models with random weights, transformers' and Warpsmith's in one run, and records both as evidence.

Needs a GPU, PyTorch and transformers. A step of decode is what `generate` takes for a token: transformers with a static
cache and compiled, Warpsmith with `warpsmith bench-model`.

usage: bench/models.py [--model NAME ...] [--batch N ...] [--no-peers] [--no-record] [--evidence DIR]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import _help  # noqa: F401
import peers
import torch

SHAPES = {
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
    ),
    "qwen3-8b": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}
TOKENS = 128
PROMPT = 8192
#: What is recorded of a row.
KEPT = ("test", "milliseconds", "mean", "deviation", "ratio", "graphs", "bytes")
VOCABULARY, KV_HEADS, HEAD_DIM = 151936, 8, 128


def limit_ms(model: str, row: dict, copied: float | None) -> float | None:
    """Milliseconds that a workload's reads alone take at the speed of a copy (GB/s): all weights in each of its steps,
    and the keys and values that its tokens see. Reading its prompts is not in it."""
    if copied is None or row["steps"] is None:
        return None
    shape = SHAPES[model]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"] * HEAD_DIM
    of_layer = hidden * (2 * heads + 2 * KV_HEADS * HEAD_DIM + 3 * shape["intermediate_size"])
    weights = layers * of_layer + VOCABULARY * hidden
    keys = layers * 2 * KV_HEADS * HEAD_DIM
    return 2 * (row["steps"] * weights + row["keys_read"] * keys) / copied * 1e-6


def ours(model: str, batches: list[int]) -> Iterator[list[dict]]:
    """Rows of `warpsmith bench-model`: decode and prompts, a shared prefix, and the workload last."""
    base = [peers.BINARY, "bench-model", "--random", model, "--device", "cuda", "-r", "3", "-o", "json"]
    listed = ",".join(map(str, batches))
    runs = [
        ["-p", f"512,{PROMPT}", "-n", str(TOKENS), "-b", listed],
        ["-p", "0", "-n", "0", "--prefix", str(PROMPT)],
        ["-p", "0", "-n", "0", "--workload", "nano-vllm"],
    ]
    for words in runs:
        done = subprocess.run([*base, *words], capture_output=True, text=True, cwd=peers.ROOT)
        if done.returncode != 0:
            print(f"warpsmith bench-model {' '.join(words)}: {done.stderr}", file=sys.stderr)
            continue
        rows = json.loads(done.stdout)
        for row in rows:
            print(f"{model} {row['test']}: {row['milliseconds']:.3f} ms, {row['mean']:.0f} tok/s", flush=True)
            if row["graph_failure"]:
                print(f"  without graphs: {row['graph_failure']}", flush=True)
        yield rows


def theirs(model: str, batches: list[int]) -> dict[str, float]:
    """Milliseconds of a step of transformers, by the name of our row."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=40960,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        **SHAPES[model],
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    found = {}
    for batch in batches:
        ids = torch.randint(0, 150000, (batch, 128), device="cuda")
        words = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            network.generate(ids, cache_implementation="static", **words)
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / TOKENS * 1e3)
        found[f"tg{TOKENS}" + (f"@{batch}" if batch > 1 else "")] = best
        print(f"{model} batch {batch}: transformers {best:.3f} ms a step", flush=True)
    del network
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--no-peers", action="store_true", help="time Warpsmith alone")
    parser.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    parser.add_argument("--evidence", type=pathlib.Path, default=peers.ROOT / "evidence")
    args = parser.parse_args()
    peers.build()
    device = torch.cuda.get_device_name()
    file = args.evidence / "models" / f"{device.lower().replace(' ', '-')}.json"
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    kernels = args.evidence / file.name
    copied = json.loads(kernels.read_text())["ceilings"]["copy_gbps"] if kernels.exists() else None
    for model in args.model:
        times = {} if args.no_peers else theirs(model, args.batch)
        # Recorded at once: what comes later may be interrupted.
        for rows in ours(model, args.batch):
            for row in rows:
                new = {key: row[key] for key in KEPT}
                new = dict(model=model, **new, transformers_ms=times.get(row["test"]))
                new["limit_ms"] = limit_ms(model, row, copied)
                if new["limit_ms"]:
                    print(f"  memory alone: {new['limit_ms']:.0f} ms", flush=True)
                known = [old for old in known if (old["model"], old["test"]) != (model, row["test"])] + [new]
            if not args.no_record:
                write(file, device, known)


def write(file: pathlib.Path, device: str, rows: list[dict]) -> None:
    """Writes the evidence, a row a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = f'"device": {json.dumps(device)},\n  "torch": "{torch.__version__}"'
    file.write_text(f'{{\n  {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
