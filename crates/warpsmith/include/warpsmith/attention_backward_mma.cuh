#pragma once
// What the kernels of `attention_backward` on mma.sync share: tiles of lines in shared memory, and their products.
//
// Threads to data: a block of 4 warps owns 64 lines of a left operand, 16 a warp, which stay in shared memory. Blocks of LINES
// lines of a right operand go past them, copied ahead by cp.async into STAGES stages. A warp's products are fragments of m16n8:
// lane l has left lines l / 4 and l / 4 + 8, and right lines 2 (l % 4) and the next of each 8. Rounded, two of them are the left
// operand of a product with the right lines. A line of shared memory is 16 bytes longer than a head, which makes it an odd
// number of 16-byte pieces, so that the eight that one ldmatrix reads lie in different banks.
//
// Defines: T, the type, of 16 bits; HEAD_DIM; LINES, a multiple of 16; STAGES, 1 or 2; those of attention.cuh.

#include "warpsmith/attention_backward.cuh"
#include "warpsmith/mma.cuh"

namespace warpsmith::attention {

constexpr int kThreads = 128, kLeft = 64, kRight = LINES, kStages = STAGES;
constexpr int kPieces = HEAD_DIM / 8, kLine = (kPieces + 1) * 16;
constexpr int kBlocks = kRight / 8;
constexpr u32 kStage = 2 * kRight * kLine;

template <int kCount> WS_INLINE void clear(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = 0.0f;
}

// Copies `count` heads, `step` elements apart, into kCount lines; lines past the end become zeros.
template <int kCount> WS_INLINE void load_lines(u32 to, const T* first, i64 step, int count) {
#pragma unroll
  for (int i = 0; i < (kCount * kPieces + kThreads - 1) / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, line = index / kPieces, piece = index % kPieces;
    if (kCount * kPieces % kThreads != 0 && index >= kCount * kPieces) break;
    const bool exists = line < count;
    copy_async(to + line * kLine + piece * 16, first + (exists ? line : 0) * step + piece * 8, exists);
  }
}

// The addresses that a lane gives to ldmatrix: of a warp's lines as a left operand, and of right lines as a right operand whose
// columns they are, or whose rows.
WS_INLINE u32 left_at(u32 lines, int warp, int lane) { return lines + (warp * 16 + lane % 16) * kLine + lane / 16 * 16; }
WS_INLINE u32 columns_at(u32 lines, int lane) { return lines + (lane % 8 + lane / 16 * 8) * kLine + lane / 8 % 2 * 16; }
WS_INLINE u32 rows_at(u32 lines, int lane) { return lines + lane % 16 * kLine + lane / 16 * 16; }

// The products of a warp's left lines with right lines, at left_at and columns_at.
WS_INLINE void multiply_lines(float (&sum)[kBlocks][4], u32 left_lines, u32 right_lines) {
  clear(sum);
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    u32 left[4];
    load_matrices<false>(left, left_lines + step * 32);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      u32 right[4];
      load_matrices<false>(right, right_lines + j * 8 * kLine + step * 32);
      multiply(sum[j], left, right[0], right[1], T());
      multiply(sum[j + 1], left, right[2], right[3], T());
    }
  }
}

// Adds right lines, at rows_at, with these weights, rounded to T.
template <int kColumnBlocks>
WS_INLINE void accumulate(float (&sum)[kColumnBlocks][4], const float (&weight)[kBlocks][4], u32 right_lines) {
#pragma unroll
  for (int j = 0; j < kBlocks; j += 2) {
    const u32 left[4] = {pack_pair(weight[j][0], weight[j][1], T()), pack_pair(weight[j][2], weight[j][3], T()),
                         pack_pair(weight[j + 1][0], weight[j + 1][1], T()), pack_pair(weight[j + 1][2], weight[j + 1][3], T())};
#pragma unroll
    for (int c = 0; c < kColumnBlocks; c += 2) {
      u32 right[4];
      load_matrices<true>(right, right_lines + j * 8 * kLine + c * 16);
      multiply(sum[c], left, right[0], right[1], T());
      multiply(sum[c + 1], left, right[2], right[3], T());
    }
  }
}

// Writes the sums times `factor` to a warp's left lines, from `column` on; `first` is the first line of the block.
template <int kColumnBlocks>
WS_INLINE void store_lines(T* first, i64 step, int column, const float (&sum)[kColumnBlocks][4], float factor, int count, int warp,
                           int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = warp * 16 + half * 8 + lane / 4;
    if (line >= count) continue;
    T* to = first + line * step + column;
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
      *(u32*)(to + c * 8 + lane % 4 * 2) = pack_pair(sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor, T());
  }
}

}  // namespace warpsmith::attention
