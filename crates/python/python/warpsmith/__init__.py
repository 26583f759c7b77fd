"""LLM kernels for CUDA and CPU: checked, measured, deterministic.

Every op is a function here (``warpsmith.rms_norm(x, weight)``) and, where PyTorch is installed, an op of PyTorch's
(``torch.ops.warpsmith.rms_norm``) that works in ``torch.compile`` and has a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warpsmith import compat, errors, ops
from warpsmith._bench import Measurement, bench
from warpsmith._memory import MemoryStats, empty_cache, memory_stats, reset_peak_memory_stats
from warpsmith._native import Tensor, __version__, from_dlpack
from warpsmith._profile import KernelTable, KernelTime, PeakMemory, profile
from warpsmith._workbench import Explanation, Finding, OpInfo, Report, available, doctor, explain, list_ops
from warpsmith.errors import (
    ArgumentError,
    CompileError,
    CudaError,
    FallbackWarning,
    FileError,
    KernelError,
    OutOfMemoryError,
    UnavailableError,
    UnsupportedError,
    WarpsmithError,
)
from warpsmith.ops import *  # noqa: F403

if TYPE_CHECKING or ops._torch is not None:
    from warpsmith import nn as nn
    from warpsmith._flash import flash_attn_func as flash_attn_func
    from warpsmith._flash import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from warpsmith._flash import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from warpsmith._flash import flash_attn_varlen_func as flash_attn_varlen_func
    from warpsmith._fuse import FusionPlan as FusionPlan
    from warpsmith._fuse import OperatorFuser as OperatorFuser
    from warpsmith._fuse import fuse as fuse
    from warpsmith._fuse import register_backend as _register_backend
    from warpsmith._kernels import Candidate as Candidate
    from warpsmith._kernels import Launch as Launch
    from warpsmith._kernels import UserKernel as UserKernel
    from warpsmith._kernels import kernel as kernel
    from warpsmith._kernels import load_kernel as load_kernel
    from warpsmith._patch import PatchReport as PatchReport
    from warpsmith._patch import patch as patch
    from warpsmith._patch import unpatch as unpatch
    from warpsmith._sdpa import sdpa as sdpa

    _register_backend()

__all__ = [
    "ArgumentError",
    "CompileError",
    "CudaError",
    "Explanation",
    "FallbackWarning",
    "FileError",
    "Finding",
    "KernelError",
    "KernelTable",
    "KernelTime",
    "Measurement",
    "MemoryStats",
    "OpInfo",
    "OutOfMemoryError",
    "PeakMemory",
    "Report",
    "Tensor",
    "UnavailableError",
    "UnsupportedError",
    "WarpsmithError",
    "__version__",
    "available",
    "bench",
    "compat",
    "doctor",
    "empty_cache",
    "errors",
    "explain",
    "from_dlpack",
    "list_ops",
    "memory_stats",
    "ops",
    "profile",
    "reset_peak_memory_stats",
]
__all__ += ops.__all__

#: Available only with PyTorch.
_NEEDS_TORCH = (
    "Candidate",
    "FusionPlan",
    "Launch",
    "OperatorFuser",
    "PatchReport",
    "UserKernel",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "fuse",
    "kernel",
    "load_kernel",
    "nn",
    "patch",
    "sdpa",
    "unpatch",
)
if ops._torch is not None:
    __all__ += _NEEDS_TORCH


if not TYPE_CHECKING:  # To a type checker, this would give every misspelt name a type.

    def __getattr__(name: str) -> Any:
        if name in _NEEDS_TORCH:
            raise AttributeError(f"warpsmith.{name} needs PyTorch: pip install torch")
        raise AttributeError(f"module 'warpsmith' has no attribute {name!r}")
