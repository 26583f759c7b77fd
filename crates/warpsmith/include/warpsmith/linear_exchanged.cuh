#pragma once
// The output of `linear` where rows of w are the rows of the products, and rows of x their columns: the counterpart of
// linear_output.cuh, for 16-bit results, and residuals, whose rows are whole pieces of 16 bytes.
//
// A lane's sums lie in a few columns of the result, so they are transposed on their way into shared memory. A warp has
// 16 columns, too few for the copy engine, so the warps of a warpgroup fill boxes of 64 columns together.
//
// Defines: those of linear_output.cuh; BLOCK_M, the rows of x in a tile, a multiple of 8.

#include "warpsmith/linear.cuh"
#include "warpsmith/mbarrier.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/vec.cuh"
#include "warpsmith/wgmma.cuh"

namespace warpsmith {

// Products with a number of columns that is a multiple of 8, but not of 16.
#define WS_OUT4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define WS_ROWS4H WS_ROWS4 ", %32, %33, %34, %35"
#define WS_ROWS7H WS_ROWS7 ", %56, %57, %58, %59"
#define WS_ROWS8H WS_ROWS8 ", %64, %65, %66, %67"
#define WS_ROWS9H WS_ROWS9 ", %72, %73, %74, %75"
#define WS_ROWS10H WS_ROWS10 ", %80, %81, %82, %83"
#define WS_ROWS11H WS_ROWS11 ", %88, %89, %90, %91"
#define WS_ROWS12H WS_ROWS12 ", %96, %97, %98, %99"
#define WS_ROWS13H WS_ROWS13 ", %104, %105, %106, %107"
#define WS_OUTS4H WS_OUTS4, WS_OUT4(32)
#define WS_OUTS7H WS_OUTS7, WS_OUT4(56)
#define WS_OUTS8H WS_OUTS8, WS_OUT4(64)
#define WS_OUTS9H WS_OUTS9, WS_OUT4(72)
#define WS_OUTS10H WS_OUTS10, WS_OUT4(80)
#define WS_OUTS11H WS_OUTS11, WS_OUT4(88)
#define WS_OUTS12H WS_OUTS12, WS_OUT4(96)
#define WS_OUTS13H WS_OUTS13, WS_OUT4(104)
#define WS_WGMMA_ODD_WIDTHS(type, kind)                            \
  WS_WGMMA_16(type, type, kind, 4H, 72, 36, 37, 38, 39, 40)        \
  WS_WGMMA_16(type, type, kind, 7H, 120, 60, 61, 62, 63, 64)       \
  WS_WGMMA_16(type, type, kind, 8H, 136, 68, 69, 70, 71, 72)       \
  WS_WGMMA_16(type, type, kind, 9H, 152, 76, 77, 78, 79, 80)       \
  WS_WGMMA_16(type, type, kind, 10H, 168, 84, 85, 86, 87, 88)      \
  WS_WGMMA_16(type, type, kind, 11H, 184, 92, 93, 94, 95, 96)      \
  WS_WGMMA_16(type, type, kind, 12H, 200, 100, 101, 102, 103, 104) \
  WS_WGMMA_16(type, type, kind, 13H, 216, 108, 109, 110, 111, 112)
WS_WGMMA_ODD_WIDTHS(bf16, "bf16.bf16")
WS_WGMMA_ODD_WIDTHS(f16, "f16.f16")

}  // namespace warpsmith

