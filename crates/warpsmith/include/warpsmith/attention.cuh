#pragma once
// What the kernels of `attention` share: where a block's rows are, which keys a row sees, and how scores and results are
// computed.
//
// Rows are the queries of all heads that share a KV head: row r of a request is query r / group, head r % group of the
// group, so that keys and values are read once for all of them.
//
// Defines: SOFTCAP, HAS_MASK, HAS_BIAS, and BIAS_T, the type of the bias if there is one.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"

namespace warpsmith::attention {

// A request. Its tokens are counted from the start of the packed tensors, or of its part of the batch.
struct Request {
  int batch, first_query, q_len, first_key, kv_len;
};

// The work of a block: a tile of rows of one KV head of a request.
struct Work {
  Request request;
  int kv_head, first_row, rows;
  bool exists;
};

// The tokens of a packed request. Starts are not trusted: the range is clamped to the tensor.
WS_INLINE void packed_range(const i32* starts, i64 step, int request, int len, int& first, int& count) {
  first = min(max(starts[request * step], 0), len);
  count = min(max(starts[(request + 1) * step], first), len) - first;
}

// Finds the request that tile `index` of all packed requests belongs to, and returns its number, or -1 if there is none.
// Fills in where its queries are, and which of its tiles it is; the last tile comes first. Tiles have tile_rows rows,
// every query has `heads` rows, and requests with fewer than `least` queries have no tiles. Every warp searches for
// itself, 32 requests at a time.
WS_INLINE int find_packed(const AttentionParams& p, int index, int tile_rows, int heads, int least, Request& request, int& tile) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < p.requests; base += 32) {
    int first = 0, count = 0;
    if (base + lane < p.requests) packed_range((const i32*)p.q_starts, p.q_starts_step, base + lane, p.q_len, first, count);
    int until = count < least ? 0 : (int)(((i64)count * heads + tile_rows - 1) / tile_rows);
    until = warp_scan<Sum>(until, lane);
    until += before;
    const u32 past = __ballot_sync(kAllLanes, index < until);
    if (past) {
      const int owner = __ffs(past) - 1;
      request.batch = 0;
      request.first_query = __shfl_sync(kAllLanes, first, owner);
      request.q_len = __shfl_sync(kAllLanes, count, owner);
      tile = __shfl_sync(kAllLanes, until, owner) - 1 - index;
      return base + owner;
    }
    before = __shfl_sync(kAllLanes, until, 31);
  }
  return -1;
}
WS_INLINE void find_packed_keys(const AttentionParams& p, int number, Request& request) {
  packed_range((const i32*)p.kv_starts, p.kv_starts_step, number, p.kv_len, request.first_key, request.kv_len);
}

WS_INLINE Work work_at(const AttentionParams& p, int block, int tile_rows) {
  Work work;
  work.kv_head = block % p.num_kv_heads;
  const int index = block / p.num_kv_heads;
  int tile;
  if (!p.q_starts) {
    work.request = {index % p.requests, 0, p.q_len, 0, p.kv_len};
    // With a causal mask the last rows see the most keys: they go first.
    tile = p.tiles - 1 - index / p.requests;
    work.exists = true;
  } else {
    const int number = find_packed(p, index, tile_rows, p.group, 1, work.request, tile);
    work.exists = number >= 0;
    if (!work.exists) return work;
    find_packed_keys(p, number, work.request);
  }
  work.first_row = tile * tile_rows;
  work.rows = min(tile_rows, work.request.q_len * p.group - work.first_row);
  return work;
}

// The keys that a query sees, apart from masks: from `first` to below `end`.
struct Keys {
  int first, end;
};
WS_INLINE Keys keys_of(const AttentionParams& p, const Request& r, int query) {
  const int position = query + r.kv_len - r.q_len;
  const int end = p.causal ? min(max(position + 1, 0), r.kv_len) : r.kv_len;
  const int first = p.window ? max(position - p.window, 0) : 0;
  return {min(first, end), end};
}

// A row: its query, its head, and the keys that it sees.
struct Row {
  int query, head;
  Keys keys;
};
WS_INLINE Row row_at(const AttentionParams& p, const Work& work, int row) {
  // Rows past the end see nothing.
  const int index = work.first_row + row, query = index / p.group;
  Row r = {query, work.kv_head * p.group + index % p.group, {0, 0}};
  if (row < work.rows) r.keys = keys_of(p, work.request, query);
  return r;
}

// The score of a key, or minus infinity if the row does not see it. `is_seen`: it is known to, apart from masks.
WS_INLINE float score_of(const AttentionParams& p, const Work& work, const Row& row, int key, float dot, bool is_seen) {
  float score = dot * p.scale;
  if (SOFTCAP) score = p.softcap * tanhf(score / p.softcap);
  if (!is_seen && (key < row.keys.first || key >= row.keys.end)) return minus_infinity();
#if HAS_BIAS
  score += to_f32(((const BIAS_T*)p.bias)[work.request.batch * p.bias_at.batch + row.head * p.bias_at.head +
                                         row.query * p.bias_at.query + key * p.bias_at.key]);
#endif
#if HAS_MASK
  if (!((const u8*)p.mask)[work.request.batch * p.mask_at.batch + row.head * p.mask_at.head +
                           row.query * p.mask_at.query + key * p.mask_at.key])
    return minus_infinity();
#endif
  return score;
}

// What is subtracted from scores before the exponential: the largest of them, or zero if there is none, because minus
// infinity minus itself is NaN.
WS_INLINE float base_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// The factor that turns a row's weighted sum into its result, from the largest score and the sum of exponentials; zero for
// a row that has seen no key. Writes the row's lse.
template <class T> WS_INLINE float finish_row(const AttentionParams& p, const Work& work, const Row& row, float most, float sum) {
  float factor = 1.0f;
  if (p.sinks) {
    const float sink = ((const float*)p.sinks)[row.head * p.sinks_step];
    const float with = sink != sink ? sink : fmaxf(most, sink);
    factor = exp_neg<T>(most - base_of(with));
    sum = sum * factor + exp_neg<T>(sink - base_of(with));
    most = with;
  }
  const bool empty = sum == 0.0f;
  if (p.lse) {
    float* lse = (float*)p.lse + work.request.batch * p.lse_at.batch + row.head * p.lse_at.head +
                 (work.request.first_query + row.query) * p.lse_at.query;
    *lse = empty ? minus_infinity() : most + logf(sum);
  }
  return empty ? 0.0f : factor / sum;
}

// Where a row of q or out, or a token of k or v, begins.
template <class T> WS_INLINE T* head_at(u64 base, const HeadStrides& s, int batch, i64 token, int head) {
  return (T*)base + batch * s.batch + token * s.token + head * s.head;
}

}  // namespace warpsmith::attention
