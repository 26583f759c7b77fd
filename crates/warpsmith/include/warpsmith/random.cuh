#pragma once
// Numbers by which kernels decide, operation by operation as on the CPU (`sample/arithmetic.rs`, `moe_route/arithmetic.rs`):
// every operation is written with its rounding, so that the compiler fuses none.

#include "warpsmith/reduce.cuh"

namespace warpsmith {

constexpr float kLargestFloat = 3.402823466e38f;
constexpr float kWeightUnit = 1099511627776.0f;  // 2^40
constexpr u64 kGolden = 0x9e3779b97f4a7c15ull;

// A number that orders: NaN as minus infinity, no plus infinity, no negative zero.
WS_INLINE float clean(float x) { return __fadd_rn(x != x ? minus_infinity() : fminf(x, kLargestFloat), 0.0f); }

// Bits whose unsigned order is that of numbers, and back. Zero is below them all.
WS_INLINE u32 ordered_bits(float x) {
  const u32 bits = float_bits(x);
  return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}
WS_INLINE float ordered_number(u32 ordered) {
  return bits_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// e^t of t <= 0; 2^-60 at least.
WS_INLINE float decisive_exp(float t) {
  const float y = fmaxf(__fmul_rn(t, 1.44269504088896341f), -60.0f);
  const float n = rintf(y), f = __fsub_rn(y, n);
  float p = 0.00015353362f;
  p = __fmaf_rn(p, f, 0.0013398875f);
  p = __fmaf_rn(p, f, 0.009618437f);
  p = __fmaf_rn(p, f, 0.055503324f);
  p = __fmaf_rn(p, f, 0.24022648f);
  p = __fmaf_rn(p, f, 0.6931472f);
  p = __fmaf_rn(p, f, 1.0f);
  return __fmul_rn(p, bits_float((u32)((int)n + 127) << 23));
}

// Such a number as a multiple of 2^-40: sums of those have no order.
WS_INLINE u64 whole_weight(float e) { return __float2ull_rz(__fmul_rn(e, kWeightUnit)); }

// A permutation of 64-bit numbers in which every bit changes about half of the bits.
WS_INLINE u64 mix_bits(u64 z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// A counter-based generator: 64 random bits for each number of a stream, of which a seed has one for each position.
struct RandomStream {
  u64 start;

  WS_INLINE RandomStream(i64 seed, i64 position)
      : start(mix_bits(mix_bits((u64)seed + kGolden) + (u64)position * kGolden)) {}
  WS_INLINE u64 operator[](u32 number) const { return mix_bits(start + ((u64)number + 1) * kGolden); }
};

WS_INLINE float decisive_ln_1p(float f) {
  float p = 0.08736038f;
  p = __fmaf_rn(p, f, -0.14309312f);
  p = __fmaf_rn(p, f, 0.14918347f);
  p = __fmaf_rn(p, f, -0.16570306f);
  p = __fmaf_rn(p, f, 0.19962022f);
  p = __fmaf_rn(p, f, -0.2500176f);
  p = __fmaf_rn(p, f, 0.3333395f);
  p = __fmaf_rn(p, f, -0.4999999f);
  return __fmaf_rn(__fmul_rn(p, f), f, f);
}

// Minus the logarithm of one minus a number that is uniform between 0 and 1.
WS_INLINE float random_exponential(u32 bits) {
  constexpr float kScale = 2.3283064365386963e-10f;  // 2^-32
  if (bits < 1u << 30) return -decisive_ln_1p(-__fmul_rn(__uint2float_rn(bits | 1), kScale));
  const float x = __fmul_rn(__uint2float_rn(~bits | 1), kScale);
  const i32 over = (i32)(float_bits(x) - 0x3f3504f3u) >> 23;
  const float f = __fsub_rn(bits_float(float_bits(x) - ((u32)over << 23)), 1.0f);
  return -__fmaf_rn(__int2float_rn(over), 0.693147180559945309f, decisive_ln_1p(f));
}

// The cosine of bits / 2^32 turns, as the sine of a quarter less.
WS_INLINE float random_cosine(u32 bits) {
  const u32 from_zero = bits >> 31 ? 0u - bits : bits;
  const float q = __fsub_rn(0.25f, __fmul_rn(__uint2float_rn(from_zero), 2.3283064365386963e-10f));
  const float square = __fmul_rn(q, q);
  float p = -15.094643f;
  p = __fmaf_rn(p, square, 42.058693f);
  p = __fmaf_rn(p, square, -76.70586f);
  p = __fmaf_rn(p, square, 81.60525f);
  p = __fmaf_rn(p, square, -41.3417f);
  p = __fmaf_rn(p, square, 6.2831855f);
  return __fmul_rn(p, q);
}

// A normally distributed number (Box and Muller).
WS_INLINE float random_normal(u64 bits) {
  const float radius = __fsqrt_rn(__fmul_rn(2.0f, random_exponential((u32)(bits >> 32))));
  return __fmul_rn(radius, random_cosine((u32)bits));
}

}  // namespace warpsmith
