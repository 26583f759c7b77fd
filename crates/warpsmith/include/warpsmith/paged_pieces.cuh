#pragma once
// `paged_attention` on tensor cores: how the pieces of work of a launch are numbered. Everything follows from lengths that
// the device alone knows.

#include "warpsmith/paged_fragments.cuh"

constexpr int kRound = 4 * kSegment;

// The range that a request begins in, and the number of those it has.
WS_INLINE int first_range(const PagedParams& p, const Request& request) { return p.ranges ? request.from / p.piece_keys : 0; }
WS_INLINE int ranges_of(const PagedParams& p, const Request& request) {
  return p.ranges ? max((request.kv_len + p.piece_keys - 1) / p.piece_keys - first_range(p, request), 1) : 1;
}
WS_INLINE i64 pieces_of(const PagedParams& p, const Request& request) {
  if (request.count < p.min_queries || request.count > p.max_queries) return 0;
  return (i64)((request.count * p.group + kRows - 1) / kRows) * ranges_of(p, request);
}
// Numbers the pieces of all requests. Threads count neighbouring requests; returns the number of all, which has no bound
// where requests overlap because their starts are wrong.
WS_INLINE i64 count_pieces(const PagedParams& p, i64* starts) {
  const int each = (p.requests + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 sum = 0;
  for (int i = 0; i < each; ++i) {
    const int r = threadIdx.x * each + i;
    if (r < p.requests) sum += pieces_of(p, request_at(p, r));
  }
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const i64 other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  starts[threadIdx.x + 1] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += starts[32 * w + 32];
  __syncthreads();
  starts[threadIdx.x + 1] = sum;
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  return starts[kThreads];
}
// Where all requests have the same number of tiles, they are numbered as if all were as long as can be, and nothing need be
// counted: if pieces are short, or if there is a block for each, which ends at once where there are no keys.
WS_INLINE u32 direct_ranges(const PagedParams& p) { return p.ranges ? (p.max_keys + p.piece_keys - 1) / p.piece_keys : 1; }
WS_INLINE u32 direct_tiles(const PagedParams& p) { return (p.queries * p.group + kRows - 1) / kRows; }
WS_INLINE i64 direct_pieces(const PagedParams& p) {
  return (i64)p.requests * direct_tiles(p) * direct_ranges(p) * p.num_kv_heads;
}
WS_INLINE bool is_direct(const PagedParams& p) {
  return p.queries >= 0 && p.levels == 0 && (p.piece_keys == kRound || direct_pieces(p) <= gridDim.x);
}
WS_INLINE i64 num_pieces(const PagedParams& p, i64* starts) {
  return is_direct(p) ? direct_pieces(p) : count_pieces(p, starts) * p.num_kv_heads;
}
WS_INLINE Piece piece_at(const PagedParams& p, const i64* starts, i64 index) {
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
    const i64 pieces = pieces_of(p, piece.request);
    if (left < pieces) break;
    left -= pieces;
  }
  const int ranges = ranges_of(p, piece.request);
  piece.tile = (int)(left / ranges);
  piece.range = (int)(left - (i64)piece.tile * ranges) + first_range(p, piece.request);
  return piece;
}
