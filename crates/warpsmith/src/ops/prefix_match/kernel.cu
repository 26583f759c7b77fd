// The longest prefix of each sequence that a radix tree holds.
//
// Threads to data: GROUP threads, a warp or a whole block, search for one sequence; with a warp a sequence, a block has
// WARPS of them. Every warp of a group looks at the same slots of the table and comes to the same decision; only the
// tokens of an edge are distributed over all of them, kItems neighbours a thread and kUnroll times that at once. Of eight
// lanes, lane i looks at the i-th slot from where the hash points.
//
// No input is trusted: starts are clamped to the tokens, edges outside the arrays are ignored, and every step consumes at
// least one page of the sequence and probes at most MAX_PROBES slots.
//
// Defines: MEMORY (0: elements may be apart, 1: every input is dense, 2: dense, and pages are aligned to 16 bytes),
// GROUP, WARPS, MAX_PROBES.

#include "warpsmith/hash.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

constexpr bool kDense = MEMORY > 0;
constexpr bool kVector = MEMORY == 2;
constexpr int kProbes = 8;
constexpr int kUnroll = 4;
constexpr int kItems = kVector ? 4 : 1;
static_assert(MAX_PROBES % kProbes == 0, "whole rounds of probes");

enum Argument { kTable, kEdgeTokens, kEdgePages, kTokens, kStarts, kMatched, kNodes, kPages };

struct Slot {
  int parent, child, start, len;
};

// Offsets inside a sequence fit 32 bits because starts do.
struct Search {
  const PrefixMatchParams& p;
  i64 begin;  // the sequence's first token
  u32 length, thread, lane;

  WS_INLINE u32 token(u32 at) const {
    return ((const u32*)p.tokens)[kDense ? begin + at : (begin + at) * p.strides[kTokens][0]];
  }

  // Token `at` of the edge that starts with page `start`.
  WS_INLINE u32 edge_token(i64 start, u32 at) const {
    const u32* tokens = (const u32*)p.edge_tokens;
    if (kDense) return tokens[start * p.page_size + at];
    const u32 page = at / (u32)p.page_size, column = at % (u32)p.page_size;
    return tokens[(start + page) * p.strides[kEdgeTokens][0] + column * p.strides[kEdgeTokens][1]];
  }

  WS_INLINE Slot slot(u32 at) const {
    Slot s;
    if (kVector) {
      u32 words[4];
      load_words(words, (const int*)p.table + (u64)at * 4);
      s.parent = words[0], s.child = words[1], s.start = words[2], s.len = words[3];
    } else {
      const i64 row = kDense ? (i64)at * 4 : at * p.strides[kTable][0], step = kDense ? 1 : p.strides[kTable][1];
      const int* table = (const int*)p.table + row;
      s.parent = table[0], s.child = table[step], s.start = table[2 * step], s.len = table[3 * step];
    }
    return s;
  }

  // This lane's token among the first 32 of the page at token `at`, or 0 if there is none.
  WS_INLINE u32 first_of(u32 at) const { return at + lane < length && lane < (u32)p.page_size ? token(at + lane) : 0; }

  // The same as `hash` in flat.rs, for the page of the sequence at token `at`. Computed by one warp.
  WS_INLINE u32 hash(int node, u32 at, u32 first) const {
    auto place = [&](u32 token, u32 i) { return mix_bits(token * 0x9e3779b1u + i * 0x85ebca77u + p.seed); };
    u32 sum = lane < (u32)p.page_size ? place(first, lane) : 0;
    for (u32 i = lane + 32; i < (u32)p.page_size; i += 32) sum += place(token(at + i), i);
    sum = warp_reduce<Sum>(sum);
    return mix_bits(sum + mix_bits((u32)node ^ p.seed));
  }

  template <int N> WS_INLINE void load_edge(u32 (&items)[N], i64 start, u32 at) const {
    if constexpr (N == 4) load_words(items, (const u32*)p.edge_tokens + start * p.page_size + at);
    else items[0] = edge_token(start, at);
  }

  template <int N> WS_INLINE void load_own(u32 (&items)[N], u32 at, bool aligned) const {
    if constexpr (N == 4) {
      if (aligned) return load_words(items, (const u32*)p.tokens + begin + at);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) items[i] = token(at + i);
  }

