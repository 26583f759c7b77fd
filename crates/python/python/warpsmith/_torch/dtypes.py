"""Names of element types in warpsmith and PyTorch."""

from __future__ import annotations

import torch

BY_NAME: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

#: The types that have kernels with gradients.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
