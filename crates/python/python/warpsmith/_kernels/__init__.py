"""User kernels, as PyTorch ops."""

from __future__ import annotations

from warpsmith._kernels.candidate import Candidate, Comparison
from warpsmith._kernels.decorator import UserKernel, kernel
from warpsmith._kernels.load import load_kernel
from warpsmith._kernels.sources import Launch

__all__ = ["Candidate", "Comparison", "Launch", "UserKernel", "kernel", "load_kernel"]
