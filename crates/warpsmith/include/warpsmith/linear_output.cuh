#pragma once
// From the sums that a warpgroup holds, in the layout of wgmma.cuh, to the output of `linear`: the epilogue of
// linear.cuh in registers, then the copy engine, which each warp feeds with its own rows through its own part of shared
// memory. No warp waits for another but for the terms of the columns.
//
// Defines besides those of linear.cuh: BLOCK_N, the sums in a row, with a gate half of them gate and half up;
// TMA_STORE, else results are stored from registers; STORE_BUFFERS, slices between a warp and the copy engine;
// RESIDUAL_ROWS, whether pairs of the residual's columns can be loaded at once.

#include "warpsmith/linear.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/wgmma.cuh"

constexpr int kOutN = GATE ? BLOCK_N / 2 : BLOCK_N;

// A slice of the output, 16 rows of 128 bytes, passes through a buffer; it is stored as boxes of 16 rows, as wide as
// divides every slice.
constexpr int kSliceRows = 16, kSliceN = 128 / (int)sizeof(OUT_T);
constexpr int kBoxN = kOutN % kSliceN == 0 ? kSliceN : kOutN % (kSliceN / 2) == 0 ? kSliceN / 2 : kSliceN / 4;
constexpr int kBoxBytes = kBoxN * (int)sizeof(OUT_T);
constexpr u32 kSliceBytes = kSliceRows * 128;
// Bias and scale of the rows of w.
constexpr int kTerms = HAS_BIAS + (SCALING == 1), kTermsPerThread = (BLOCK_N + 127) / 128;

static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256 && kOutN % 16 == 0 && kOutN % kBoxN == 0, "columns");

