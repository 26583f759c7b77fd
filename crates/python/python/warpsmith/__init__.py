"""LLM kernels for CUDA and CPU: checked, measured, deterministic.

Every op is a function here (``warpsmith.rms_norm(x, weight)``) and, where PyTorch is installed, an op of PyTorch's
(``torch.ops.warpsmith.rms_norm``) that works in ``torch.compile`` and has a gradient.
"""

from __future__ import annotations

from warpsmith import errors, ops
from warpsmith._bench import Measurement, bench
from warpsmith._native import Tensor, __version__, from_dlpack
from warpsmith._workbench import Explanation, Finding, OpInfo, Report, available, doctor, explain, list_ops
from warpsmith.errors import (
    ArgumentError,
    CompileError,
    CudaError,
    FileError,
    OutOfMemoryError,
    UnavailableError,
    UnsupportedError,
    WarpsmithError,
)
from warpsmith.ops import *  # noqa: F403

__all__ = [
    "ArgumentError",
    "CompileError",
    "CudaError",
    "Explanation",
    "FileError",
    "Finding",
    "Measurement",
    "OpInfo",
    "OutOfMemoryError",
    "Report",
    "Tensor",
    "UnavailableError",
    "UnsupportedError",
    "WarpsmithError",
    "__version__",
    "available",
    "bench",
    "doctor",
    "errors",
    "explain",
    "from_dlpack",
    "list_ops",
    "ops",
]
__all__ += ops.__all__
