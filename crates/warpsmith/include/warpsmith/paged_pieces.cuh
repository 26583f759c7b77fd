#pragma once
// `paged_attention` on tensor cores: how the pieces of work of a launch are numbered. Lengths are known only on the device,
// so every block counts for itself.

#include "warpsmith/paged_fragments.cuh"

namespace warpsmith::paged {

constexpr int kRound = 4 * kSegment;
// Whether lengths may decide if requests stay whole. Dense requests have one length, and long heads leave no register for
// the answer.
constexpr bool kLengthsDecide = HEAD_DIM <= 128 && !DENSE;
WS_INLINE bool lengths_decide(const PagedParams& p) { return kLengthsDecide && p.slots; }

// Keys are cut into ranges of `keys` keys: the first range of a request, and the number of its ranges. A request that stays
// whole has one.
WS_INLINE int first_range(const Request& request, bool whole, int keys) { return whole ? 0 : request.from / keys; }
WS_INLINE int ranges_of(const Request& request, bool whole, int keys) {
  return whole ? 1 : max((request.kv_len + keys - 1) / keys - first_range(request, whole, keys), 1);
}
WS_INLINE i64 tiles_of(const PagedParams& p, const Request& request) {
  if (request.count < p.min_queries || request.count > p.max_queries) return 0;
  return (request.count * p.group + kRows - 1) / kRows;
}
// Whether requests stay whole, that is, are not cut into ranges. If the parameters leave it to the lengths, they do if that
// finishes no later, going by the longest request. Every warp decides for itself.
WS_INLINE bool stay_whole(const PagedParams& p) {
  if (!lengths_decide(p)) return p.ranges == 0;
  i64 whole = 0, cut = 0;
  int longest = 0;
  for (int r = threadIdx.x % 32; r < p.requests; r += 32) {
    const Request request = request_at(p, r);
    const i64 tiles = tiles_of(p, request);
    whole += tiles, cut += tiles * ranges_of(request, false, p.piece_keys);
    if (tiles) longest = max(longest, ranges_of(request, false, kSpan));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    whole += __shfl_xor_sync(kAllLanes, whole, offset), cut += __shfl_xor_sync(kAllLanes, cut, offset);
    longest = max(longest, __shfl_xor_sync(kAllLanes, longest, offset));
  }
  const auto spans = [&](i64 pieces, int each) { return (pieces * p.num_kv_heads + p.slots - 1) / p.slots * each; };
  return spans(whole, longest) <= spans(cut, p.piece_keys / kSpan);
}
// Whether requests stay whole. Kept in a register only if lengths decide; otherwise the parameters say.
struct Whole {
  const PagedParams& p;
  bool decided;
  WS_INLINE operator bool() const { return kLengthsDecide ? decided : p.ranges == 0; }
};
// Numbers the pieces of all requests, of which each thread counts a few neighbours. Returns the number of pieces, which has
// no bound: invalid starts can make requests overlap.
WS_INLINE i64 count_pieces(const PagedParams& p, bool whole, i64* starts) {
  const int each = (p.requests + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 sum = 0;
  for (int i = 0; i < each; ++i) {
    const int r = threadIdx.x * each + i;
    if (r >= p.requests) break;
    const Request request = request_at(p, r);
    sum += tiles_of(p, request) * ranges_of(request, whole, p.piece_keys);
  }
  sum = warp_scan<Sum>(sum, lane);
  starts[threadIdx.x + 1] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += starts[32 * w + 32];
  __syncthreads();
  starts[threadIdx.x + 1] = sum;
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  return starts[kThreads];
}
// Direct numbering: if all requests have the same number of tiles, pieces can be numbered as if all requests had the
// maximal length, without counting. That is done if they have it, if pieces are short, or if there is a block for each of
// them; a block without keys ends at once.
WS_INLINE u32 direct_ranges(const PagedParams& p) { return p.ranges ? (p.max_keys + p.piece_keys - 1) / p.piece_keys : 1; }
WS_INLINE u32 direct_tiles(const PagedParams& p) { return (p.queries * p.group + kRows - 1) / kRows; }
WS_INLINE i64 direct_pieces(const PagedParams& p) {
  return (i64)p.requests * direct_tiles(p) * direct_ranges(p) * p.num_kv_heads;
}
WS_INLINE bool is_direct(const PagedParams& p) {
  return DENSE || (p.queries >= 0 && p.levels == 0 && !lengths_decide(p) && (p.piece_keys == kRound || direct_pieces(p) <= gridDim.x));
}
WS_INLINE i64 num_pieces(const PagedParams& p, bool whole, i64* starts) {
  return is_direct(p) ? direct_pieces(p) : count_pieces(p, whole, starts) * p.num_kv_heads;
}
WS_INLINE Piece piece_at(const PagedParams& p, bool whole, const i64* starts, i64 index) {
  Piece piece;
  if (is_direct(p)) {
    const u32 ranges = direct_ranges(p), tiles = direct_tiles(p);
    const u32 left = (u32)index / p.num_kv_heads, tile = left / ranges, request = tile / tiles;
    return {request_at(p, request), (int)(tile - request * tiles), (int)(left - tile * ranges), (int)((u32)index - left * p.num_kv_heads)};
  }
  i64 left = index / p.num_kv_heads;
  piece.head = (int)(index - left * p.num_kv_heads);
  int lo = 0;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half /= 2)
    if (starts[lo + half] <= left) lo += half;
  left -= starts[lo];
  for (int r = lo * ((p.requests + kThreads - 1) / kThreads);; ++r) {
    piece.request = request_at(p, r);
    const i64 pieces = tiles_of(p, piece.request) * ranges_of(piece.request, whole, p.piece_keys);
    if (left < pieces) break;
    left -= pieces;
  }
  const int ranges = ranges_of(piece.request, whole, p.piece_keys);
  piece.tile = (int)(left / ranges);
  piece.range = (int)(left - (i64)piece.tile * ranges) + first_range(piece.request, whole, p.piece_keys);
  return piece;
}

// Loads a number that another kernel may still be writing, past L1, which would keep the old value.
WS_INLINE i32 load_uncached(u64 numbers, i64 at) {
  i32 x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"((const i32*)numbers + at) : "memory");
  return x;
}
// Prefetches the first keys and values of each group of warps of this block to L2, before await_kernel_before: memory is
// idle while the last blocks of the kernel before finish. Lengths and pages may not be final yet, but a wrong prefetch does
// no harm. Only with direct numbering. Prefetching more keys would delay the block's own loads.
WS_INLINE void prefetch_first_keys(const PagedParams& p) {
#if __CUDA_ARCH__ >= 900
  if ((p.ranges == 0 && !kAlone) || p.window > 0 || !is_direct(p)) return;
  constexpr int kAhead = 32, kLineElements = 128 / (int)sizeof(KV), kLines = (HEAD_DIM + kLineElements - 1) / kLineElements;
  const u32 ranges = direct_ranges(p), tiles = direct_tiles(p), left = blockIdx.x / p.num_kv_heads, tile = left / ranges;
  const u32 row = tile / tiles, head = blockIdx.x - left * p.num_kv_heads;
  const int first = (left - tile * ranges) * p.piece_keys + threadIdx.x / kGroupThreads * kSegment;
  const int keys = DENSE ? p.max_keys : min(load_uncached(p.kv_lens, row * p.kv_lens_step), p.max_keys);
  const KV *k = (const KV*)p.k + head * p.k_head, *v = (const KV*)p.v + head * p.v_head;
#pragma unroll 2
  for (int i = threadIdx.x % kGroupThreads; i < kAhead * kLines; i += kGroupThreads) {
    const int key = first + i / kLines, page = DENSE ? row : page_of(p, key);
    if (key >= keys) return;
    const i32 id = DENSE ? row : load_uncached(p.page_table, row * p.table_row + page * p.table_col);
    if (!DENSE && (id < 0 || id >= p.num_pages)) continue;
    const i64 slot = DENSE ? key : key - page * p.page_size, element = i % kLines * kLineElements;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(k + id * p.k_page + slot * p.k_slot + element) : "memory");
    asm volatile("prefetch.global.L2 [%0];" ::"l"(v + id * p.v_page + slot * p.v_slot + element) : "memory");
  }
#endif
}

}  // namespace warpsmith::paged
