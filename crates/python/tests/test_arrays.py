"""Memory of others: DLPack, numpy, PyTorch."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
import torch
import warpsmith

pytestmark = pytest.mark.cpu


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Producer:
    """A producer of capsules: what it is told, of a numpy array."""

    def __init__(self, array: np.ndarray, *, versioned: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.versioned, self.device = array, versioned, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**{k: v for k, v in options.items() if k != "stream"})


def test_memory_is_shared_both_ways() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = warpsmith.from_dlpack(array)
    assert (tensor.shape, tensor.strides, tensor.dtype, tensor.device) == ((3, 4), (4, 1), "f32", "cpu")
    array[1, 2] = 50
    assert tensor.tolist()[1][2] == 50
    back, torched = tensor.numpy(), tensor.torch()
    back[0, 0] = -1
    assert array[0, 0] == -1 and torched[0, 0] == -1
    assert np.shares_memory(array, back)
    assert torched.data_ptr() == array.ctypes.data
    assert len(tensor) == 3 and tensor.nbytes == 48 and tensor.ndim == 2 and "f32" in repr(tensor)
    assert np.asarray(tensor).sum() == array.sum()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_every_type_survives(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(warpsmith.from_dlpack(x).torch(), x)


def test_strides_offsets_and_emptiness_survive() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2].T
    assert np.array_equal(warpsmith.from_dlpack(array).numpy(), array)
    assert warpsmith.from_dlpack(np.empty((0, 3), np.float32)).numpy().shape == (0, 3)
    assert warpsmith.from_dlpack(np.array(3, np.float32)).tolist() == 3


def test_capsules_follow_the_version_asked_for() -> None:
    tensor = warpsmith.from_dlpack(np.zeros(3, np.float32))
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    assert name(tensor.__dlpack__()) == b"dltensor"
    assert name(tensor.__dlpack__(max_version=(0, 8))) == b"dltensor"
    assert name(tensor.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    capsule = tensor.__dlpack__(max_version=(1, 0))
    torch.utils.dlpack.from_dlpack(capsule)
    assert name(capsule) == b"used_dltensor_versioned"


def test_read_only_memory_stays_so() -> None:
    array = np.zeros((2, 8), np.float32)
    array.flags.writeable = False
    tensor = warpsmith.from_dlpack(array)
    assert tensor.read_only and "read-only" in repr(tensor)
    assert not tensor.numpy().flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()
    with pytest.raises(warpsmith.ArgumentError, match="read-only"):
        warpsmith.rms_norm_(tensor)
    old = warpsmith.from_dlpack(Producer(np.zeros(3, np.float32), versioned=False))
    assert old.read_only, "the old protocol cannot say that memory may be written"


def test_copies_and_devices() -> None:
    array = np.zeros(3, np.float32)
    tensor = warpsmith.from_dlpack(array)
    copy = np.from_dlpack(tensor, copy=True)
    copy[0] = 1
    assert array[0] == 0
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ValueError, match="stream"):
        tensor.__dlpack__(stream=7)


def test_memory_that_does_not_hold_the_values_is_refused() -> None:
    """PyTorch hands out the memory of lazy negatives, such as the imaginary part of a conjugate, as it is."""
    negative = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert negative.is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        warpsmith.from_dlpack(negative)
    assert warpsmith.from_dlpack(negative.resolve_neg()).tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int32, np.uint8, np.bool_])
def test_lists_that_do_not_fit_into_memory(dtype: type) -> None:
    endless = warpsmith.from_dlpack(np.broadcast_to(np.ones(1, dtype), (1 << 45,)))
    with pytest.raises(MemoryError):
        endless.tolist()
    few = warpsmith.from_dlpack(np.broadcast_to(np.ones(1, dtype), (2, 1, 3)))
    assert few.tolist() == [[[1, 1, 1]], [[1, 1, 1]]]


def test_what_cannot_be_taken_is_refused() -> None:
    for wrong, error in [
        (3, TypeError),
        ([1.0], TypeError),
        (np.zeros(3, np.float64), ValueError),
        (np.zeros(3, np.complex64), ValueError),
        (np.zeros(3, np.float32)[::-1], ValueError),
        (np.zeros((1,) * 9, np.float32), ValueError),
        (Producer(np.zeros(3, np.float32), device=(7, 0)), BufferError),
    ]:
        with pytest.raises(error):
            warpsmith.from_dlpack(wrong)
    with pytest.raises(BufferError):
        warpsmith.from_dlpack(torch.zeros(3, requires_grad=True))


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    weight = np.ones(64, np.float32)
    out = warpsmith.rms_norm(x, weight)
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), rtol=1e-5)
    out, total = warpsmith.rms_norm(x, weight, x)
    assert isinstance(total, np.ndarray) and np.array_equal(total, x + x)
    low = warpsmith.cast(x, to="bf16")
    assert isinstance(low, warpsmith.Tensor) and low.dtype == "bf16"
    again = warpsmith.rms_norm(low)
    assert isinstance(again, warpsmith.Tensor) and again.shape == (4, 64)
    assert warpsmith.rms_norm_(x) is None
    np.testing.assert_allclose((x**2).mean(-1), 1, rtol=1e-4)


@pytest.mark.cpu
def test_jax_in_tensors_out() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x, weight = jnp.asarray(rows), jnp.full(64, 2.0)
    out = warpsmith.rms_norm(x, weight)
    assert isinstance(out, warpsmith.Tensor)
    expected = 2 * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(np.asarray(jnp.from_dlpack(out)), expected, rtol=1e-5)
    low = warpsmith.rms_norm(x.astype(jnp.bfloat16))
    assert low.dtype == "bf16" and jnp.from_dlpack(low).dtype == jnp.bfloat16
    # JAX's arrays never change.
    with pytest.raises(warpsmith.ArgumentError, match="read-only"):
        warpsmith.rms_norm_(x)
    np.testing.assert_array_equal(np.asarray(x), rows)


def test_results_outlive_everything() -> None:
    array = warpsmith.rms_norm(warpsmith.from_dlpack(np.ones((2, 8), np.float32))).numpy()
    gc.collect()
    np.testing.assert_allclose(array, 1, rtol=1e-5)


def test_one_tensor_as_input_and_output_is_refused() -> None:
    tensor = warpsmith.from_dlpack(np.ones((2, 8), np.float32))
    with pytest.raises(warpsmith.ArgumentError, match="residual"):
        warpsmith.rms_norm_(tensor, residual=tensor)
    held = tensor.numpy()
    with pytest.raises(warpsmith.ArgumentError, match="handles"):
        warpsmith.rms_norm_(tensor)
    del held


def test_many_round_trips_leak_nothing() -> None:
    array = np.zeros((2, 8), np.float32)
    tensor = warpsmith.from_dlpack(array)
    own = warpsmith.rms_norm(tensor)

    def trips(count: int) -> None:
        take, np_take = warpsmith.from_dlpack, np.from_dlpack
        wrong = Producer(np.zeros(3, np.float64))
        for _ in range(count):
            take(array)
            own.__dlpack__()  # never consumed
            own.__dlpack__(max_version=(1, 0))
            np_take(own)
            try:
                take(wrong)
            except ValueError:
                pass

    import sys

    trips(2_000)
    gc.collect()
    before, references = resident(), sys.getrefcount(array)
    trips(50_000)
    gc.collect()
    assert sys.getrefcount(array) == references, "each deleter was called once"
    assert resident() - before < 1 << 20


def test_the_deleter_is_called_once_each() -> None:
    import sys

    array = np.zeros(4, np.float32)
    before = sys.getrefcount(array)
    tensors = [warpsmith.from_dlpack(array) for _ in range(100)]
    torched = [tensor.torch() for tensor in tensors]
    assert sys.getrefcount(array) == before + 100
    del tensors
    assert sys.getrefcount(array) == before + 100
    del torched
    gc.collect()
    assert sys.getrefcount(array) == before
