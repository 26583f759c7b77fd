// `grouped_linear` without tensor cores: any types, any strides.
//
// Threads to data: a block computes a tile of TILE_M rows of a group by TILE_N rows of its matrix, as grouped_generic.cuh says.
//
// Defines: those of linear.cuh; TILE_M, 16, 64 or 128; TILE_N, 64 or 128; LOAD_X, LOAD_W, whether rows can be read in pieces of 16
// bytes.

#include "warpsmith/grouped_generic.cuh"
#include "warpsmith/grouped_linear.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kThreads = kGenericThreads, kRows = TILE_M / 16, kColumns = TILE_N / 16;
constexpr int kOutN = GATE ? TILE_N / 2 : TILE_N;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_linear_generic(const __grid_constant__ GroupedLinearParams p) {
  begin_kernel();
  __shared__ int x_rows[TILE_M];
  GroupWalk<TILE_M, 4, GroupedLinearParams> walk(p);
  const GroupTile tile = group_tile<TILE_M>(walk, blockIdx.x, (p.linear.n + kOutN - 1) / kOutN);
  if (tile.row >= tile.end) return;
  if (tile.group == p.groups) return clear_tile<kOutN, kThreads>(p, tile);
  for (int i = threadIdx.x; i < TILE_M; i += kThreads) x_rows[i] = x_row_of(p, tile, tile.row + i);
  __syncthreads();

  const LinearParams product = product_of(p, tile);
  const X_T* x = (const X_T*)product.x;
  const W_T* w = (const W_T*)product.w + tile.group * product.w_batch;
  const int first_w = tile.column * TILE_N;
  auto x_row = [&](int row) { return x_rows[row]; };
  auto w_row = [&](int row) { return weight_row<1>(product, first_w + row, -1); };
  auto same = [](int k) { return k; };
  Operand<X_T, TILE_M, LOAD_X> x_step;
  Operand<W_T, TILE_N, LOAD_W> w_step;
  float sums[kRows][kColumns];
  multiply_steps(sums, x_step, w_step, product.x_col, product.w_col, product.k, [&](int step) {
    x_step.load(x, product.x_row, product.x_col, step * kDepth, product.k, x_row, same);
    w_step.load(w, product.w_row, product.w_col, step * kDepth, product.k, w_row, same);
  });

  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int j = 0; j < kColumns; j += GATE ? 2 : 1) {
    const int column = column_of<1>(first_w + place_of<kColumns>(j, tx));
    if (column >= product.n) continue;
    const ColumnTerms terms = column_terms(product, 0, column);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = tile.row + place_of<kRows>(i, ty);
      if (row >= tile.end) continue;
      write_row_element(product, row, column, sums[i][j], GATE ? sums[i][j + 1] : 0.0f, factor_of(p, row), terms);
    }
  }
}
