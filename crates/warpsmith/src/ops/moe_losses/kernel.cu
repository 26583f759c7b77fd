// Sums over tokens of what a router's losses are made of.
//
// Threads to data: a block has consecutive tokens, its warps take one in turn. Lane l of a warp has the experts l, l + 32, ...,
// EXPERTS / 32 of them, and adds their probabilities in registers; then the warps' sums are added in order. Slots are counted by
// atomics of whole numbers.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for.

#include "warpsmith/moe_losses.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kItems = EXPERTS / 32, kThreads = 256, kWarps = kThreads / 32;

// One block on a multiprocessor is enough: with the registers that more would leave it, the compiler spills.
extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_losses(const MoeLossesParams p) {
  begin_kernel();
  __shared__ float sums[kWarps][EXPERTS];
  __shared__ float others[kWarps][2];
  __shared__ i32 counts[EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < EXPERTS; e += kThreads) counts[e] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * p.block_tokens, last = min(first + p.block_tokens, p.num_tokens);
  float all[kItems], squares = 0.0f, entropy = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) all[i] = 0.0f;
  for (i64 token = first + warp; token < last; token += kWarps) {
    float x[kItems], powers[kItems];
    moe::load_logits(x, row_at<const T>(p.logits, p.rows, 0, token), p.steps[0], p.experts);
    moe::Softmax found = moe::softmax(powers, x);
    const float lse = found.top + found.log();
    squares += lse * lse;
    if (p.is_sigmoid) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) x[i] = i * 32 + lane < p.experts ? moe::log_sigmoid(x[i]) : minus_infinity();
      found = moe::softmax(powers, x);
    }
    entropy += found.log() + moe::sum_below(found, powers, x) / found.powers;
#pragma unroll
    for (int i = 0; i < kItems; ++i) all[i] += powers[i] / found.powers;
    const i32* ids = row_at<const i32>(p.ids, p.rows, 1, token);
    for (int slot = lane; slot < p.top_k; slot += 32) {
      const i32 id = ids[slot * p.steps[1]];
      if ((u32)id < (u32)p.experts) atomicAdd(&counts[id], 1);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) sums[warp][i * 32 + lane] = all[i];
  if (lane == 0) {
    others[warp][0] = squares;
    others[warp][1] = entropy;
  }
  __syncthreads();
  // In the workspace, a row for each block: its sums, those of the other two, and its counts.
  float* to = (float*)p.sums + (i64)blockIdx.x * (p.experts + 2);
  i32* to_counts = (i32*)p.block_counts + (i64)blockIdx.x * p.experts;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][e];
    to[e] = sum;
    to_counts[e] = counts[e];
  }
  if (threadIdx.x >= 2) return;
  float sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) sum += others[w][threadIdx.x];
  to[p.experts + threadIdx.x] = sum;
}
