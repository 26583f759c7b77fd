// The experts of each token and their weights; where one block has all tokens, their places too. See mod.rs for what is
// computed, and arithmetic.rs for the operations that decide, which are the same here.
//
// Threads to data: a block has consecutive tokens, its warps take one in turn. Lane l of a warp has the experts l, l + 32, ...,
// EXPERTS / 32 of them, in registers. Lane j % 32 keeps what was chosen for slot j; slots beyond the first 32 go through memory.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for; THREADS; PLAIN, whether the order of the logits decides
// alone: no bias, no groups, no noise.

#include "warpsmith/moe_places.cuh"
#include "warpsmith/random.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kItems = EXPERTS / 32, kWarps = THREADS / 32;

// Over a warp. Instructions for it came with sm_80.
WS_INLINE u32 warp_largest(u32 x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
#endif
}
WS_INLINE u32 warp_least(u32 x) { return ~warp_largest(~x); }

// Of a few registers, the one at a place that is only known at run time.
WS_INLINE float pick(const float (&values)[kItems], int at) {
  float found = values[0];
#pragma unroll
  for (int i = 1; i < kItems; ++i) found = i == at ? values[i] : found;
  return found;
}

// From logits to what the choice is made by.
WS_INLINE void make_scores(const MoeRouteParams& p, i64 token, float (&x)[kItems]) {
  const int lane = threadIdx.x % 32;
  if (p.noise > 0.0f) {
    const RandomStream random(p.seed, token);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      x[i] = clean(__fadd_rn(x[i], __fmul_rn(p.noise, random_normal(random[(u32)(i * 32 + lane)]))));
  }
  if (!p.compares_scores) return;
  float most = minus_infinity();
  u64 sum = 0;
  if (!p.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) most = fmaxf(most, x[i]);
    most = warp_reduce<MaxIgnoringNan>(most);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    // Stays where it is: chosen last, whatever the bias is.
    if (x[i] == minus_infinity()) continue;
    const float e = decisive_exp(p.is_sigmoid ? -fabsf(x[i]) : __fsub_rn(x[i], most));
    if (p.is_sigmoid) {
      x[i] = __fdiv_rn(x[i] < 0.0f ? e : 1.0f, __fadd_rn(1.0f, e));
    } else {
      x[i] = e;
      sum += whole_weight(e);
    }
  }
  const float divisor = __fdiv_rn(__ull2float_rn(p.is_sigmoid ? 0 : warp_reduce<Sum>(sum)), kWeightUnit);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = i * 32 + lane;
    if (x[i] == minus_infinity()) continue;
    if (!p.is_sigmoid) x[i] = __fdiv_rn(x[i], divisor);
    if (p.bias && e < p.experts) x[i] = __fadd_rn(x[i], ((const float*)p.bias)[e * p.bias_step]);
  }
}

// Zeroes the keys of all but the best groups. `scratch` is the warp's, with room for a number of each expert.
WS_INLINE void keep_best_groups(const MoeRouteParams& p, u32 (&keys)[kItems], u32* scratch) {
  const int lane = threadIdx.x % 32, size = p.experts / p.groups;
  u32 groups[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) scratch[i * 32 + lane] = keys[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int group = i * 32 + lane;
    u32 first = 0, second = 0;
    if (group < p.groups)
#pragma unroll 1
      for (int j = 0; j < size; ++j) {
        const u32 key = scratch[group * size + j];
        second = max(second, min(key, first));
        first = max(first, key);
      }
    const bool adds = !p.largest_of_group && size > 1;
    groups[i] = adds ? ordered_bits(clean(__fadd_rn(ordered_number(first), ordered_number(second)))) : first;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) scratch[i * 32 + lane] = groups[i];
  __syncwarp();
  u32 admitted = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int group = i * 32 + lane;
    int better = 0;
#pragma unroll 1
    for (int other = 0; other < p.groups; ++other) {
      const u32 key = scratch[other];
      better += key > groups[i] || (key == groups[i] && other < group);
    }
    admitted |= (u32)(better < p.top_groups) << i;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) scratch[i * 32 + lane] = admitted >> i & 1;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = i * 32 + lane;
    if (e < p.experts && !scratch[e / size]) keys[i] = 0;
  }
  __syncwarp();
}

