#pragma once
// The softmax of attention_sm90.cuh: from scores to weights, block by block. Defines as there.
//
// Weights are 2^(score - base), with a base for each row. Scores above the base do no harm as long as the weights of a
// block add up to less than 2^kSlack: weights and sums are as precise as if they were at most one, and what was summed
// before needs no factor. So scores are not searched for their maximum. The sums, which are needed anyway, show
// afterwards whether some score was too high, even if they overflowed. In that case the warp computes the scores of the
// block again and raises the base of the rows concerned. Whether a row is raised depends on its own scores alone; a warp
// does the work if any of its rows needs it.
//
// With kAnyBlock, the number of keys in a block does not change the bits of a row, except for terms below 2^-94 of its
// largest weight. The base is the score of the first key that the row sees, and weights are added in the order of the
// keys. A row with a score kSlack above its base is raised by a multiple of kSlack: its weights and sums are divided by a
// power of two, which changes no digit of the mantissa, so that it does not matter in which block this happens. It is not
// for f16, whose small weights would lose digits.
//
// Without, the base is the largest score of the first block of which the row sees any key, and a row is raised to its
// largest score.

#include "warpsmith/attention_producer.cuh"

namespace warpsmith::attention {

template <class T> constexpr bool has_range_of_f32(T) { return false; }
constexpr bool has_range_of_f32(bf16) { return true; }
// For heads of 64, which are limited by the exponentials, ordered sums would cost 4 %. Pages leave no registers for it.
constexpr bool kAnyBlock = HEAD_DIM == 128 && has_range_of_f32(T{}) && !PAGED;
constexpr float kSlack = has_range_of_f32(T{}) ? 32.0f : 15.0f, kHigh = has_range_of_f32(T{}) ? 0x1p32f : 0x1p15f;
// Whether a row may see nothing of the first block, but something of a later one.
constexpr bool kMayLackBase = WINDOW || PAGED;

// threadIdx.x, read again: for rare paths, so that the compiler does not compute what depends on it early and keep it in
// registers.
WS_INLINE u32 thread_now() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The state of a thread's two rows: their bases, in units of log2, and the sums of the weights of this thread's columns.
struct Rows {
  float top[2], sum[2];
  // Whether rows of the warp were raised, so that the sum of values before this block must be multiplied by a factor. With
  // kAnyBlock, it stays true for all later blocks.
  bool raised;

  // Turns a block of scores into weights, in place, and sets the factors if rows are raised. `again` computes the scores
  // again. The amounts by which rows are raised are kept in shared memory.
  template <bool kFirst, class Again>
  WS_INLINE void weigh(float (&s)[BLOCK_N / 2], float (&factor)[2], float scale, u32 shared, const Again& again) {
    if (kFirst || !kAnyBlock) raised = false;
    find_bases<kFirst>(s, scale);
    float added[2];
    u32 high[2] = {};
    if (kFirst || !kAnyBlock || !__any_sync(kAllLanes, raised)) {
      relate(s, scale);
      exponentials(s);
      add_up<kFirst>(s, added);
      // No score of the first block is above a base that is its largest.
      if ((kFirst && !kAnyBlock) || !__any_sync(kAllLanes, fmaxf(added[0], added[1]) >= kHigh)) return take<kFirst>(added);
#pragma unroll
      for (int h = 0; h < 2; ++h) high[h] = __ballot_sync(kAllLanes, added[h] >= kHigh);
      again();
    }
    relate(s, scale);
    if (kAnyBlock) {
      divide<kFirst>(s, factor, raised_at(shared));
    } else {
      raise(s, factor, high);
      exponentials(s);
    }
    add_up<kFirst>(s, added);
    take<kFirst>(added);
    raised = true;
  }

  // After the last block: makes `top` what the sums are relative to.
  WS_INLINE void end(u32 shared) {
    if (kAnyBlock && raised) {
      const u32 at = raised_at(shared);
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] += raised_by(at, h);
    }
  }

private:
  // Where the amount by which the first row is raised is kept; that of the second is 32 bytes further.
  static WS_INLINE u32 raised_at(u32 shared) {
    const u32 thread = thread_now();
    return shared + kRaisedAt + (thread / 32 * 16 - 64 + thread % 32 / 4) * 4;
  }

  static WS_INLINE float raised_by(u32 at, int h) {
    u32 bits;
    load_shared(bits, at + 32 * h);
    return bits_float(bits);
  }

