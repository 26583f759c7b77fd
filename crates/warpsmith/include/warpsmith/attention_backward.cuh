#pragma once
// What the kernels of `attention_backward` share: where a block's queries or keys are, which queries see a key, and what a
// weight and its gradient are.
//
// Tiles are queries of one query head, or keys of one KV head. Queries of the heads that share a KV head come one head after
// the other, so that a tile's queries have neighbouring positions.
//
// Defines: T, the type; HEAD_DIM; those of attention.cuh.

#include "warpsmith/attention.cuh"

namespace warpsmith::attention {

// What is kept of a row of queries: what its scores are taken less of, and what the gradients of its weights are.
struct RowStats {
  float base, delta;
};
// Those of a head of a request, by query. `stats` has [batch, num_heads, q_len].
WS_INLINE RowStats* stats_at(const AttentionBackwardParams& p, const Request& r, int head) {
  const AttentionParams& a = p.attention;
  return (RowStats*)p.stats + ((i64)r.batch * (a.num_kv_heads * a.group) + head) * a.q_len + r.first_query;
}
// From a row's lse. Where a row has seen nothing, all scores are minus infinity, or it has none: their weights are zero.
WS_INLINE float base_of_lse(float lse) { return lse == minus_infinity() ? -lse : lse; }

// Some queries or keys of a head of a request.
struct Tile {
  Request request;
  int head, first, count;
  bool exists;
};

// The queries of a block, of a query head: those that see the most keys first.
WS_INLINE Tile query_tile(const AttentionParams& p, int block, int tile_queries) {
  Tile t;
  const int heads = p.num_kv_heads * p.group, index = block / heads;
  t.head = block % heads;
  int tile;
  t.exists = true;
  if (!p.q_starts) {
    t.request = {index % p.requests, 0, p.q_len, 0, p.kv_len};
    tile = p.tiles - 1 - index / p.requests;
  } else {
    const int number = find_packed(p, index, tile_queries, 1, 1, t.request, tile);
    t.exists = number >= 0;
    if (!t.exists) return t;
    find_packed_keys(p, number, t.request);
  }
  t.first = tile * tile_queries;
  t.count = min(tile_queries, t.request.q_len - t.first);
  return t;
}

// The keys of a block, of a KV head: with a causal mask the first are seen by the most queries, and come first.
WS_INLINE Tile key_tile(const AttentionParams& p, int block, int tile_keys) {
  Tile t;
  const int index = block / p.num_kv_heads;
  t.head = block % p.num_kv_heads;
  int tile;
  t.exists = true;
  if (!p.q_starts) {
    t.request = {index % p.requests, 0, p.q_len, 0, p.kv_len};
    tile = index / p.requests;
  } else {
    // The same search among the keys.
    AttentionParams of_keys = p;
    of_keys.q_starts = p.kv_starts, of_keys.q_starts_step = p.kv_starts_step, of_keys.q_len = p.kv_len;
    Request keys;
    const int number = find_packed(of_keys, index, tile_keys, 1, 1, keys, tile);
    t.exists = number >= 0;
    if (!t.exists) return t;
    tile = (keys.q_len + tile_keys - 1) / tile_keys - 1 - tile;
    t.request = {0, 0, 0, keys.first_query, keys.q_len};
    packed_range((const i32*)p.q_starts, p.q_starts_step, number, p.q_len, t.request.first_query, t.request.q_len);
  }
  t.first = tile * tile_keys;
  t.count = min(tile_keys, t.request.kv_len - t.first);
  return t;
}

// The queries that see some of the keys from `first` to below `end`, apart from masks: both ends ascend with the keys.
struct Queries {
  int first, end;
};
WS_INLINE Queries queries_of(const AttentionParams& p, const Request& r, int first, int end) {
  const int shift = r.kv_len - r.q_len;
  Queries queries = {0, r.q_len};
  if (p.causal) queries.first = min(max(first - shift, 0), r.q_len);
  if (p.window) queries.end = (int)min((i64)r.q_len, max((i64)end + p.window - shift, (i64)0));
  return queries;
}

// The weight of a key for a query, and the slope of its score as a function of their product, without the scale.
struct Weight {
  float p, slope;
  bool seen;
  // The gradients of the score and, before the scale, of the product. Where the key is not seen, the slope and `dp` may be
  // anything.
  WS_INLINE float score_gradient(float dp, float delta) const { return seen ? p * (dp - delta) : 0.0f; }
  WS_INLINE float product_gradient(float dp, float delta) const {
    if (!SOFTCAP) return score_gradient(dp, delta);
    return seen ? p * (dp - delta) * slope : 0.0f;
  }
};
// `keys` are those that the query sees, apart from masks. `is_seen`: it is known to see this one.
WS_INLINE Weight weight_of(const AttentionParams& p, int batch, int head, int query, const Keys& keys, int key, float dot,
                           float base, bool is_seen) {
  float score = dot * p.scale;
  Weight weight = {0.0f, 1.0f, is_seen || (key >= keys.first && key < keys.end)};
  if (SOFTCAP) {
    const float t = tanhf(score / p.softcap);
    score = p.softcap * t;
    weight.slope = fmaf(-t, t, 1.0f);
  }
  if (!weight.seen) return weight;
#if HAS_BIAS
  score += to_f32(((const BIAS_T*)p.bias)[batch * p.bias_at.batch + head * p.bias_at.head + query * p.bias_at.query +
                                         key * p.bias_at.key]);
#endif
#if HAS_MASK
  weight.seen = ((const u8*)p.mask)[batch * p.mask_at.batch + head * p.mask_at.head + query * p.mask_at.query +
                                   key * p.mask_at.key] != 0;
  if (!weight.seen) return weight;
#endif
  // The gradient of a bias is in f32, whatever the type.
  weight.p = HAS_BIAS ? expf(score - base) : exp_neg<T>(score - base);
  return weight;
}

}  // namespace warpsmith::attention
