// The gradient of the sinks of `attention`: -sum(exp(sink - lse) * delta) over all queries of a head.
//
// Threads to data: a block of 256 threads has a head; thread t adds queries t, t + 256 and so on, counted over the batch, and
// the sums of threads are added as a tree.
//
// Defines: those of attention_backward.cuh.

#include "warpsmith/attention_backward.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kThreads = 256;

__shared__ float scratch[kThreads / 32];

extern "C" __global__ void __launch_bounds__(kThreads) attention_backward_sinks(const AttentionBackwardParams p) {
  begin_kernel();
  const AttentionParams& a = p.attention;
  const int head = blockIdx.x, heads = a.num_kv_heads * a.group;
  const float sink = ((const float*)a.sinks)[head * a.sinks_step];
  int first = 0, end = a.q_len;
  if (a.q_starts) {
    // Tokens before the first request and after the last are padding.
    first = min(max(((const i32*)a.q_starts)[0], 0), a.q_len);
    end = a.requests ? min(((const i32*)a.q_starts)[a.requests * a.q_starts_step], a.q_len) : first;
  }
  const i64 batches = a.q_starts ? 1 : a.requests;
  float sum[1] = {0.0f};
  for (i64 batch = 0; batch < batches; ++batch) {
    const RowStats* stats = (const RowStats*)p.stats + (batch * heads + head) * a.q_len;
    for (int query = first + threadIdx.x; query < end; query += kThreads)
      sum[0] = fmaf(expf(sink - stats[query].base), stats[query].delta, sum[0]);
  }
  block_reduce<Sum, kThreads>(sum, scratch);
  if (threadIdx.x == 0) ((float*)p.dsinks)[head * p.dsinks_step] = 0.0f - sum[0];
}
