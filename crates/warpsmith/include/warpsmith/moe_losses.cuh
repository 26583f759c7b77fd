#pragma once
// The distribution of a token over experts, by one warp: lane l has the experts l, l + 32, ..., kItems of them.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

namespace warpsmith {
namespace moe {

// What the softmax of a row is made of, beside its exponentials.
struct Softmax {
  float top, powers;

  // The logarithm of the sum of exponentials relative to the largest. Only a row that is all minus infinity has none.
  WS_INLINE float log() const { return powers == 0.0f ? bits_float(0x7fffffffu) : logf(powers); }
};

// Logits; minus infinity where there is no expert.
template <class T, int kItems> WS_INLINE void load_logits(float (&x)[kItems], const T* row, i64 step, int experts) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = i * 32 + (int)(threadIdx.x % 32);
    x[i] = e < experts ? to_f32(row[e * step]) : minus_infinity();
  }
}

// The exponentials of a row relative to its largest element, which is the lowest finite number at least: with minus infinity,
// differences to it would be NaN. NaN is passed over there and shows in the sum.
template <int kItems> WS_INLINE Softmax softmax(float (&powers)[kItems], const float (&x)[kItems]) {
  Softmax found{-3.4028234663852886e38f, 0.0f};
#pragma unroll
  for (int i = 0; i < kItems; ++i) found.top = fmaxf(found.top, x[i]);
  found.top = warp_reduce<MaxIgnoringNan>(found.top);
#pragma unroll
  for (int i = 0; i < kItems; ++i) found.powers += powers[i] = expf(x[i] - found.top);
  found.powers = warp_reduce<Sum>(found.powers);
  return found;
}

// The sum of exponentials, each times what its number is below the largest: minus infinity has no part.
template <int kItems>
WS_INLINE float sum_below(const Softmax& found, const float (&powers)[kItems], const float (&x)[kItems]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += powers[i] == 0.0f ? 0.0f : powers[i] * (found.top - x[i]);
  return warp_reduce<Sum>(sum);
}

WS_INLINE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))) + (x != x ? x : 0.0f); }

// 1 - sigmoid(x), the slope of its logarithm.
WS_INLINE float below_one(float x) {
  const float e = expf(-fabsf(x));
  return (x > 0.0f ? e : 1.0f) / (1.0f + e);
}

}  // namespace moe
}  // namespace warpsmith