// Of one warpgroup, for tiles of kRowBlocks blocks of 64 rows.
template <int kRowBlocks> struct Output {
  static constexpr u32 kBufferBytes = TMA_STORE ? 4 * STORE_BUFFERS * kSliceBytes : 0, kTermBytes = kTerms * BLOCK_N * 4;

  u32 buffers, terms_at, barrier;
  u32 warp, lane;
  u32 buffer = 0;
  OUT_T bias[kTermsPerThread];
  float scale[kTermsPerThread];
  float row_terms[kRowBlocks][2];

  // Addresses of kBufferBytes, aligned to 1024, and of kTermBytes of shared memory, and a named barrier.
  WS_INLINE Output(u32 buffers_at, u32 terms_at, u32 barrier)
      : terms_at(terms_at), barrier(barrier), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    buffers = buffers_at + warp * (STORE_BUFFERS * kSliceBytes);
  }

  WS_INLINE int row(const Tile& tile, int r, int h) const { return tile.m + r * 64 + warp * 16 + lane / 4 + h * 8; }

  // Fetches what the epilogue of a tile needs, to arrive while the tile is multiplied: any use of it here, even a
  // conversion, would make the products wait for memory.
  WS_INLINE void begin(const LinearParams& p, const Tile& tile) {
    if (kTerms > 0) {
#pragma unroll
      for (int i = 0; i < kTermsPerThread; ++i) {
        const int at = i * 128 + threadIdx.x % 128, n = tile.n + (at < kOutN ? at : at - kOutN);
        if (at >= BLOCK_N) break;
        const int row = at < kOutN ? gate_row(p, n) : up_row(p, n);
        if (HAS_BIAS) bias[i] = n < p.n ? ((const OUT_T*)p.bias)[row * p.bias_step] : OUT_T{};
        if (SCALING == 1) scale[i] = n < p.n ? w_scale_at(p, tile.batch, row, 0) : 1.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) row_terms[r][h] = row_term(p, tile.batch, row(tile, r, h));
  }

  // Hands the terms of the columns to the other threads. Between the `store` of a tile and this, for the next tile, the
  // warps must meet at a barrier.
  WS_INLINE void share_terms() const {
    if (kTerms > 0) {
#pragma unroll
      for (int i = 0; i < kTermsPerThread; ++i) {
        const u32 at = i * 128 + threadIdx.x % 128;
        if (at >= BLOCK_N) break;
        if (HAS_BIAS) store_shared(terms_at + at * 4, to_f32(bias[i]));
        if (SCALING == 1) store_shared(terms_at + (HAS_BIAS * BLOCK_N + at) * 4, scale[i]);
      }
      meet();
    }
  }
  WS_INLINE void meet() const {
    if (kTerms > 0) named_barrier_sync(barrier, 128);
  }
  static WS_INLINE void store_shared(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
  static WS_INLINE void load_shared(float& a, float& b, u32 at) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(at));
  }

  // The results of columns 8 j + 2 (lane % 4) + {0, 1} of the tile in row block r, in both halves of the block's rows.
  WS_INLINE void evaluate(float (&y)[2][2], const LinearParams& p, const Tile& tile, const float (&d)[BLOCK_N / 2], int r,
                          int j) const {
    const int column = 8 * j + 2 * (lane % 4);
    ColumnTerms c[2];
    if (HAS_BIAS) {
      load_shared(c[0].bias, c[1].bias, terms_at + column * 4);
      if (GATE) load_shared(c[0].up_bias, c[1].up_bias, terms_at + (kOutN + column) * 4);
    }
    if (SCALING == 1) {
      const u32 scales = terms_at + HAS_BIAS * BLOCK_N * 4;
      load_shared(c[0].scale, c[1].scale, scales + column * 4);
      if (GATE) load_shared(c[0].up_scale, c[1].up_scale, scales + (kOutN + column) * 4);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * j + 2 * h;
      float residual[2];
      if (HAS_RESIDUAL) load_residual(residual, p, tile.batch, row(tile, r, h), tile.n + column);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        y[h][i] = finish(p, d[at + i], GATE ? d[BLOCK_N / 4 + at + i] : 0.0f, row_terms[r][h], c[i], residual[i]);
    }
  }

  // Zero where there is none.
  static WS_INLINE void load_residual(float (&y)[2], const LinearParams& p, int batch, int m, int n) {
    y[0] = y[1] = 0.0f;
    if (m >= p.m || n >= p.n) return;
    if (RESIDUAL_ROWS) {
      // Rows are multiples of 16 bytes: a pair is whole or absent.
      struct alignas(2 * sizeof(OUT_T)) Pair {
        OUT_T items[2];
      };
      const Pair pair = *(const Pair*)((const OUT_T*)p.residual + (batch * p.residual_batch + m * p.residual_row + n));
      y[0] = to_f32(pair.items[0]);
      y[1] = to_f32(pair.items[1]);
    } else {
      y[0] = residual_at(p, batch, m, n);
      if (n + 1 < p.n) y[1] = residual_at(p, batch, m, n + 1);
    }
  }

  // `map`: of the output, in boxes of kBoxN columns and kSliceRows rows.
  WS_INLINE void store(const LinearParams& p, const void* map, const Tile& tile, const float (&d)[kRowBlocks][BLOCK_N / 2]) {
    share_terms();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      // The same in all lanes of the warp.
      if (tile.m + r * 64 + (int)warp * 16 >= p.m) break;
      if (TMA_STORE) {
#pragma unroll
        for (int column = 0; column < kOutN; column += kSliceN) store_slice(p, map, tile, d[r], r, column);
      } else {
        store_direct(p, tile, d[r], r);
      }
    }
  }

  WS_INLINE void store_slice(const LinearParams& p, const void* map, const Tile& tile, const float (&d)[BLOCK_N / 2], int r,
                             int first) {
    constexpr int kMost = kSliceN / 8;
    const int groups = min(kSliceN, kOutN - first) / 8;
    const u32 to = buffers + buffer * kSliceBytes;
    float y[kMost][2][2];
#pragma unroll
    for (int j = 0; j < kMost; ++j)
      if (j < groups) evaluate(y[j], p, tile, d, r, first / 8 + j);
    // The buffer is free once the copy engine has read it.
    if (lane == 0) tma_store_wait_read<STORE_BUFFERS - 1>();
    __syncwarp();
    write_slice(to, y, groups);
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kSliceN / kBoxN; ++i)
        if (i * kBoxN < groups * 8)
          tma_store(map, to + i * (kSliceRows * kBoxBytes), tile.n + first + i * kBoxN, tile.m + r * 64 + (int)warp * 16,
                    tile.batch);
      tma_store_commit();
    }
    buffer = buffer + 1 == STORE_BUFFERS ? 0 : buffer + 1;
  }

  // Address in a buffer of an element of a slice.
  static WS_INLINE u32 place(u32 to, u32 row, u32 column) {
    return to + column / kBoxN * (kSliceRows * kBoxBytes) +
           swizzled<kBoxBytes>(row * kBoxBytes + column % kBoxN * sizeof(OUT_T));
  }

  template <int kMost> WS_INLINE void write_slice(u32 to, const float (&y)[kMost][2][2], int groups) const {
    if constexpr (sizeof(OUT_T) == 2) {
      const u32 row = lane % 16, column = lane / 16 * 8;
#pragma unroll
      for (int j = 0; j < kMost; j += 2)
        if (j < groups)
          store_matrices(place(to, row, 8 * j + column), pack_pair(y[j][0], OUT_T{}), pack_pair(y[j][1], OUT_T{}),
                         pack_pair(y[j + 1][0], OUT_T{}), pack_pair(y[j + 1][1], OUT_T{}));
    } else {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (j < groups)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place(to, lane / 4 + 8 * h, 8 * j + 2 * (lane % 4))),
                         "f"(y[j][h][0]), "f"(y[j][h][1]) : "memory");
    }
  }

  WS_INLINE void store_direct(const LinearParams& p, const Tile& tile, const float (&d)[BLOCK_N / 2], int r) const {
#pragma unroll
    for (int j = 0; j < kOutN / 8; ++j) {
      float y[2][2];
      evaluate(y, p, tile, d, r, j);
      const int n = tile.n + 8 * j + 2 * (lane % 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = row(tile, r, h);
        OUT_T* to = (OUT_T*)p.out + (tile.batch * p.out_batch + m * p.out_row);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (m < p.m && n + i < p.n) to[(n + i) * p.out_col] = from_f32<OUT_T>(y[h][i]);
      }
    }
  }

  // The copy engine must have read the buffers before the block ends.
  WS_INLINE void drain() const {
    if (TMA_STORE && lane == 0) tma_store_wait_read<0>();
  }
};
