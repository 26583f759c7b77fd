#pragma once
// Products of 16-bit types by mma.sync (sm_80 and later): steps of both operands in a ring in shared memory, copied ahead by cp.async.
//
// Threads to data: a block of 8 warps computes a tile of TILE_M rows of the first operand by 128 rows of the second. With 16 rows each
// warp has all of them and an eighth of the second, otherwise half of the rows and a quarter. A step has 64 bytes of K. K is summed in
// ascending order, 32 bytes an mma, whatever the tile.
//
// Defines: X_T, the type; TILE_M, 16, 32, 64 or 128.

#include "warpsmith/mma.cuh"

namespace warpsmith::grouped {

constexpr int kMmaThreads = 256, kTileN = 128, kStages = 4, kStepBytes = 64;
constexpr int kStep = kStepBytes / 2, kPiece = 8;
constexpr int kWarpsM = TILE_M == 16 ? 1 : 2, kWarpsN = 8 / kWarpsM;
constexpr int kWarpRows = TILE_M / kWarpsM, kFragments = kWarpRows / 16, kBlocks = kTileN / 8 / kWarpsN;
constexpr u32 kXBytes = TILE_M * kStepBytes, kStageBytes = kXBytes + kTileN * kStepBytes;

static_assert(sizeof(X_T) == 2, "16-bit types");

// A step of an operand of kRows rows: lines of 64 bytes of K or, with kAcross, kStep lines of kRows elements. Pieces of 16 bytes are
// swizzled, so that the eight that one ldmatrix reads from eight lines lie in different banks.
template <int kRows, bool kAcross> struct Stage {
  static constexpr int kPerLine = kAcross ? kRows / kPiece : kStepBytes / 16, kLines = kAcross ? kStep : kRows;
  static_assert(kPerLine == 4 || kPerLine >= 8, "swizzles of four and of eight pieces");

  static WS_INLINE u32 place(int line, int piece) {
    const int swizzled = kPerLine == 4 ? piece ^ ((line >> 1) & 3) : piece ^ (line & 7);
    return (u32)(line * kPerLine + swizzled) * 16;
  }
  // Matrices of 16 rows and one slice of 32 bytes of K, that is two pieces. With kRowsFirst: rows 0-7 and 8-15 of the first piece, then
  // of the second; otherwise both pieces of rows 0-7, then of rows 8-15.
  template <bool kRowsFirst> static WS_INLINE void fragments(u32 (&r)[4], u32 base, int row, int slice) {
    const int lane = threadIdx.x % 32, inside = lane % 8;
    const int upper_rows = kRowsFirst ? lane / 8 % 2 : lane / 16, upper_k = kRowsFirst ? lane / 16 : lane / 8 % 2;
    const u32 at = kAcross ? place((slice * 2 + upper_k) * 8 + inside, row / 8 + upper_rows)
                           : place(row + upper_rows * 8 + inside, slice * 2 + upper_k);
    load_matrices<kAcross>(r, base + at);
  }
};

// What a thread copies of every step: a piece of each of a few lines, the same of every step.
template <int kRows, bool kAcross> struct Copies {
  typedef Stage<kRows, kAcross> S;
  static constexpr int kPieces = S::kLines * S::kPerLine, kCount = (kPieces + kMmaThreads - 1) / kMmaThreads;

  static WS_INLINE int line(int i) { return ((int)threadIdx.x + i * kMmaThreads) / S::kPerLine; }
  static WS_INLINE int piece() { return threadIdx.x % S::kPerLine; }
  static WS_INLINE bool has(int i) { return kPieces % kMmaThreads == 0 || line(i) < S::kLines; }
};

// Of rows along which K lies.
template <int kRows> struct CopiesAlong : Copies<kRows, false> {
  typedef Copies<kRows, false> C;
  // Where the rows begin; null for a row of zeros.
  const X_T* rows[C::kCount];

  // `map` turns a line into a row of the matrix, -1 for zeros.
  template <class Map> WS_INLINE CopiesAlong(const X_T* base, i64 row_stride, Map map) {
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) {
      const int row = C::has(i) ? map(C::line(i)) : -1;
      rows[i] = row >= 0 ? base + row * row_stride : nullptr;
    }
  }
  WS_INLINE void load(u32 to, int k0, int depth) const {
    const int k = k0 + C::piece() * kPiece;
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) {
      if (!C::has(i)) break;
      const bool exists = rows[i] && k < depth;
      copy_async(to + C::S::place(C::line(i), C::piece()), exists ? rows[i] + k : rows[i], exists);
    }
  }
};

// Of rows across which K lies: `first` is the first of the tile, of `count` in all, which are neighbours in memory.
template <int kRows> struct CopiesAcross : Copies<kRows, true> {
  typedef Copies<kRows, true> C;
  const X_T* from;
  i64 k_stride;
  bool inside;

  WS_INLINE CopiesAcross(const X_T* base, i64 k_stride, int first, int count) : k_stride(k_stride) {
    const int row = first + C::piece() * kPiece;
    inside = row < count;
    from = base + (inside ? row : 0);
  }
  // `place` turns a number along K below `depth` into a line of the matrix, -1 for zeros.
  template <class Place> WS_INLINE void load(u32 to, int k0, int depth, Place place) const {
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) {
      if (!C::has(i)) break;
      const int k = k0 + C::line(i), line = inside && k < depth ? place(k) : -1;
      copy_async(to + C::S::place(C::line(i), C::piece()), line >= 0 ? from + line * k_stride : from, line >= 0);
    }
  }
};

// A thread's sums: of fragment i and block j, rows lane / 4 and 8 more, and columns 2 (lane % 4) and the next.
typedef float Sums[kFragments][kBlocks][4];

// Multiplies all steps, whose stages are at `stages`. `load` starts to load one, to the address of its x and of its w.
template <bool kXAcross, bool kWAcross, class Load> WS_INLINE void multiply_steps(Sums& sums, u32 stages, int depth, Load load) {
  typedef Stage<TILE_M, kXAcross> XStage;
  typedef Stage<kTileN, kWAcross> WStage;
  const int warp = threadIdx.x / 32, warp_row = warp % kWarpsM * kWarpRows, warp_w = warp / kWarpsM * 8 * kBlocks;
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
  auto load_step = [&](int step) {
    const u32 stage = stages + step % kStages * kStageBytes;
    load(step * kStep, stage, stage + kXBytes);
  };
  const int steps = (depth + kStep - 1) / kStep;
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load_step(step);
    commit_copies();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // The copies of this step are done, and all warps have left the stage that is filled next.
    wait_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) load_step(step + kStages - 1);
    commit_copies();
    const u32 x_base = stages + step % kStages * kStageBytes, w_base = x_base + kXBytes;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      u32 a[kFragments][4], b[kBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) XStage::template fragments<true>(a[i], x_base, warp_row + i * 16, slice);
#pragma unroll
      for (int j = 0; j < kBlocks / 2; ++j) WStage::template fragments<false>(b[j], w_base, warp_w + j * 16, slice);
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], X_T());
    }
  }
}

// Calls `use` with each pair of a thread's sums that are neighbours in a row: the row, the column, fragment, block and half of the tile.
template <int kEach, class Use> WS_INLINE void each_pair(Use use) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % kWarpsM * kWarpRows, warp_w = warp / kWarpsM * 8 * kBlocks;
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kBlocks; j += kEach)
        use(warp_row + i * 16 + half * 8 + lane / 4, warp_w + j * 8 + lane % 4 * 2, i, j, half * 2);
}

}  // namespace warpsmith::grouped
