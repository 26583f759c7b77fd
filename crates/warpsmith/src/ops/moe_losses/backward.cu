// The gradients of the logits of tokens, from those of a router's losses: see backward.rs for the formulas.
//
// Threads to data: a block has consecutive tokens, its warps take one in turn. Lane l of a warp has the experts l, l + 32, ...,
// EXPERTS / 32 of them. First the block computes what arrives at the probabilities of every token.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for.

#include "warpsmith/moe_losses.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kItems = EXPERTS / 32, kThreads = 256, kWarps = kThreads / 32;

WS_INLINE float number(u64 at) { return *(const float*)at; }

// What arrives, in shared memory; zero behind the experts.
WS_INLINE void make_arriving(const MoeLossesBackwardParams& p, float* arrives, float* scratch) {
  const auto probability = [&](int e) { return ((const float*)p.probability)[e * p.probability_step]; };
  float sum[1] = {0.0f};
  for (int e = threadIdx.x; e < p.experts; e += kThreads) sum[0] += probability(e);
  block_reduce<Sum, kThreads>(sum, scratch);
  const float mean = sum[0] / p.experts;
  float variation[1] = {0.0f};
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    const float apart = probability(e) - mean;
    variation[0] += apart * apart;
  }
  block_reduce<Sum, kThreads>(variation, scratch + kWarps);
  const float dbalance = number(p.dload_balance), dimportance = number(p.dimportance);
  for (int e = threadIdx.x; e < EXPERTS; e += kThreads) {
    float value = 0.0f;
    if (e < p.experts) {
      const float load = ((const float*)p.load)[e * p.load_step];
      const float slope = 2.0f * p.experts / (sum[0] * sum[0]) * (probability(e) - mean - variation[0] / sum[0]);
      value = (p.experts * load * dbalance + slope * dimportance) / (float)p.num_tokens;
    }
    arrives[e] = value;
  }
  __syncthreads();
}

// One block on a multiprocessor is enough: with the registers that more would leave it, the compiler spills.
extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_losses_backward(const MoeLossesBackwardParams p) {
  begin_kernel();
  __shared__ float arrives[EXPERTS];
  __shared__ float scratch[2 * kWarps];
  make_arriving(p, arrives, scratch);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float dz = number(p.dz_loss) / (float)p.num_tokens;
  const i64 first = blockIdx.x * p.block_tokens, last = min(first + p.block_tokens, p.num_tokens);
#pragma unroll 1
  for (i64 token = first + warp; token < last; token += kWarps) {
    float x[kItems], powers[kItems];
    moe::load_logits(x, row_at<const T>(p.logits, p.rows, 0, token), p.steps[0], p.experts);
    moe::Softmax found = moe::softmax(powers, x);
    const float factor = 2.0f * (found.top + found.log()) * dz, divisor = found.powers;
    float others[kItems];
    if (p.is_sigmoid) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        others[i] = factor * (powers[i] / divisor);
        powers[i] = i * 32 + lane < p.experts ? moe::log_sigmoid(x[i]) : minus_infinity();
      }
      // In their own place.
      found = moe::softmax(powers, powers);
    }
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) dot += powers[i] * arrives[i * 32 + lane];
    dot = warp_reduce<Sum>(dot) / found.powers;
    T* out = row_at<T>(p.dlogits, p.rows, 1, token);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int e = i * 32 + lane;
      if (e >= p.experts) continue;
      const float share = powers[i] / found.powers, part = share * (arrives[e] - dot);
      out[e * p.steps[1]] = from_f32<T>(p.is_sigmoid ? fmaf(part, moe::below_one(x[i]), others[i]) : fmaf(share, factor, part));
    }
  }
}
