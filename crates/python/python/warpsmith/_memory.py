"""The memory of devices, and of the pool that the library's own tensors and workspaces on a GPU come from."""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith import _native


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of a device's memory. The CPU has no pool: its numbers are 0."""

    #: What every process can still have.
    free: int
    #: All there is.
    total: int
    #: What the pool holds, in use or kept for later.
    pool_reserved: int
    #: What of that is in use.
    pool_used: int
    #: The most that was in use at once, since the last :func:`reset_peak_memory_stats`.
    pool_peak: int

    @property
    def pool_unused(self) -> int:
        """What :func:`empty_cache` would give back, once the device has done its work."""
        return max(self.pool_reserved - self.pool_used, 0)


def best_device() -> str:
    """The first GPU, else the CPU."""
    names = [name for name, _ in _native.devices()]
    return next((name for name in names if name != "cpu"), "cpu")


def memory_stats(device: object = None) -> MemoryStats:
    """The memory of a device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or PyTorch's. Left out, the first GPU, else the CPU.

    PyTorch's tensors are not in the pool: ``torch.cuda.memory_stats()`` counts them.
    """
    return MemoryStats(*_native.memory(best_device() if device is None else str(device)))


def reset_peak_memory_stats(device: object = None) -> None:
    """Begins ``pool_peak`` anew, from what is in use now."""
    _native.reset_peak_memory(best_device() if device is None else str(device))


def empty_cache(device: object = None) -> None:
    """Gives memory that the pool keeps for later back to the system, after the work of the device has ended."""
    _native.empty_cache(best_device() if device is None else str(device))
