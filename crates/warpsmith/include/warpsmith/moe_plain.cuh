#pragma once
// Routing where the order of the logits decides alone, and the places of slots, for blocks of at most 32 tokens: which of them an
// expert has are the bits of a word, and the bits below a token's are how many come before it.

#include "warpsmith/random.cuh"
#include "warpsmith/rows.cuh"

namespace warpsmith {
namespace moe {

// Tokens of a block and slots of a token, at most.
constexpr int kBlockTokens = 32, kMostSlots = 32;
// Experts of a warp that scans: four for each lane.
constexpr int kWarpExperts = 128;

// Over a warp. Instructions for it came with sm_80.
WS_INLINE u32 warp_largest(u32 x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
#endif
}
WS_INLINE u32 warp_least(u32 x) { return ~warp_largest(~x); }

// The experts of a token that are not taken yet: lane l has l, l + 32, ... With 16 bits a word holds logit and expert.
template <class T, int kItems> struct Candidates {
  u32 keys[kItems];

  WS_INLINE Candidates(const T* row, i64 step, int experts) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int e = i * 32 + lane;
      keys[i] = e < experts ? ordered(row[e * step]) << 16 | (0xffffu - e) : 0;
    }
  }

  // Takes the best, of equal ones the lowest.
  WS_INLINE void take(u32& id, float& logit) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) best = max(best, keys[i]);
    best = warp_largest(best);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (keys[i] == best) keys[i] = 0;
    id = 0xffffu - (best & 0xffffu);
    const u32 order = best >> 16;
    T value;
    value.bits = (u16)(order & 0x8000u ? order ^ 0x8000u : ~order);
    logit = clean(to_f32(value));
  }

 private:
  // As `ordered_bits`; not zero.
  static WS_INLINE u32 ordered(T value) {
    const float x = to_f32(value);
    u32 bits = value.bits;
    if (x != x) bits = from_f32<T>(minus_infinity()).bits;
    if (x == 0.0f) bits = 0;
    return bits & 0x8000u ? bits ^ 0xffffu : bits | 0x8000u;
  }
};

template <int kItems> struct Candidates<f32, kItems> {
  u32 keys[kItems];

  WS_INLINE Candidates(const f32* row, i64 step, int experts) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int e = i * 32 + lane;
      keys[i] = e < experts ? ordered_bits(clean(row[e * step])) : 0;
    }
  }

  WS_INLINE void take(u32& id, float& logit) {
    const int lane = threadIdx.x % 32;
    u32 best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (keys[i] > best) best = keys[i], at = i;
    const u32 most = warp_largest(best);
    id = warp_least(best == most ? (u32)(at * 32 + lane) : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (id == (u32)(i * 32 + lane)) keys[i] = 0;
    logit = ordered_number(most);
  }
};

// What the weight of an expert is made of.
template <class P> WS_INLINE float plain_score(const P& p, float x, float pivot) {
  if (!p.is_sigmoid) return expf(x - pivot);
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// Routes a token, which is number `local` of its block, by a warp. Bits of weights are those of the kernel for all calls.
template <class T, int kExperts, class P> WS_INLINE void route_plain(const P& p, i64 token, int local, u32* masks, u16* ids) {
  const int lane = threadIdx.x % 32;
  const T* row = row_at<const T>(p.logits, p.rows, 0, token);
  Candidates<T, kExperts / 32> candidates(row, p.steps[0], p.experts);
  float mine = minus_infinity(), largest = minus_infinity();
  u32 id = 0;
#pragma unroll 1
  for (int slot = 0; slot < p.top_k; ++slot) {
    u32 taken;
    float logit;
    candidates.take(taken, logit);
    if (slot == 0) largest = logit;
    if (lane == slot) mine = logit, id = taken;
  }
  const bool present = lane < p.top_k;
  if (present) {
    row_at<i32>(p.ids, p.rows, 2, token)[lane * p.steps[2]] = (i32)id;
    atomicOr(&masks[id], 1u << local);
    ids[local * p.top_k + lane] = (u16)id;
  }
  const float own = plain_score(p, mine, largest);
  float divisor = 0.0f;
  if (!p.is_sigmoid && !p.normalize) {
#pragma unroll
    for (int i = 0; i < kExperts / 32; ++i) {
      const int e = i * 32 + lane;
      divisor += expf((e < p.experts ? clean(to_f32(row[e * p.steps[0]])) : minus_infinity()) - largest);
    }
  } else if (p.normalize && present) {
    divisor += own;
  }
  divisor = warp_reduce<Sum>(divisor);
  if (p.is_sigmoid) divisor = p.normalize ? divisor + 1e-20f : 1.0f;
  if (present)
    row_at<float>(p.weights, p.rows, 1, token)[lane * p.steps[1]] = largest == minus_infinity() ? 0.0f : own / divisor * p.scale;
}

// How many tokens of a block the experts from 4 word to 4 word + 3 have: a byte each.
WS_INLINE u32 count_tokens(const u32* masks, int word) {
  u32 counts = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) counts |= (u32)__popc(masks[word * 4 + i]) << (8 * i);
  return counts;
}

