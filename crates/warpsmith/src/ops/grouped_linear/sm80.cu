// `grouped_linear` on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16, from rows that begin at multiples of 16
// bytes and are as long.
//
// Threads to data: a block computes a tile of TILE_M rows of a group by 128 rows of its matrix, as grouped_mma.cuh says; each thread
// copies the same places of every step, so it looks up once where its rows begin. With a gate, blocks of 8 gate rows and 8 up rows
// alternate, which are neighbouring fragments of a thread.
//
// Defines: those of linear.cuh; TILE_M; W_ACROSS, whether rows of w lie side by side and K across them, as in the gradient of x;
// OUT_PAIRS, whether two neighbours of a row of out (and residual) are one aligned word.

#include "warpsmith/grouped_linear.cuh"
#include "warpsmith/grouped_mma.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kOutN = GATE ? kTileN / 2 : kTileN;
// Small tiles are for groups of few rows, which are as fast as their matrices are read: more blocks have more loads in flight.
constexpr int kResident = TILE_M <= 32 ? 4 : TILE_M == 64 ? 3 : 2;

static_assert(sizeof(W_T) == 2 && !(W_ACROSS && GATE), "16-bit types");

extern __shared__ __align__(128) u8 shared[];

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

extern "C" __global__ void __launch_bounds__(kMmaThreads, kResident) grouped_linear_sm80(const __grid_constant__ GroupedLinearParams p) {
  begin_kernel();
  GroupWalk<TILE_M, 4, GroupedLinearParams> walk(p);
  const GroupTile tile = group_tile<TILE_M>(walk, blockIdx.x, (p.linear.n + kOutN - 1) / kOutN);
  if (tile.row >= tile.end) return;
  if (tile.group == p.groups) return clear_tile<kOutN, kMmaThreads>(p, tile);

  const LinearParams product = product_of(p, tile);
  const int first_w = tile.column * kTileN, depth = product.k;
  const X_T* w = (const X_T*)product.w + tile.group * product.w_batch;
  const CopiesAlong<TILE_M> x_copies((const X_T*)product.x, product.x_row,
                                     [&](int line) { return x_row_of(p, tile, tile.row + line); });
  Sums sums;
  if constexpr (W_ACROSS) {
    const CopiesAcross<kTileN> w_copies(w, product.w_col, first_w, product.n);
    multiply_steps<false, true>(sums, shared_address(shared), depth, [&](int k, u32 x_at, u32 w_at) {
      x_copies.load(x_at, k, depth);
      w_copies.load(w_at, k, depth, [](int k) { return k; });
    });
  } else {
    const CopiesAlong<kTileN> w_copies(w, product.w_row, [&](int line) { return weight_row<8>(product, first_w + line, -1); });
    multiply_steps<false, false>(sums, shared_address(shared), depth, [&](int k, u32 x_at, u32 w_at) {
      x_copies.load(x_at, k, depth);
      w_copies.load(w_at, k, depth);
    });
  }
  each_pair<GATE ? 2 : 1>([&](int below, int w_row, int i, int j, int at) {
    const int row = tile.row + below, column = column_of<8>(first_w + w_row);
    if (row >= tile.end || column >= product.n) return;
    const ColumnTerms terms[2] = {column_terms(product, 0, column), column_terms(product, 0, column + 1)};
    write_row_pair(product, row, column, &sums[i][j][at], &sums[i][GATE ? j + 1 : j][at], factor_of(p, row), terms);
  });
}
