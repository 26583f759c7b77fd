// The first pass of `attention_backward`: for each row of queries what its scores are taken less of, and
// delta = sum(dout * out) - dlse.
//
// Threads to data: kLanes neighbouring lanes have a row, counted over [batch, token, head]; lane l has the chunks of 16 bytes
// l, l + kLanes and so on of the head, whatever its strides are, and the sums of lanes are added as a tree.
//
// Defines: those of attention_backward.cuh; VECTOR, whether the chunks of out and dout are aligned and dense.

#include "warpsmith/attention_backward.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kThreads = 256, kChunks = HEAD_DIM / kVec<T>;
constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;

extern "C" __global__ void __launch_bounds__(kThreads) attention_backward_rows(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const int lane = threadIdx.x % kLanes, heads = a.num_kv_heads * a.group;
  const i64 row = ((i64)blockIdx.x * kThreads + threadIdx.x) / kLanes;
  // Packed requests are one batch.
  const i64 batches = a.q_starts ? 1 : a.requests, token = row / heads;
  const int head = (int)(row % heads);
  const bool exists = token < batches * a.q_len;
  const int batch = exists ? (int)(token / a.q_len) : 0, query = exists ? (int)(token % a.q_len) : 0;
  const T* out = head_at<const T>(a.out, a.out_at, batch, query, head);
  const T* dout = head_at<const T>(p.dout, p.dout_at, batch, query, head);
  float sum = 0.0f;
#pragma unroll
  for (int first = 0; first < kChunks; first += kLanes) {
    const int chunk = first + lane, count = exists && chunk < kChunks ? kVec<T> : 0;
    Chunk<T> x, y;
    load_chunk<VECTOR ? kAligned : kAny>(x, out, chunk * kVec<T>, a.out_at.dim, count, from_f32<T>(0.0f));
    load_chunk<VECTOR ? kAligned : kAny>(y, dout, chunk * kVec<T>, p.dout_at.dim, count, from_f32<T>(0.0f));
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) sum = fmaf(to_f32(x.items[i]), to_f32(y.items[i]), sum);
  }
  sum = warp_reduce<Sum, kLanes>(sum);
  if (!exists || lane != 0) return;
  if (p.dlse) sum -= ((const float*)p.dlse)[batch * p.dlse_at.batch + head * p.dlse_at.head + query * p.dlse_at.query];
  const float lse = ((const float*)a.lse)[batch * a.lse_at.batch + head * a.lse_at.head + query * a.lse_at.query];
  ((RowStats*)p.stats)[((i64)batch * heads + head) * a.q_len + query] = {base_of_lse(lse), sum};
}
