#pragma once
// Rows of strided tensors: where they start, and which threads work on which of them. `Rows` is the C twin of the
// host's struct of that name: the leading dimensions of an op's tensors, merged where all of them allow it.

#include "warpsmith/base.cuh"

namespace warpsmith {

// Offset in elements of row `index` in tensor `t`. Rows are counted in 32 bits (the host refuses more), because a
// 64-bit division is a call; offsets need 64. One dimension, the usual case, needs no division.
template <class R> WS_INLINE i64 row_offset(const R& rows, int t, i64 index) {
  i64 offset = 0;
  u32 left = (u32)index;
  for (int d = rows.rank - 1; d > 0; --d) {
    u32 size = (u32)rows.sizes[d], q = left / size;
    offset += (i64)(left - q * size) * rows.strides[t][d];
    left = q;
  }
  return offset + (i64)left * rows.strides[t][0];
}

// As row_offset for the kCount tensors from kFirst on: one division a dimension, and little code.
template <int kFirst, int kCount, class R> WS_INLINE void row_offsets(i64 (&offsets)[kCount], const R& rows, i64 index) {
#pragma unroll
  for (int t = 0; t < kCount; ++t) offsets[t] = 0;
#pragma unroll 1
  for (int d = rows.rank - 1; d > 0; --d) {
    i64 q = index / rows.sizes[d];
#pragma unroll
    for (int t = 0; t < kCount; ++t) offsets[t] += (index - q * rows.sizes[d]) * rows.strides[kFirst + t][d];
    index = q;
  }
#pragma unroll
  for (int t = 0; t < kCount; ++t) offsets[t] += index * rows.strides[kFirst + t][0];
}

// Row `index` of tensor t, which starts at the address `base`.
template <class T, class R> WS_INLINE T* row_at(u64 base, const R& rows, int t, i64 index) {
  return (T*)base + row_offset(rows, t, index);
}

// The row of a thread where kLanes threads work on a row and a block has kRows of them.
template <int kLanes, int kRows> struct ThreadRow {
  static_assert(kRows == 1 || kLanes == 32, "several rows a block only with a warp a row");
  int lane;   // of the threads of the row
  i64 index;  // of the row

  WS_INLINE ThreadRow() : lane(threadIdx.x % kLanes), index((i64)blockIdx.x * kRows + threadIdx.x / kLanes) {}
};

// A block of kThreads threads as lines of 2^lane_bits threads each, for row lengths that are known only at run time.
// `lane_bits` refers to the kernel's parameters: to read it again is cheaper than to keep it in a register.
template <int kThreads> struct Lines {
  const int& lane_bits;

  WS_INLINE int lane() const { return threadIdx.x & ((1 << lane_bits) - 1); }
  WS_INLINE u32 line() const { return threadIdx.x >> lane_bits; }
  WS_INLINE int count() const { return kThreads >> lane_bits; }
};

// Where a block is in a grid that has `columns` blocks side by side.
struct BlockPlace {
  u32 row, column;

  WS_INLINE explicit BlockPlace(u32 columns) : row(blockIdx.x / columns), column(blockIdx.x - row * columns) {}
};

// Number `at` of an array of 64-bit or 32-bit integers.
WS_INLINE i64 load_integer(u64 base, bool is_wide, i64 at) {
  return is_wide ? ((const i64*)base)[at] : ((const i32*)base)[at];
}

}  // namespace warpsmith
