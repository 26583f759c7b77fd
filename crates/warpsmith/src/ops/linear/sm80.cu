// `linear` on the tensor cores of sm_80 and later, through mma.sync: f16, bf16, and f32 as TF32.
//
// Threads to data: a block of 8 warps computes a tile of TILE_M rows of x by 128 rows of w; a warp has half of the rows of
// x and a quarter of those of w. Steps of 64 bytes of K (32 or 16 elements) go through four stages of shared memory,
// copied ahead by cp.async. K is summed in ascending order, 32 bytes an mma, whatever the tile. With a gate, blocks of
// 8 gate rows and 8 up rows alternate, which are neighbouring fragments of a thread.
//
// Defines: those of linear.cuh; TILE_M, 32, 64 or 128; LOAD_X, LOAD_W, how a step is moved (0: element by element, any
// strides; 1: in pieces of 16 bytes along K; 2, for 16-bit types: in pieces of 16 bytes along the rows, stored as
// [k][row], and transposed by ldmatrix); OUT_PAIRS, whether two neighbours of a row of out (and residual) are one aligned
// word.

#include "warpsmith/linear_pairs.cuh"
#include "warpsmith/mma.cuh"

using namespace warpsmith;
using namespace warpsmith::linear;

constexpr int kThreads = 256, kTileN = 128, kStages = 4, kStepBytes = 64;
constexpr int kSize = (int)sizeof(X_T), kStep = kStepBytes / kSize, kPiece = 16 / kSize;
constexpr int kWarpRows = TILE_M / 2, kFragments = kWarpRows / 16, kBlocks = 4;
constexpr int kStageBytes = (TILE_M + kTileN) * kStepBytes;
// Tensor cores truncate as they add, so long sums drift towards zero. Results of 32 bits would show it: the sums of so many
// steps are added up apart.
constexpr bool kInBlocks = kSize == 2 && sizeof(OUT_T) == 4;
constexpr int kBlockSteps = 32;

extern __shared__ __align__(128) u8 shared[];

// A step of an operand of kRows rows: kRows lines of 64 bytes of K or, transposed, kStep lines of kRows elements. Pieces
// of 16 bytes are swizzled, so that the eight that one ldmatrix reads from eight lines lie in different banks.
template <int kRows, int kLoad> struct Stage {
  static constexpr bool kTransposed = kLoad == 2;
  static constexpr int kPerLine = (kTransposed ? kRows * kSize : kStepBytes) / 16;

  static WS_INLINE u32 place(int line, int piece) {
    const int swizzled = kPerLine == 4 ? piece ^ ((line >> 1) & 3) : piece ^ (line & 7);
    return (u32)(line * kPerLine + swizzled) * 16;
  }
  // Matrices of 16 rows and one slice of 32 bytes of K, that is two pieces. With kRowsFirst: rows 0-7 and 8-15 of the first
  // piece, then of the second; otherwise both pieces of rows 0-7, then of rows 8-15.
  template <bool kRowsFirst> static WS_INLINE void fragments(u32 (&r)[4], u32 base, int row, int slice) {
    const int lane = threadIdx.x % 32, inside = lane % 8;
    const int upper_rows = kRowsFirst ? lane / 8 % 2 : lane / 16, upper_k = kRowsFirst ? lane / 16 : lane / 8 % 2;
    const u32 at = kTransposed ? place((slice * 2 + upper_k) * 8 + inside, row / 8 + upper_rows)
                               : place(row + upper_rows * 8 + inside, slice * 2 + upper_k);
    load_matrices<kTransposed>(r, base + at);
  }
  // `map` turns a row of the tile into a row of the matrix; rows from `count` on are zeros.
  template <class Map>
  static WS_INLINE void load(u8* to, const X_T* base, i64 row_stride, i64 col_stride, int count, int k0, int depth, Map map) {
    if (kLoad == 0) {
      const bool along_k = col_stride == 1;
      constexpr int kEach = kRows * kStep / kThreads;
#pragma unroll 4
      for (int i = 0; i < kEach; ++i) {
        const int index = threadIdx.x + i * kThreads;
        const int row = along_k ? index / kStep : index % kRows, k = along_k ? index % kStep : index / kRows;
        const int from = map(row);
        const X_T value = from < count && k0 + k < depth ? base[from * row_stride + (k0 + k) * col_stride] : from_f32<X_T>(0.0f);
        *(X_T*)(to + place(row, k / kPiece) + k % kPiece * kSize) = value;
      }
    } else {
      constexpr int kPieces = kRows * kStepBytes / 16;
#pragma unroll
      for (int i = 0; i < (kPieces + kThreads - 1) / kThreads; ++i) {
        const int index = threadIdx.x + i * kThreads;
        if (kPieces % kThreads && index >= kPieces) break;
        const int line = index / kPerLine, piece = index % kPerLine;
        const int row = kTransposed ? piece * kPiece : line, k = k0 + (kTransposed ? line : piece * kPiece);
        const int from = map(row);
        const bool exists = from < count && k < depth;
        const X_T* source = base + (exists ? from * row_stride + k * col_stride : 0);
        copy_async(shared_address(to + place(line, piece)), source, exists);
      }
    }
  }
};
using XStage = Stage<TILE_M, LOAD_X>;
using WStage = Stage<kTileN, LOAD_W>;