  // A row that has seen nothing yet has scores of -inf; relative to zero, their weights are zero.
  WS_INLINE float base(int h) const { return kMayLackBase && top[h] == minus_infinity() ? 0.0f : top[h]; }

  // Whether a base is found in the first block of the tile or later does not change any bit.
  template <bool kFirst> WS_INLINE void find_bases(const float (&s)[BLOCK_N / 2], float scale) {
    // Most rows see the first key of the first block.
    if (kFirst && kAnyBlock) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = __shfl_sync(kAllLanes, s[2 * h], threadIdx.x % 32 / 4 * 4) * scale;
    }
    const bool all = kFirst && !kAnyBlock;
    if (!all && !kFirst && !kMayLackBase) return;
    if (!all && !__any_sync(kAllLanes, fminf(top[0], top[1]) == minus_infinity())) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float score = (kAnyBlock ? first(s, h) : largest(s, h)) * scale;
      if (all || top[h] == minus_infinity()) top[h] = score;
      if (!kMayLackBase && top[h] == minus_infinity()) top[h] = 0.0f;
    }
  }

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
      const float other_score = __shfl_xor_sync(kAllLanes, score, lanes);
      const int other_column = __shfl_xor_sync(kAllLanes, column, lanes);
      if (other_column < column) score = other_score, column = other_column;
    }
    return score;
  }

  // The largest score of row h, ignoring NaN, in four chains to hide latency.
  static WS_INLINE float largest(const float (&s)[BLOCK_N / 2], int h) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
    for (int j = 4; j < BLOCK_N / 8; ++j) most[j % 4] = fmaxf(most[j % 4], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    const float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    return quad_reduce<MaxIgnoringNan>(all);
  }

  // Scores relative to the bases.
  WS_INLINE void relate(float (&s)[BLOCK_N / 2], float scale) const {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = fmaf(s[i], scale, -base(i / 2 % 2));
  }
  static WS_INLINE void exponentials(float (&s)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = exp2_flushed(s[i]);
  }

  // The sums of the weights of a block; where kAnyBlock, of all so far.
  template <bool kFirst> WS_INLINE void add_up(const float (&weights)[BLOCK_N / 2], float (&added)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[2] = {kAnyBlock && !kFirst ? sum[h] : 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) {
        const float* pair = weights + 4 * j + 2 * h;
        if (kAnyBlock) {
          part[0] += pair[0] + pair[1];
        } else {
          part[0] += pair[0];
          part[1] += pair[1];
        }
      }
      added[h] = kAnyBlock ? part[0] : part[0] + part[1];
    }
  }
  template <bool kFirst> WS_INLINE void take(const float (&added)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = kAnyBlock || kFirst ? added[h] : sum[h] + added[h];
  }

  // Raises rows with scores that are too high to their largest score.
  WS_INLINE void raise(float (&s)[BLOCK_N / 2], float (&factor)[2], const u32 (&high)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Too high in one of the four threads of the row. Other rows do not matter.
      const bool raises = high[h] >> (threadIdx.x % 32 / 4 * 4) & 15;
      const float more = largest(s, h), before = top[h];
      if (raises) top[h] += more;
      const float by = raises ? top[h] - before : 0.0f;
      factor[h] = exp2_flushed(-by);
      sum[h] *= factor[h];
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) s[4 * j + 2 * h + c] -= by;
    }
  }

  // The weights of a block, if scores are too high in it or were in an earlier one. Raises a row by the largest multiple of
  // kSlack that does not exceed its largest score.
  template <bool kFirst> WS_INLINE void divide(float (&s)[BLOCK_N / 2], float (&factor)[2], u32 raised_at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = !kFirst && raised ? raised_by(raised_at, h) : 0.0f;
      const float after = fmaxf(floorf(largest(s, h) * (1.0f / kSlack)) * kSlack, before);
      __syncwarp();
      if (threadIdx.x % 4 == 0) store_shared(raised_at + 32 * h, float_bits(after));
      factor[h] = exp2_flushed(before - after);
      if (!kFirst) sum[h] *= factor[h];
      const float divisor = exp2_flushed(-after);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // The power of the same number whatever the block, times a power of two: the approximate powers of x and x + n
          // need not have the same mantissa. Powers of whole numbers are exact.
          float& x = s[4 * j + 2 * h + c];
          const float whole = floorf(x);
          x = x >= kSlack ? exp2_flushed(x - whole) * exp2_flushed(whole - after) : exp2_flushed(x) * divisor;
        }
    }
    __syncwarp();
  }
};

}  // namespace warpsmith::attention
