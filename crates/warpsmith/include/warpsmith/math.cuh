#pragma once
// Activation functions in f32. `value<false>` is within a few units in the last place of the exact result, in the
// tails too; `value<true>` is for results that are rounded to 16 bits: within 2^-13, in fewer instructions. There is no
// coarse derivative, since near its zero nothing of one would be left.

#include "warpsmith/base.cuh"

// 1 / x to one unit in the last place, for x in 1..2^20.
WS_INLINE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x to two units in the last place of a normal result.
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

// e^-|x|. Coarse: the product is rounded before the power is taken, an error of up to 2^-17.
template <bool kCoarse> WS_INLINE float exp_neg_abs(float x) {
  return kCoarse ? exp2_approx(-1.4426950408889634f * fabsf(x)) : expf(-fabsf(x));
}

// sigmoid(x) = numerator / denominator, free of overflow and cancellation; u = e^-|x|.
struct Sigmoid {
  float numerator, denominator, u;
};
template <bool kCoarse> WS_INLINE Sigmoid sigmoid_parts(float x) {
  float u = exp_neg_abs<kCoarse>(x);
  return {x < 0.0f ? u : 1.0f, 1.0f + u, u};
}

struct Relu {
  // Comparisons rather than fmaxf, which would lose NaN.
  template <bool kCoarse> static WS_INLINE float value(float x) { return x < 0.0f ? 0.0f : x; }
  static WS_INLINE float derivative(float x) { return x > 0.0f ? 1.0f : (x != x ? x : 0.0f); }
};

struct Silu {
  template <bool kCoarse> static WS_INLINE float value(float x) {
    Sigmoid s = sigmoid_parts<kCoarse>(x);
    return x * (s.numerator * reciprocal(s.denominator));
  }
  static WS_INLINE float derivative(float x) {
    // sigmoid(x) (1 + x sigmoid(-x)): the factor outside the sum keeps the error small where the sum is zero.
    Sigmoid s = sigmoid_parts<false>(x);
    float inverse = reciprocal(s.denominator);
    return (s.numerator * inverse) * fmaf(x, (x < 0.0f ? 1.0f : s.u) * inverse, 1.0f);
  }
};

// x/2 (1 + tanh z) = x sigmoid(2 z), with 2 z = x (A + B x^2).
struct GeluTanh {
  static constexpr float A = 1.5957691216057308f, B = 0.044715f * 1.5957691216057308f;
  template <bool kCoarse> static WS_INLINE float value(float x) {
    Sigmoid s = sigmoid_parts<kCoarse>(x * fmaf(x * x, B, A));
    return x * (s.numerator * reciprocal(s.denominator));
  }
  static WS_INLINE float derivative(float x) {
    float square = x * x;
    Sigmoid s = sigmoid_parts<false>(x * fmaf(square, B, A));
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
  template <bool kCoarse> static WS_INLINE Parts parts(float x) {
    float u = exp_neg_abs<kCoarse>(x);
    bool negative = x < 0.0f;
    float a = negative ? u * (u + 2.0f) : fmaf(2.0f, u, 1.0f);
    return {u, a, a + (negative ? 2.0f : 2.0f * u * u)};
  }
  template <bool kCoarse> static WS_INLINE float value(float x) {
    Parts m = parts<kCoarse>(x);
    return x * (m.a * reciprocal(m.b));
  }
  static WS_INLINE float derivative(float x) {
    // d/dx tanh(softplus(x)) = 4 w (w + 1) / (w^2 + 2w + 2)^2, and for positive x the same in u.
    Parts m = parts<false>(x);
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
  // Phi(x) and e^(-x^2/2). The upper tail is e^(-t^2/2) P(t) / Q(t), a fit of this project with an error of 2^-26 up to
  // 14.5, where the tail is zero in f32. The square is exact in two parts.
  static WS_INLINE Normal normal(float x) {
    float t = fminf(fabsf(x), 14.5f), m = -0.5f * t, h = m * t;
    float e = expf(h);
    e = fmaf(e, fmaf(m, t, -h), e);
    float p = fmaf(fmaf(fmaf(fmaf(0.0040841387f, t, 0.040436465f), t, 0.1826814f), t, 0.43759477f), t, 0.5f);
    float q = fmaf(fmaf(fmaf(fmaf(fmaf(0.010237296f, t, 0.10136572f), t, 0.46799994f), t, 1.2002792f), t, 1.6730744f), t, 1.0f);
    float tail = e * (p * reciprocal(q));
    return {x < 0.0f ? tail : 1.0f - tail, e};
  }
  template <bool kCoarse> static WS_INLINE float value(float x) {
    if (!kCoarse) return x * normal(x).cdf;
    // log2 of the upper tail up to 14.5, where it is zero in f32; error of the power 2^-13.6.
    float t = fminf(fabsf(x), 14.5f);
    float p = fmaf(-1.4180350e-9f, t, 1.1079374e-7f);
    p = fmaf(p, t, -3.7853474e-6f);
    p = fmaf(p, t, 7.4739211e-5f);
    p = fmaf(p, t, -9.5307169e-4f);
    p = fmaf(p, t, 8.3643487e-3f);
    p = fmaf(p, t, -5.3201154e-2f);
    p = fmaf(p, t, -0.45973438f);
    p = fmaf(p, t, -1.1505286f);
    float tail = exp2_flushed(fmaf(p, t, -1.0000645f));
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
  static WS_INLINE float derivative(float x) {
    Normal n = normal(x);
    return fmaf(x * 0.3989423f, n.e, n.cdf);
  }
};
