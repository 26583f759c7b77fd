#pragma once
// What the norms and their gradients share.

#include "warpsmith/base.cuh"

namespace warpsmith {

// 1 / sqrt(x) to an ulp: an estimate and one Newton step, which is skipped for infinity, where the estimate is zero.
WS_INLINE float inverse_sqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  float better = fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y);
  return y > 0.0f ? better : y;
}

}  // namespace warpsmith
