// out = gelu(x + bias). Threads to data: as in elementwise.cuh.
//
// Defines: FUNCTION, Gelu or GeluTanh; those of elementwise.cuh.

#include "warpsmith/elementwise.cuh"
#include "warpsmith/math.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(kThreads) add_gelu(const ElementwiseParams p) {
  elementwise<ELEM, 2, 1>(p, [](const float (&x)[2], float (&y)[1]) {
    y[0] = FUNCTION::value<ELEM>(x[0] + x[1]);
  });
}
