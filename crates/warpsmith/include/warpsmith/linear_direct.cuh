#pragma once
// Rows of w that start at any element, on their way to shared memory through registers: the copy engine takes only rows that
// start at multiples of 16 bytes.
//
// Threads to data: eight neighbouring lanes have the 128 bytes that a stage needs of a row, 16 bytes each, and the 128
// threads of a warpgroup 16 rows; a tile of kRows rows takes kRounds of these. A lane reads the two aligned pieces of
// memory that hold its 16 bytes, of which the next lane reads one too, and finds it in L1. With a gate, the first half of
// a tile are rows of gate and the second half rows of up. Rows past the last are the last once more: their results are
// not stored.

#include "warpsmith/linear.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith::linear {

// Two aligned neighbouring pieces of memory.
struct PiecePair {
  u32 low[4], high[4];

  // Starts to load both, which must exist.
  WS_INLINE void load(u64 at) {
    load_words(low, (const void*)at);
    load_words(high, (const void*)(at + 16));
  }
  // Loads what there is of both in a matrix that is [start, end).
  WS_INLINE void load_edge(u64 at, u64 start, u64 end) {
    load_edge(low, at, start, end);
    load_edge(high, at + 16, start, end);
  }

  // The 16 bytes that begin `bytes` into them.
  WS_INLINE void take(u32 (&out)[4], u32 bytes) const {
    u32 a[6], b[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) a[i] = bytes & 8 ? word(i + 2) : word(i);
#pragma unroll
    for (int i = 0; i < 5; ++i) b[i] = bytes & 4 ? a[i + 1] : a[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __funnelshift_r(b[i], b[i + 1], (bytes & 2) * 8);
  }

  // Zeros from element `count` on.
  WS_INLINE static void cut(u32 (&w)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = count >= 2 * i + 2 ? w[i] : count == 2 * i + 1 ? w[i] & 0xffff : 0;
  }

 private:
  WS_INLINE u32 word(int i) const { return i < 4 ? low[i] : high[i - 4]; }
  WS_INLINE static void load_edge(u32 (&w)[4], u64 at, u64 start, u64 end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = 0;
    if (at >= start && at + 16 <= end) {
      load_words(w, (const void*)at);
    } else if (at + 16 > start && at < end) {
      u32 elements[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u64 element = at + 2 * i;
        elements[i] = element >= start && element < end ? *(const u16*)element : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = elements[2 * i] | elements[2 * i + 1] << 16;
    }
  }
};

// A thread's rows of a tile of kRows rows of w.
template <int kRows> struct DirectRows {
  static constexpr int kRounds = kRows / 16, kPartRows = GATE ? kRows / 2 : kRows;
  static_assert(kPartRows % 16 == 0, "a round is of one part");

  // Of each round's row: the aligned piece that holds the beginning of this lane's first 16 bytes, and where it begins.
  u64 at[kRounds];
  u32 bytes[kRounds];
  int batch;

  WS_INLINE DirectRows() {}
  WS_INLINE DirectRows(const LinearParams& p, int column, int batch) : batch(batch) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int j = min(column + round * 16 % kPartRows + (int)(threadIdx.x / 8), p.n - 1);
      const int row = round * 16 < kPartRows ? gate_row(p, j) : up_row(p, j);
      const u64 start = p.w + (batch * p.w_batch + row * p.w_row) * 2;
      bytes[round] = (u32)start & 15;
      at[round] = (start & ~(u64)15) + place() * 16;
    }
  }

  WS_INLINE static int place() { return (int)(threadIdx.x % 8); }

  // Starts to load the k-th 128 bytes of all rows. One lane of eight also brings those `ahead` stages later to L2. In a row's
  // first and last two stages pieces may reach past its ends, and past those of the matrix, where nothing is read.
  WS_INLINE void load(PiecePair (&pairs)[kRounds], const LinearParams& p, int k, int ahead) const {
    if (k > 0 && k * 64 + 72 <= p.k) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) pairs[round].load(at[round] + (i64)k * 128);
      if (place() == 0 && (k + ahead) * 64 < p.k) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) prefetch(round, k + ahead);
      }
    } else {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const u64 start = p.w + batch * p.w_batch * 2;
        const u64 end = start + ((num_weight_rows(p) - 1) * p.w_row + p.k) * 2;
        pairs[round].load_edge(at[round] + (i64)k * 128, start, end);
      }
    }
  }
  // Stores what was loaded of the k-th 128 bytes to the stage at `to`, in the swizzle of the copy engine, with zeros past K.
  WS_INLINE void store(u32 to, const PiecePair (&pairs)[kRounds], const LinearParams& p, int k) const {
    const int left = p.k - k * 64 - place() * 8;
    to += swizzled<128>(threadIdx.x / 8 * 128 + place() * 16);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      u32 words[4];
      pairs[round].take(words, bytes[round]);
      if (left < 8) PiecePair::cut(words, left);
      // The swizzle repeats every 8 rows.
      store_shared(to + round * 16 * 128, words);
    }
  }
  WS_INLINE void prefetch(int round, int k) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at[round] + (i64)k * 128) : "memory");
  }
};

}  // namespace warpsmith::linear
