#pragma once
// Stores of two neighbours of a row, as a thread has them in the layout of mma.cuh.
//
// Defines besides those of linear.cuh: OUT_PAIRS, whether two neighbours of a row of out (and residual) are one aligned
// word.

#include "warpsmith/linear.cuh"

namespace warpsmith::linear {

// Writes those of the two that exist, from their sums.
WS_INLINE void write_pair(const LinearParams& p, int batch, int row, int column, const float* sum, const float* up,
                          float factor, const ColumnTerms (&terms)[2]) {
  if (!OUT_PAIRS) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (column + e < p.n) write_element(p, batch, row, column + e, sum[e], up[e], factor, terms[e]);
    return;
  }
  OutPair residual = {}, result;
  if (HAS_RESIDUAL)
    residual = *(const OutPair*)((const OUT_T*)p.residual + batch * p.residual_batch + row * p.residual_row + column);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    result.items[e] = from_f32<OUT_T>(finish(p, sum[e], up[e], factor, terms[e], to_f32(residual.items[e])));
  *(OutPair*)((OUT_T*)p.out + batch * p.out_batch + row * p.out_row + column) = result;
}

}  // namespace warpsmith::linear
