"""Registers the ops with PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel
from torch.utils.dlpack import from_dlpack

from warpsmith import _codegen, _native
from warpsmith._spec import Op, Variant, all_ops
from warpsmith._torch.autocast import KEYS, autocast_kernel
from warpsmith._torch.autograd import Overloads, autograd_kernel, quick, raw_options
from warpsmith._torch.batching import batching_rule, no_batched_gradients
from warpsmith._torch.fakes import fake

PUBLIC = "warpsmith"
RAW = "_warpsmith"

#: Set to ``python`` to have kernels called through Python although PyTorch could call them directly.
KERNELS = "WARPSMITH_TORCH_KERNELS"


class Torch:
    """The ops as PyTorch knows them."""

    def __init__(self, libraries: list[Library], native: bool) -> None:
        #: Kept: without them the ops would be gone.
        self.libraries = libraries
        #: Whether PyTorch calls the kernels directly.
        self.native = native
        self.functions: dict[str, Callable[..., Any]] = {}

    def differentiable(self, op: Op) -> Callable[..., Any]:
        """An op with its gradient: takes tensors, options and switches in one row, and returns what people get."""
        if op.name not in self.functions:
            self.functions[op.name] = quick(op)
        return self.functions[op.name]


def register() -> Torch:
    """Registers every op, for the life of the process."""
    native = _native.torch_is_native() and os.environ.get(KERNELS) != "python"
    public, raw = Library(PUBLIC, "DEF"), Library(RAW, "DEF")
    calls = [(op, variant) for op in all_ops().values() for variant in op.variants]
    for _, variant in calls:
        tags = (torch.Tag.pt2_compliant_tag,)
        public.define(variant.schema, tags=tags)
        raw.define(variant.raw_schema, tags=tags)
    unable = set(_native.register_kernels(PUBLIC, RAW) if native else [variant.name for _, variant in calls])
    for op, variant in calls:
        if variant.name in unable:
            kernel = through_raw(op, variant)
            for key in ("CPU", "CUDA"):
                public.impl(variant.name, kernel, key)
                if not native:
                    raw.impl(variant.name, through_python(op, variant), key)
        raw.impl(variant.name, fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{PUBLIC}::{variant.name}", fake(op, variant, raw=False), lib=public)
        torch.library.register_fake(f"{RAW}::{variant.name}", fake(op, variant, raw=True), lib=raw)
        public.impl(variant.name, autograd_kernel(op, variant), "Autograd")
        torch.library.register_vmap(f"{PUBLIC}::{variant.name}", batching_rule(op, variant), lib=public)
        for library in (public, raw):
            library.impl(variant.name, no_batched_gradients(op), "Batched")
        if op.autocast != "unchanged" and not variant.is_mutating:
            for device, key in KEYS.items():
                public.impl(variant.name, autocast_kernel(op, variant, device), key)
    return Torch([public, raw], native)


def through_raw(op: Op, variant: Variant) -> Callable[..., Any]:
    """A public op's kernel where PyTorch cannot pass text to native ones."""
    target = Overloads.raw(variant.name)

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        return target(*tensors, *raw_options(op, options), *switches)

    return _codegen.bound(op, variant, run)


def through_python(op: Op, variant: Variant, kernel: str | None = None) -> Callable[..., Any]:
    """A kernel where PyTorch has no stable interface: tensors are handed over by DLPack."""

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        borrowed = [None if tensor is None else _native.from_dlpack(tensor.detach(), True) for tensor in tensors]
        made = _native.call(op.name, variant.in_place, borrowed, list(options), list(switches), kernel)
        results = [None if tensor is None else from_dlpack(tensor) for tensor in made]
        if len(results) == 1:
            return results[0]
        return tuple(results) if results else None

    return _codegen.bound(op, variant, run, raw=True)
