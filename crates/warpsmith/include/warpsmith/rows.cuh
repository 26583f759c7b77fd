#pragma once
// Where the rows of strided tensors start. `Rows` is the C twin of the host's struct of that name: the leading
// dimensions of an op's tensors, merged where all of them allow it.

#include "warpsmith/base.cuh"

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

// As row_offset for kCount tensors from kFirst on at once: one division a dimension, and little code.
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

// Offsets in elements of row `index` in the first kCount tensors: one division a dimension for all of them.
template <int kCount, class R> WS_INLINE void row_offsets(i64 (&at)[kCount], const R& rows, i64 index) {
#pragma unroll
  for (int t = 0; t < kCount; ++t) at[t] = 0;
#pragma unroll 1
  for (int d = rows.rank - 1; d > 0; --d) {
    const i64 q = index / rows.sizes[d], rest = index - q * rows.sizes[d];
#pragma unroll
    for (int t = 0; t < kCount; ++t) at[t] += rest * rows.strides[t][d];
    index = q;
  }
#pragma unroll
  for (int t = 0; t < kCount; ++t) at[t] += index * rows.strides[t][0];
}
