// out = a b + c, and the gradients da = dout b, db = dout a. Threads to data: as in elementwise.cuh.
//
// Defines: those of elementwise.cuh.

#include "warpsmith/elementwise.cuh"

using namespace warpsmith;

extern "C" __global__ void __launch_bounds__(kThreads) mul_add(const ElementwiseParams p) {
  elementwise<ELEM, 3, 1>(p, [](const float (&x)[3], float (&y)[1]) { y[0] = fmaf(x[0], x[1], x[2]); });
}

// Inputs a, b, dout; outputs da, db.
extern "C" __global__ void __launch_bounds__(kThreads) mul_add_backward(const ElementwiseParams p) {
  elementwise<ELEM, 3, 2>(p, [](const float (&x)[3], float (&y)[2]) {
    y[0] = x[2] * x[1];
    y[1] = x[2] * x[0];
  });
}

// One gradient alone needs only the other factor.
extern "C" __global__ void __launch_bounds__(kThreads) mul_add_backward_one(const ElementwiseParams p) {
  elementwise<ELEM, 2, 1>(p, [](const float (&x)[2], float (&y)[1]) { y[0] = x[0] * x[1]; });
}
