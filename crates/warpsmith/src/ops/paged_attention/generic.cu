// `paged_attention` without tensor cores: any types, any strides.
//
// Threads to data: a block of 4 warps has one row. It goes through the keys in segments, a quarter of a segment a warp: a
// warp computes the score of one key at a time, with the elements of the head distributed over its lanes. Then thread d
// sums element d of the weighted values, and elements d + 128, ... Segments are folded into spans, and spans into the
// total. If rows are too few to fill the device, a block has one of p.ranges ranges of keys of its row, and leaves its
// state for the merge.
//
// Defines: ELEM, type of q and out; KV, type of the cache; HEAD_DIM; SOFTCAP, whether scores are capped; DENSE, whether
// there are no pages (the strides of pages are then those of requests).

#include "warpsmith/fp8.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/reduce.cuh"

using namespace warpsmith;
using namespace warpsmith::paged;

constexpr int kThreads = 128, kWarps = kThreads / 32, kLanes = HEAD_DIM / 32 + (HEAD_DIM % 32 > 0);
constexpr int kEach = (HEAD_DIM + kThreads - 1) / kThreads;
static_assert(kSegment == kThreads, "a thread has the weight of one key");

struct Sums {
  float m, l, o[kEach];
  WS_INLINE void clear() {
    m = minus_infinity(), l = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = 0.0f;
  }
  WS_INLINE void take(const Sums& next) {
    if (next.l == 0.0f) return;
    const Fold f = fold_of(m, next.m);
    m = f.m, l = folded(f, l, next.l);
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = folded(f, o[i], next.o[i]);
  }
};

// The tanh of a softcap needs registers: with a minimum of one block, the compiler does not spill to fit a third.
extern "C" __global__ void __launch_bounds__(kThreads, SOFTCAP ? 1 : 0) paged_attention_generic(const PagedParams p) {
  // For each key of a segment: its score, then its weight; and the offsets of its key and value, negative if it is not
  // seen.
  __shared__ float weights[kSegment];
  __shared__ i64 rows[2][kSegment];
  __shared__ float scratch[2][kWarps];
  begin_kernel();
  const int rows_of_all = p.num_tokens * p.num_heads, range = blockIdx.x / rows_of_all, number = blockIdx.x % rows_of_all;
  const int token = number / p.num_heads, head = number % p.num_heads, kv_head = head / p.group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int index;
  Request request;
  if (!find_request<kThreads>(p, token, index, request)) return;
  Keys keys = keys_of(p, request, token - request.first);
  if (p.ranges) keys = {max(keys.lo, range * p.range_keys), min(keys.hi, (range + 1) * p.range_keys)};
  // The merge does not read states of ranges of which the row sees nothing.
  if (p.ranges && keys.lo >= keys.hi) return;
  const i32* table = (const i32*)p.page_table + request.row * p.table_row;
  const KV* k = (const KV*)p.k + kv_head * p.k_head + (DENSE ? request.row * p.k_page : 0);
  const KV* v = (const KV*)p.v + kv_head * p.v_head + (DENSE ? request.row * p.v_page : 0);
  const float scale = p.scale * scale_of(p.k_scale, p.k_scale_step, kv_head);

  const ELEM* query = (const ELEM*)p.q + token_at(p, token, p.q_batch, p.q_token) + head * p.q_head;
  float q[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const int d = lane + 32 * i;
    q[i] = d < HEAD_DIM ? to_f32(query[d * p.q_dim]) : 0.0f;
  }
  Sums span, total;
  span.clear(), total.clear();
  for (int start = keys.lo / kSegment * kSegment; start < keys.hi; start += kSegment) {
    const int own = start + threadIdx.x;
    i64 at = -1;
    if (own >= keys.lo && own < keys.hi) {
      const int page = DENSE ? 0 : page_of(p, own), slot = own - page * p.page_size;
      const i32 id = DENSE ? 0 : table[page * p.table_col];
      if (DENSE || (id >= 0 && id < p.num_pages)) {
        at = id * p.k_page + slot * p.k_slot;
        rows[1][threadIdx.x] = id * p.v_page + slot * p.v_slot;
      }
    }
    rows[0][threadIdx.x] = at;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < kSegment / kWarps; ++i) {
      const int key = warp * (kSegment / kWarps) + i;
      const i64 row = rows[0][key];
      float sum = 0.0f;
      if (row >= 0) {
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          const int d = lane + 32 * j;
          if (HEAD_DIM % 32 == 0 || d < HEAD_DIM) sum = fmaf(q[j], to_f32(k[row + d * p.k_dim]), sum);
        }
      }
      sum = warp_reduce<Sum>(sum);
      if (lane == 0) weights[key] = sum;
    }
    __syncthreads();
    float score = weights[threadIdx.x] * scale;
    if (SOFTCAP) score = p.softcap * tanhf(score / p.softcap);
    score = at < 0 ? minus_infinity() : score * kLog2E;
    float most[1] = {score};
    block_reduce<Max, kThreads>(most, scratch[0]);
    const float weight = most[0] == minus_infinity() ? 0.0f : exp2f(score - most[0]);
    float sum[1] = {weight};
    block_reduce<Sum, kThreads>(sum, scratch[1]);
    weights[threadIdx.x] = weight;
    __syncthreads();
    Sums segment;
    segment.clear();
    segment.m = most[0], segment.l = sum[0];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = threadIdx.x + i * kThreads;
      if (d >= HEAD_DIM) break;
#pragma unroll 4
      for (int key = 0; key < kSegment; ++key)
        if (rows[0][key] >= 0) segment.o[i] = fmaf(weights[key], to_f32(v[rows[1][key] + d * p.v_dim]), segment.o[i]);
    }
    span.take(segment);
    if (!p.ranges && ((start + kSegment) % kSpan == 0 || start + kSegment >= keys.hi)) {
      total.take(span);
      span.clear();
    }
    // The offsets are overwritten next.
    __syncthreads();
  }
  if (p.ranges) {
    const i64 slot = partial_row(p, range, token, head);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (threadIdx.x + i * kThreads < HEAD_DIM) partial_sums(p, slot)[threadIdx.x + i * kThreads] = span.o[i];
    if (threadIdx.x == 0) *partial_weights(p, slot) = {span.m, span.l};
    return;
  }
  const Finish finish = finish_of(p, head, total.m, total.l);
  ELEM* out = (ELEM*)p.out + token_at(p, token, p.out_batch, p.out_token) + head * p.out_head;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = threadIdx.x + i * kThreads;
    if (d < HEAD_DIM) out[d * p.out_dim] = from_f32<ELEM>(total.o[i] * finish.factor);
  }
  if (threadIdx.x == 0) write_lse(p, token, head, finish.lse);
}
