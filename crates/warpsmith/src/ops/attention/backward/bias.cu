// The gradient of the bias of `attention`, for any type and strides: that of the scores, summed over the requests and heads
// that share an element.
//
// Threads to data: as in attention_backward_generic.cuh. A block has 64 queries by 64 keys of one matrix of the bias, and adds
// the gradients of requests and heads in ascending order.
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

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_backward_bias(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int key_tiles = (a.kv_len + kLines - 1) / kLines, heads = a.num_kv_heads * a.group;
  const int block = blockIdx.x % key_tiles * kLines, above = blockIdx.x / key_tiles;
  const int first = above % a.tiles * kQueries, matrix = above / a.tiles;
  const int bias_batch = matrix / p.bias_heads, bias_head = matrix % p.bias_heads;
  const int queries = min(kQueries, a.q_len - first), count = min(kLines, a.kv_len - block);
  const int first_batch = p.bias_batch == 1 ? 0 : bias_batch, end_batch = p.bias_batch == 1 ? a.requests : bias_batch + 1;
  const int first_head = p.bias_heads == 1 ? 0 : bias_head, end_head = p.bias_heads == 1 ? heads : bias_head + 1;
  float sum[kRows][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;

  // All requests are equally long.
  const Request shape = {0, 0, a.q_len, 0, a.kv_len};
  const bool any = keys_of(a, shape, first).first < block + count && keys_of(a, shape, first + queries - 1).end > block;
#pragma unroll 1
  for (int batch = first_batch; any && batch < end_batch; ++batch) {
    const Request r = {batch, 0, a.q_len, 0, a.kv_len};
#pragma unroll 1
    for (int head = first_head; head < end_head; ++head) {
      const int kv_head = head / a.group;
      float s[kRows][4], dp[kRows][4];
      tiles.multiply(
          s, queries, a.q_at.dim, [&](int query) { return head_at<const T>(a.q, a.q_at, batch, (i64)first + query, head); },
          count, a.k_at.dim, [&](int key) { return head_at<const T>(a.k, a.k_at, batch, (i64)block + key, kv_head); });
      tiles.multiply(
          dp, queries, p.dout_at.dim,
          [&](int query) { return head_at<const T>(p.dout, p.dout_at, batch, (i64)first + query, head); }, count, a.v_at.dim,
          [&](int key) { return head_at<const T>(a.v, a.v_at, batch, (i64)block + key, kv_head); });
      const RowStats* stats = stats_at(p, r, head);
#if DROPOUT
      const HeadDropout dropout(p.dropout, batch, head);
      u32 kept = 0;
#pragma unroll 1
      for (int i = 0; i < 4 * kRows; ++i)
        kept |= (u32)dropout.keeps(first + y * kRows + i / 4, block + x + i % 4 * 16) << i;
#endif
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int query = first + y * kRows + i;
        if (query >= a.q_len) continue;
        const RowStats row = stats[query];
        const Keys keys = keys_of(a, r, query);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Weight weight = weight_of(a, batch, head, query, keys, block + x + 16 * j, s[i][j], row.base, false);
#if DROPOUT
          dp[i][j] = kept >> (4 * i + j) & 1 ? dp[i][j] * p.dropout.factor : 0.0f;
#endif
          sum[i][j] += weight.score_gradient(dp[i][j], row.delta);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int query = first + y * kRows + i, key = block + x + 16 * j;
      if (query < a.q_len && key < a.kv_len)
        ((float*)p.dbias)[bias_batch * p.dbias_at.batch + bias_head * p.dbias_at.head + query * p.dbias_at.query +
                          key * p.dbias_at.key] = sum[i][j];
    }
}
