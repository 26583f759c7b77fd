// Puts the slots of tokens in their places, after `moe_route` has counted them.
//
// Threads to data: blocks have the tokens that they have in `moe_route`.
//
// Defines: EXPERTS, of which there is room for; THREADS.

#include "warpsmith/moe_places.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_place(const MoeRouteParams p) {
  begin_kernel();
  __shared__ moe::Places<THREADS, EXPERTS> places;
  const i64 first = blockIdx.x * p.block_tokens, last = min(first + p.block_tokens, p.num_tokens);
  places.put(p, (const i32*)p.block_counts, (i32)gridDim.x, first, last);
}
