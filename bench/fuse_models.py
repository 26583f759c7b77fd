#!/usr/bin/env python3
"""Times whole models under torch.compile: backend="warpsmith", inductor, and eager PyTorch, in one run.

The models are those of transformers with random weights in bf16: Qwen3-0.6B, Llama, GPT-2, a BERT and a ViT. Timed
are prefill (a forward pass without gradients) and a training step (forward, loss and backward). Before anything is
timed, logits and gradients are compared with those of the same model in f32: errors may be at most half as large again
as eager PyTorch's in bf16. With --record the rows go to evidence/fusion, beside those of bench/fuse.py.

usage: bench/fuse_models.py [--device cuda | cpu] [--model NAME ...] [--only prefill | training] [--batch 4]
                            [--length 512] [--layers N] [--rounds 5] [--no-inductor] [--plan] [--record]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import fuse

#: Families and what their configurations are given beside their defaults.
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3-0.6b": (
        "qwen3",
        dict(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "llama-1b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
        ),
    ),
    "gpt2": ("gpt2", dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "bert-base": ("bert", dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    "vit-base": ("vit", {}),
}
#: What a configuration calls its number of layers.
LAYERS = {"gpt2": "n_layer"}


def make(name: str, layers: int | None, device: str):
    """A model in f32, and what it is called with."""
    import torch
    import transformers

    family, words = MODELS[name]
    if layers:
        words = words | {LAYERS.get(family, "num_hidden_layers"): layers}
    config = transformers.AutoConfig.for_model(family, **words)
    config.use_cache = False
    kind = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, kind.get(family, "AutoModelForCausalLM")).from_config(config)
    return model, family, config


def inputs_of(family: str, config, batch: int, length: int, device: str) -> dict:
    import torch

    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        shape = (batch, config.num_channels, config.image_size, config.image_size)
        pixels = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        labels = torch.randint(0, config.num_labels, (batch,), generator=generator).to(device)
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(0, config.vocab_size, (batch, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def prefill(model, inputs: dict) -> Callable[[], object]:
    import torch

    given = {key: value for key, value in inputs.items() if key != "labels"}

    def call():
        with torch.no_grad():
            return model(**given).logits

    return call


def training(model, inputs: dict) -> Callable[[], object]:
    def call():
        model.zero_grad(set_to_none=True)
        loss = model(**inputs).loss
        loss.backward()
        return loss

    return call


def size(tensor) -> float:
    """Root mean square."""
    return tensor.float().square().mean().sqrt().item()


def error(got, exact, least: float = 0.0) -> float:
    """Size of the difference, by that of the exact values, or by the least that these count as."""
    return size(got.float() - exact.float()) / max(size(exact), least)


def judge(model, step: str, result, exact) -> float:
    """The error of logits, or the mean error of gradients. Some, as those of keys' biases, are zero but for rounding:
    what is smaller than a thousandth of the others counts as that.
    """
    if step == "prefill":
        return error(result, exact)
    least = 1e-3 * statistics.mean(map(size, exact.values()))
    given = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert given.keys() == exact.keys(), given.keys() ^ exact.keys()
    return statistics.mean(error(grad, exact[name], least) for name, grad in given.items())


def exact_results(model, step: str, inputs: dict):
    import torch

    wide = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    result = STEPS[step](model, wide)()
    if step == "prefill":
        return result
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return grads


STEPS = {"prefill": prefill, "training": training}


def milliseconds(call: Callable[[], object], device: str, seconds: float = 0.5) -> float:
    """The median of calls that the host gives to the device one by one."""
    import torch

    if device == "cpu":
        return 1e3 * fuse.time_on_cpu(call, seconds)
    for _ in range(2):
        call()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 5 or time.perf_counter() - begin < seconds:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        marks[0].record()
        call()
        marks[1].record()
        torch.cuda.synchronize()
        samples.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(samples)


def measure(args: argparse.Namespace, name: str, step: str, backends: list[str]) -> dict[str, object]:
    import torch

    model, family, config = make(name, args.layers, args.device)
    model = model.train(step == "training")
    inputs = inputs_of(family, config, args.batch, args.length, args.device)
    exact = exact_results(model, step, inputs)
    model = model.to(torch.bfloat16)
    calls, errors, first = {}, {}, {}
    for backend in backends:
        # Copies: what one compiler made of a model must not be in the way of the next.
        own = copy.deepcopy(model)
        torch._dynamo.reset()
        compiled = own if backend == "eager" else torch.compile(own, backend=backend, dynamic=False)
        calls[backend] = STEPS[step](compiled, inputs)
        start = time.perf_counter()
        result = calls[backend]()
        if args.device == "cuda":
            torch.cuda.synchronize()
        first[backend] = time.perf_counter() - start
        errors[backend] = judge(own, step, result, exact)
        del result
        own.zero_grad(set_to_none=True)
        if not errors[backend] <= 1.5 * errors["eager"]:
            raise AssertionError(f"{backend} errs by {errors[backend]:.2e}, eager PyTorch by {errors['eager']:.2e}")
    del exact
    if args.plan:
        show_plan(model, step, inputs)
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    for _ in range(args.rounds):
        for backend in backends:
            times[backend].append(milliseconds(calls[backend], args.device))
    row: dict[str, object] = {"model": name, "step": step, "batch": args.batch, "length": args.length}
    row |= {f"{backend}_ms": round(statistics.median(values), 4) for backend, values in times.items()}
    row |= {f"{backend}_error": float(f"{errors[backend]:.3e}") for backend in backends}
    row |= {f"{backend}_first_s": round(first[backend], 3) for backend in backends if backend != "eager"}
    return row


def show_plan(model, step: str, inputs: dict) -> None:
    """What became of each graph, without the kernels' text."""
    import torch
    import warpsmith

    torch._dynamo.reset()
    given = inputs if step == "training" else {key: value for key, value in inputs.items() if key != "labels"}
    with torch.set_grad_enabled(step == "training"):
        plan = warpsmith.OperatorFuser(model, given).plan()
    for graph in plan.graphs:
        kept = [line for line in str(graph).splitlines() if not line.startswith("    ") or "aten." in line]
        print("\n".join(f"    {line[:400]}" for line in kept if not line.startswith("      ")), flush=True)
    torch._dynamo.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, help="instead of as many as the model has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-inductor", action="store_true", help="beside eager PyTorch alone")
    parser.add_argument("--plan", action="store_true", help="show what stays with PyTorch, and why")
    parser.add_argument("--record", action="store_true", help="write the evidence")
    args = parser.parse_args()
    fuse.empty_caches()
    import torch
    import warpsmith  # noqa: F401, here it registers the backend

    backends = ["eager", "warpsmith"] + ([] if args.no_inductor else ["inductor"])
    rows, failed = [], 0
    for name in args.model:
        for step in [args.only] if args.only else STEPS:
            try:
                row = measure(args, name, step, backends)
            except Exception as problem:  # the others still count
                failed += 1
                print(f"{name} {step}: {type(problem).__name__}: {str(problem)[:3000]}", file=sys.stderr, flush=True)
                continue
            rows.append(row)
            shown = "  ".join(f"{one} {row[f'{one}_ms']:8.2f} ms (error {row[f'{one}_error']:.1e})" for one in backends)
            seconds = " ".join(f"{row[f'{one}_first_s']:.1f}" for one in backends[1:])
            print(f"{name} {step}: {shown}  first {seconds} s", flush=True)
            if args.record:
                if args.no_inductor:
                    sys.exit("fuse_models.py: nothing is recorded without the peer")
                if args.layers:
                    row["layers"] = args.layers
                device = torch.cuda.get_device_name() if args.device == "cuda" else fuse.cpu_name()
                fuse.record(device, [row])
    print("\n".join(fuse.summary(rows)))
    if failed:
        sys.exit(f"fuse_models.py: {failed} failed")


if __name__ == "__main__":
    main()
