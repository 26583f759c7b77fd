// out = max(x, 0)^2: one element a thread.

#include "warpsmith/base.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(256) relu_squared(const ReluSquaredParams p) {
  begin_kernel();
  const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
  if (at >= p.count) return;
  const float x = ((const float*)p.x)[at];
  // Not fmaxf, which turns NaN into zero.
  const float positive = x < 0.0f ? 0.0f : x;
  ((float*)p.out)[at] = positive * positive;
}
