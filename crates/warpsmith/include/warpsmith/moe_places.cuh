#pragma once
// Where the slots of a block's tokens are among those of their experts. Blocks have tokens in order, and the counts of all are
// in memory; a block adds up those before it. Its warps do the same with the slots that each of them has, in shared memory.
// Counts are added by atomics, which no order shows in; ranks never are.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

namespace warpsmith {
namespace moe {

// Element `expert` of an argument with one for each.
WS_INLINE i32* of_expert(u64 base, i64 step, int expert) { return (i32*)base + expert * step; }

template <int kThreads, int kExperts> struct Places {
  static constexpr int kWarps = kThreads / 32;

  // Of each warp and expert: how many slots, and then how many come before the warp's next one. Before that, scratch of
  // each warp.
  i32 ranks[kWarps][kExperts];
  // Of each expert: all slots, and then where they begin in the order; and slots of blocks before this one.
  i32 totals[kExperts], before[kExperts];
  i32 kept;

  // Puts this block's slots in their places. `counts` has those of each block and expert. Begins with a barrier.
  template <class P> WS_INLINE void put(const P& p, const i32* counts, i32 blocks, i64 first_token, i64 last_token) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    __syncthreads();
    for (int e = thread; e < kExperts; e += kThreads) totals[e] = before[e] = 0;
    for (int i = thread; i < kWarps * kExperts; i += kThreads) ranks[i / kExperts][i % kExperts] = 0;
    __syncthreads();
    sum(p, counts, blocks);
    __syncthreads();
    if (warp == 0) scan(p);
    const i64 slots = (last_token - first_token) * p.top_k;
    // Whole rounds of 32 slots.
    const i64 each = (slots + kThreads - 1) / kThreads * 32, first = min(warp * each, slots), last = min(first + each, slots);
    for (i64 slot = first + lane; slot < last; slot += 32) atomicAdd(&ranks[warp][*at(p, p.ids, 2, first_token, slot)], 1);
    __syncthreads();
    for (int e = thread; e < p.experts; e += kThreads) {
      i32 rank = before[e];
      for (int w = 0; w < kWarps; ++w) {
        const i32 count = ranks[w][e];
        ranks[w][e] = rank;
        rank += count;
      }
    }
    __syncthreads();
    for (i64 round = first; round < last; round += 32) put_round(p, first_token, round + lane, round + lane < last);
    if (!p.order) return;
    // What no slot has, all blocks together.
    const i64 all = p.num_tokens * p.top_k;
    for (i64 place = kept + (i64)blockIdx.x * kThreads + thread; place < all; place += (i64)gridDim.x * kThreads)
      *in_order(p, place) = -1;
  }

 private:
  // The element of a row for a slot of this block. There are fewer than 2^31 slots.
  template <class P> static WS_INLINE i32* at(const P& p, u64 base, int row, i64 first_token, i64 slot) {
    const u32 token = (u32)slot / (u32)p.top_k;
    return row_at<i32>(base, p.rows, row, first_token + token) + ((u32)slot - token * (u32)p.top_k) * p.steps[row];
  }

  template <class P> static WS_INLINE i32* in_order(const P& p, i64 place) {
    const u32 row = (u32)place / (u32)p.top_k;
    return row_at<i32>(p.order, p.order_rows, 0, row) + ((u32)place - row * (u32)p.top_k) * p.order_step;
  }

  // Of each expert: the slots of all blocks, and of those before this one. Threads share the blocks.
  template <class P> WS_INLINE void sum(const P& p, const i32* counts, i32 blocks) {
    const int lines = kThreads > p.experts ? kThreads / p.experts : 1;
    const int line = threadIdx.x / p.experts;
    for (int e = threadIdx.x - line * p.experts; line < lines && e < p.experts; e += kThreads) {
      i32 all = 0, earlier = 0;
#pragma unroll 4
      for (i32 block = line; block < blocks; block += lines) {
        const i32 count = counts[(i64)block * p.experts + e];
        all += count;
        earlier += block < (i32)blockIdx.x ? count : 0;
      }
      atomicAdd(&totals[e], all);
      atomicAdd(&before[e], earlier);
    }
  }

  // From totals to where experts begin, by one warp; the first block's writes what is known of experts.
  template <class P> WS_INLINE void scan(const P& p) {
    const int lane = threadIdx.x;
    i32 begin = 0;
    for (int first = 0; first < p.experts; first += 32) {
      const int e = first + lane;
      const i32 total = e < p.experts ? totals[e] : 0, keeps = p.capacity > 0 ? min(total, p.capacity) : total;
      const i32 end = warp_scan<Sum>(keeps, lane);
      if (e < p.experts) {
        totals[e] = begin + end - keeps;
        if (p.counts && blockIdx.x == 0) *of_expert(p.counts, p.counts_step, e) = keeps;
        if (p.dropped && blockIdx.x == 0) *of_expert(p.dropped, p.dropped_step, e) = total - keeps;
      }
      begin += __shfl_sync(kAllLanes, end, 31);
    }
    if (lane == 0) kept = begin;
  }

  // 32 slots of a warp, in order. Those of one expert are a token each, so their lanes tell their order.
  template <class P> WS_INLINE void put_round(const P& p, i64 first_token, i64 slot, bool present) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncwarp();
    const i32 expert = present ? *at(p, p.ids, 2, first_token, slot) : -1;
    const u32 same = __match_any_sync(kAllLanes, expert);
    const i32 rank = present ? ranks[warp][expert] + __popc(same & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (!present) return;
    if (lane == 31 - __clz((int)same)) ranks[warp][expert] = rank + 1;
    const bool keeps = p.capacity == 0 || rank < p.capacity;
    const i32 place = totals[expert] + rank;
    if (p.positions) *at(p, p.positions, 3, first_token, slot) = keeps ? place : -1;
    if (p.order && keeps) *in_order(p, place) = (i32)(first_token * p.top_k + slot);
    if (!keeps) *(float*)at(p, p.weights, 1, first_token, slot) = 0.0f;
  }
};

}  // namespace moe
}  // namespace warpsmith
