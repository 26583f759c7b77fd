// Gradients of grouped matrices without tensor cores: any types, any strides.
//
// Threads to data: a block computes a tile of TILE x TILE of the gradient of a group, as grouped_generic.cuh says; K are the group's
// rows.
//
// Defines: ELEM; TILE, 64 or 128.

#include "warpsmith/grouped_generic.cuh"
#include "warpsmith/grouped_weights.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kEach = TILE / 16;

extern "C" __global__ void __launch_bounds__(kGenericThreads) grouped_weights_generic(const __grid_constant__ GroupedWeightsParams p) {
  begin_kernel();
  const WeightTile tile = weight_tile<TILE, TILE>(p, blockIdx.x);
  auto m_of = [&](int row) { return tile.m + row < p.m ? tile.m + row : -1; };
  auto n_of = [&](int row) { return tile.n + row < p.n ? tile.n + row : -1; };
  auto a_row = [&](int k) { return row_of(p, tile, k, p.gathers_a); };
  auto b_row = [&](int k) { return row_of(p, tile, k, p.gathers_b); };
  Operand<ELEM, TILE, 0> a, b;
  float sums[kEach][kEach];
  multiply_steps(sums, a, b, p.a_row, p.b_row, tile.depth, [&](int step) {
    a.load((const ELEM*)p.a, p.a_col, p.a_row, step * kDepth, tile.depth, m_of, a_row);
    b.load((const ELEM*)p.b, p.b_col, p.b_row, step * kDepth, tile.depth, n_of, b_row);
  });
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int m = tile.m + place_of<kEach>(i, threadIdx.x / 16), n = tile.n + place_of<kEach>(j, threadIdx.x % 16);
      if (m < p.m && n < p.n) *element_of(p, tile, m, n) = from_f32<ELEM>(sums[i][j]);
    }
}
