"""A Qwen3 of 0.6B parameters (random weights) with and without the patch, in one run: error against f64, and speed of
prefill and decode, eager and compiled (torch.compile, its default mode).

usage: python crates/python/bench/qwen3.py [--device cuda] [--only eager|compiled] [--tiny]
--tiny takes a model of two layers, to see that the script works. Ends with 1 if the patched model is less exact.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import warpsmith
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ROUNDS, WARMUP, CALLS = 5, 3, 10
LOGITS = 32
TINY = SHAPE | {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def prefill(model: Callable[..., Any], tokens: torch.Tensor) -> Callable[[], Any]:
    """A prompt. The same call gives the time and the error: each kind of call takes the compiler half a minute."""
    return lambda: model(tokens, use_cache=False, logits_to_keep=LOGITS).logits


def error(model: Callable[..., Any], tokens: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean error of the last logits against f64."""
    found: float = (prefill(model, tokens)().double() - exact).abs().mean().item()
    return found


def decode(model: Callable[..., Any], config: Any, tokens: torch.Tensor) -> Callable[[], Any]:
    """One more token after those that a cache holds."""
    cache = StaticCache(config=config, max_cache_len=tokens.shape[1] + ROUNDS * (WARMUP + CALLS))
    model(tokens, past_key_values=cache, logits_to_keep=1)
    return lambda: model(tokens[:, -1:], past_key_values=cache, logits_to_keep=1).logits


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["eager", "compiled"], help="compiling takes minutes")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if chosen.tiny else SHAPE))
    with torch.device(chosen.device):
        plain = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
        tokens = torch.randint(0, config.vocab_size, (1, 64 if chosen.tiny else 1024))
    patched = copy.deepcopy(plain)
    print(warpsmith.patch(patched))
    exact = prefill(copy.deepcopy(plain).double(), tokens)()

    models: dict[str, tuple[Any, Any]] = {}
    if chosen.only != "compiled":
        models["eager"] = (plain, patched)
    if chosen.only != "eager":
        models["compiled"] = (torch.compile(plain, fullgraph=True), torch.compile(patched, fullgraph=True))
    less_exact = False
    for kind, pair in models.items():
        theirs, ours = (error(model, tokens, exact) for model in pair)
        less_exact |= ours > 1.05 * theirs
        print(f"{kind}: mean error of the logits against f64: {theirs:.3e} without, {ours:.3e} with the patch")
        for what, make in (("prefill", lambda m: prefill(m, tokens)), ("decode", lambda m: decode(m, config, tokens))):
            # In turns, so that a slower machine is slower for both.
            calls = [make(model) for model in pair]
            times: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for call, kept in zip(calls, times, strict=True):
                    kept.append(warpsmith.bench(timed(call), tokens, warmup=WARMUP, iters=CALLS).median)
            before, after = (min(kept) for kept in times)
            print(f"{kind} {what}: {before * 1e3:.2f} ms without, {after * 1e3:.2f} ms with: {before / after:.2f}x")
    return int(less_exact)


def timed(call: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    """A call that the clock of a tensor's device is read around."""
    return lambda _: call()


if __name__ == "__main__":
    sys.exit(main())
