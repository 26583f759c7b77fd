"""Compiles what coming cases need in other processes, so that timing waits for nothing.

`torch.compile` and FlashInfer leave what they compile in caches on disk, and so does Warpsmith. The processes here do
not launch what `torch.compile` makes, because that would disturb what is timed. Its choice between variants of a kernel
is left to the process that times, which has the GPU to itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait

import peers
import torch
from random_cases import Drawn

# Ops of which FlashInfer compiles a kernel for each type and size of head.
SLOW = ("attention", "paged_attention")


def share_caches() -> None:
    """Gives this process and its children one place for compiled code. To be called before anything is compiled."""
    # One thread each: the processes are as many as there are cores.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "warpsmith-sweep"))
    # Where the process that the others come from finds our modules.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(peers.ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    _configure()


def _configure() -> None:
    from torch._functorch import config as autograd
    from torch._inductor import config

    config.compile_threads = 1
    # Which of its variants is fastest is for the process to find out that times alone, not for those that compile.
    config.autotune_local_cache = False
    # As the gradients' calls set it: it is part of the cache's key.
    autograd.donated_buffer = False


def _start() -> None:
    """Begins a process that compiles."""
    _configure()
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compiled(self, *args, **kwargs):
        if not self.launchers:
            self.precompile()

    CachingAutotuner.run = compiled
    # Memory without values is made without a launch.
    torch.randn = lambda *shape, device=None: torch.empty(*shape, device=device)


def _compile(case: peers.Case, device: str) -> None:
    torch._dynamo.reset()
    work = peers.of(case, device)
    if work is None:
        return
    # Only what compiles: the others would launch their kernels for nothing.
    slow = [call for name, call in work.calls.items() if name.startswith(("flashinfer", "torch.compile"))]
    slow += [torch.compile(work.compile, dynamic=False)] if work.compile else []
    tensors = work.fresh() if slow else ()
    for call in slow:
        # What a peer cannot do shows when it is timed.
        with contextlib.suppress(Exception):
            call(*tensors)
    del work, tensors, slow
    gc.collect()
    torch.cuda.empty_cache()


class Ahead:
    """Goes through cases in the order in which they are ready to be timed."""

    def __init__(self, cases: list[Drawn], cores: int, device: str):
        self.cases, self.device = cases, device
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["peers"])
        # What FlashInfer compiles takes minutes: it has processes of its own, and the other cases need not wait for it.
        self.slow, self.quick = (
            ProcessPoolExecutor(max(cores // 3, 1), mp_context=context, initializer=_start) for _ in range(2)
        )
        self.threads = ThreadPoolExecutor(max(cores // 4, 1))
        self.local = threading.local()
        self.binaries: list[peers.Ask] = []

    def __enter__(self) -> Ahead:
        self.waiting: dict[int, list[Future]] = {
            index: [
                (self.slow if drawn.op in SLOW else self.quick).submit(_compile, drawn.case(), self.device),
                self.threads.submit(self._compile_ours, drawn),
            ]
            for index, drawn in enumerate(self.cases)
        }
        return self

    def __exit__(self, *_) -> None:
        running = [one for pool in (self.slow, self.quick) for one in (pool._processes or {}).values()]
        for pool in (self.slow, self.quick):
            pool.shutdown(wait=False, cancel_futures=True)
        self.threads.shutdown(wait=True, cancel_futures=True)
        for binary in self.binaries:
            binary.close()
        # They may be in the middle of a case that nobody waits for.
        for process in running:
            process.terminate()

    def _compile_ours(self, drawn: Drawn) -> None:
        if not hasattr(self.local, "binary"):
            self.local.binary = peers.Ask(self.device)
            self.binaries.append(self.local.binary)
        self.local.binary(drawn.request("compile"))

    def ready(self, deadline: float) -> Iterator[Drawn]:
        """The cases, each when all that it needs is compiled, until the deadline."""
        while self.waiting:
            done = [index for index, futures in self.waiting.items() if all(one.done() for one in futures)]
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if not done:
                unfinished = [one for futures in self.waiting.values() for one in futures if not one.done()]
                wait(unfinished, timeout=min(left, 3600.0), return_when=FIRST_COMPLETED)
                continue
            index = done[0]
            for one in self.waiting.pop(index):
                if one.exception():
                    # Then it is compiled when it is timed.
                    print(f"{self.cases[index]} was not compiled ahead: {one.exception()!r}", file=sys.stderr)
            yield self.cases[index]
