"""Where the tests run: on the CPU, or with WARPSMITH_TEST_DEVICE=cuda on a GPU."""

from __future__ import annotations

import os

import torch

DEVICE = os.environ.get("WARPSMITH_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


def generator(seed: int) -> torch.Generator:
    """A source of random numbers on the device."""
    return torch.Generator(device=DEVICE).manual_seed(seed)
