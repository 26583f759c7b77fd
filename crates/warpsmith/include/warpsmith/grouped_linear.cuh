#pragma once
// What the CUDA kernels of `grouped_linear` share: which rows and matrices a tile has, and what comes after the sums over K.
//
// The prelude declares GroupedLinearParams, whose member `linear` has what `linear` has of a product: its batch are the groups, and
// only `w` has a distance between them. Defines: those of linear.cuh but for SCALING, which is 0.

#include "warpsmith/grouped_tiles.cuh"
#include "warpsmith/linear.cuh"
#include "warpsmith/rows.cuh"

namespace warpsmith::grouped {

using namespace warpsmith::linear;

// The product of one tile: `m` is the end of its rows, which are rows of the whole result.
WS_INLINE LinearParams product_of(const GroupedLinearParams& p, const GroupTile& tile) {
  LinearParams product = p.linear;
  product.m = tile.end;
  if (HAS_BIAS) product.bias += tile.group * p.bias_group * (i64)sizeof(OUT_T);
  return product;
}

// The row of x that a row of the result is made from, or -1.
WS_INLINE int x_row_of(const GroupedLinearParams& p, const GroupTile& tile, int row) {
  if (row >= tile.end) return -1;
  if (!p.index) return row;
  const i64 from = load_integer(p.index, p.wide_index, row * p.index_step);
  return from >= 0 && from < p.x_rows ? (int)from : -1;
}

// What a row of the result is multiplied by.
WS_INLINE float factor_of(const GroupedLinearParams& p, int row) {
  if (!p.row_scale) return p.linear.scale;
  const i64 at = row * p.row_scale_step;
  return p.linear.scale * (p.wide_row_scale ? ((const f32*)p.row_scale)[at] : to_f32(((const OUT_T*)p.row_scale)[at]));
}

// From the sums over K to the result before it is rounded, as `finish` of linear.cuh.
WS_INLINE float finish_row(float sum, float up, float factor, const ColumnTerms& c, float residual) {
  float y = ActivationOfSum::value(scaled(sum, kFactor, 1.0f, c.scale, c.bias));
  if (GATE) y *= scaled(up, 1.0f, 1.0f, c.up_scale, c.up_bias);
  return HAS_RESIDUAL ? fmaf(factor, y, residual) : factor * y;
}

WS_INLINE void write_row_element(const LinearParams& p, int row, int column, float sum, float up, float factor,
                                 const ColumnTerms& c) {
  const float y = finish_row(sum, up, factor, c, residual_at(p, 0, row, column));
  ((OUT_T*)p.out)[row * p.out_row + column * p.out_col] = from_f32<OUT_T>(y);
}

// Writes zeros to a tile of rows that belong to no group, by all threads of a block. A tile has kColumns columns.
template <int kColumns, int kThreads> WS_INLINE void clear_tile(const GroupedLinearParams& p, const GroupTile& tile) {
  if (!p.clears) return;
  const int first = tile.column * kColumns, columns = min(kColumns, p.linear.n - first);
  for (int i = threadIdx.x; i < (tile.end - tile.row) * kColumns; i += kThreads) {
    const int row = tile.row + i / kColumns, column = i % kColumns;
    if (column < columns)
      ((OUT_T*)p.linear.out)[row * p.linear.out_row + (first + column) * p.linear.out_col] = from_f32<OUT_T>(0.0f);
  }
}

}  // namespace warpsmith::grouped
