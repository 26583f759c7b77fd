// Sorts the slots of tokens by their experts: how many each expert has, the token of each sorted row, and the row of each slot, -1 for
// slots that are dropped.
//
// Threads to data: one block has all slots; p.lines of its warps have consecutive ones each. A warp counts its slots by expert; sums
// over experts and warps say where its slots of an expert begin; then it deals them out, 32 at a time, in their order. Counts are
// added by atomics, which no order shows in; places never are.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 1024, kWarps = kThreads / 32;
// Slots whose ids a lane loads at a time.
constexpr int kAhead = 4;

// Of each warp that has slots, and each expert: how many slots, and then the place of the warp's next one.
extern __shared__ __align__(16) i32 places[];

// The expert of a slot of this call, -1 if there is none.
WS_INLINE i32 expert_of(const MoeFfnSortParams& p, i64 slot, i64 end) {
  if (slot >= end) return -1;
  const u32 token = (u32)slot / (u32)p.top_k;
  const i64 at = row_offset(p.tokens_of, 0, p.first + token) + ((u32)slot - token * (u32)p.top_k) * p.id_step;
  const i64 id = load_integer(p.ids, p.wide_ids, at);
  return id >= 0 && id < p.experts ? (i32)id : -1;
}

// Calls `use` for each slot of a lane and its expert, whole warps at a time.
template <class Use> WS_INLINE void each_slot(const MoeFfnSortParams& p, i64 first, i64 end, Use use) {
#pragma unroll 1
  for (i64 round = first; round < end; round += 32 * kAhead) {
    i32 experts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) experts[i] = expert_of(p, round + i * 32 + threadIdx.x % 32, end);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) use(round + i * 32 + threadIdx.x % 32, experts[i]);
  }
}

// From the counts of each warp to its first place of each expert.
WS_INLINE void scan(const MoeFfnSortParams& p) {
  __shared__ i32 sums[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i32 begin = 0;
#pragma unroll 1
  for (int first = 0; first < p.experts; first += kThreads) {
    const int e = first + threadIdx.x;
    i32 total = 0;
    if (e < p.experts) {
      for (int line = 0; line < p.lines; ++line) {
        i32& place = places[line * p.experts + e];
        const i32 count = place;
        place = total;
        total += count;
      }
      ((i32*)p.counts)[e] = total;
    }
    const i32 inside = warp_scan<Sum>(total, lane);
    if (lane == 31) sums[warp] = inside;
    __syncthreads();
    const i32 of_warps = warp_scan<Sum>(sums[lane], lane);
    const i32 before = warp > 0 ? __shfl_sync(kAllLanes, of_warps, max(warp - 1, 0)) : 0;
    if (e < p.experts)
      for (int line = 0; line < p.lines; ++line) places[line * p.experts + e] += begin + before + inside - total;
    begin += __shfl_sync(kAllLanes, of_warps, 31);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) moe_ffn_sort(const __grid_constant__ MoeFfnSortParams p) {
  begin_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < p.lines * p.experts; i += kThreads) places[i] = 0;
  __syncthreads();
  const i64 slots = (i64)p.tokens * p.top_k;
  const i64 each = (slots + p.lines * 32 - 1) / (p.lines * 32) * 32;
  const i64 first = min(warp * each, slots), end = warp < p.lines ? min(first + each, slots) : first;
  i32* mine = places + warp * p.experts;
  each_slot(p, first, end, [&](i64, i32 expert) {
    if (expert >= 0) atomicAdd(&mine[expert], 1);
  });
  __syncthreads();
  scan(p);
  each_slot(p, first, end, [&](i64 slot, i32 expert) {
    // Lanes with the same expert take its next places in the order of their slots.
    const u32 same = __match_any_sync(kAllLanes, expert);
    i32 place = -1;
    if (expert >= 0) place = mine[expert] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (expert >= 0 && lane == 31 - __clz((int)same)) mine[expert] = place + 1;
    __syncwarp();
    if (slot >= end) return;
    ((i32*)p.positions)[slot] = place;
    if (place >= 0) ((i32*)p.order)[place] = (i32)((u32)slot / (u32)p.top_k);
  });
  // The group of the shared expert has all tokens.
  if (threadIdx.x == 0) ((i32*)p.counts)[p.experts] = p.tokens;
}
