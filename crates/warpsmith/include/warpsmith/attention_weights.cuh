#pragma once
// The softmax of attention_sm90.cuh: from scores to weights, block by block. Defines as there.
//
// Weights are relative to a score of their row, its base: the largest of the first block that the row sees any of. As long as
// no later score exceeds it by more than kSlack, in units of log2, it stays, and what was summed before needs no factor:
// weights are at most 2^kSlack then, and they and their sums as exact as if they were at most one. Whether a base is raised
// depends on the scores of its row alone; whether a warp looks for rows to raise, on whether it has any.

#include "warpsmith/attention_tiles.cuh"

constexpr float kSlack = 8.0f;
// Whether a block may hide all its keys from a row, so that the row has no base yet.
constexpr bool kMayLackBase = CAUSAL || WINDOW || PAGED;

// The state of the rows of a thread: what weights are relative to, in units of log2, and the sums of the weights of this
// thread's columns only.
struct Rows {
  float top[2], sum[2];

  // The weights of a block of scores, in place. Returns whether some earlier sums of the warp are to be multiplied by `factor`.
  template <bool kFirst> WS_INLINE bool weigh(float (&s)[BLOCK_N / 2], float (&factor)[2], float scale) {
    // Whether a base is found in the first block of the tile or later makes no difference, in no bit.
    if (kFirst || (kMayLackBase && __any_sync(0xffffffffu, fminf(top[0], top[1]) == minus_infinity()))) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float most = largest(s, h) * scale;
        if (kFirst || top[h] == minus_infinity()) top[h] = most;
      }
    }
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = fmaf(s[i], scale, -base(i / 2 % 2));
    bool raised = false;
    if (!kFirst) {
      raised = __any_sync(0xffffffffu, above_slack(s));
      if (raised) raise(s, factor);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * j + 2 * h + c];
          x = exp2_flushed(x);
          part[c] += x;
        }
      sum[h] = kFirst ? part[0] + part[1] : sum[h] + (part[0] + part[1]);
    }
    return raised;
  }

private:
  // Where nothing was seen yet, scores stay -inf and weights become zero.
  WS_INLINE float base(int h) const { return kMayLackBase && top[h] == minus_infinity() ? 0.0f : top[h]; }

  // The largest of the scores of row h, in four chains for the sake of latency. NaN does not count.
  static WS_INLINE float largest(const float (&s)[BLOCK_N / 2], int h) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
    for (int j = 4; j < BLOCK_N / 8; ++j) most[j % 4] = fmaxf(most[j % 4], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, 1));
    return fmaxf(all, __shfl_xor_sync(0xffffffffu, all, 2));
  }

  // Whether a score of this thread exceeds its base by more than the slack. Positive numbers are in the order of their bits as
  // integers, and all above the negative ones: so integers will do, of which one instruction compares three.
  static WS_INLINE bool above_slack(const float (&s)[BLOCK_N / 2]) {
    int most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = (int)float_bits(s[i]);
#pragma unroll
    for (int i = 4; i < BLOCK_N / 2; i += 2)
      most[i / 2 % 4] = max(max((int)float_bits(s[i]), (int)float_bits(s[i + 1])), most[i / 2 % 4]);
    return max(max(most[0], most[1]), max(most[2], most[3])) > (int)float_bits(kSlack);
  }

  // Raises the bases that are too low to the largest of the scores, which are relative to them.
  WS_INLINE void raise(float (&s)[BLOCK_N / 2], float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float more = largest(s, h), before = top[h];
      if (more > kSlack) top[h] += more;
      const float by = more > kSlack ? top[h] - before : 0.0f;
      factor[h] = exp2_flushed(-by);
      sum[h] *= factor[h];
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) s[4 * j + 2 * h + c] -= by;
    }
  }
};
