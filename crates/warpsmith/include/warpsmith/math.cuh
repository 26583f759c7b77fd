#pragma once
// Activation functions in f32, for results that are stored as T. For f32 they are within a few units in the last place
// (ulp) of the exact result, also in the tails. For 16-bit types, values may err by a quarter of an ulp of T and take
// fewer instructions. Derivatives have zeros, near which such an error would leave nothing: they save on exponentials
// only.

#include "warpsmith/base.cuh"

namespace warpsmith {

// 1 / x to one ulp; zero where it is below 2^-126.
WS_INLINE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x to two ulps where the result is normal.
WS_INLINE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The same with results below 2^-126 flushed to zero, in a single instruction.
WS_INLINE float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Whether results of type T have precision to spare.
template <class T> constexpr bool kSixteenBits = sizeof(T) == 2;
constexpr float kLog2E = 1.4426950408889634f;

// e^x for x <= 0. With 16 bits the product is rounded before the power is taken: an error of up to 2^-17.
template <class T> WS_INLINE float exp_neg(float x) { return kSixteenBits<T> ? exp2_approx(kLog2E * x) : expf(x); }

// sigmoid(x) = numerator / denominator, free of overflow and cancellation; u = e^-|x|.
struct Sigmoid {
  float numerator, denominator, u;
};
template <class T> WS_INLINE Sigmoid sigmoid_parts(float x) {
  float u = exp_neg<T>(-fabsf(x));
  return {x < 0.0f ? u : 1.0f, 1.0f + u, u};
}

// 1 / (1 + 2^-x) for results of 16 bits. Both terms are scaled by 2^-64, so that the power overflows only where the
// result is zero in T.
WS_INLINE float sigmoid2(float minus_x_minus_64) {
  constexpr float kScale = 5.421010862427522e-20f;
  return reciprocal(kScale + exp2_flushed(minus_x_minus_64)) * kScale;
}

struct Relu {
  // Not fmaxf, which would lose NaN.
  template <class T> static WS_INLINE float value(float x) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < 0.0f ? 0.0f : x;
#endif
  }
  template <class T> static WS_INLINE float derivative(float x) { return x > 0.0f ? 1.0f : (x != x ? x : 0.0f); }
};

struct Silu {
  template <class T> static WS_INLINE float value(float x) {
    if (kSixteenBits<T>) return x * sigmoid2(fmaf(x, -kLog2E, -64.0f));
    Sigmoid s = sigmoid_parts<T>(x);
    return x * (s.numerator * reciprocal(s.denominator));
  }
  template <class T> static WS_INLINE float derivative(float x) {
    // sigmoid(x) (1 + x sigmoid(-x)). Factored out, so that the error stays small where the sum is zero.
    Sigmoid s = sigmoid_parts<T>(x);
    float inverse = reciprocal(s.denominator);
    return (s.numerator * inverse) * fmaf(x, (x < 0.0f ? 1.0f : s.u) * inverse, 1.0f);
  }
};

// x/2 (1 + tanh z) = x sigmoid(2 z), with 2 z = x (A + B x^2).
struct GeluTanh {
  static constexpr float A = 1.5957691216057308f, B = 0.044715f * 1.5957691216057308f;
  template <class T> static WS_INLINE float value(float x) {
    if (kSixteenBits<T>) return x * sigmoid2(fmaf(x, fmaf(x * x, -kLog2E * B, -kLog2E * A), -64.0f));
    Sigmoid s = sigmoid_parts<T>(x * fmaf(x * x, B, A));
    return x * (s.numerator * reciprocal(s.denominator));
  }
  template <class T> static WS_INLINE float derivative(float x) {
    float square = x * x;
    Sigmoid s = sigmoid_parts<T>(x * fmaf(square, B, A));
    // Bounded, so that zero times it stays zero: u is zero long before x^2 = 400.
    float inner = fmaf(fminf(square, 400.0f), 3.0f * B, A);
    float inverse = reciprocal(s.denominator);
    return fmaf(x, (s.u * inverse) * (inverse * inner), s.numerator * inverse);
  }
};

