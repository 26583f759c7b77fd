// Gradients of grouped matrices on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16, where rows of a and b consist of
// whole aligned pieces of 16 bytes.
//
// Threads to data: a block computes a tile of TILE_M x 128 of the gradient of a group, as grouped_mma.cuh says; K are the group's rows,
// across both operands. Rows past its end are zeros in both: those of another group could be infinite.
//
// Defines: ELEM, and X_T, the same; TILE_M; OUT_PAIRS, whether two neighbours of a row of out are one aligned word.

#include "warpsmith/grouped_mma.cuh"
#include "warpsmith/grouped_weights.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

extern __shared__ __align__(128) u8 shared[];

extern "C" __global__ void __launch_bounds__(kMmaThreads, 2) grouped_weights_sm80(const __grid_constant__ GroupedWeightsParams p) {
  begin_kernel();
  const WeightTile tile = weight_tile<TILE_M, kTileN>(p, blockIdx.x);
  const CopiesAcross<TILE_M> a((const ELEM*)p.a, p.a_row, tile.m, p.m);
  const CopiesAcross<kTileN> b((const ELEM*)p.b, p.b_row, tile.n, p.n);
  Sums sums;
  multiply_steps<true, true>(sums, shared_address(shared), tile.depth, [&](int k, u32 a_at, u32 b_at) {
    a.load(a_at, k, tile.depth, [&](int k) { return row_of(p, tile, k, p.gathers_a); });
    b.load(b_at, k, tile.depth, [&](int k) { return row_of(p, tile, k, p.gathers_b); });
  });
  each_pair<1>([&](int below, int beside, int i, int j, int at) {
    const int m = tile.m + below, n = tile.n + beside;
    if (m >= p.m || n >= p.n) return;
    if (OUT_PAIRS) {
      *(u32*)element_of(p, tile, m, n) = pack_pair(sums[i][j][at], sums[i][j][at + 1], ELEM());
    } else {
      *element_of(p, tile, m, n) = from_f32<ELEM>(sums[i][j][at]);
      if (n + 1 < p.n) *element_of(p, tile, m, n + 1) = from_f32<ELEM>(sums[i][j][at + 1]);
    }
  });
}
