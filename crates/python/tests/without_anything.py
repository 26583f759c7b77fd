"""The package without numpy and PyTorch. Run by scripts/python-test.sh in an empty environment."""

import ctypes
import importlib.util
import sys

import warpsmith

assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("torch") is None


class Column(ctypes.Structure):
    """DLPack's tensor, enough of it to hand over a column of numbers."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


DELETED = []
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(DELETED.append)


class Array:
    """An array of f32 that speaks the old DLPack."""

    def __init__(self, values: list[float]) -> None:
        self.memory = (ctypes.c_float * len(values))(*values)
        self.shape = (ctypes.c_int64 * 2)(1, len(values))
        f32 = 2 | 32 << 8 | 1 << 16
        self.column = Column(
            ctypes.addressof(self.memory),
            (1, 0),
            2,
            f32,
            self.shape,
            None,
            0,
            None,
            ctypes.cast(DELETER, ctypes.c_void_p),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, stream: object = None) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.column), b"dltensor", None)


array = Array([3.0, 4.0])
out = warpsmith.rms_norm(array, eps=0.0)
assert isinstance(out, warpsmith.Tensor) and out.shape == (1, 2), out
(first, second), size = out.tolist()[0], (12.5**0.5)
assert abs(first - 3 / size) < 1e-6 and abs(second - 4 / size) < 1e-6, out.tolist()
assert len(DELETED) == 1, "the tensor was given back once"
again = warpsmith.activation(out, kind="relu")
assert warpsmith.explain("rms_norm", out).kernel.startswith("rms_norm")
assert warpsmith.bench(warpsmith.rms_norm, out, iters=3, warmup=0).median > 0
states = {finding.what: finding.state for finding in warpsmith.doctor()}
assert states["torch"] == "missing" and states["cpu"] == "ok", states
assert len(warpsmith.list_ops()) > 20
for name in ("nn", "sdpa", "patch"):
    try:
        getattr(warpsmith, name)
    except AttributeError as error:
        assert "needs PyTorch" in str(error), error
    else:
        sys.exit(f"there is no PyTorch for {name}")
try:
    out.numpy()
except ImportError:
    pass
else:
    sys.exit("there is no numpy")
try:
    warpsmith.rms_norm(out, again, eps=0.0)
except warpsmith.ArgumentError as error:
    assert error.argument == "weight"
else:
    sys.exit("a weight of the wrong shape was taken")
print(f"warpsmith {warpsmith.__version__} works without numpy and PyTorch")
