#pragma once
// What every CUDA kernel of `linear` does after the sums over K: scales, bias, activation, gate, factor, residual and
// one rounding, with the same arithmetic in the same order in each, so that tiers differ in their sums alone.
//
// The prelude declares LinearParams. Defines:
//   X_T, W_T, OUT_T  element types; bias and residual are of type OUT_T
//   ACTIVATION       0: none; 1: gelu; 2: gelu_tanh; 3: silu; 4: relu
//   GATE             0: none; 1: `w` has n gate rows and then n up rows; 2: gate rows are even, up rows odd
//   SCALING          0: none; 1: scales that do not depend on k; 2: scales for every kScaleBlock elements of a row
//   HAS_BIAS, HAS_RESIDUAL
//   HAS_SCALE        0: p.scale is 1 and costs nothing; 1, the default: results are multiplied by it
// n counts columns of `out`; `w` has n rows, or 2 n with a gate. Rows of `w` index bias and w_scale.

#include "warpsmith/base.cuh"
#include "warpsmith/fp8.cuh"
#include "warpsmith/linear_activation.cuh"

#ifndef HAS_SCALE
#define HAS_SCALE 1
#endif

namespace warpsmith::linear {

constexpr int kScaleBlock = 128;

// The type for which the activation must be precise: f32 if there is a residual, which could cancel all but the error.
template <bool kResidual> struct ActivationType {
  typedef OUT_T type;
};
template <> struct ActivationType<true> {
  typedef f32 type;
};
typedef Activation<ACTIVATION, ActivationType<HAS_RESIDUAL>::type> ActivationOfSum;
constexpr float kFactor = ActivationOfSum::kFactor;

// The row of `w` that gives column j of the result, or of its gate, and the row that gives column j of up.
WS_INLINE int gate_row(const LinearParams& p, int j) { return GATE == 2 ? 2 * j : j; }
WS_INLINE int up_row(const LinearParams& p, int j) { return GATE == 2 ? 2 * j + 1 : p.n + j; }

WS_INLINE int num_weight_rows(const LinearParams& p) { return GATE ? 2 * p.n : p.n; }

// The order of rows of `w` in the tiles of kernels that compute gate and up together: with a gate, blocks of kBlock gate
// rows and kBlock up rows alternate, so that a thread has the sums of both for its columns. `row` counts from the start
// of the first tile.
template <int kBlock> WS_INLINE int column_of(int row) {
  return GATE ? row / (2 * kBlock) * kBlock + row % kBlock : row;
}
// `none` if there is no such row: past the end of gate, the next row would be one of up.
template <int kBlock> WS_INLINE int weight_row(const LinearParams& p, int row, int none) {
  const int j = column_of<kBlock>(row);
  return j < p.n ? (GATE && row / kBlock % 2 ? up_row(p, j) : gate_row(p, j)) : none;
}

// A tile of the result, and its matrix in the batch.
struct Tile {
  int m, n, batch;
};
// The place of tile `index`, in tiles. Tiles that run at the same time should share rows of x and of w, so the order is
// by bands of up to kBand tiles along m, and in a band column by column. kRowsOfTile and kColumnsOfTile count elements
// of `out`.
template <int kRowsOfTile, int kColumnsOfTile> WS_INLINE Tile tile_at(const LinearParams& p, u32 index) {
  constexpr u32 kBand = 8;
  const u32 tiles_m = ((u32)p.m + kRowsOfTile - 1) / kRowsOfTile, tiles_n = ((u32)p.n + kColumnsOfTile - 1) / kColumnsOfTile;
  const u32 matrix = tiles_m * tiles_n, batch = index / matrix, at = index - batch * matrix;
  const u32 band = at / (kBand * tiles_n), first = band * kBand, height = min(tiles_m - first, kBand);
  const u32 inside = at - band * kBand * tiles_n, n = inside / height;
  return {(int)(first + inside - n * height), (int)n, (int)batch};
}

// Scales of row i of x, and of row `row` of w, in block kb of k; 1 where there are none. With SCALING 1, kb is 0.
WS_INLINE float x_scale_at(const LinearParams& p, int batch, int i, int kb) {
  if (!SCALING) return 1.0f;
  return ((const float*)p.x_scale)[batch * p.x_scale_batch + i * p.x_scale_row + (SCALING == 2 ? kb * p.x_scale_col : 0)];
}
WS_INLINE float w_scale_at(const LinearParams& p, int batch, int row, int kb) {
  if (!SCALING) return 1.0f;
  const int at = SCALING == 2 ? row / kScaleBlock : row;
  return ((const float*)p.w_scale)[batch * p.w_scale_batch + at * p.w_scale_row + (SCALING == 2 ? kb * p.w_scale_col : 0)];
}
// SCALING 2: adds the sum over one block to the sum over those before it.
WS_INLINE float add_block(float total, float block, float x_scale, float w_scale) {
  return fmaf(block * x_scale, w_scale, total);
}

// What the epilogue needs of a column: bias and (SCALING 1) scale of its row of w, times kFactor, and of its up row.
struct ColumnTerms {
  float bias, up_bias, scale, up_scale;
};
WS_INLINE float bias_at(const LinearParams& p, int row) {
  return HAS_BIAS ? to_f32(((const OUT_T*)p.bias)[row * p.bias_step]) : 0.0f;
}
WS_INLINE ColumnTerms column_terms(const LinearParams& p, int batch, int j) {
  ColumnTerms c = {0.0f, 0.0f, 1.0f, 1.0f};
  if (j >= p.n) return c;
  c.bias = bias_at(p, gate_row(p, j)) * kFactor;
  if (SCALING == 1) c.scale = w_scale_at(p, batch, gate_row(p, j), 0) * kFactor;
  if (GATE) {
    c.up_bias = bias_at(p, up_row(p, j));
    if (SCALING == 1) c.up_scale = w_scale_at(p, batch, up_row(p, j), 0);
  }
  return c;
}
// And of a row: the scale of its row of x.
WS_INLINE float row_term(const LinearParams& p, int batch, int i) {
  return SCALING == 1 && i < p.m ? x_scale_at(p, batch, i, 0) : 1.0f;
}

// factor times a sum over K with its scales and bias; `scale` and `bias` come multiplied by the factor.
WS_INLINE float scaled(float sum, float factor, float row, float scale, float bias) {
  // Fused explicitly, so that the bits do not depend on what the compiler fuses in each kernel.
  if (SCALING == 1) return HAS_BIAS ? fmaf(sum * row, scale, bias) : (sum * row) * scale;
  if (factor != 1.0f) return HAS_BIAS ? fmaf(sum, factor, bias) : sum * factor;
  return HAS_BIAS ? sum + bias : sum;
}
// From the sums over K to the result before it is rounded. `up` is used only with a gate, `residual` only if there is
// one.
WS_INLINE float finish(const LinearParams& p, float sum, float up, float row, const ColumnTerms& c, float residual) {
  float y = ActivationOfSum::value(scaled(sum, kFactor, row, c.scale, c.bias));
  if (GATE) y *= scaled(up, 1.0f, row, c.up_scale, c.up_bias);
  if (HAS_SCALE) return HAS_RESIDUAL ? fmaf(p.scale, y, residual) : p.scale * y;
  return HAS_RESIDUAL ? y + residual : y;
}

WS_INLINE float residual_at(const LinearParams& p, int batch, int i, int j) {
  if (!HAS_RESIDUAL) return 0.0f;
  return to_f32(((const OUT_T*)p.residual)[batch * p.residual_batch + i * p.residual_row + j * p.residual_col]);
}
// Two neighbouring elements of `out` or the residual, read or written as one.
struct alignas(2 * sizeof(OUT_T)) OutPair {
  OUT_T items[2];
};
// Writes one element of the result, which must exist, from its sums.
WS_INLINE void write_element(const LinearParams& p, int batch, int i, int j, float sum, float up, float row,
                             const ColumnTerms& c) {
  const float y = finish(p, sum, up, row, c, residual_at(p, batch, i, j));
  ((OUT_T*)p.out)[batch * p.out_batch + i * p.out_row + j * p.out_col] = from_f32<OUT_T>(y);
}

}  // namespace warpsmith::linear
