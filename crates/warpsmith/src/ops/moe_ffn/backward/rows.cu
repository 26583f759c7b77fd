// Rows of a tensor, whatever their strides, as dense rows, times a factor.
//
// Threads to data: a thread has an element.
//
// Defines: ELEM, the type of both.

#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) moe_ffn_backward_rows(const __grid_constant__ MoeFfnRowsParams p) {
  begin_kernel();
  const i64 at = (i64)blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.tokens * p.hidden) return;
  const i64 token = at / p.hidden;
  const float x = to_f32(row_at<const ELEM>(p.from, p.tokens_of, 0, token)[(at - token * p.hidden) * p.step]);
  ((ELEM*)p.to)[at] = from_f32<ELEM>(p.scale * x);
}
