// The longest prefix of each sequence that a radix tree holds.
//
// Threads to data: GROUP threads search for one sequence, a warp or a whole block; a block has WARPS sequences where it
// is a warp. Every warp of a group looks at the same slots of the table and comes to the same decision; only the tokens
// of an edge are shared out over all of them, four or one a thread and kUnroll of these at once. Lane i of eight looks at
// the i-th slot from where the hash says.
//
// Nothing that is read is trusted: starts are moved inside the tokens, edges outside the arrays are no edges, every step
// takes at least one page of the sequence and at most MAX_PROBES slots.
//
// Defines: MEMORY (0: elements may be apart, 1: every input is dense, 2: dense, and pages are aligned to 16 bytes),
// GROUP, WARPS, MAX_PROBES.

#include "warpsmith/vec.cuh"

constexpr bool kDense = MEMORY > 0;
constexpr bool kVector = MEMORY == 2;
constexpr u32 kAll = 0xffffffffu;
constexpr int kProbes = 8;
constexpr int kUnroll = 4;
constexpr int kItems = kVector ? 4 : 1;
static_assert(MAX_PROBES % kProbes == 0, "whole rounds of probes");

enum Argument { kTable, kEdgeTokens, kEdgePages, kTokens, kStarts, kMatched, kNodes, kPages };

struct Slot {
  int parent, child, start, len;
};

WS_INLINE u32 mix(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Search {
  const PrefixMatchParams& p;
  i64 begin;  // the sequence's first token
  int thread, lane;

  WS_INLINE int token(i64 at) const {
    return ((const int*)p.tokens)[kDense ? begin + at : (begin + at) * p.strides[kTokens][0]];
  }

  // Token `at` of the edge that starts with page `start`.
  WS_INLINE int edge_token(i64 start, i64 at) const {
    const int* tokens = (const int*)p.edge_tokens;
    if (kDense) return tokens[start * p.page_size + at];
    const i64 page = start + at / p.page_size, column = at % p.page_size;
    return tokens[page * p.strides[kEdgeTokens][0] + column * p.strides[kEdgeTokens][1]];
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

  // As `hash` of radix/flat.rs, for the page of the sequence that begins with token `at`; by one warp.
  WS_INLINE u32 hash(int node, i64 at) const {
    u32 sum = 0;
    for (u32 i = lane; i < (u32)p.page_size; i += 32) sum += mix((u32)token(at + i) * 0x9e3779b1u + i * 0x85ebca77u + p.seed);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
    return mix(sum + mix((u32)node ^ p.seed));
  }

  // The first of the items from `at` on, out of this thread's kItems, that differ; kItems if none does.
  WS_INLINE int first_difference(i64 start, i64 at, i64 edge_at, bool aligned) const {
    if (kVector) {
      u32 edge[4], own[4];
      load_words(edge, (const int*)p.edge_tokens + start * p.page_size + edge_at);
      const int* mine = (const int*)p.tokens + begin + at;
      if (aligned) {
        load_words(own, mine);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = mine[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (edge[i] != own[i]) return i;
      return 4;
    }
    return edge_token(start, edge_at) == token(at) ? 1 : 0;
  }

  // Tokens that the edge and the sequence from token `at` on have in common, up to `count`, by the whole group.
  WS_INLINE i64 common(i64 start, i64 at, i64 count, int* shared) const {
    constexpr int kStep = GROUP * kItems;
    const bool aligned = ((begin + at) & 3) == 0;
    for (i64 done = 0; done < count; done += kStep * kUnroll) {
      int first = kStep * kUnroll;
#pragma unroll
      for (int u = kUnroll - 1; u >= 0; --u) {
        const int item = (u * GROUP + thread) * kItems;
        if (done + item < count) {
          const int same = first_difference(start, at + done + item, done + item, aligned);
          if (same < kItems) first = item + same;
        }
      }
      const bool differs = first < kStep * kUnroll;
      if (GROUP == 32) {
        if (!__any_sync(kAll, differs)) continue;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) first = min(first, __shfl_xor_sync(kAll, first, offset));
      } else {
        // The barrier also keeps this store behind the reads of the round before.
        if (!__syncthreads_or(differs)) continue;
        if (thread == 0) *shared = kStep * kUnroll;
        __syncthreads();
        if (differs) atomicMin(shared, first);
        __syncthreads();
        first = *shared;
      }
      return done + first;
    }
    return count;
  }

  // The edge from `node` that begins with the page at token `at`: pages it has in common with the sequence, which goes on
  // for `left` pages. Zero if there is none.
  WS_INLINE i64 edge(Slot& found, int node, i64 at, i64 left, int* shared) const {
    const u32 home = hash(node, at);
    for (u32 round = 0; round < MAX_PROBES && round <= p.slot_mask; round += kProbes) {
      // Eight lanes have a slot each, the others the same slots again.
      const Slot mine = slot((home + round + lane % kProbes) & p.slot_mask);
      const u32 empty = __ballot_sync(kAll, mine.child == 0) & ((1u << kProbes) - 1);
      const bool inside = mine.child > 0 && mine.start >= 0 && mine.len > 0 && (i64)mine.start + mine.len <= p.num_pages;
      u32 candidates = __ballot_sync(kAll, inside && mine.parent == node) & ((1u << kProbes) - 1);
      // What lies behind an empty slot has nothing to do with this hash.
      candidates &= empty ? (empty & -empty) - 1 : kAll;
      for (; candidates; candidates &= candidates - 1) {
        const int source = __ffs(candidates) - 1;
        found.child = __shfl_sync(kAll, mine.child, source);
        found.start = __shfl_sync(kAll, mine.start, source);
        found.len = __shfl_sync(kAll, mine.len, source);
        const i64 pages = min((i64)found.len, left);
        const i64 same = common(found.start, at, pages * p.page_size, shared) / p.page_size;
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
  __shared__ int shared;
  const i64 sequence = GROUP == 32 ? (i64)blockIdx.x * WARPS + threadIdx.x / 32 : blockIdx.x;
  if (sequence >= p.batch) return;
  const i64 begin = start_of(p, sequence);
  const i64 length = max(start_of(p, sequence + 1) - begin, (i64)0);
  const Search search{p, begin, (int)(threadIdx.x % GROUP), (int)(threadIdx.x % 32)};
  const i64 whole = length / p.page_size;
  int* row = (int*)p.pages + sequence * p.strides[kPages][0];
  const i64 column = p.strides[kPages][1];

  int node = 0;
  i64 matched = 0;
  while (matched < whole) {
    Slot edge;
    const i64 same = search.edge(edge, node, matched * p.page_size, whole - matched, &shared);
    if (same == 0) break;
    for (i64 i = search.thread; i < same && matched + i < p.max_pages; i += GROUP) {
      const i64 from = (i64)edge.start + i;
      row[(matched + i) * column] = ((const int*)p.edge_pages)[kDense ? from : from * p.strides[kEdgePages][0]];
    }
    matched += same;
    node = edge.child;
    if (same < edge.len) break;
  }
  for (i64 i = matched + search.thread; i < p.max_pages; i += GROUP) row[i * column] = -1;
  if (search.thread == 0) {
    ((int*)p.matched)[sequence * p.strides[kMatched][0]] = (int)(matched * p.page_size);
    ((int*)p.nodes)[sequence * p.strides[kNodes][0]] = node;
  }
}