// x tanh(softplus(x)). With w = e^x, the tanh is (w^2 + 2w) / (w^2 + 2w + 2); for positive x in terms of u = 1/w.
struct Mish {
  struct Parts {
    float u, a, b;
  };
  template <class T> static WS_INLINE Parts parts(float x) {
    float u = exp_neg<T>(-fabsf(x));
    bool negative = x < 0.0f;
    float a = negative ? u * (u + 2.0f) : fmaf(2.0f, u, 1.0f);
    return {u, a, a + (negative ? 2.0f : 2.0f * u * u)};
  }
  template <class T> static WS_INLINE float value(float x) {
    Parts m = parts<T>(x);
    return x * (m.a * reciprocal(m.b));
  }
  template <class T> static WS_INLINE float derivative(float x) {
    // d/dx tanh(softplus(x)) = 4 w (w + 1) / (w^2 + 2w + 2)^2, and for positive x the same in u.
    Parts m = parts<T>(x);
    float power = x < 0.0f ? m.u : m.u * m.u, inverse = reciprocal(m.b);
    float slope = (4.0f * power) * ((1.0f + m.u) * (inverse * inverse));
    return fmaf(x, slope, m.a * inverse);
  }
};

// x Phi(x), Phi the normal distribution.
struct Gelu {
  struct Normal {
    float cdf, e;
  };
  // Phi(x) and e^(-x^2/2). The upper tail is 2^(C t^2) P(t) / Q(t): a fit of our own, made for C as rounded to f32, with
  // an error of 2^-26 up to 14.5; the power is flushed to zero from 13.2 on. What the two roundings of C t^2 lost is
  // computed exactly and added back.
  template <class T> static WS_INLINE Normal normal(float x) {
    constexpr float C = -0.5f * kLog2E, kLn2 = 0.6931472f;
    float t = fminf(fabsf(x), 14.5f), square = t * t, power = C * square;
    float e = exp2_flushed(power);
    if (!kSixteenBits<T>) e = fmaf(kLn2 * e, fmaf(C, fmaf(t, t, -square), fmaf(C, square, -power)), e);
    float p = fmaf(fmaf(fmaf(fmaf(0.0043805717f, t, 0.04246461f), t, 0.18876736f), t, 0.4459618f), t, 0.5f);
    float q = fmaf(fmaf(fmaf(fmaf(fmaf(0.0109805055f, t, 0.10644504f), t, 0.48406133f), t, 1.2258008f), t, 1.6898087f), t, 1.0f);
    float tail = e * (p * reciprocal(q));
    return {x < 0.0f ? tail : 1.0f - tail, e};
  }
  // log2 of the upper tail; fits of our own. Up to 4.8 the power has an error of 2^-16.1 for f16 and 2^-11.1 for bf16;
  // beyond, it grows like that of 1 + erf(x) in f32. Past 12 both the tail and the power are practically zero.
  static WS_INLINE float log2_tail(f16, float t) {
    float p = fmaf(-1.4120036e-6f, t, 5.241367e-5f);
    p = fmaf(p, t, -8.5227902e-4f);
    p = fmaf(p, t, 8.1769545e-3f);
    p = fmaf(p, t, -5.3237431e-2f);
    p = fmaf(p, t, -0.45922682f);
    p = fmaf(p, t, -1.1509382f);
    return fmaf(p, t, -1.0000192f);
  }
  static WS_INLINE float log2_tail(bf16, float t) {
    float p = fmaf(-1.8391592e-4f, t, 4.2452775e-3f);
    p = fmaf(p, t, -4.1863907e-2f);
    p = fmaf(p, t, -0.47449332f);
    p = fmaf(p, t, -1.1433625f);
    return fmaf(p, t, -1.0006301f);
  }
  template <class T> static WS_INLINE float value(float x) {
    if constexpr (kSixteenBits<T>) {
      float tail = exp2_flushed(log2_tail(T(), fabsf(x)));
      return x * (x < 0.0f ? tail : 1.0f - tail);
    } else {
      return x * normal<T>(x).cdf;
    }
  }
  template <class T> static WS_INLINE float derivative(float x) {
    Normal n = normal<T>(x);
    return fmaf(x * 0.3989423f, n.e, n.cdf);
  }
};

}  // namespace warpsmith
