#pragma once
// Divergences of two rows of logits: the running sums of a thread, how the threads of a block join theirs, and gradients. Of the
// two rows, the first is that of the distribution that weighs.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith {
namespace kl_div {

constexpr float kLowest = -3.4028234663852886e38f;

WS_INLINE float no_number() { return bits_float(0x7fffffffu); }
WS_INLINE bool is_absent(float x) { return x == minus_infinity(); }

// Sums over some logits of two rows: exponentials are relative to the largest, which is the lowest finite number at least, so
// that no difference to it is NaN unless the row has NaN or plus infinity.
template <class T> struct Sums {
  float top[2] = {kLowest, kLowest}, powers[2] = {0.0f, 0.0f};
  // What the first logits are above the second, both below their largest, weighed by the first exponentials.
  float above = 0.0f;
  // More than zero if the second distribution lacks a column that the first has.
  float lacking = 0.0f;

  // Adds the first `present` of some logits. `inverse` is that of the temperature.
  template <int kCount> WS_INLINE void add(const float (&x)[kCount], const float (&y)[kCount], int present, float inverse) {
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < present) {
        most[0] = fmaxf(most[0], x[i]);
        most[1] = fmaxf(most[1], y[i]);
      }
    rebase(most, inverse);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < present) {
        const float a = (x[i] - top[0]) * inverse, b = (y[i] - top[1]) * inverse;
        const float p = exp_neg<T>(a);
        powers[0] += p;
        powers[1] += exp_neg<T>(b);
        // What has no weight adds nothing, infinite or not.
        if (p > 0.0f) above = fmaf(p, a - b, above);
        if (is_absent(y[i]) && !is_absent(x[i])) lacking = 1.0f;
      }
  }

  // Makes everything relative to larger logits.
  WS_INLINE void rebase(const float (&most)[2], float inverse) {
    if (most[0] == top[0] && most[1] == top[1]) return;
    const float first = (most[0] - top[0]) * inverse, second = (most[1] - top[1]) * inverse;
    // What is nothing stays so, however far down it goes.
    const float factor = powers[0] == 0.0f ? 0.0f : exp_neg<T>(-first);
    above = factor == 0.0f ? 0.0f : factor * fmaf(powers[0], second - first, above);
    powers[0] *= factor;
    if (powers[1] != 0.0f) powers[1] *= exp_neg<T>(-second);
    top[0] = most[0];
    top[1] = most[1];
  }

  // Those of all threads, in every thread. `scratch` holds six floats a warp, of which none is in use.
  template <int kThreads> WS_INLINE void join(float* scratch, float inverse) {
    float most[2] = {top[0], top[1]};
    block_reduce<MaxIgnoringNan, kThreads>(most, scratch);
    rebase(most, inverse);
    float sums[4] = {powers[0], powers[1], above, lacking};
    block_reduce<Sum, kThreads>(sums, scratch + 2 * kThreads / 32);
    powers[0] = sums[0];
    powers[1] = sums[1];
    above = sums[2];
    lacking = sums[3];
  }
};

struct Loss {
  float loss, lse[2];
};

// The loss of two rows with these sums.
template <class T> WS_INLINE Loss loss_of(const Sums<T>& sums, float temperature) {
  float logs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    // Only a row that is all minus infinity has no powers.
    logs[i] = sums.powers[i] == 0.0f ? no_number() : logf(sums.powers[i]);
  const float apart = logs[1] - logs[0];
  float loss = sums.above / sums.powers[0] + apart;
  // NaN of either logarithm stays.
  if (sums.lacking > 0.0f) loss = apart - minus_infinity();
  return {loss, {fmaf(temperature, logs[0], sums.top[0]), fmaf(temperature, logs[1], sums.top[1])}};
}

// What the gradients of a row's logits have in common: of student and teacher, in this order.
template <bool kReverse> struct Slope {
  float lse[2], loss, inverse, factor;

  WS_INLINE Slope(float lse_of_student, float lse_of_teacher, float loss, float inverse, float dloss)
      : lse{lse_of_student, lse_of_teacher}, loss(loss), inverse(inverse),
        // An infinite loss has no gradient, a finite one adds nothing here.
        factor((kReverse ? dloss + (loss - loss) : dloss) * inverse) {}

  WS_INLINE float of(float x, float y) const {
    const float a = (x - lse[0]) * inverse, b = (y - lse[1]) * inverse;
    const float q = expf(a);
    if (!kReverse) return (q - expf(b)) * factor;
    // What has no probability keeps none, however much the teacher has. NaN is not zero.
    return q == 0.0f ? q * factor : q * ((a - b) - loss) * factor;
  }
};

}  // namespace kl_div
}  // namespace warpsmith
