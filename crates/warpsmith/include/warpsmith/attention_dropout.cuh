#pragma once
// Dropout of `attention` and `attention_backward`: which weights count, decided as on the CPU (`cpu/attention/dropout.rs`), by
// the seed, the offset, the number of the request, the head, and the query and the key in the request alone.
//
// 64 random bits decide about four pairs, 16 bits each: queries i and i + 8 with keys j and j + 8. A lane has these in fragments
// of m16n8 whose tiles begin at multiples of 16, whichever of the two are rows.
//
// Defines: those of attention.cuh; DROPOUT, 1 where there is any.

#include "warpsmith/attention.cuh"
#include "warpsmith/random.cuh"

namespace warpsmith::attention {

// The place of a query or key: its cell, and which of two it is there.
WS_INLINE u32 cell_of(int index) { return (u32)(index / 16 * 8 + index % 8); }
WS_INLINE int half_of(int index) { return index / 8 % 2; }

// The number of a request in the call. Packed ones are searched for by their queries, 32 at a time; all lanes of a warp do it.
WS_INLINE int number_of(const AttentionParams& p, const Request& r) {
  if (!p.q_starts) return r.batch;
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < p.requests; base += 32) {
    int first = 0, count = 0;
    if (base + lane < p.requests) packed_range((const i32*)p.q_starts, p.q_starts_step, base + lane, p.q_len, first, count);
    const u32 found = __ballot_sync(kAllLanes, count > 0 && first == r.first_query && count == r.q_len);
    if (found) return base + __ffs(found) - 1;
  }
  return 0;
}

// Dropout of a head of a request.
struct HeadDropout {
  u64 start;
  u32 below;

  WS_INLINE HeadDropout(const DropoutParams& p, int request, int head)
      : start(mix_bits((u64)p.start + (((u64)(u32)request << 32 | (u32)head) + 1) * kGolden)), below(p.below) {}

  // The bits of a cell: from 32 * half_of(query) + 16 * half_of(key) on.
  WS_INLINE u64 bits(u32 query_cell, u32 key_cell) const {
    return mix_bits(start + (((u64)query_cell << 32 | key_cell) + 1) * kGolden);
  }
  WS_INLINE bool keeps(u64 bits, int query_half, int key_half) const {
    return ((u32)(bits >> (32 * query_half + 16 * key_half)) & 0xffff) >= below;
  }
  WS_INLINE bool keeps(int query, int key) const {
    return keeps(bits(cell_of(query), cell_of(key)), half_of(query), half_of(key));
  }
};

}  // namespace warpsmith::attention