// Where the slots of a block go. Lives in shared memory.
template <int kThreads, int kExperts> struct BlockPlaces {
  static constexpr int kScanWarps = kExperts > kWarpExperts ? kExperts / kWarpExperts : 1;
  static_assert(kScanWarps * 32 <= kThreads, "a warp for each 128 experts");

  // Of each expert: the block's tokens that it has; where it begins among those of its warp; slots of the blocks before.
  alignas(16) u32 masks[kExperts];
  i32 begins[kExperts], before[kExperts];
  i32 sums[kScanWarps];
  u16 ids[kBlockTokens * kMostSlots];

  // By the first warps. `totals` and `earlier` are of four experts from 4 threadIdx.x on: all their slots, and those of blocks before
  // this one. One block writes what is known of experts.
  template <class P> WS_INLINE void scan(const P& p, const i32 (&totals)[4], const i32 (&earlier)[4], bool writes) {
    const int lane = threadIdx.x % 32;
    i32 keeps[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keeps[i] = p.capacity > 0 ? min(totals[i], p.capacity) : totals[i];
      own += keeps[i];
    }
    const i32 end = warp_scan<Sum>(own, lane);
    i32 begin = end - own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = threadIdx.x * 4 + i;
      if (e < kExperts) begins[e] = begin, before[e] = earlier[i];
      begin += keeps[i];
      if (!writes || e >= p.experts) continue;
      if (p.counts) ((i32*)p.counts)[e * p.counts_step] = keeps[i];
      if (p.dropped) ((i32*)p.dropped)[e * p.dropped_step] = totals[i] - keeps[i];
    }
    if (lane == 31) sums[threadIdx.x / 32] = end;
  }

  // After a barrier.
  template <class P> WS_INLINE void put(const P& p, i64 first_token, int tokens) {
    for (int i = threadIdx.x; i < tokens * p.top_k; i += kThreads) {
      const int local = (u32)i / (u32)p.top_k, slot = i - local * p.top_k, e = ids[i];
      const i32 rank = before[e] + __popc(masks[e] & ((1u << local) - 1));
      i32 place = begins[e] + rank;
      for (int w = 0; w < e / kWarpExperts; ++w) place += sums[w];
      const bool keeps = p.capacity == 0 || rank < p.capacity;
      const i64 token = first_token + local;
      if (p.positions) row_at<i32>(p.positions, p.rows, 3, token)[slot * p.steps[3]] = keeps ? place : -1;
      if (p.order && keeps) *in_order(p, place) = (i32)(token * p.top_k + slot);
      if (!keeps) row_at<float>(p.weights, p.rows, 1, token)[slot * p.steps[1]] = 0.0f;
    }
    if (!p.order || p.capacity == 0) return;
    // What no slot has, all blocks together.
    i32 kept = 0;
    for (int w = 0; w < kScanWarps; ++w) kept += sums[w];
    const i32 all = (i32)(p.num_tokens * p.top_k);
    for (i32 place = kept + blockIdx.x * kThreads + threadIdx.x; place < all; place += gridDim.x * kThreads) *in_order(p, place) = -1;
  }

 private:
  template <class P> static WS_INLINE i32* in_order(const P& p, i32 place) {
    const u32 row = (u32)place / (u32)p.top_k;
    return row_at<i32>(p.order, p.order_rows, 0, row) + ((u32)place - row * (u32)p.top_k) * p.order_step;
  }
};

}  // namespace moe
}  // namespace warpsmith
