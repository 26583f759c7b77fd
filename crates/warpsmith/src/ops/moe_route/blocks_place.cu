// Puts the slots of tokens in their places, after `moe_route_blocks`.
//
// Threads to data: blocks have the tokens that they have there. Some threads add up what all blocks counted, 16 experts at a time; a
// word holds sums of two experts, which stay below 2^16.
//
// Defines: EXPERTS, of which there is room for; THREADS.

#include "warpsmith/moe_plain.cuh"

using namespace warpsmith;
using namespace warpsmith::moe;

constexpr int kColumns = EXPERTS / 16, kSumThreads = THREADS < 256 ? THREADS : 256, kLines = kSumThreads / kColumns;
static_assert(kLines * kColumns == kSumThreads, "whole lines");

// Sums of the experts 4 i and 4 i + 2, and of 4 i + 1 and 4 i + 3: of all blocks, and of those before this one.
__shared__ u32 of_all[EXPERTS / 2], of_earlier[EXPERTS / 2];

WS_INLINE void add_counts(const MoeRouteParams& p) {
  const int column = threadIdx.x % kColumns, line = threadIdx.x / kColumns;
  u32 sums[8] = {}, sums_before[8] = {};
#pragma unroll 4
  for (int block = line; block < (int)gridDim.x; block += kLines) {
    const uint4 piece = ((const uint4*)p.block_counts)[block * kColumns + column];
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 counts = words[i / 2] >> (i % 2 * 8) & 0x00ff00ffu;
      sums[i] += counts;
      sums_before[i] += block < (int)blockIdx.x ? counts : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Lanes of the same column.
#pragma unroll
    for (int offset = 16; offset >= kColumns; offset /= 2) {
      sums[i] += __shfl_xor_sync(kAllLanes, sums[i], offset);
      sums_before[i] += __shfl_xor_sync(kAllLanes, sums_before[i], offset);
    }
    if ((int)threadIdx.x % 32 >= kColumns) continue;
    atomicAdd(&of_all[column * 8 + i], sums[i]);
    atomicAdd(&of_earlier[column * 8 + i], sums_before[i]);
  }
}

WS_INLINE void unpack(i32 (&counts)[4], const u32* sums, int word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) counts[i] = word * 4 < EXPERTS ? sums[word * 2 + i % 2] >> (i / 2 * 16) & 0xffff : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_blocks_place(const __grid_constant__ MoeRouteParams p) {
  __shared__ BlockPlaces<THREADS, EXPERTS> places;
  const int thread = threadIdx.x;
  for (int i = thread; i < EXPERTS / 2; i += THREADS) of_all[i] = of_earlier[i] = 0;
  __syncthreads();
  begin_kernel();
  const i64 first = blockIdx.x * p.block_tokens;
  const int tokens = (int)min(p.block_tokens, p.num_tokens - first);
  for (int i = thread; i < tokens * p.top_k; i += THREADS) {
    const int local = (u32)i / (u32)p.top_k;
    places.ids[i] = (u16)row_at<const i32>(p.ids, p.rows, 2, first + local)[(i - local * p.top_k) * p.steps[2]];
  }
  const u32* masks = (const u32*)p.block_counts + gridDim.x * (EXPERTS / 4) + blockIdx.x * EXPERTS;
  for (int e = thread; e < EXPERTS; e += THREADS) places.masks[e] = masks[e];
  if (thread < kSumThreads) add_counts(p);
  __syncthreads();
  if (thread / 32 < places.kScanWarps) {
    i32 totals[4], before[4];
    unpack(totals, of_all, thread);
    unpack(before, of_earlier, thread);
    places.scan(p, totals, before, blockIdx.x == 0);
  }
  __syncthreads();
  places.put(p, first, tokens);
}
