// `grouped_linear` on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16, from rows that begin at multiples of 16
// bytes and are as long.
//
// Threads to data: a block of 8 warps computes a tile of TILE_M rows of a group by 128 rows of its matrix. With 16 rows each warp has
// all of them and an eighth of the matrix, otherwise half of the rows and a quarter. Steps of 64 bytes of K go through four stages
// of shared memory, copied ahead by cp.async; each thread copies the same places of every step, so it looks up once where its rows
// begin. K is summed in ascending order, 32 bytes an mma, whatever the tile. With a gate, blocks of 8 gate rows and 8 up rows
// alternate, which are neighbouring fragments of a thread.
//
// Defines: those of linear.cuh; TILE_M, 16, 32, 64 or 128; OUT_PAIRS, whether two neighbours of a row of out (and residual) are one
// aligned word.

#include "warpsmith/grouped_linear.cuh"
#include "warpsmith/mma.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kThreads = 256, kTileN = 128, kStages = 4, kStepBytes = 64;
constexpr int kStep = kStepBytes / 2, kPiece = 8, kPieces = kStepBytes / 16;
constexpr int kOutN = GATE ? kTileN / 2 : kTileN;
constexpr int kWarpsM = TILE_M == 16 ? 1 : 2, kWarpsN = 8 / kWarpsM;
constexpr int kWarpRows = TILE_M / kWarpsM, kFragments = kWarpRows / 16, kBlocks = kTileN / 8 / kWarpsN;
constexpr int kXBytes = TILE_M * kStepBytes, kStageBytes = kXBytes + kTileN * kStepBytes;
// Small tiles are for groups of few rows, which are as fast as their matrices are read: more blocks have more loads in flight.
constexpr int kResident = TILE_M <= 32 ? 4 : TILE_M == 64 ? 3 : 2;

static_assert(sizeof(X_T) == 2 && sizeof(W_T) == 2, "16-bit types");

extern __shared__ __align__(128) u8 shared[];

// A step of an operand of kRows rows: lines of 64 bytes. Pieces of 16 bytes are swizzled, so that the eight that one ldmatrix reads
// from eight lines lie in different banks.
WS_INLINE u32 place(int line, int piece) { return (u32)(line * kPieces + (piece ^ ((line >> 1) & 3))) * 16; }

// Matrices of 16 rows and one slice of 32 bytes of K, that is two pieces. With kRowsFirst: rows 0-7 and 8-15 of the first piece, then
// of the second; otherwise both pieces of rows 0-7, then of rows 8-15.
template <bool kRowsFirst> WS_INLINE void fragments(u32 (&r)[4], u32 base, int row, int slice) {
  const int lane = threadIdx.x % 32;
  const int upper_rows = kRowsFirst ? lane / 8 % 2 : lane / 16, upper_k = kRowsFirst ? lane / 16 : lane / 8 % 2;
  load_matrices<false>(r, base + place(row + upper_rows * 8 + lane % 8, slice * 2 + upper_k));
}

// What a thread copies of every step of an operand of kRows rows: a piece of each of a few lines.
template <int kRows> struct Copies {
  static constexpr int kCount = (kRows * kPieces + kThreads - 1) / kThreads;
  // Where the rows begin; null for a row of zeros.
  const X_T* rows[kCount];

  static WS_INLINE int line(int i) { return ((int)threadIdx.x + i * kThreads) / kPieces; }
  static WS_INLINE int piece() { return threadIdx.x % kPieces; }

  // `map` turns a line into a row of the matrix, -1 for zeros.
  template <class Map> WS_INLINE Copies(const X_T* base, i64 row_stride, Map map) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = line(i) < kRows ? map(line(i)) : -1;
      rows[i] = row >= 0 ? base + row * row_stride : nullptr;
    }
  }
  WS_INLINE void load(u32 to, int k0, int depth) const {
    const int k = k0 + piece() * kPiece;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kRows * kPieces % kThreads && line(i) >= kRows) break;
      const bool exists = rows[i] && k < depth;
      copy_async(to + place(line(i), piece()), exists ? rows[i] + k : rows[i], exists);
    }
  }
};

// Writes those of two neighbours of a row that exist, from their sums.
WS_INLINE void write_row_pair(const LinearParams& p, int row, int column, const float* sum, const float* up, float factor,
                              const ColumnTerms (&terms)[2]) {
  if (!OUT_PAIRS) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (column + e < p.n) write_row_element(p, row, column + e, sum[e], up[e], factor, terms[e]);
    return;
  }
  OutPair residual = {}, result;
  if (HAS_RESIDUAL) residual = *(const OutPair*)((const OUT_T*)p.residual + row * p.residual_row + column);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    result.items[e] = from_f32<OUT_T>(finish_row(sum[e], up[e], factor, terms[e], to_f32(residual.items[e])));
  *(OutPair*)((OUT_T*)p.out + row * p.out_row + column) = result;
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) grouped_linear_sm80(const __grid_constant__ GroupedLinearParams p) {
  begin_kernel();
  GroupWalk<TILE_M, 4, GroupedLinearParams> walk(p);
  const GroupTile tile = group_tile<TILE_M>(walk, blockIdx.x, (p.linear.n + kOutN - 1) / kOutN);
  if (tile.row >= tile.end) return;
  if (tile.group == p.groups) return clear_tile<kOutN, kThreads>(p, tile);

  const LinearParams product = product_of(p, tile);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % kWarpsM * kWarpRows, warp_w = warp / kWarpsM * 8 * kBlocks;
  const int first_w = tile.column * kTileN, depth = product.k;
  const X_T* w = (const X_T*)product.w + tile.group * product.w_batch;
  const Copies<TILE_M> x_copies((const X_T*)product.x, product.x_row, [&](int line) { return x_row_of(p, tile, tile.row + line); });
  const Copies<kTileN> w_copies(w, product.w_row, [&](int line) { return weight_row<8>(product, first_w + line, -1); });
  const u32 stages = shared_address(shared);
  auto load = [&](int step) {
    const u32 stage = stages + step % kStages * kStageBytes;
    x_copies.load(stage, step * kStep, depth);
    w_copies.load(stage + kXBytes, step * kStep, depth);
  };

  float sums[kFragments][kBlocks][4];
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;

  const int steps = (depth + kStep - 1) / kStep;
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    commit_copies();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // The copies of this step are done, and all warps have left the stage that is filled next.
    wait_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    commit_copies();
    const u32 x_base = stages + step % kStages * kStageBytes, w_base = x_base + kXBytes;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      u32 a[kFragments][4], b[kBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) fragments<true>(a[i], x_base, warp_row + i * 16, slice);
#pragma unroll
      for (int j = 0; j < kBlocks / 2; ++j) fragments<false>(b[j], w_base, warp_w + j * 16, slice);
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], X_T());
    }
  }

  // A thread has rows lane / 4 and 8 more of a fragment, and columns 2 (lane % 4) and the next of a block.
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + warp_row + i * 16 + half * 8 + lane / 4;
      if (row >= tile.end) continue;
      const float factor = factor_of(p, row);
#pragma unroll
      for (int j = 0; j < kBlocks; j += GATE ? 2 : 1) {
        const int column = column_of<8>(first_w + warp_w + j * 8 + lane % 4 * 2);
        if (column >= product.n) continue;
        const ColumnTerms terms[2] = {column_terms(product, 0, column), column_terms(product, 0, column + 1)};
        write_row_pair(product, row, column, &sums[i][j][half * 2], &sums[i][GATE ? j + 1 : j][half * 2], factor, terms);
      }
    }
  }
}