// The score of a chosen expert, over what all are divided by.
WS_INLINE float score(const MoeRouteParams& p, float x, float pivot) {
  if (!p.is_sigmoid) return expf(x - pivot);
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

WS_INLINE void route(const MoeRouteParams& p, i64 token, u32* scratch, i32* counts) {
  const int lane = threadIdx.x % 32;
  const T* row = row_at<const T>(p.logits, p.rows, 0, token);
  float* weights = row_at<float>(p.weights, p.rows, 1, token);
  i32* ids = row_at<i32>(p.ids, p.rows, 2, token);
  float x[kItems], scores[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = i * 32 + lane;
    scores[i] = x[i] = e < p.experts ? clean(to_f32(row[e * p.steps[0]])) : minus_infinity();
  }
  if (!PLAIN) make_scores(p, token, scores);
  u32 keys[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) keys[i] = i * 32 + lane < p.experts ? ordered_bits(clean(scores[i])) : 0;
  if (!PLAIN && p.top_groups < p.groups) keep_best_groups(p, keys, scratch);

  float mine = minus_infinity(), largest = minus_infinity();
#pragma unroll 1
  for (int slot = 0; slot < p.top_k; ++slot) {
    u32 best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (keys[i] > best) {
        best = keys[i];
        at = i;
      }
    const u32 most = warp_largest(best);
    const u32 id = warp_least(best == most ? (u32)(at * 32 + lane) : 0xffffffffu);
    const float chosen = __shfl_sync(kAllLanes, pick(x, at), (int)(id % 32));
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (id == (u32)(i * 32 + lane)) keys[i] = 0;
    largest = fmaxf(largest, chosen);
    if (lane != slot % 32) continue;
    mine = chosen;
    ids[slot * p.steps[2]] = (i32)id;
    if (p.top_k > 32) weights[slot * p.steps[1]] = chosen;
    if (counts) atomicAdd(&counts[id], 1);
  }

  const bool of_all = !p.is_sigmoid && !p.normalize;
  float pivot = largest, divisor = 0.0f;
  if (of_all) {
    pivot = minus_infinity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) pivot = fmaxf(pivot, x[i]);
    pivot = warp_reduce<MaxIgnoringNan>(pivot);
#pragma unroll
    for (int i = 0; i < kItems; ++i) divisor += expf(x[i] - pivot);
  } else if (p.normalize) {
    for (int slot = lane; slot < p.top_k; slot += 32)
      divisor += score(p, p.top_k > 32 ? weights[slot * p.steps[1]] : mine, pivot);
  }
  divisor = warp_reduce<Sum>(divisor);
  if (p.is_sigmoid) divisor = p.normalize ? divisor + 1e-20f : 1.0f;
  for (int slot = lane; slot < p.top_k; slot += 32) {
    const float own = p.top_k > 32 ? weights[slot * p.steps[1]] : mine;
    weights[slot * p.steps[1]] = largest == minus_infinity() ? 0.0f : score(p, own, pivot) / divisor * p.scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_route(const MoeRouteParams p) {
  begin_kernel();
  __shared__ moe::Places<THREADS, EXPERTS> places;
  __shared__ i32 counts[EXPERTS];
  const int warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * p.block_tokens, last = min(first + p.block_tokens, p.num_tokens);
  for (i64 token = first + warp; token < last; token += kWarps)
    route(p, token, (u32*)places.ranks[warp], p.has_places ? counts : nullptr);
  if (!p.has_places) return;
  if (gridDim.x == 1) return places.put(p, counts, 1, first, last);
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += THREADS)
    ((i32*)p.block_counts)[(i64)blockIdx.x * p.experts + e] = counts[e];
}
