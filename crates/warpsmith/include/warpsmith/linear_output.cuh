#pragma once
// From the sums of a warpgroup, in the layout of wgmma.cuh, to the output of `linear`: the epilogue of linear.cuh in
// registers, then a copy by the copy engine, to which each warp hands its own rows through its own part of shared
// memory. Warps wait for each other only for the terms of the columns.
//
// Defines besides those of linear.cuh: BLOCK_N, the sums in a row, with a gate half of them gate and half up; TMA_STORE (0:
// the copy engine cannot store rows of out); LINE_STORE, whether warps then store dense rows that start anywhere from
// shared memory, in words side by side (0: elements are stored from registers); RESIDUAL_ROWS, whether pairs of columns of the residual can be loaded at once;
// SMALL_STEPS, whether columns are evaluated 16 at a time, which needs fewer registers and disturbs the tensor cores
// less.

#include "warpsmith/linear.cuh"
#include "warpsmith/mbarrier.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/wgmma.cuh"

namespace warpsmith::linear {

constexpr int kOutN = GATE ? BLOCK_N / 2 : BLOCK_N;

// Slices of the output, 16 rows of 128 bytes, pass through a buffer two at a time, because handing them to the copy engine
// takes a fence, which waits for shared memory. A slice is stored as boxes of 16 rows, of a width that divides every
// slice.
constexpr int kSlices = 2, kSliceRows = 16, kSliceN = 128 / (int)sizeof(OUT_T);
constexpr int kBoxN = kOutN % kSliceN == 0 ? kSliceN : kOutN % (kSliceN / 2) == 0 ? kSliceN / 2 : kSliceN / 4;
constexpr int kBoxBytes = kBoxN * (int)sizeof(OUT_T);
constexpr u32 kSliceBytes = kSliceRows * 128;
// Registers of a thread's results of 16 columns.
constexpr int kWords = 2 * (int)sizeof(OUT_T);
// Bias and scale of the rows of w.
constexpr int kTerms = HAS_BIAS + (SCALING == 1), kTermsPerThread = (BLOCK_N + 127) / 128;
// Groups of 16 columns whose bias is in registers before the sums are complete.
constexpr int kEarlyGroups = HAS_BIAS && SCALING != 1 && !GATE ? (kOutN < 128 ? kOutN : 128) / 16 : 0;

static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256 && kOutN % 16 == 0 && kOutN % kBoxN == 0, "columns");

