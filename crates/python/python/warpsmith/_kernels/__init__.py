"""Kernels of users, as ops of PyTorch."""

from __future__ import annotations

from warpsmith._kernels.decorator import UserKernel, kernel
from warpsmith._kernels.sources import Launch

__all__ = ["Launch", "UserKernel", "kernel"]
