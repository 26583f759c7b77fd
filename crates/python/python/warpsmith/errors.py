"""The exceptions of warpsmith.

Each is a :class:`WarpsmithError`, and the built-in exception that Python programmers expect in its place.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CompileError",
    "CudaError",
    "FallbackWarning",
    "FileError",
    "KernelError",
    "OutOfMemoryError",
    "UnavailableError",
    "UnsupportedError",
    "WarpsmithError",
]


class WarpsmithError(RuntimeError):
    """Anything that went wrong in warpsmith. What is known beside the message is in attributes, else ``None``."""

    #: The op that was called.
    op: str | None = None
    #: The argument or option at fault.
    argument: str | None = None
    #: What was expected of it.
    expected: str | None = None
    #: What was given instead.
    got: str | None = None

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        for name, value in details.items():
            setattr(self, name, value)


class ArgumentError(WarpsmithError, ValueError):
    """An argument does not fit the op's contract."""


class UnsupportedError(WarpsmithError, NotImplementedError):
    """No kernel can run the call on this device, or the op has no such derivative."""


class OutOfMemoryError(WarpsmithError, MemoryError):
    """Memory ran out. The device stays usable."""

    #: Bytes asked for, free and there at all.
    requested: int = 0
    free: int = 0
    total: int = 0


class CudaError(WarpsmithError):
    """A call of the CUDA driver failed."""


class UnavailableError(WarpsmithError):
    """Something this machine lacks is needed."""


class CompileError(WarpsmithError):
    """The CUDA compiler refused a kernel."""


class KernelError(WarpsmithError):
    """A user's kernel was refused: it is wrong, writes where it must not, or gives other bits the next time."""

    #: Which of its cases, and which of its outputs.
    case: int | None = None
    output: int | None = None
    #: The first wrong element.
    index: tuple[int, ...] | None = None


class FileError(WarpsmithError):
    """A file could not be read or written."""

    #: The file or folder.
    path: str | None = None


class FallbackWarning(RuntimeWarning):
    """PyTorch computes what no kernel can. Said once for each reason."""
