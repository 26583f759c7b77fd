#pragma once
// Reductions and scans over the threads of a warp or a block. Their order depends on the number of threads alone, so
// that results are the same in every run.

#include "warpsmith/base.cuh"

namespace warpsmith {

constexpr u32 kAllLanes = 0xffffffffu;

struct Sum {
  static WS_INLINE float identity() { return 0.0f; }
  template <class V> static WS_INLINE V join(V a, V b) { return a + b; }
};

// NaN wins, as it does in the references.
struct Max {
  static WS_INLINE float identity() { return minus_infinity(); }
  static WS_INLINE float join(float a, float b) { return (a > b || a != a) ? a : b; }
};

// NaN loses: where it matters, it shows in a sum.
struct MaxIgnoringNan {
  static WS_INLINE float join(float a, float b) { return fmaxf(a, b); }
};

// Over each kLanes neighbouring lanes, the most distant joined first.
template <class R, int kLanes = 32, class V> WS_INLINE V warp_reduce(V x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = R::join(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Over the four lanes that hold a row of a matrix fragment, neighbours joined first.
template <class R> WS_INLINE float quad_reduce(float x) {
  x = R::join(x, __shfl_xor_sync(kAllLanes, x, 1));
  return R::join(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// What the lanes up to and including this one hold, joined, in each kLanes neighbouring lanes; `place` is this lane's
// among them.
template <class R, int kLanes = 32, class V> WS_INLINE V warp_scan(V x, int place) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    const V other = __shfl_up_sync(kAllLanes, x, offset);
    if (place >= offset) x = R::join(x, other);
  }
  return x;
}

// Reduces kCount values at once over kThreads threads; every thread gets the results. `scratch` holds
// kCount * kThreads / 32 floats. There is no barrier at the end: before the same scratch is used again, the block must
// pass another barrier, so callers alternate between two.
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

}  // namespace warpsmith