extern "C" __global__ void __launch_bounds__(kThreads) linear_sm80(const LinearParams p) {
  begin_kernel();
  const Tile tile = tile_at<TILE_M, GATE ? kTileN / 2 : kTileN>(p, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % 2 * kWarpRows, warp_w = warp / 2 * 8 * kBlocks;
  const X_T* x = (const X_T*)p.x + tile.batch * p.x_batch;
  const X_T* w = (const X_T*)p.w + tile.batch * p.w_batch;
  const int first_row = tile.m * TILE_M, first_w = tile.n * kTileN, w_rows = num_weight_rows(p);
  auto x_row = [&](int row) { return first_row + row; };
  auto w_row = [&](int row) { return weight_row<8>(p, first_w + row, w_rows); };
  auto load = [&](int step) {
    u8* stage = shared + step % kStages * kStageBytes;
    XStage::load(stage, x, p.x_row, p.x_col, p.m, step * kStep, p.k, x_row);
    WStage::load(stage + TILE_M * kStepBytes, w, p.w_row, p.w_col, w_rows, step * kStep, p.k, w_row);
  };

  float sums[kFragments][kBlocks][4], totals[kFragments][kBlocks][4];
  auto each_sum = [&](auto change) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) change(sums[i][j][e], totals[i][j][e]);
  };
  each_sum([](float& sum, float& total) { sum = total = 0.0f; });

  const int steps = (p.k + kStep - 1) / kStep;
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
    const u32 x_base = shared_address(shared) + step % kStages * kStageBytes, w_base = x_base + TILE_M * kStepBytes;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      u32 a[kFragments][4], b[kBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) XStage::fragments<true>(a[i], x_base, warp_row + i * 16, slice);
#pragma unroll
      for (int j = 0; j < kBlocks / 2; ++j) WStage::fragments<false>(b[j], w_base, warp_w + j * 16, slice);
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], X_T());
    }
    if (kInBlocks && step % kBlockSteps == kBlockSteps - 1)
      each_sum([](float& sum, float& total) { total += sum, sum = 0.0f; });
  }
  if (kInBlocks) each_sum([](float& sum, float& total) { sum += total; });

  // A thread has rows lane / 4 and 8 more of a fragment, and columns 2 (lane % 4) and the next of a block.
#pragma unroll
  for (int j = 0; j < kBlocks; j += GATE ? 2 : 1) {
    const int column = column_of<8>(first_w + warp_w + j * 8 + lane % 4 * 2);
    if (column >= p.n) continue;
    const ColumnTerms terms[2] = {column_terms(p, tile.batch, column), column_terms(p, tile.batch, column + 1)};
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
        if (row >= p.m) continue;
        write_pair(p, tile.batch, row, column, &sums[i][j][half * 2], &sums[i][GATE ? j + 1 : j][half * 2],
                   row_term(p, tile.batch, row), terms);
      }
    }
  }
}
