// The pass of `moe_ffn_backward` between its products: from x · w1ᵀ, which it makes z = x · w1ᵀ + b1, and da = dy · w2 of each slot to
//   dz = r da act'(z), with a gate r da up act'(gate) and r da act(gate), rounded, and also unrounded in place of z;
//   h = r act(z), with a gate r act(gate) up;
//   dweights = da · h without the r, + dy · b2.
//
// Threads to data: a warp has a slot, or a token of the shared expert; a lane has 4 neighbouring columns in every 128. Sums over a row
// are those of lanes, joined in an order that depends on its length alone.
//
// Defines: ELEM, the type of x; FUNCTION, Identity or a struct of math.cuh; VECTOR, whether rows are a multiple of 4 long.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

typedef ELEM T;
constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = 4;
// Values of p.gate.
constexpr int kHalves = 1, kInterleaved = 2;

struct Identity {
  template <class V> static WS_INLINE float value(float x) { return x; }
  template <class V> static WS_INLINE float derivative(float) { return 1.0f; }
};

template <class V> struct alignas(kColumns * sizeof(V)) Piece {
  V items[kColumns];
};

// `count` numbers, `step` apart.
WS_INLINE void load(float (&v)[kColumns], const float* from, int step, int count) {
  if (VECTOR && step == 1) {
    const float4 all = *(const float4*)from;
    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v[i] = i < count ? from[i * step] : 0.0f;
  }
}

// As V, which is f32 or T.
template <class V> WS_INLINE void store(V* to, const float (&v)[kColumns], int step, int count) {
  if (VECTOR && step == 1) {
    Piece<V> piece;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) piece.items[i] = from_f32<V>(v[i]);
    *(Piece<V>*)to = piece;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i < count) to[i * step] = from_f32<V>(v[i]);
  }
}

// Adds `count` elements of a bias, `step` apart.
WS_INLINE void add(float (&v)[kColumns], const T* bias, i64 step, int count) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (i < count) v[i] += to_f32(bias[i * step]);
}

// Goes through a row, whose bias is at `bias` if it has one; returns this lane's part of da · h.
WS_INLINE float pass(const MoeFfnPassParams& p, i64 row, float weight, const T* bias) {
  const int rows = p.gate ? 2 * p.ffn : p.ffn, step = p.gate == kInterleaved ? 2 : 1, up_at = p.gate == kHalves ? p.ffn : 1;
  float* z_row = (float*)p.z + row * rows;
  T* dz_row = (T*)p.dz + row * rows;
  const float* da_row = (const float*)p.da + row * p.ffn;
  T* h_row = (T*)p.h + row * p.ffn;
  float sum = 0.0f;
#pragma unroll 1
  for (int column = threadIdx.x % 32 * kColumns; column < p.ffn; column += 32 * kColumns) {
    const int count = min(p.ffn - column, kColumns), at = column * step;
    float z[kColumns], up[kColumns], da[kColumns], h[kColumns];
    load(z, z_row + at, step, count);
    if (p.gate) load(up, z_row + at + up_at, step, count);
    if (bias) {
      add(z, bias + at * p.z_bias_step, step * p.z_bias_step, count);
      if (p.gate) add(up, bias + (at + up_at) * p.z_bias_step, step * p.z_bias_step, count);
    }
    load(da, da_row + column, 1, count);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      // In full f32 accuracy whatever the type is: sums of many show errors that rounding hides in each term.
      const float act = FUNCTION::template value<f32>(z[i]), slope = FUNCTION::template derivative<f32>(z[i]);
      const float plain = rounded<T>(p.gate ? act * up[i] : act), dh = weight * da[i];
      if (i < count) sum = fmaf(da[i], plain, sum);
      h[i] = weight * plain;
      z[i] = p.gate ? dh * slope * up[i] : dh * slope;
      up[i] = dh * act;
    }
    store(h_row + column, h, 1, count);
    store(dz_row + at, z, step, count);
    if (p.keeps_exact) store(z_row + at, z, step, count);
    if (p.gate) {
      store(dz_row + at + up_at, up, step, count);
      if (p.keeps_exact) store(z_row + at + up_at, up, step, count);
    }
  }
  return sum;
}

// This lane's part of dy · b2.
WS_INLINE float of_bias(const MoeFfnPassParams& p, i64 token, i64 expert) {
  const T* dy = (const T*)p.dy + token * p.dy_row;
  const T* bias = (const T*)p.bias + expert * p.bias_expert;
  float sum = 0.0f;
#pragma unroll 4
  for (int column = threadIdx.x % 32; column < p.hidden; column += 32)
    sum = fmaf(to_f32(dy[column * p.dy_col]), to_f32(bias[column * p.bias_step]), sum);
  return sum;
}

WS_INLINE void store_score(const MoeFfnPassParams& p, i64 token, i64 slot, float score) {
  const i64 at = row_offset(p.scores_of, 0, token) + slot * p.score_step;
  if (p.wide_weights) ((f32*)p.scores)[at] = score;
  else ((T*)p.scores)[at] = from_f32<T>(score);
}

extern "C" __global__ void __launch_bounds__(kThreads) moe_ffn_backward_pass(const __grid_constant__ MoeFfnPassParams p) {
  begin_kernel();
  // The weight of every slot in the sum that is dx.
  if (p.one && blockIdx.x == 0 && threadIdx.x == 0) *(float*)p.one = 1.0f;
  const int lane = threadIdx.x % 32;
  const i64 unit = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
  if (unit >= p.units) return;
  if (!p.positions) {
    pass(p, unit, 1.0f, nullptr);
    return;
  }
  // There are fewer than 2^30 slots.
  const i64 token = (u32)unit / (u32)p.top_k, slot = unit - token * p.top_k, row = ((const i32*)p.positions)[unit];
  if (row < 0) {
    if (p.scores && lane == 0) store_score(p, token, slot, 0.0f);
    return;
  }
  i64 offsets[2];
  row_offsets<0, 2>(offsets, p.tokens_of, token);
  const i64 at = offsets[1] + slot * p.weight_step;
  const float weight = p.wide_weights ? ((const f32*)p.weights)[at] : to_f32(((const T*)p.weights)[at]);
  const i64 expert = p.bias || p.z_bias ? load_integer(p.ids, p.wide_ids, offsets[0] + slot * p.id_step) : 0;
  float score = pass(p, row, weight, p.z_bias ? (const T*)p.z_bias + expert * p.z_bias_expert : nullptr);
  if (p.row_weights && lane == 0) ((float*)p.row_weights)[row] = weight;
  if (!p.scores) return;
  if (p.bias) score += of_bias(p, token, expert);
  score = warp_reduce<Sum>(score);
  if (lane == 0) store_score(p, token, slot, score);
}
