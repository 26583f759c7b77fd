#pragma once
// The softmax of attention_sm90.cuh: from scores to weights, block by block. Defines as there.
//
// Weights are relative to a score of their row, its base: that of the first key it sees. As long as no later score exceeds it by
// kSlack, in units of log2, what was summed before needs no factor: weights are less than 2^kSlack then, and they and their
// sums as exact as if they were at most one. A row with larger scores is raised.
//
// In bf16, which has the range of f32, a row is raised by whole multiples of kSlack: all its weights and sums are divided
// by a power of two, which changes none of their digits. So it makes no difference in which block that happens; nor does
// the number of keys of a block to the order of the sums. A row's bits are the same for any BLOCK_N, except where something is
// less than 2^-126 of its largest weight. Small weights of f16 lose digits: there a row gets a new base, its largest score
// so far, and BLOCK_N matters.
//
// Which rows are raised depends on their scores alone; whether a warp looks for them, on whether it has any.

#include "warpsmith/attention_producer.cuh"

template <class T> constexpr bool has_range_of_f32(T) { return false; }
constexpr bool has_range_of_f32(bf16) { return true; }
constexpr bool kAnyBlock = has_range_of_f32(T{});
constexpr float kSlack = kAnyBlock ? 32.0f : 14.0f;
constexpr int kEverything = (int)0x80000000;
// Whether a row may see nothing of the first block, but something of a later one.
constexpr bool kMayLackBase = WINDOW || PAGED;

// The state of the rows of a thread: what weights are relative to, in units of log2, and the sums of the weights of this
// thread's columns only.
struct Rows {
  float top[2], sum[2];
  // What scores of the warp, relative to their base, have to stay below for there to be nothing to raise, as integers. If rows
  // were raised by multiples of kSlack, all blocks have something to raise.
  int limit;

  // The weights of a block of scores, in place. Returns whether some earlier sums of the warp are to be multiplied by `factor`.
  // By how much rows are raised is kept in shared memory, at `raised_at`, and 32 bytes further for the second row.
  template <bool kFirst> WS_INLINE bool weigh(float (&s)[BLOCK_N / 2], float (&factor)[2], float scale, u32 raised_at) {
    if (kFirst) {
      limit = (int)float_bits(kSlack);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = 0.0f;
        top[h] = __shfl_sync(0xffffffffu, s[2 * h], threadIdx.x % 32 / 4 * 4) * scale;
      }
    }
    if ((kFirst || kMayLackBase) && __any_sync(0xffffffffu, fminf(top[0], top[1]) == minus_infinity())) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (top[h] == minus_infinity()) {
          top[h] = first(s, h) * scale;
          if (!kMayLackBase && top[h] == minus_infinity()) top[h] = 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = fmaf(s[i], scale, -base(i / 2 % 2));
    const bool raised = __any_sync(0xffffffffu, largest_bits(s) >= limit);
    if (raised && kAnyBlock) {
      divide(s, factor, raised_at);
      add_up(s);
      return true;
    }
    if (raised) raise(s, factor);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = exp2_flushed(s[i]);
    add_up(s);
    return raised;
  }

  // Once all blocks have been: what the sums are relative to.
  WS_INLINE void end(u32 raised_at) {
    if (kAnyBlock && limit < 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] += bits_float(load_shared_word(raised_at + 32 * h));
    }
  }

private:
  // Where nothing was seen yet, scores stay -inf and weights become zero.
  WS_INLINE float base(int h) const { return kMayLackBase && top[h] == minus_infinity() ? 0.0f : top[h]; }

  // The first score of row h that is not -inf, in the order of the keys; -inf if there is none.
  static WS_INLINE float first(const float (&s)[BLOCK_N / 2], int h) {
    float score = minus_infinity();
    int column = BLOCK_N;
#pragma unroll
    for (int j = BLOCK_N / 8 - 1; j >= 0; --j)
#pragma unroll
      for (int c = 1; c >= 0; --c)
        if (s[4 * j + 2 * h + c] != minus_infinity()) score = s[4 * j + 2 * h + c], column = 8 * j + c;
    column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float other_score = __shfl_xor_sync(0xffffffffu, score, lanes);
      const int other_column = __shfl_xor_sync(0xffffffffu, column, lanes);
      if (other_column < column) score = other_score, column = other_column;
    }
    return score;
  }

  // The largest of the scores of row h. NaN does not count.
  static WS_INLINE float largest(const float (&s)[BLOCK_N / 2], int h) {
    float most = s[2 * h];
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }

  // The bits of the largest of the scores of this thread, if some are positive. Positive numbers are in the order of their bits
  // as integers, and all above the negative ones: so integers will do, of which one instruction compares three.
  static WS_INLINE int largest_bits(const float (&s)[BLOCK_N / 2]) {
    int most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = (int)float_bits(s[i]);
#pragma unroll
    for (int i = 4; i < BLOCK_N / 2; i += 2)
      most[i / 2 % 4] = max(max((int)float_bits(s[i]), (int)float_bits(s[i + 1])), most[i / 2 % 4]);
    return max(max(most[0], most[1]), max(most[2], most[3]));
  }

  // In the order of the keys, whatever block they are in.
  WS_INLINE void add_up(const float (&weights)[BLOCK_N / 2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) sum[h] += weights[4 * j + 2 * h] + weights[4 * j + 2 * h + 1];
  }

  // Gives rows with scores that are too high a higher base, their largest score.
  WS_INLINE void raise(float (&s)[BLOCK_N / 2], float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float more = largest(s, h), before = top[h];
      if (more >= kSlack) top[h] += more;
      const float by = more >= kSlack ? top[h] - before : 0.0f;
      factor[h] = exp2_flushed(-by);
      sum[h] *= factor[h];
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) s[4 * j + 2 * h + c] -= by;
    }
  }

  // The weights of a block, where scores are too high in it or were in one before. Raises rows by the largest multiple of kSlack
  // that is in one of their scores.
  WS_INLINE void divide(float (&s)[BLOCK_N / 2], float (&factor)[2], u32 raised_at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = limit < 0 ? bits_float(load_shared_word(raised_at + 32 * h)) : 0.0f;
      const float after = fmaxf(floorf(largest(s, h) * (1.0f / kSlack)) * kSlack, before);
      __syncwarp();
      if (threadIdx.x % 4 == 0) store_shared_word(raised_at + 32 * h, float_bits(after));
      factor[h] = exp2_flushed(before - after);
      sum[h] *= factor[h];
      const float divisor = exp2_flushed(-after);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // The difference to a high score is exact, the one to a low score would not be.
          float& x = s[4 * j + 2 * h + c];
          x = x >= kSlack ? exp2_flushed(x - after) : exp2_flushed(x) * divisor;
        }
    }
    __syncwarp();
    limit = kEverything;
  }
};
