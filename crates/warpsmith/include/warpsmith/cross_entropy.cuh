#pragma once
// Losses of rows of logits: the running sums of a thread, how the threads of a block join theirs, and gradients.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith {
namespace cross_entropy {

constexpr float kLowest = -3.4028234663852886e38f;

WS_INLINE float no_number() { return bits_float(0x7fffffffu); }

// e^x for x <= 0, as exact as logits of type T need it.
template <class T> WS_INLINE float power(float x) { return exp_neg<T>(x); }

// A logit with the soft cap.
template <bool kCapped> WS_INLINE float capped(float x, float cap) { return kCapped ? cap * tanhf(x / cap) : x; }

// Sums over some logits of a row: exponentials are relative to the largest, which is the lowest finite number at least, so
// that no difference to it is NaN unless the row has NaN or plus infinity.
template <class T, bool kCapped, bool kSmooth> struct Sums {
  float top = kLowest, powers = 0.0f, below = 0.0f, count = 0.0f;

  // Adds the first `present` of some logits.
  template <int kCount> WS_INLINE void add(const float (&x)[kCount], int present, float cap) {
    float z[kCount], most = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      z[i] = capped<kCapped>(x[i], cap);
      if (i < present) most = fmaxf(most, z[i]);
    }
    rebase(most);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < present) {
        powers += power<T>(z[i] - top);
        if (kSmooth) below += top - z[i];
      }
    if (kSmooth) count += (float)present;
  }

  // Makes everything relative to a larger logit.
  WS_INLINE void rebase(float most) {
    if (most == top) return;
    if (powers != 0.0f) powers *= power<T>(top - most);
    if (kSmooth && count > 0.0f) below = fmaf(count, most - top, below);
    top = most;
  }

  // Those of all threads, in every thread. `scratch` holds three floats a warp, of which none is in use.
  template <int kThreads> WS_INLINE void join(float* scratch) {
    float most[1] = {top};
    block_reduce<MaxIgnoringNan, kThreads>(most, scratch);
    rebase(most[0]);
    float sums[2] = {powers, below};
    block_reduce<Sum, kThreads>(sums, scratch + kThreads / 32);
    powers = sums[0];
    below = sums[1];
  }
};

// The options of a loss.
struct Formula {
  float cap, smoothing, z_loss;
};

struct Loss {
  float loss, lse;
};

// The loss of a row of `n` logits with these sums and this target's logit.
template <class T, bool kCapped, bool kSmooth>
WS_INLINE Loss loss_of(const Sums<T, kCapped, kSmooth>& sums, const Formula& f, float target, i64 n) {
  // Only a row that is all minus infinity has no powers.
  const float log = sums.powers == 0.0f ? no_number() : logf(sums.powers);
  const float lse = sums.top + log;
  float loss = log;
  if (!kSmooth || f.smoothing != 1.0f) {
    const float below = sums.top - capped<kCapped>(target, f.cap);
    loss += kSmooth ? (1.0f - f.smoothing) * below : below;
  }
  if (kSmooth) loss += f.smoothing * (sums.below / (float)n);
  if (f.z_loss != 0.0f) loss += f.z_loss * (lse * lse);
  return {loss, lse};
}

// What the gradients of a row's logits have in common.
struct Slope {
  float lse, weight, even, factor;

  WS_INLINE Slope(const Formula& f, float lse, float factor, i64 n)
      : lse(lse), weight(f.z_loss == 0.0f ? 1.0f : 1.0f + 2.0f * f.z_loss * lse), even(-f.smoothing / (float)n),
        factor(factor) {}

  template <bool kCapped> WS_INLINE float of(const Formula& f, float x, bool is_target) const {
    const float t = kCapped ? tanhf(x / f.cap) : 0.0f, z = kCapped ? f.cap * t : x;
    const float share = is_target ? even - (1.0f - f.smoothing) : even;
    const float d = fmaf(expf(z - lse), weight, share) * factor;
    return kCapped ? d * (1.0f - t * t) : d;
  }
};

// The column of a target: -1 where the row is ignored, -2 where there is no such column.
WS_INLINE i64 column_of(i64 target, i64 ignore_index, i64 vocab) {
  if (target == ignore_index) return -1;
  return (u64)target < (u64)vocab ? target : -2;
}

}  // namespace cross_entropy
}  // namespace warpsmith
