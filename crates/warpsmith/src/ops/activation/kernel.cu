// out = f(x), and dx = dout f'(x). Threads to data: as in elementwise.cuh.
//
// Defines: FUNCTION, a struct of math.cuh; those of elementwise.cuh.

#include "warpsmith/elementwise.cuh"
#include "warpsmith/math.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(kThreads) activation(const ElementwiseParams p) {
  elementwise<ELEM, 1, 1>(p, [](const float (&x)[1], float (&y)[1]) {
    y[0] = FUNCTION::value<ELEM>(x[0]);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads) activation_backward(const ElementwiseParams p) {
  elementwise<ELEM, 2, 1>(p, [](const float (&x)[2], float (&y)[1]) { y[0] = x[1] * FUNCTION::derivative<ELEM>(x[0]); });
}