namespace warpsmith::linear {

constexpr int kOutN = BLOCK_N;

// Of one warpgroup, for tiles of kRowBlocks blocks of 64 rows of w.
template <int kRowBlocks> struct Output {
  // Boxes of 8 rows and 64 columns, in the 128-byte swizzle: those of a tile and those that the buffer holds.
  static constexpr int kBoxes = kRowBlocks * (BLOCK_M / 8), kMost = 12;
  static constexpr u32 kBoxBytes = 8 * 128, kBufferBytes = kMost * kBoxBytes, kTermBytes = 0;
  // Boxes that pass through the buffer at a time, and boxes that are evaluated at the same time if there is a residual,
  // which needs registers too.
  static constexpr int kPass = HAS_RESIDUAL ? 8 : kMost, kStep = 4;

  u32 buffer, barrier, warp, lane;
  OUT_T bias[kRowBlocks][2];

  // The address of kBufferBytes of shared memory, aligned to 1024, and a named barrier.
  WS_INLINE Output(u32 buffer, u32, u32 barrier) : buffer(buffer), barrier(barrier), lane(threadIdx.x % 32) {
    // A shuffle, so that the compiler knows that all lanes agree.
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  }

  // The first row and column of a box, from the start of the tile.
  static WS_INLINE int box_row(int box) { return box / kRowBlocks * 8; }
  static WS_INLINE int box_column(int box) { return box % kRowBlocks * 64; }

  // Loads what the epilogue of a tile needs, to arrive while the tile is multiplied.
  WS_INLINE void begin(const LinearParams& p, const Tile& tile) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = tile.n + box_column(r) + (int)(warp * 16 + lane / 4) + 8 * h;
        if (HAS_BIAS) bias[r][h] = n < p.n ? ((const OUT_T*)p.bias)[n * p.bias_step] : OUT_T{};
      }
  }

  // `map`: the map of the output, with boxes of 64 columns and 8 rows.
  WS_INLINE void store(const LinearParams& p, const void* map, const Tile& tile, const float (&d)[kRowBlocks][BLOCK_M / 2]) const {
    u32 fetched[kPass / 2][4];
    if (HAS_RESIDUAL) fetch_residual(fetched, p, tile, 0);
#pragma unroll
    for (int first = 0; first < kBoxes; first += kPass) {
      // The same in all warps.
      if (tile.m + box_row(first) >= p.m) break;
      // The buffer is free once the copy engine has read what every warp handed to it.
      drain();
      named_barrier_sync(barrier, 128);
      u32 residual[kPass / 2][4] = {};
      if (HAS_RESIDUAL) {
        transpose_residual(residual, fetched);
        if (first + kPass < kBoxes) fetch_residual(fetched, p, tile, first + kPass);
      }
#pragma unroll
      for (int i = 0; i < kPass && first + i < kBoxes; i += 2) {
        // The branch keeps the compiler from evaluating several steps at a time.
        if (HAS_RESIDUAL && i % kStep == 0 && tile.m + box_row(first + i) >= p.m) break;
        u32 words[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (first + i + j / 2 < kBoxes) words[j] = evaluate(p, d, first + i + j / 2, j % 2, residual[i / 2][j]);
        store_matrices<true>(matrix_row(i), words[0], words[1], words[2], words[3]);
      }
      async_proxy_fence();
      named_barrier_sync(barrier, 128);
      if (elect_one()) {
#pragma unroll
        for (int i = 0; i < kPass; i += 4) {
          const int box = first + i + (int)warp;
          if (box < kBoxes)
            tma_store(map, buffer + (i + warp) * kBoxBytes, tile.n + box_column(box), tile.m + box_row(box), tile.batch);
        }
        tma_store_commit();
      }
    }
  }

  // Threads share no terms here: there is nothing to prepare and nobody to wait for.
  WS_INLINE void prepare() const {}
  WS_INLINE void meet() const {}

  // Waits until the copy engine has read what this warp handed to it.
  WS_INLINE void drain() const {
    if (elect_one()) tma_store_wait_read<0>();
  }

  // Boxes are written in pairs; the upper half of the lanes has the second. The address of a lane's row of the warp's four
  // matrices in a pair, and that of its piece of 16 bytes.
  WS_INLINE u32 matrix_row(int i) const {
    return buffer + (i + lane / 16) * kBoxBytes + swizzled<128>(lane % 8 * 128 + warp * 32 + lane / 8 % 2 * 16);
  }
  WS_INLINE u32 piece(int i) const {
    return buffer + (i + lane / 16) * kBoxBytes + swizzled<128>(lane % 16 / 2 * 128 + warp * 32 + lane % 2 * 16);
  }

  // Loads this lane's pieces of the residual for a pass; zeros where there are none.
  WS_INLINE void fetch_residual(u32 (&words)[kPass / 2][4], const LinearParams& p, const Tile& tile, int first) const {
#pragma unroll
    for (int i = 0; i < kPass; i += 2) {
      const int box = first + i + (int)lane / 16;
      const int m = tile.m + box_row(box) + (int)lane % 16 / 2;
      const int n = tile.n + box_column(box) + (int)(warp * 16 + lane % 2 * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i / 2][j] = 0;
      if (box < kBoxes && m < p.m && n < p.n)
        load_words(words[i / 2], (const OUT_T*)p.residual + (tile.batch * p.residual_batch + m * p.residual_row + n));
    }
  }
  // From pieces of rows to the layout of the sums, through this warp's part of the buffer.
  WS_INLINE void transpose_residual(u32 (&pairs)[kPass / 2][4], const u32 (&words)[kPass / 2][4]) const {
#pragma unroll
    for (int i = 0; i < kPass; i += 2) store_shared(piece(i), words[i / 2]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPass; i += 2) load_matrices<true>(pairs[i / 2], matrix_row(i));
    __syncwarp();
  }

  // This lane's two results in one of its columns of a box.
  WS_INLINE u32 evaluate(const LinearParams& p, const float (&d)[kRowBlocks][BLOCK_M / 2], int box, int h, u32 residual) const {
    const int r = box % kRowBlocks, at = box_row(box) / 2 + 2 * h;
    const ColumnTerms c = {HAS_BIAS ? to_f32(bias[r][h]) * kFactor : 0.0f, 0.0f, 1.0f, 1.0f};
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      y[i] = finish(p, d[r][at + i], 0.0f, 1.0f, c, to_f32(OUT_T{(u16)(residual >> (16 * i))}));
    return pack_pair(y, OUT_T{});
  }
};

}  // namespace warpsmith::linear
