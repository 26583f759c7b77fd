#!/usr/bin/env python3
"""Compares a GGUF model on Warpsmith's engine with llama.cpp: the tokens of greedy answers, and the speed of both.

Needs llama-cpp-python and numpy. Both run on the CPU with the same number of threads, in turn, in one run.

Tokens: Warpsmith answers each prompt greedily and says how likely its best tokens were. llama.cpp computes the same
prompts with the same answers, and its logits are compared at every token. Where it would have chosen another token, the
two candidates must be no further apart than the largest difference between the programs.

Speed: the rows of llama-bench, `pp512` and `tg128`; the best of some rounds.

usage: bench/llama.py MODEL.gguf [--prompts N] [--tokens N] [--rounds N] [--threads N] [--no-speed]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import _help  # noqa: F401
import numpy as np
from llama_cpp import Llama

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = ROOT / "target" / "release" / "warpsmith"

PROMPTS = [
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "Write a short poem about the sea.",
    "List three uses of copper.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 6?",
    "Name the planets of the solar system.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What causes the seasons?",
    "Summarise the story of Cinderella in two sentences.",
    "What is the difference between a frog and a toad?",
    "Describe a sunset to a blind person.",
    "How does a bicycle stay upright?",
    "Write an email that asks for a day off.",
    "What is photosynthesis?",
    "Tell me a joke about computers.",
    "Why do cats purr?",
]
TOP = 5


@dataclass
class Comparison:
    """What the answers of both programs have in common."""

    tokens: int = 0
    largest_difference: float = 0.0
    #: Tokens that llama.cpp would not have chosen, with how far apart it has the two candidates.
    disagreements: list[tuple[int, int, float]] | None = None


def answer(model: str, prompt: str, tokens: int) -> dict:
    """Warpsmith's greedy answer, with the log-probabilities of its best tokens."""
    words = ["generate", prompt, "--model", model, "--device", "cpu", "--max-tokens", str(tokens)]
    words += ["--logprobs", str(TOP), "--json"]
    done = subprocess.run([BINARY, *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"warpsmith {' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout)


def compare(llama: Llama, answers: list[dict]) -> Comparison:
    """llama.cpp's opinion of every token of the answers."""
    result = Comparison(disagreements=[])
    for number, said in enumerate(answers):
        prompt, tokens = said["prompt"], said["tokens"]
        llama.reset()
        llama.eval(prompt + tokens[:-1])
        logits = np.asarray(llama.scores[len(prompt) - 1 : len(prompt) - 1 + len(tokens)], dtype=np.float64)
        logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(
            1, keepdims=True
        )
        for place, (token, best, row) in enumerate(zip(tokens, said["top_logprobs"], logits, strict=True)):
            result.tokens += 1
            for other in best:
                difference = abs(other["logprob"] - row[other["token"]])
                result.largest_difference = max(result.largest_difference, float(difference))
            if row.argmax() != token:
                result.disagreements.append((number, place, float(row.max() - row[token])))
    return result


def prompt_rate(llama: Llama, tokens: list[int]) -> float:
    llama.reset()
    start = time.perf_counter()
    llama.eval(tokens)
    return len(tokens) / (time.perf_counter() - start)


def decode_rate(llama: Llama, first: int, count: int) -> float:
    llama.reset()
    llama.eval([first])
    start = time.perf_counter()
    for _ in range(count):
        llama.eval([llama.sample(temp=0.0)])
    return count / (time.perf_counter() - start)


def speed(model: str, llama: Llama, rounds: int) -> None:
    """Both programs in turn; the best of the rounds."""
    tokens = llama.tokenize(b"The quick brown fox jumps over the lazy dog. " * 60)[:512]
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for _ in range(rounds):
        found = subprocess.run(
            [BINARY, "bench-model", "--model", model, "--device", "cpu", "-r", "2", "-o", "json"],
            capture_output=True,
            text=True,
            check=True,
        )
        for row in json.loads(found.stdout):
            ours[row["test"]] = max(ours.get(row["test"], 0.0), *row["samples"])
        theirs["pp512"] = max(theirs.get("pp512", 0.0), prompt_rate(llama, tokens))
        theirs["tg128"] = max(theirs.get("tg128", 0.0), decode_rate(llama, tokens[0], 128))
    for test, rate in ours.items():
        print(f"{test}: warpsmith {rate:.1f} tok/s, llama.cpp {theirs[test]:.1f}: {rate / theirs[test]:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-speed", action="store_true", help="compare the tokens alone")
    args = parser.parse_args()
    if shutil.which("cargo"):
        subprocess.run(["cargo", "build", "--release", "-p", "warpsmith-cli"], cwd=ROOT, check=True)
    model = os.path.abspath(args.model)
    threads = dict(n_threads=args.threads, n_threads_batch=args.threads)
    answers = [answer(model, prompt, args.tokens) for prompt in PROMPTS[: args.prompts]]
    found = compare(Llama(model, n_ctx=1024, n_batch=512, logits_all=True, verbose=False, **threads), answers)
    print(
        f"{found.tokens} tokens of {len(answers)} answers: {len(found.disagreements)} disagreements; "
        f"log-probabilities differ by at most {found.largest_difference:.3f}"
    )
    unexplained = 0
    for number, place, margin in found.disagreements:
        explained = margin <= found.largest_difference
        unexplained += not explained
        print(f"  answer {number}, token {place}: {margin:.3f} apart{'' if explained else ', UNEXPLAINED'}")
    if not args.no_speed:
        speed(model, Llama(model, n_ctx=1024, n_batch=512, verbose=False, **threads), args.rounds)
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
