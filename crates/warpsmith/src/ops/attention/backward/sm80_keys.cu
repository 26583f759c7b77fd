// The gradients of keys and values on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16 with dense heads.
//
// Threads to data: as in attention_backward_mma.cuh. The left lines are 64 keys of a KV head; blocks of LINES queries go past
// them, in ascending order, of one query head after the other. Where heads are so long that the sums of both gradients do not fit
// the registers, PARTS blocks share the columns of a head, each of which computes the weights.
//
// Defines: those of attention_backward_mma.cuh; PARTS, 1 or 2; DROPOUT, if there is any.

#include "warpsmith/attention_backward_mma.cuh"
#include "warpsmith/attention_dropout.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kColumns = HEAD_DIM / PARTS;

extern __shared__ __align__(128) u8 shared[];

extern "C" __global__ void __launch_bounds__(kThreads, 2) attention_backward_sm80_keys(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const int part = blockIdx.x % PARTS;
  const Tile tile = key_tile(a, blockIdx.x / PARTS, kLeft);
  if (!tile.exists) return;
  const Request& r = tile.request;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 keys = shared_address(shared), values = keys + kLeft * kLine, stages = values + kLeft * kLine;
  RowStats* shared_stats = (RowStats*)(shared + 2 * kLeft * kLine + kStages * kStage);
  const i64 first_key = (i64)r.first_key + tile.first;
  const Queries seen = queries_of(a, r, tile.first, tile.first + tile.count);
  const int first_block = seen.first / kRight;
  const int blocks = max((seen.end + kRight - 1) / kRight - first_block, 0), count = blocks * a.group;

  // Copies block `index`, counted over the heads, into its stage, if there is one. Closes a group of copies either way.
  auto load = [&](int index) {
    if (index < count) {
      const int head = tile.head * a.group + index / blocks, query = (first_block + index % blocks) * kRight;
      const u32 to = stages + index % kStages * kStage;
      const i64 token = (i64)r.first_query + query;
      load_lines<kRight>(to, head_at<const T>(a.q, a.q_at, r.batch, token, head), a.q_at.token, r.q_len - query);
      load_lines<kRight>(to + kRight * kLine, head_at<const T>(p.dout, p.dout_at, r.batch, token, head), p.dout_at.token,
                         r.q_len - query);
      if (threadIdx.x < kRight) {
        const int own = query + threadIdx.x;
        const RowStats none = {0.0f, 0.0f};
        shared_stats[index % kStages * kRight + threadIdx.x] = own < r.q_len ? stats_at(p, r, head)[own] : none;
      }
    }
    commit_copies();
  };
  load_lines<kLeft>(keys, head_at<const T>(a.k, a.k_at, r.batch, first_key, tile.head), a.k_at.token, tile.count);
  load_lines<kLeft>(values, head_at<const T>(a.v, a.v_at, r.batch, first_key, tile.head), a.v_at.token, tile.count);
  load(0);

#if DROPOUT
  const int number = number_of(a, r);
#endif
  float dk[kColumns / 8][4], dv[kColumns / 8][4];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int index = 0; index < count; ++index) {
    const int head = tile.head * a.group + index / blocks, block = (first_block + index % blocks) * kRight;
    const u32 queries = stages + index % kStages * kStage, douts = queries + kRight * kLine;
    const RowStats* stats = shared_stats + index % kStages * kRight;
    if (kStages == 2) load(index + 1);
    wait_copies<kStages - 1>();
    __syncthreads();
    float p_or_s[kBlocks][4], ds[kBlocks][4];
    multiply_lines(p_or_s, left_at(keys, warp, lane), columns_at(queries, lane));
    multiply_lines(ds, left_at(values, warp, lane), columns_at(douts, lane));

    // Both ends of the keys that a query sees ascend with the query.
    const bool whole = block + kRight <= r.q_len && tile.count == kLeft;
    const bool is_seen = whole && keys_of(a, r, block + kRight - 1).first <= tile.first &&
                         keys_of(a, r, block).end >= tile.first + kLeft;
#if DROPOUT
    const HeadDropout dropout(p.dropout, number, head);
    u64 cells[kBlocks / 2][2];
#pragma unroll
    for (int j = 0; j < kBlocks / 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        cells[j][e] = dropout.bits(cell_of(block + j * 16 + lane % 4 * 2 + e), cell_of(tile.first + warp * 16 + lane / 4));
#endif
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = j * 8 + lane % 4 * 2 + e, query = block + column;
        const RowStats row = stats[column];
        const Keys sees = is_seen || query >= r.q_len ? Keys{0, 0} : keys_of(a, r, query);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& s = p_or_s[j][2 * half + e];
          float& gradient = ds[j][2 * half + e];
          const int key = tile.first + warp * 16 + half * 8 + lane / 4;
          const Weight weight = weight_of(a, r.batch, head, query, sees, key, s, row.base, is_seen);
          s = weight.p;
#if DROPOUT
          const bool counts = dropout.keeps(cells[j / 2][e], j % 2, half);
          if (!counts) s = 0.0f;
          gradient = counts ? gradient * p.dropout.factor : 0.0f;
#endif
          gradient = weight.product_gradient(gradient, row.delta);
        }
      }
    accumulate(dv, p_or_s, rows_at(douts, lane) + part * kColumns * (int)sizeof(T));
    accumulate(dk, ds, rows_at(queries, lane) + part * kColumns * (int)sizeof(T));
    // The stage may be filled again.
    __syncthreads();
    if (kStages == 1) load(index + 1);
  }
  wait_copies<0>();
  store_lines(head_at<T>(p.dk, p.dk_at, r.batch, first_key, tile.head), p.dk_at.token, part * kColumns, dk, a.scale, tile.count,
              warp, lane);
#if DROPOUT
  const float factor = p.dropout.factor;
#else
  const float factor = 1.0f;
#endif
  store_lines(head_at<T>(p.dv, p.dv_at, r.batch, first_key, tile.head), p.dv_at.token, part * kColumns, dv, factor, tile.count,
              warp, lane);
}
