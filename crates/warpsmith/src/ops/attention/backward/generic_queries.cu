// The gradient of queries without tensor cores, for any type and strides.
//
// Threads to data: as in attention_backward_generic.cuh. The left lines are 64 queries of a head; blocks of 64 keys go past
// them in ascending order.
//
// Defines: those of attention_backward.cuh; DROPOUT, if there is any.

#include "warpsmith/attention_backward_generic.cuh"
#include "warpsmith/attention_dropout.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kQueries = 64;
using Tiles = Block<kQueries>;
constexpr int kRows = Tiles::kRows;

__shared__ Tiles tiles;

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_generic_queries(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const Tile tile = query_tile(a, blockIdx.x, kQueries);
  if (!tile.exists) return;
  const Request& r = tile.request;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16, kv_head = tile.head / a.group;
  const i64 first_query = (i64)r.first_query + tile.first;
  auto query_at = [&](int query) { return head_at<const T>(a.q, a.q_at, r.batch, first_query + query, tile.head); };
  auto dout_at = [&](int query) { return head_at<const T>(p.dout, p.dout_at, r.batch, first_query + query, tile.head); };
  const RowStats* stats = stats_at(p, r, tile.head);
  RowStats row[kRows];
  Keys keys[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = tile.first + y * kRows + i;
    const bool exists = query < r.q_len;
    row[i] = exists ? stats[query] : RowStats{0.0f, 0.0f};
    keys[i] = exists ? keys_of(a, r, query) : Keys{0, 0};
  }
  const int first = keys_of(a, r, tile.first).first, end = keys_of(a, r, tile.first + tile.count - 1).end;

#if DROPOUT
  const HeadDropout dropout(p.dropout, number_of(a, r), tile.head);
#endif

  float dq[kRows][kColumns];
  Tiles::clear(dq);
#pragma unroll 1
  for (int block = first / kLines * kLines; block < end; block += kLines) {
    const int count = min(kLines, r.kv_len - block);
    const i64 first_key = (i64)r.first_key + block;
    auto key_at = [&](int key) { return head_at<const T>(a.k, a.k_at, r.batch, first_key + key, kv_head); };
    auto value_at = [&](int key) { return head_at<const T>(a.v, a.v_at, r.batch, first_key + key, kv_head); };
#if DROPOUT
    // Before anything else of the block takes registers.
    u32 kept = 0;
#pragma unroll 1
    for (int i = 0; i < 4 * kRows; ++i)
      kept |= (u32)dropout.keeps(tile.first + y * kRows + i / 4, block + x + i % 4 * 16) << i;
#endif
    float s[kRows][4], ds[kRows][4];
    tiles.multiply(s, tile.count, a.q_at.dim, query_at, count, a.k_at.dim, key_at);
    tiles.multiply(ds, tile.count, p.dout_at.dim, dout_at, count, a.v_at.dim, value_at);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int query = tile.first + y * kRows + i, key = block + x + 16 * j;
        const Weight weight = weight_of(a, r.batch, tile.head, query, keys[i], key, s[i][j], row[i].base, false);
#if DROPOUT
        ds[i][j] = kept >> (4 * i + j) & 1 ? ds[i][j] * p.dropout.factor : 0.0f;
#endif
        ds[i][j] = weight.product_gradient(ds[i][j], row[i].delta);
      }
    tiles.accumulate(dq, ds, count, a.k_at.dim, key_at);
  }
  Tiles::store(dq, a.scale, tile.count, p.dq_at.dim,
               [&](int query) { return head_at<T>(p.dq, p.dq_at, r.batch, first_query + query, tile.head); });
}
