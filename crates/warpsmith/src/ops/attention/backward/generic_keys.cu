// The gradients of keys and values without tensor cores, for any type and strides.
//
// Threads to data: as in attention_backward_generic.cuh. The left lines are KEYS keys of a KV head; blocks of 64 queries go
// past them, in ascending order, of one query head after the other.
//
// Defines: those of attention_backward.cuh; KEYS, 64 or 32; DROPOUT, if there is any.

#include "warpsmith/attention_backward_generic.cuh"
#include "warpsmith/attention_dropout.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

using Tiles = Block<KEYS>;
constexpr int kRows = Tiles::kRows;

__shared__ Tiles tiles;

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_generic_keys(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const Tile tile = key_tile(a, blockIdx.x, KEYS);
  if (!tile.exists) return;
  const Request& r = tile.request;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const i64 first_key = (i64)r.first_key + tile.first;
  auto key_at = [&](int key) { return head_at<const T>(a.k, a.k_at, r.batch, first_key + key, tile.head); };
  auto value_at = [&](int key) { return head_at<const T>(a.v, a.v_at, r.batch, first_key + key, tile.head); };
  const Queries seen = queries_of(a, r, tile.first, tile.first + tile.count);

#if DROPOUT
  const int number = number_of(a, r);
#endif

  float dk[kRows][kColumns], dv[kRows][kColumns];
  Tiles::clear(dk);
  Tiles::clear(dv);
#pragma unroll 1
  for (int g = 0; g < a.group; ++g) {
    const int head = tile.head * a.group + g;
    const RowStats* stats = stats_at(p, r, head);
#if DROPOUT
    const HeadDropout dropout(p.dropout, number, head);
#endif
#pragma unroll 1
    for (int block = seen.first / kLines * kLines; block < seen.end; block += kLines) {
      const int count = min(kLines, r.q_len - block);
      const i64 first_query = (i64)r.first_query + block;
      auto query_at = [&](int query) { return head_at<const T>(a.q, a.q_at, r.batch, first_query + query, head); };
      auto dout_at = [&](int query) { return head_at<const T>(p.dout, p.dout_at, r.batch, first_query + query, head); };
#if DROPOUT
      // Before anything else of the block takes registers.
      u32 kept = 0;
#pragma unroll 1
      for (int i = 0; i < 4 * kRows; ++i)
        kept |= (u32)dropout.keeps(block + x + i % 4 * 16, tile.first + y * kRows + i / 4) << i;
#endif
      float s[kRows][4], ds[kRows][4];
      tiles.multiply(s, tile.count, a.k_at.dim, key_at, count, a.q_at.dim, query_at);
      tiles.multiply(ds, tile.count, a.v_at.dim, value_at, count, p.dout_at.dim, dout_at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int query = block + x + 16 * j;
        const bool exists = query < r.q_len;
        const RowStats row = exists ? stats[query] : RowStats{0.0f, 0.0f};
        const Keys keys = exists ? keys_of(a, r, query) : Keys{0, 0};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int key = tile.first + y * kRows + i;
          const Weight weight = weight_of(a, r.batch, head, query, keys, key, s[i][j], row.base, false);
          s[i][j] = weight.p;
#if DROPOUT
          const bool counts = kept >> (4 * i + j) & 1;
          if (!counts) s[i][j] = 0.0f;
          ds[i][j] = counts ? ds[i][j] * p.dropout.factor : 0.0f;
#endif
          ds[i][j] = weight.product_gradient(ds[i][j], row.delta);
        }
      }
      tiles.accumulate(dv, s, count, p.dout_at.dim, dout_at);
      tiles.accumulate(dk, ds, count, a.q_at.dim, query_at);
    }
  }
  Tiles::store(dk, a.scale, tile.count, p.dk_at.dim,
               [&](int key) { return head_at<T>(p.dk, p.dk_at, r.batch, first_key + key, tile.head); });
#if DROPOUT
  const float factor = p.dropout.factor;
#else
  const float factor = 1.0f;
#endif
  Tiles::store(dv, factor, tile.count, p.dv_at.dim,
               [&](int key) { return head_at<T>(p.dv, p.dv_at, r.batch, first_key + key, tile.head); });
}