// Of one warpgroup, for tiles of kRowBlocks blocks of 64 rows.
template <int kRowBlocks> struct Output {
  static constexpr u32 kBufferBytes = TMA_STORE || LINE_STORE ? 4 * kSlices * kSliceBytes : 0, kTermBytes = kTerms * BLOCK_N * 4;

  u32 buffer, terms_at, barrier;
  u32 warp, lane;
  OUT_T bias[kTermsPerThread];
  float scale[kTermsPerThread];
  float row_terms[kRowBlocks][2];
  float early_bias[kEarlyGroups + 1][4];

  // Addresses of kBufferBytes, aligned to 1024, and of kTermBytes of shared memory, and a named barrier.
  WS_INLINE Output(u32 buffers_at, u32 terms_at, u32 barrier) : terms_at(terms_at), barrier(barrier), lane(threadIdx.x % 32) {
    // A shuffle, so that the compiler knows that all lanes agree.
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    buffer = buffers_at + warp * (kSlices * kSliceBytes);
  }

  WS_INLINE int row(const Tile& tile, int r, int h) const { return tile.m + r * 64 + warp * 16 + lane / 4 + h * 8; }

  // Loads what the epilogue of a tile needs, to arrive while the tile is multiplied. Any use of it here, even a
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

  // Passes the terms of the columns to the other threads, and loads the first of its own, while the last products run:
  // they keep shared memory busy, so this takes a while. Between the `store` of a tile and the `prepare` of the next, the
  // warps must pass a barrier.
  WS_INLINE void prepare() {
    if (kTerms > 0) {
#pragma unroll
      for (int i = 0; i < kTermsPerThread; ++i) {
        const u32 at = i * 128 + threadIdx.x % 128;
        if (at >= BLOCK_N) break;
        const float factor = at < kOutN ? kFactor : 1.0f;
        if (HAS_BIAS) store_shared(term_at(at), to_f32(bias[i]) * factor);
        if (SCALING == 1) store_shared(term_at(HAS_BIAS * BLOCK_N + at), scale[i] * factor);
      }
      meet();
#pragma unroll
      for (int g = 0; g < kEarlyGroups; ++g) load_terms(early_bias[g], 16 * g);
    }
  }
  WS_INLINE void meet() const {
    if (kTerms > 0) named_barrier_sync(barrier, 128);
  }
  // Terms are stored in the order in which lanes use them: for every 16 columns the four of lane 0, those of lane 1, ...
  WS_INLINE u32 term_at(u32 row) const {
    const u32 half = row / 8 % 2, lane = row / 2 % 4;
    return terms_at + (row / 16 * 16 + lane * 4 + half * 2 + row % 2) * 4;
  }
  // This lane's terms of the 16 rows of w that start at `row`. No "memory" clobber: it would keep the compiler from moving
  // other loads of the epilogue past these.
  WS_INLINE void load_terms(float (&terms)[4], u32 row) const {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(terms[0]), "=f"(terms[1]), "=f"(terms[2]), "=f"(terms[3]) : "r"(terms_at + (row + lane % 4 * 4) * 4));
  }

  // The results y[j][h][i] of this lane in row block r and the 16 columns from `first` on: column i of its two in the j-th
  // eight, row h of its two.
  WS_INLINE void evaluate(float (&y)[2][2][2], const LinearParams& p, const Tile& tile, const float (&d)[BLOCK_N / 2], int r,
                          int first) const {
    float bias[4], up_bias[4], scale[4], up_scale[4];
    if (HAS_BIAS) {
      if (first < 16 * kEarlyGroups) {
#pragma unroll
        for (int i = 0; i < 4; ++i) bias[i] = early_bias[first / 16][i];
      } else {
        load_terms(bias, first);
      }
      if (GATE) load_terms(up_bias, kOutN + first);
    }
    if (SCALING == 1) {
      load_terms(scale, HAS_BIAS * BLOCK_N + first);
      if (GATE) load_terms(up_scale, HAS_BIAS * BLOCK_N + kOutN + first);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = first / 2 + 4 * j + 2 * h;
        float residual[2];
        if (HAS_RESIDUAL)
          load_residual(residual, p, tile.batch, row(tile, r, h), tile.n + first + 8 * j + 2 * (int)(lane % 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const ColumnTerms c = {bias[2 * j + i], up_bias[2 * j + i], scale[2 * j + i], up_scale[2 * j + i]};
          y[j][h][i] = finish(p, d[at + i], GATE ? d[BLOCK_N / 4 + at + i] : 0.0f, row_terms[r][h], c, residual[i]);
        }
      }
  }

  // Zero where there is none.
  static WS_INLINE void load_residual(float (&y)[2], const LinearParams& p, int batch, int m, int n) {
    y[0] = y[1] = 0.0f;
    if (m >= p.m || n >= p.n) return;
    if (RESIDUAL_ROWS) {
      // Rows are multiples of 16 bytes: a pair is whole or absent.
      const OutPair pair = *(const OutPair*)((const OUT_T*)p.residual + (batch * p.residual_batch + m * p.residual_row + n));
      y[0] = to_f32(pair.items[0]);
      y[1] = to_f32(pair.items[1]);
    } else {
      y[0] = residual_at(p, batch, m, n);
      if (n + 1 < p.n) y[1] = residual_at(p, batch, m, n + 1);
    }
  }

  // `map`: the map of the output, with boxes of kBoxN columns and kSliceRows rows.
  WS_INLINE void store(const LinearParams& p, const void* map, const Tile& tile, const float (&d)[kRowBlocks][BLOCK_N / 2]) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      // The same in all lanes of the warp.
      if (tile.m + r * 64 + (int)warp * 16 >= p.m) break;
      if (TMA_STORE || LINE_STORE) {
#pragma unroll
        for (int column = 0; column < kOutN; column += kSlices * kSliceN) store_slices(p, map, tile, d[r], r, column);
      } else {
        store_direct(p, tile, d[r], r);
      }
    }
  }

  WS_INLINE void store_slices(const LinearParams& p, const void* map, const Tile& tile, const float (&d)[BLOCK_N / 2], int r,
                              int first) {
    constexpr int kMost = kSlices * kSliceN / 16;
    const int groups = min(kSlices * kSliceN, kOutN - first) / 16;
    // Groups of 16 columns that are evaluated at the same time; a residual needs registers too.
    constexpr int kStep = SMALL_STEPS ? 1 : HAS_RESIDUAL ? kSliceN / 16 : kMost;
    u32 words[kMost][kWords];
#pragma unroll
    for (int step = 0; step < kMost; step += kStep) {
      // The branch keeps the compiler from evaluating several steps at a time.
      if (step < groups && (kStep == kMost || tile.n + first + 16 * step < p.n)) {
#pragma unroll
        for (int g = step; g < step + kStep; ++g) {
          if (g >= groups) break;
          float y[2][2][2];
          evaluate(y, p, tile, d, r, first + 16 * g);
          pack_group<OUT_T>(words[g], y);
        }
      }
    }
    // The buffer is free once the copy engine has read it; that overlapped with the evaluation.
    if (TMA_STORE && elect_one()) tma_store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int g = 0; g < kMost; ++g)
      if (g < groups) write_group<OUT_T>(words[g], 16 * g);
    if (!TMA_STORE) {
      __syncwarp();
      return store_lines(p, tile, r, first, min(groups * 16, p.n - tile.n - first));
    }
    async_proxy_fence();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
      for (int column = 0; column < kSlices * kSliceN; column += kBoxN)
        if (column < groups * 16)
          tma_store(map, place(0, column), tile.n + first + column, tile.m + r * 64 + (int)warp * 16, tile.batch);
      tma_store_commit();
    }
  }

  // Stores `columns` of the rows in the buffer, 128 bytes of a row at a time.
  WS_INLINE void store_lines(const LinearParams& p, const Tile& tile, int r, int first, int columns) const {
    const int above = tile.m + r * 64 + (int)warp * 16, rows = min(kSliceRows, p.m - above);
    OUT_T* to = (OUT_T*)p.out + (tile.batch * p.out_batch + above * p.out_row + tile.n + first);
#pragma unroll 4
    for (int row = 0; row < rows; ++row, to += p.out_row) store_line<OUT_T>(to, row, columns);
  }
  template <class T> WS_INLINE void store_line(T* to, int row, int columns) const {
    if constexpr (sizeof(T) == 4) {
      for (int column = lane; column < columns; column += 32) {
        u32 word;
        load_shared(word, place(row, column));
        *(u32*)(to + column) = word;
      }
    } else {
      // Words are aligned: a row may have an element before the first and one after the last.
      const int skipped = (u64)to & 2 ? 1 : 0;
      for (int column = skipped + 2 * (int)lane; column + 1 < columns; column += 64) {
        u32 word;
        if (skipped) word = element(row, column) | element(row, column + 1) << 16;
        else load_shared(word, place(row, column));
        *(u32*)(to + column) = word;
      }
      if (skipped && lane == 0 && columns > 0) *(u16*)to = (u16)element(row, 0);
      if ((columns - skipped) % 2 && columns > skipped && lane == 31) *(u16*)(to + columns - 1) = (u16)element(row, columns - 1);
    }
  }
  WS_INLINE u32 element(int row, int column) const {
    u16 bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(place(row, column)) : "memory");
    return bits;
  }

  // Address in the buffer of an element of the slices, `column` from the start of the first.
  WS_INLINE u32 place(u32 row, u32 column) const {
    return buffer + column / kBoxN * (kSliceRows * kBoxBytes) +
           swizzled<kBoxBytes>(row * kBoxBytes + column % kBoxN * sizeof(OUT_T));
  }

  template <class T> static WS_INLINE void pack_group(u32 (&words)[kWords], const float (&y)[2][2][2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (sizeof(T) == 2) words[2 * j + h] = pack_pair(y[j][h], T{});
        else words[4 * j + 2 * h] = float_bits(y[j][h][0]), words[4 * j + 2 * h + 1] = float_bits(y[j][h][1]);
      }
  }
  template <class T> WS_INLINE void write_group(const u32 (&words)[kWords], u32 column) const {
    if constexpr (sizeof(T) == 2) {
      store_matrices<false>(place(lane % 16, column + lane / 16 * 8), words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store_shared(place(lane / 4 + 8 * h, column + 8 * j + 2 * (lane % 4)), words[4 * j + 2 * h], words[4 * j + 2 * h + 1]);
    }
  }

  WS_INLINE void store_direct(const LinearParams& p, const Tile& tile, const float (&d)[BLOCK_N / 2], int r) const {
#pragma unroll
    for (int first = 0; first < kOutN; first += 16) {
      if (SMALL_STEPS && tile.n + first >= p.n) break;
      float y[2][2][2];
      evaluate(y, p, tile, d, r, first);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int m = row(tile, r, h), n = tile.n + first + 8 * j + 2 * (lane % 4);
          OUT_T* to = (OUT_T*)p.out + (tile.batch * p.out_batch + m * p.out_row);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (m < p.m && n + i < p.n) to[(n + i) * p.out_col] = from_f32<OUT_T>(y[j][h][i]);
        }
    }
  }

  // The copy engine must have read the buffers before the block ends.
  WS_INLINE void drain() const {
    if (TMA_STORE && elect_one()) tma_store_wait_read<0>();
  }
};

}  // namespace warpsmith::linear
