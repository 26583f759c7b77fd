// `moe_route` where the order of the logits decides alone: experts and weights, and which tokens of a block each expert has, by which
// blocks_place.cu finds the places.
//
// Threads to data: a block has p.block_tokens tokens in a row, at most 32; its warps take one in turn. In the workspace every block
// has a byte for each expert, how many tokens; and behind those of all blocks a word, which.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for; THREADS.

#include "warpsmith/moe_plain.cuh"

using namespace warpsmith;
using namespace warpsmith::moe;

constexpr int kWarps = THREADS / 32, kWords = EXPERTS / 4;

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_blocks(const __grid_constant__ MoeRouteParams p) {
  __shared__ u32 masks[EXPERTS];
  __shared__ u16 ids[kBlockTokens * kMostSlots];
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) masks[e] = 0;
  __syncthreads();
  begin_kernel();
  const i64 first = blockIdx.x * p.block_tokens;
  const int tokens = (int)min(p.block_tokens, p.num_tokens - first);
  for (int local = threadIdx.x / 32; local < tokens; local += kWarps) route_plain<ELEM, EXPERTS>(p, first + local, local, masks, ids);
  __syncthreads();
  u32* counts = (u32*)p.block_counts;
  u32* all_masks = counts + gridDim.x * kWords;
  for (int word = threadIdx.x; word < kWords; word += THREADS) counts[blockIdx.x * kWords + word] = count_tokens(masks, word);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) all_masks[blockIdx.x * EXPERTS + e] = masks[e];
}
