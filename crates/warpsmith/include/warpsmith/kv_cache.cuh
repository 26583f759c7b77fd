#pragma once
// Where keys and values go in a paged cache, and how they become 8-bit floats. `KvSlots` is the C twin of the host's struct.

#include "warpsmith/division.cuh"
#include "warpsmith/math.cuh"
#include "warpsmith/rows.cuh"

namespace warpsmith {

WS_INLINE i64 slot_at(const KvSlots& slots, u32 token) { return load_integer(slots.at, slots.wide, token * slots.stride); }

// Elements from the start of a cache to the first head of a slot, or -1 if there is no such slot. Converted to unsigned, a
// negative slot is too large.
WS_INLINE i64 place_at(const KvSlots& slots, i64 slot, i64 page_stride, i64 place_stride) {
  if ((u64)slot >= slots.count) return -1;
  const u32 page = divide((u32)slot, slots.page_factor, slots.page_shift);
  return page * page_stride + ((u32)slot - page * slots.page_size) * place_stride;
}

// Divides many numbers by the same scale. Before rounding, a quotient has a relative error of 2^-44, so that rounded to
// 8 bits it is that of __fdiv_rn, without the special cases which that distinguishes for each element.
struct ScaleDivisor {
  float scale, inverse, factor;

  WS_INLINE explicit ScaleDivisor(float given) {
    // Scaling both sides by a power of two keeps inverse and correction in range. What overflows because of it would
    // saturate anyway; what underflows is zero in 8 bits. The sign is moved to the numerator: with a positive scale the
    // correction preserves the sign of zero.
    factor = fabsf(given) < 1e-15f ? 0x1p100f : fabsf(given) > 1e15f ? 0x1p-100f : 1.0f;
    factor = copysignf(factor, given);
    scale = given * factor;
    inverse = reciprocal(scale);
    // An infinite scale has a zero inverse; the product of the two would be NaN.
    if (inverse == 0.0f) scale = 0.0f;
  }
  WS_INLINE float operator()(float x) const {
    x *= factor;
    const float first = x * inverse;
    const float q = fmaf(-fmaf(scale, first, -x), inverse, first);
    // The correction would turn infinity into NaN.
    return fabsf(first) < 1e30f ? q : first;
  }
};

// What a head is divided by; one if there are no scales.
WS_INLINE ScaleDivisor divisor_at(u64 scales, i64 stride, u32 head) {
  return ScaleDivisor(scales ? ((const float*)scales)[head * stride] : 1.0f);
}

}  // namespace warpsmith
