#pragma once
// What the kernels of `attention_backward` without tensor cores share: products of tiles in shared memory.
//
// Threads to data: a block of 256 threads, 16 x 16, owns kTile lines of a left operand and goes past blocks of 64 lines of a
// right one. Thread (y, x) has the products of left lines y * kRows + i and right lines x + 16 * j, summed over head_dim in
// ascending order, with 16 elements in shared memory at a time. It then adds weighted right lines, one after the other, to
// columns x + 16 * c of its left lines, with 16 lines in shared memory at a time.

#include "warpsmith/attention_backward.cuh"

namespace warpsmith::attention {

constexpr int kThreads = 256, kLines = 64, kDepth = 16, kColumns = HEAD_DIM / 16;

template <int kTile> struct Block {
  static constexpr int kRows = kTile / 16;
  // Lines are one element longer than they need to be, so that writing a column does not hit a single bank.
  static constexpr int kLeftLine = kTile + 1, kRightLine = kLines + 1;
  float left[kDepth * kLeftLine], right[kDepth * kRightLine], weights[kTile * kRightLine], values[kDepth * HEAD_DIM];

  // Loads elements depth to depth + kDepth - 1 of `count` heads, the i-th at at(i), as [depth][head]; zeros past the end.
  template <int kHeads, class At> static WS_INLINE void load(float* to, int count, int depth, i64 dim, At at) {
#pragma unroll
    for (int i = 0; i < kHeads * kDepth / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, d = index % kDepth, head = index / kDepth;
      to[d * (kHeads + 1) + head] = head < count ? to_f32(at(head)[(depth + d) * dim]) : 0.0f;
    }
  }

  // The products of lines. Every thread of the block must call it.
  template <class Left, class Right>
  WS_INLINE void multiply(float (&sum)[kRows][4], int left_count, i64 left_dim, Left left_at, int right_count, i64 right_dim,
                          Right right_at) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll 1
    for (int depth = 0; depth < HEAD_DIM; depth += kDepth) {
      __syncthreads();
      load<kTile>(left, left_count, depth, left_dim, left_at);
      load<kLines>(right, right_count, depth, right_dim, right_at);
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < kDepth; ++d) {
        float r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) r[j] = right[d * kRightLine + x + 16 * j];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float l = left[d * kLeftLine + y * kRows + i];
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(l, r[j], sum[i][j]);
        }
      }
    }
  }

  // Adds the right lines with these weights, rounded to T. Every thread of the block must call it.
  template <class Right>
  WS_INLINE void accumulate(float (&sum)[kRows][kColumns], const float (&weight)[kRows][4], int count, i64 dim, Right at) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    // The weights of a left line are written and read by the lanes of one warp alone.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[(y * kRows + i) * kRightLine + x + 16 * j] = rounded<T>(weight[i][j]);
#pragma unroll 1
    for (int part = 0; part < count; part += kDepth) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kDepth * HEAD_DIM / kThreads; ++i) {
        const int index = threadIdx.x + i * kThreads, line = index / HEAD_DIM, column = index % HEAD_DIM;
        values[index] = part + line < count ? to_f32(at(part + line)[column * dim]) : 0.0f;
      }
      __syncthreads();
#pragma unroll 4
      for (int line = 0; line < kDepth; ++line) {
        float w[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) w[i] = weights[(y * kRows + i) * kRightLine + part + line];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float v = values[line * HEAD_DIM + x + 16 * c];
#pragma unroll
          for (int i = 0; i < kRows; ++i) sum[i][c] = fmaf(w[i], v, sum[i][c]);
        }
      }
    }
  }

  // Writes the sums times `factor` to the left lines.
  template <class To> static WS_INLINE void store(const float (&sum)[kRows][kColumns], float factor, int count, i64 dim, To at) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (y * kRows + i >= count) continue;
      T* to = at(y * kRows + i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) to[(x + 16 * c) * dim] = from_f32<T>(sum[i][c] * factor);
    }
  }

  static WS_INLINE void clear(float (&sum)[kRows][kColumns]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] = 0.0f;
  }
};

}  // namespace warpsmith::attention
