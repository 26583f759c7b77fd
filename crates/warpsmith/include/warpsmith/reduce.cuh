#pragma once
// Sums and maxima over the threads of a warp or a block, in an order fixed by the number of threads.

#include "warpsmith/base.cuh"

struct Sum {
  static WS_INLINE float identity() { return 0.0f; }
  static WS_INLINE float join(float a, float b) { return a + b; }
};

// NaN wins, as it does in the reference.
struct Max {
  static WS_INLINE float identity() { return bits_float(0xff800000u); }
  static WS_INLINE float join(float a, float b) { return (a > b || a != a) ? a : b; }
};

// Over each kLanes neighbouring lanes.
template <class R, int kLanes = 32> WS_INLINE float warp_reduce(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = R::join(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Reduces `kCount` values at once over kThreads threads; every thread gets the results. `scratch` holds
// kCount * kThreads / 32 floats and may be reused after the next barrier: calls alternate between two scratch areas.
template <class R, int kThreads, int kCount> WS_INLINE void block_reduce(float (&x)[kCount], float* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = warp_reduce<R>(x[i]);
  if (kThreads == 32) return;
  constexpr int kWarps = kThreads / 32;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[i * kWarps + warp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr ((kWarps & (kWarps - 1)) == 0)
      x[i] = warp_reduce<R, kWarps>(scratch[i * kWarps + lane % kWarps]);
    else
      x[i] = warp_reduce<R>(lane < kWarps ? scratch[i * kWarps + lane] : R::identity());
  }
}
