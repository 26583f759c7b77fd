// The weighted sums of what experts made of tokens: out = residual + scale * (sum over slots of weight * (y + b2) + shared). Slots are
// added in their order.
//
// Threads to data: a thread has 4 neighbouring columns of a token.
//
// Defines: ELEM, the type of x; VECTOR, whether 4 columns of out and residual are an aligned piece of memory, and rows of y a multiple
// of 4 long; HAS_BIAS, whether there is a b2.

#include "warpsmith/rows.cuh"

using namespace warpsmith;

typedef ELEM T;
constexpr int kThreads = 256, kColumns = 4;
// Slots whose rows are loaded at the same time; a bias needs registers too.
constexpr int kAtOnce = HAS_BIAS ? 2 : 4;

struct alignas(kColumns * sizeof(T)) Piece {
  T items[kColumns];
};

// `count` columns of a dense row of sums.
WS_INLINE void load_sums(float (&y)[kColumns], const float* from, int count) {
  if (VECTOR) {
    const float4 v = *(const float4*)from;
    y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y[i] = i < count ? from[i] : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) moe_ffn_sum(const __grid_constant__ MoeFfnSumParams p) {
  begin_kernel();
  const u32 pieces = ((u32)p.hidden + kColumns - 1) / kColumns, unit = blockIdx.x * kThreads + threadIdx.x, token = unit / pieces;
  if (token >= (u32)p.tokens) return;
  const int column = (int)(unit - token * pieces) * kColumns, count = min(p.hidden - column, kColumns);
  i64 offsets[4];
  row_offsets<0, 4>(offsets, p.tokens_of, p.first + token);
  float sum[kColumns] = {0.0f, 0.0f, 0.0f, 0.0f}, y[kAtOnce][kColumns];
  const i32* positions = (const i32*)p.positions + (i64)token * p.top_k;
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    i64 places[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = first + i;
      places[i] = slot < p.top_k ? positions[slot] : -1;
      if (places[i] < 0) continue;
      const i64 at = offsets[1] + slot * p.steps[1];
      weights[i] = p.wide_weights ? ((const f32*)p.weights)[at] : to_f32(((const T*)p.weights)[at]);
      load_sums(y[i], (const float*)p.y + places[i] * p.hidden + column, count);
      if (HAS_BIAS) {
        const i64 expert = load_integer(p.ids, p.wide_ids, offsets[0] + slot * p.steps[0]);
        const T* bias = (const T*)p.bias + expert * p.bias_expert + column * p.bias_step;
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          if (j < count) y[i][j] += to_f32(bias[j * p.bias_step]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (places[i] < 0) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[j] = fmaf(weights[i], y[i][j], sum[j]);
    }
  }
  if (p.shared) {
    load_sums(y[0], (const float*)p.shared + (i64)token * p.hidden + column, count);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum[j] += y[0][j];
  }
  const T* residual = (const T*)p.residual + offsets[2] + column * p.steps[2];
  T* out = (T*)p.out + offsets[3] + column * p.steps[3];
  if (VECTOR) {
    Piece result, added;
    if (p.residual) added = *(const Piece*)residual;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      result.items[j] = from_f32<T>(p.residual ? fmaf(p.scale, sum[j], to_f32(added.items[j])) : p.scale * sum[j]);
    *(Piece*)out = result;
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j >= count) break;
      const float y = p.residual ? fmaf(p.scale, sum[j], to_f32(residual[j * p.steps[2]])) : p.scale * sum[j];
      out[j * p.steps[3]] = from_f32<T>(y);
    }
  }
}
