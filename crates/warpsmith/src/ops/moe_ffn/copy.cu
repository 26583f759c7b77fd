// Copies rows of x, whatever their strides, to dense rows.
//
// Threads to data: a thread has an element.
//
// Defines: ELEM, the type of x.

#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) moe_ffn_copy(const __grid_constant__ MoeFfnCopyParams p) {
  begin_kernel();
  const i64 at = (i64)blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.tokens * p.hidden) return;
  const i64 token = at / p.hidden;
  ((ELEM*)p.to)[at] = row_at<const ELEM>(p.x, p.tokens_of, 0, p.first + token)[(at - token * p.hidden) * p.step];
}
