"""Arrays of a GPU that are not PyTorch's: CuPy's and JAX's."""

from __future__ import annotations

import numpy as np
import pytest
import warpsmith
from device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def expected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((64, 512), dtype=np.float32), rng.standard_normal(512, dtype=np.float32)


def test_cupy_in_and_out_without_a_copy() -> None:
    cp = pytest.importorskip("cupy", reason="CuPy is not installed")
    x, weight = inputs()
    a, b = cp.asarray(x), cp.asarray(weight)
    out = warpsmith.rms_norm(a, b, eps=1e-6)
    back = cp.from_dlpack(out)
    np.testing.assert_allclose(cp.asnumpy(back), expected(x, weight), rtol=2e-6, atol=2e-6)
    shared = warpsmith.from_dlpack(a)
    a[0, 0] = 17
    assert cp.from_dlpack(shared).data.ptr == a.data.ptr
    assert float(cp.from_dlpack(shared)[0, 0]) == 17


def test_cupy_on_a_stream_of_its_own() -> None:
    cp = pytest.importorskip("cupy", reason="CuPy is not installed")
    x, weight = inputs()
    b = cp.asarray(weight)
    for turn in range(20):
        with cp.cuda.Stream(non_blocking=True) as stream:
            # Long work before the array has its values: the op must wait for this stream.
            a = cp.zeros((64, 512), dtype=cp.float32)
            for _ in range(50):
                a += cp.float32(turn) - a
            a += cp.asarray(x) - cp.float32(turn)
            out = cp.from_dlpack(warpsmith.rms_norm(a, b, eps=1e-6))
            result = cp.asnumpy(out, stream=stream)
            stream.synchronize()
        np.testing.assert_allclose(result, expected(x, weight), rtol=1e-4, atol=1e-4)


def test_jax_in_tensors_out() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX finds no GPU")
    x, weight = inputs()
    out = warpsmith.rms_norm(jax.numpy.asarray(x), jax.numpy.asarray(weight), eps=1e-6)
    assert out.device.startswith("cuda")
    np.testing.assert_allclose(np.asarray(jax.dlpack.from_dlpack(out)), expected(x, weight), rtol=2e-6, atol=2e-6)
