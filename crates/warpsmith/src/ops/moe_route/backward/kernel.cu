// The gradient of the logits of each token: see mod.rs for the formulas.
//
// Threads to data: a warp has a token. Lane l has the experts l, l + 32, ..., EXPERTS / 32 of them, in registers, and the slots
// l, l + 32, ..., which it reads again in each pass.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for.

#include "warpsmith/random.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kItems = EXPERTS / 32, kThreads = 128, kWarps = kThreads / 32;

// What a slot has; without an expert where its id is none.
struct Slot {
  i32 expert;
  float logit, gradient;
};

struct Token {
  const T* logits;
  const i32* ids;
  const float *weights, *dweights;

  WS_INLINE Token(const MoeRouteBackwardParams& p, i64 token)
      : logits(row_at<const T>(p.logits, p.rows, 0, token)), ids(row_at<const i32>(p.ids, p.rows, 1, token)),
        weights(row_at<const float>(p.weights, p.rows, 2, token)),
        dweights(row_at<const float>(p.dweights, p.rows, 3, token)) {}

  WS_INLINE float logit(const MoeRouteBackwardParams& p, i32 expert) const {
    return clean(to_f32(logits[expert * p.steps[0]]));
  }
  WS_INLINE Slot slot(const MoeRouteBackwardParams& p, int at) const {
    const i32 id = ids[at * p.steps[1]];
    if ((u32)id >= (u32)p.experts) return {-1, minus_infinity(), 0.0f};
    const float weight = weights[at * p.steps[2]];
    return {id, logit(p, id), weight == 0.0f ? 0.0f : dweights[at * p.steps[3]]};
  }
};

WS_INLINE float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// One block on a multiprocessor is enough: with the registers that more would leave it, the compiler spills.
extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_route_backward(const MoeRouteBackwardParams p) {
  begin_kernel();
  const int lane = threadIdx.x % 32;
  const i64 index = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= p.num_tokens) return;
  const Token token(p, index);
  const bool of_all = !p.is_sigmoid && !p.normalize;
  float out[kItems], all[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) out[i] = 0.0f;

  float pivot = minus_infinity(), divisor = 0.0f, product = 0.0f;
  if (of_all) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int e = i * 32 + lane;
      all[i] = e < p.experts ? token.logit(p, e) : minus_infinity();
      pivot = fmaxf(pivot, all[i]);
    }
  } else {
    for (int at = lane; at < p.top_k; at += 32) pivot = fmaxf(pivot, token.slot(p, at).logit);
  }
  pivot = warp_reduce<MaxIgnoringNan>(pivot);
  const bool exists = pivot > minus_infinity();
  if (of_all && exists) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) divisor += all[i] = expf(all[i] - pivot);
  }
  for (int at = lane; exists && at < p.top_k; at += 32) {
    const Slot slot = token.slot(p, at);
    const float score = p.is_sigmoid ? sigmoid(slot.logit) : expf(slot.logit - pivot);
    if (p.normalize) divisor += score;
    product += score * slot.gradient;
  }
  divisor = warp_reduce<Sum>(divisor);
  if (p.is_sigmoid) divisor = p.normalize ? divisor + 1e-20f : 1.0f;
  const float dot = p.normalize || of_all ? warp_reduce<Sum>(product) / divisor : 0.0f;

  for (int first = 0; exists && first < p.top_k; first += 32) {
    Slot slot{-1, minus_infinity(), 0.0f};
    if (first + lane < p.top_k) slot = token.slot(p, first + lane);
    float value = slot.gradient;
    if (!of_all) {
      const float score = p.is_sigmoid ? sigmoid(slot.logit) : expf(slot.logit - pivot);
      value = score / divisor * (slot.gradient - dot);
      if (p.is_sigmoid) value *= sigmoid(-slot.logit);
      value *= p.scale;
    }
    const int count = min(32, p.top_k - first);
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const i32 expert = __shfl_sync(kAllLanes, slot.expert, j);
      const float add = __shfl_sync(kAllLanes, value, j);
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (expert == i * 32 + lane) out[i] += add;
    }
  }
  T* row = row_at<T>(p.dlogits, p.out_rows, 0, index);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = i * 32 + lane;
    if (of_all && exists) out[i] = p.scale * (all[i] / divisor * (out[i] - dot));
    if (e < p.experts) row[e * p.out_step] = from_f32<T>(out[i]);
  }
}
