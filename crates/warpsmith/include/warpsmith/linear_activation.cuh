#pragma once
// The activations of `linear`, applied to sums that have been multiplied by kFactor.
//
// While other tiles are multiplied, an epilogue pays for every register that it reads: the tensor cores use the same
// ports. The bias costs an addition; a multiplication fused with it reads no register more. With the right factor, the
// first step of a polynomial becomes a subtraction from a constant, and a scale that keeps a power in range is free.

#include "warpsmith/math.cuh"

namespace warpsmith::linear {

// Of sums without a factor.
struct Identity {
  template <class T> static WS_INLINE float value(float x) { return x; }
};
template <class Function, class T> struct Unscaled {
  static constexpr float kFactor = 1.0f;
  static WS_INLINE float value(float x) { return Function::template value<T>(x); }
};

// x Phi(x) for results of 16 bits: the polynomial of `Gelu` for log2 of the tail, in kFactor x, so that its leading
// coefficient is -1. The tail is divided by the factor because x is multiplied by it.
WS_INLINE float scaled_log2_tail(f16, float t) {
  float p = 5.4183993f - t;
  p = fmaf(p, t, -12.860875f);
  p = fmaf(p, t, 18.011196f);
  p = fmaf(p, t, -17.117105f);
  p = fmaf(p, t, -21.552752f);
  p = fmaf(p, t, -7.884783f);
  return fmaf(p, t, 1.7762415f);
}
// A fit of its own, with an error of 2^-12.9 up to 4.8.
WS_INLINE float scaled_log2_tail(bf16, float t) {
  float p = 3.7418332f - t;
  p = fmaf(p, t, -6.2811227f);
  p = fmaf(p, t, -12.180914f);
  p = fmaf(p, t, -5.8715224f);
  return fmaf(p, t, 1.3540386f);
}
constexpr float tail_factor(f16) { return 0.14596954f; }
constexpr float tail_factor(bf16) { return 0.1955724f; }
template <class T> struct ScaledGelu {
  static constexpr float kFactor = tail_factor(T());
  static WS_INLINE float value(float x) {
    const float tail = exp2_flushed(scaled_log2_tail(T(), fabsf(x)));
    // Compared as an integer: the compiler would compare the sum with the bias instead of x with zero, and read both.
    return x * (__float_as_int(x) < 0 ? tail : 1.0f / kFactor - tail);
  }
};

// x sigmoid(z) for results of 16 bits, from 2^-13 x and -z log2(e) - 13. Both terms of the denominator are scaled like x.
// With 2^-13 the reciprocal is flushed to zero only where the result is below 2^-132, the last subnormals of bf16, and an x
// near 2^-126 keeps two bits more than bf16 has.
struct ScaledSigmoid {
  static constexpr float kFactor = 0.0001220703125f, kShift = -13.0f;
  static WS_INLINE float times(float x, float power) { return x * reciprocal(kFactor + exp2_flushed(power)); }
};
struct ScaledSilu : ScaledSigmoid {
  static WS_INLINE float value(float x) { return times(x, fmaf(x, -kLog2E / kFactor, kShift)); }
};
struct ScaledGeluTanh : ScaledSigmoid {
  static WS_INLINE float value(float x) {
    constexpr float A = -kLog2E * GeluTanh::A / kFactor, B = -kLog2E * GeluTanh::B / (kFactor * kFactor * kFactor);
    return times(x, fmaf(x, fmaf(x * x, B, A), kShift));
  }
};

template <int kKind, class T> struct Activation : Unscaled<Identity, T> {};
template <class T> struct Activation<4, T> : Unscaled<Relu, T> {};
template <> struct Activation<1, f32> : Unscaled<Gelu, f32> {};
template <> struct Activation<1, f16> : ScaledGelu<f16> {};
template <> struct Activation<1, bf16> : ScaledGelu<bf16> {};
template <> struct Activation<2, f32> : Unscaled<GeluTanh, f32> {};
template <> struct Activation<2, f16> : ScaledGeluTanh {};
template <> struct Activation<2, bf16> : ScaledGeluTanh {};
template <> struct Activation<3, f32> : Unscaled<Silu, f32> {};
template <> struct Activation<3, f16> : ScaledSilu {};
template <> struct Activation<3, bf16> : ScaledSilu {};

}  // namespace warpsmith::linear