  // How many of `count` tokens the edge has in common with the sequence from token `at` on. Computed by the whole group.
  WS_INLINE u32 common(i64 start, u32 at, u32 count, u32* shared) const {
    constexpr u32 kStep = GROUP * kItems;
    const bool aligned = ((begin + at) & 3) == 0;
    for (u32 done = 0; done < count; done += kStep * kUnroll) {
      u32 edge[kUnroll][kItems], own[kUnroll][kItems];
      // All loads are issued before the first comparison.
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const u32 item = done + u * kStep + thread * kItems;
        if (item < count) {
          load_edge(edge[u], start, item);
          load_own(own[u], at + item, aligned);
        }
      }
      u32 first = count;
#pragma unroll
      for (int u = kUnroll - 1; u >= 0; --u) {
        const u32 item = done + u * kStep + thread * kItems;
#pragma unroll
        for (int i = kItems - 1; i >= 0; --i)
          if (item < count && edge[u][i] != own[u][i]) first = item + i;
      }
      if (GROUP == 32) {
        if (!__any_sync(kAllLanes, first < count)) continue;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) first = min(first, __shfl_xor_sync(kAllLanes, first, offset));
      } else {
        // This barrier also keeps the store behind the reads of an earlier edge.
        if (!__syncthreads_or(first < count)) continue;
        if (thread == 0) *shared = count;
        __syncthreads();
        if (first < count) atomicMin(shared, first);
        __syncthreads();
        first = *shared;
      }
      return first;
    }
    return count;
  }

  // Finds the edge from `node` that begins with the page at token `at`, and returns how many pages it has in common with
  // the sequence, which has `left` pages left; zero if there is no such edge. `first` is first_of this page, and becomes
  // first_of the page after the edge: that load overlaps with the comparison.
  WS_INLINE u32 edge(Slot& found, int node, u32 at, u32 left, u32& first, u32* shared) const {
    const u32 home = hash(node, at, first);
    for (u32 round = 0; round < MAX_PROBES && round <= p.slot_mask; round += kProbes) {
      // Eight lanes have a slot each, the others the same slots again.
      const Slot mine = slot((home + round + lane % kProbes) & p.slot_mask);
      const u32 empty = __ballot_sync(kAllLanes, mine.child == 0) & ((1u << kProbes) - 1);
      const bool inside = mine.child > 0 && mine.start >= 0 && mine.len > 0 && (i64)mine.start + mine.len <= p.num_pages;
      u32 candidates = __ballot_sync(kAllLanes, inside && mine.parent == node) & ((1u << kProbes) - 1);
      // Probing ends at the first empty slot: what follows belongs to other hashes.
      if (empty) candidates &= (empty & -empty) - 1;
      for (; candidates; candidates &= candidates - 1) {
        const int source = __ffs(candidates) - 1;
        found.child = __shfl_sync(kAllLanes, mine.child, source);
        found.start = __shfl_sync(kAllLanes, mine.start, source);
        found.len = __shfl_sync(kAllLanes, mine.len, source);
        const u32 pages = min((u32)found.len, left);
        first = first_of(at + pages * p.page_size);
        const u32 same = common(found.start, at, pages * p.page_size, shared) / (u32)p.page_size;
        if (same > 0) return same;
      }
      if (empty) return 0;
    }
    return 0;
  }
};

WS_INLINE i64 start_of(const PrefixMatchParams& p, i64 sequence) {
  const i64 start = ((const int*)p.starts)[kDense ? sequence : sequence * p.strides[kStarts][0]];
  return min(max(start, (i64)0), p.total);
}

extern "C" __global__ void __launch_bounds__(GROUP == 32 ? 32 * WARPS : GROUP) prefix_match(const PrefixMatchParams p) {
  begin_kernel();
  __shared__ u32 shared;
  const i64 sequence = GROUP == 32 ? (i64)blockIdx.x * WARPS + threadIdx.x / 32 : blockIdx.x;
  if (sequence >= p.batch) return;
  const i64 begin = start_of(p, sequence);
  const u32 length = (u32)max(start_of(p, sequence + 1) - begin, (i64)0);
  const Search search{p, begin, length, threadIdx.x % GROUP, threadIdx.x % 32};
  const u32 whole = length / (u32)p.page_size;
  int* row = (int*)p.pages + sequence * p.strides[kPages][0];
  const i64 column = p.strides[kPages][1];

  int node = 0;
  u32 matched = 0, first = search.first_of(0);
  while (matched < whole) {
    Slot edge;
    const u32 same = search.edge(edge, node, matched * p.page_size, whole - matched, first, &shared);
    if (same == 0) break;
    for (u32 i = search.thread; i < same && matched + i < p.max_pages; i += GROUP) {
      const i64 from = (i64)edge.start + i;
      row[(matched + i) * column] = ((const int*)p.edge_pages)[kDense ? from : from * p.strides[kEdgePages][0]];
    }
    matched += same;
    node = edge.child;
    if (same < (u32)edge.len) break;
  }
  for (u32 i = matched + search.thread; i < p.max_pages; i += GROUP) row[i * column] = -1;
  if (search.thread == 0) {
    ((int*)p.matched)[sequence * p.strides[kMatched][0]] = (int)(matched * p.page_size);
    ((int*)p.nodes)[sequence * p.strides[kNodes][0]] = node;
  }
}
