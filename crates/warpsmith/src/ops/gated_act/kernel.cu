// out = f(gate) up, and its gradients. Threads to data: as in elementwise.cuh.
//
// Defines: FUNCTION, a struct of math.cuh; those of elementwise.cuh.

#include "warpsmith/elementwise.cuh"
#include "warpsmith/math.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(kThreads) gated_act(const ElementwiseParams p) {
  elementwise<ELEM, 2, 1>(p, [](const float (&x)[2], float (&y)[1]) {
    y[0] = FUNCTION::value<ELEM>(x[0]) * x[1];
  });
}

// Inputs gate, up, dout; outputs dgate, dup.
extern "C" __global__ void __launch_bounds__(kThreads) gated_act_backward(const ElementwiseParams p) {
  elementwise<ELEM, 3, 2>(p, [](const float (&x)[3], float (&y)[2]) {
    y[0] = x[2] * x[1] * FUNCTION::derivative<ELEM>(x[0]);
    y[1] = x[2] * FUNCTION::value<ELEM>(x[0]);
  });
}
