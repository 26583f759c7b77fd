// The pass of `grouped_linear_backward` over the gradient of the result: dz = dout scale f'(z), rounded and not.
//
// Threads to data: a thread has an element; neighbours are in the same row.
//
// Defines: ELEM; FUNCTION, Identity or a struct of math.cuh.

#include "warpsmith/math.cuh"

using namespace warpsmith;

struct Identity {
  template <class T> static WS_INLINE float derivative(float) { return 1.0f; }
};
template <class F> constexpr bool kHasSlope = true;
template <> constexpr bool kHasSlope<Identity> = false;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_linear_backward_pass(const GroupedPassParams p) {
  begin_kernel();
  const i64 at = (i64)blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.rows * p.n) return;
  const i64 row = at / p.n, column = at - row * p.n;
  float d = to_f32(((const ELEM*)p.dout)[row * p.dout_row + column * p.dout_col]) * p.scale;
  // In full f32 accuracy whatever the type is: a sum of many shows errors that rounding hides in each term.
  if (kHasSlope<FUNCTION>)
    d *= FUNCTION::template derivative<f32>(to_f32(((const ELEM*)p.z)[row * p.z_row + column * p.z_col]));
  if (p.dz) ((ELEM*)p.dz)[at] = from_f32<ELEM>(d);
  if (p.exact) ((float*)p.exact)[at] = d;
}
