// From the sums of blocks to the losses.
//
// Threads to data: one block. As many lines of threads as fit take blocks in turn, a thread an expert; then the lines' sums are
// added in order. The order depends on the number of experts and of blocks alone.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 1024;

extern "C" __global__ void __launch_bounds__(kThreads) moe_losses_sum(const MoeLossesParams p) {
  begin_kernel();
  __shared__ float scratch[2][2 * kThreads / 32];
  __shared__ float sums[kThreads];
  __shared__ i32 counts[kThreads];
  const int thread = threadIdx.x, lines = kThreads / p.experts, line = thread / p.experts, e = thread - line * p.experts;
  float sum = 0.0f, others[2] = {0.0f, 0.0f};
  i32 count = 0;
  if (line < lines)
#pragma unroll 4
    for (i32 block = line; block < p.blocks; block += lines) {
      sum += ((const float*)p.sums)[(i64)block * (p.experts + 2) + e];
      count += ((const i32*)p.block_counts)[(i64)block * p.experts + e];
    }
  for (i32 block = thread; block < p.blocks; block += kThreads)
    for (int i = 0; i < 2; ++i) others[i] += ((const float*)p.sums)[(i64)block * (p.experts + 2) + p.experts + i];
  sums[thread] = sum;
  counts[thread] = count;
  __syncthreads();
  float load = 0.0f, probability = 0.0f;
  // Without tokens or slots all sums are zero.
  const float tokens = p.num_tokens > 0 ? (float)p.num_tokens : 1.0f, slots = p.top_k > 0 ? tokens * p.top_k : 1.0f;
  const bool has_expert = thread < p.experts;
  if (has_expert) {
    for (int i = 1; i < lines; ++i) {
      sum += sums[i * p.experts + thread];
      count += counts[i * p.experts + thread];
    }
    probability = sum / tokens;
    load = (float)count / slots;
    if (p.load) ((float*)p.load)[thread * p.load_step] = load;
    if (p.probability) ((float*)p.probability)[thread * p.probability_step] = probability;
  }
  float first[2] = {load * probability, probability};
  block_reduce<Sum, kThreads>(first, scratch[0]);
  const float mean = first[1] / p.experts, apart = has_expert ? probability - mean : 0.0f;
  float variation[1] = {apart * apart};
  block_reduce<Sum, kThreads>(variation, scratch[1]);
  __syncthreads();
  block_reduce<Sum, kThreads>(others, scratch[0]);
  if (thread > 0) return;
  *(float*)p.load_balance = p.experts * first[0];
  *(float*)p.importance = mean == 0.0f ? 0.0f : variation[0] / p.experts / (mean * mean);
  *(float*)p.z_loss = others[0] / tokens;
  if (p.entropy) *(float*)p.entropy = others[1] / tokens;
}
