"""The ops as PyTorch's own.

Each op is registered twice. ``torch.ops.warpsmith`` has the public ones, with gradients and autocast.
``torch.ops._warpsmith`` has the same kernels with nothing around them: what the public ones and the functions of
:mod:`warpsmith.ops` call once they know that nothing more is needed.
"""

from __future__ import annotations

from warpsmith._torch.registration import Torch, register

__all__ = ["Torch", "register"]
