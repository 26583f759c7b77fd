#pragma once
// 8-bit floats. Values are rounded to nearest, ties to even; what is too large, including infinity, becomes the largest
// finite value; NaN becomes 0x7f. The instructions of sm_89 and the arithmetic for older devices give the same bits.

#include "warpsmith/base.cuh"

namespace warpsmith {

#if __CUDA_ARCH__ < 890
// The code of x. kDropped: mantissa bits lost; kMinNormal: bits of the smallest normal value; kMax: code of the largest
// value. `subnormal_unit` is 2^23 times the smallest subnormal: adding it rounds a small value to a multiple of that.
template <int kDropped, u32 kMinNormal, u32 kMax> WS_INLINE u8 encode_fp8(float x, float subnormal_unit) {
  u32 bits = float_bits(x), abs = bits & 0x7fffffffu;
  // Rounded in place: a carry moves the exponent as it should.
  u32 rounded = (abs + ((1u << (kDropped - 1)) - 1) + ((abs >> kDropped) & 1)) >> kDropped;
  u32 normal = min(rounded - ((kMinNormal >> kDropped) - (1u << (23 - kDropped))), kMax);
  u32 subnormal = float_bits(bits_float(abs) + subnormal_unit) - float_bits(subnormal_unit);
  u32 code = abs < kMinNormal ? subnormal : normal;
  return x != x ? 0x7f : (u8)(code | ((bits >> 24) & 0x80));
}
#endif

// Two codes, that of `lo` in the low byte.
WS_INLINE u16 encode_e4m3x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
#else
  return encode_fp8<20, 0x3c800000u, 0x7e>(lo, 16384.0f) | (u16)(encode_fp8<20, 0x3c800000u, 0x7e>(hi, 16384.0f) << 8);
#endif
}
WS_INLINE u16 encode_e5m2x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
#else
  return encode_fp8<21, 0x38800000u, 0x7b>(lo, 128.0f) | (u16)(encode_fp8<21, 0x38800000u, 0x7b>(hi, 128.0f) << 8);
#endif
}

// e5m2 is the upper half of f16.
WS_INLINE float to_f32(f8e5m2 x) { return to_f32(f16{(u16)(x.bits << 8)}); }
// The exponent field of e4m3 fits that of f16; the biases differ by 8, hence the factor.
WS_INLINE float to_f32(f8e4m3 x) {
  u16 magnitude = x.bits & 0x7f;
  float y = to_f32(f16{(u16)(((x.bits & 0x80) << 8) | (magnitude << 7))}) * 256.0f;
  return magnitude == 0x7f ? bits_float(0x7fffe000u) : y;
}

WS_INLINE void decode_x2(float& lo, float& hi, u16 codes, f8e4m3) {
#if __CUDA_ARCH__ >= 890
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  lo = to_f32(f16{(u16)halves});
  hi = to_f32(f16{(u16)(halves >> 16)});
#else
  lo = to_f32(f8e4m3{(u8)codes});
  hi = to_f32(f8e4m3{(u8)(codes >> 8)});
#endif
}
WS_INLINE void decode_x2(float& lo, float& hi, u16 codes, f8e5m2) {
  lo = to_f32(f8e5m2{(u8)codes});
  hi = to_f32(f8e5m2{(u8)(codes >> 8)});
}

template <> WS_INLINE f8e4m3 from_f32<f8e4m3>(float x) { return f8e4m3{(u8)encode_e4m3x2(x, 0.0f)}; }
template <> WS_INLINE f8e5m2 from_f32<f8e5m2>(float x) { return f8e5m2{(u8)encode_e5m2x2(x, 0.0f)}; }

}  // namespace warpsmith
