// The gradient of queries on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16 with dense heads.
//
// Threads to data: as in attention_backward_mma.cuh. The left lines are 64 queries of a head; blocks of LINES keys go past them
// in ascending order.
//
// Defines: those of attention_backward_mma.cuh; DROPOUT, if there is any.

#include "warpsmith/attention_backward_mma.cuh"
#include "warpsmith/attention_dropout.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

extern __shared__ __align__(128) u8 shared[];

extern "C" __global__ void __launch_bounds__(kThreads, 2) attention_backward_sm80_queries(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const Tile tile = query_tile(a, blockIdx.x, kLeft);
  if (!tile.exists) return;
  const Request& r = tile.request;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = tile.head / a.group;
  const u32 queries = shared_address(shared), douts = queries + kLeft * kLine, stages = douts + kLeft * kLine;
  const i64 first_query = (i64)r.first_query + tile.first;
  // Both ends of the keys that a query sees ascend with the query.
  const Keys low = keys_of(a, r, tile.first), high = keys_of(a, r, tile.first + tile.count - 1);
  const int first_block = low.first / kRight, end_block = (high.end + kRight - 1) / kRight;

  // Copies a block into its stage, if there is one. Closes a group of copies either way.
  auto load = [&](int block) {
    if (block < end_block) {
      const u32 to = stages + block % kStages * kStage;
      const i64 token = (i64)r.first_key + block * kRight;
      const int count = r.kv_len - block * kRight;
      load_lines<kRight>(to, head_at<const T>(a.k, a.k_at, r.batch, token, kv_head), a.k_at.token, count);
      load_lines<kRight>(to + kRight * kLine, head_at<const T>(a.v, a.v_at, r.batch, token, kv_head), a.v_at.token, count);
    }
    commit_copies();
  };
  load_lines<kLeft>(queries, head_at<const T>(a.q, a.q_at, r.batch, first_query, tile.head), a.q_at.token, tile.count);
  load_lines<kLeft>(douts, head_at<const T>(p.dout, p.dout_at, r.batch, first_query, tile.head), p.dout_at.token, tile.count);
  load(first_block);

  RowStats row[2];
  Keys sees[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile.first + warp * 16 + half * 8 + lane / 4;
    const bool exists = query < r.q_len;
    row[half] = exists ? stats_at(p, r, tile.head)[query] : RowStats{0.0f, 0.0f};
    sees[half] = exists ? keys_of(a, r, query) : Keys{0, 0};
  }
#if DROPOUT
  const HeadDropout dropout(p.dropout, number_of(a, r), tile.head);
#endif
  float dq[HEAD_DIM / 8][4];
  clear(dq);
#pragma unroll 1
  for (int block = first_block; block < end_block; ++block) {
    const u32 keys = stages + block % kStages * kStage, values = keys + kRight * kLine;
    if (kStages == 2) load(block + 1);
    wait_copies<kStages - 1>();
    __syncthreads();
    float s[kBlocks][4], ds[kBlocks][4];
    multiply_lines(s, left_at(queries, warp, lane), columns_at(keys, lane));
    multiply_lines(ds, left_at(douts, warp, lane), columns_at(values, lane));

    const int first = block * kRight;
#if DROPOUT
    u64 cells[kBlocks / 2][2];
#pragma unroll
    for (int j = 0; j < kBlocks / 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        cells[j][e] = dropout.bits(cell_of(tile.first + warp * 16 + lane / 4), cell_of(first + j * 16 + lane % 4 * 2 + e));
#endif
    const bool is_seen = tile.count == kLeft && high.first <= first && low.end >= first + kRight;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = tile.first + warp * 16 + half * 8 + lane / 4, key = first + j * 8 + lane % 4 * 2 + e;
          float& gradient = ds[j][2 * half + e];
          const Weight weight =
              weight_of(a, r.batch, tile.head, query, sees[half], key, s[j][2 * half + e], row[half].base, is_seen);
#if DROPOUT
          gradient = dropout.keeps(cells[j / 2][e], half, j % 2) ? gradient * p.dropout.factor : 0.0f;
#endif
          gradient = weight.product_gradient(gradient, row[half].delta);
        }
    accumulate(dq, ds, rows_at(keys, lane));
    // The stage may be filled again.
    __syncthreads();
    if (kStages == 1) load(block + 1);
  }
  wait_copies<0>();
  store_lines(head_at<T>(p.dq, p.dq_at, r.batch, first_query, tile.head), p.dq_at.token, 0, dq, a.scale, tile.count, warp, lane);
}
