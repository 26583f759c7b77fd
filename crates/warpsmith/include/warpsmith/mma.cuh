#pragma once
// Matrix products of a warp (sm_80 and later).

#include "warpsmith/async_copy.cuh"

namespace warpsmith {

#define WS_MMA(SHAPE, TYPE)                                                                                \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                     \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                       \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
// d += a b, with 16 rows of a and 8 columns of b, over 32 bytes of K. A thread holds rows lane / 4 and lane / 4 + 8 of d,
// and columns 2 (lane % 4) and the next. The last argument only selects the type.
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) { WS_MMA("m16n8k16", "bf16"); }
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) { WS_MMA("m16n8k16", "f16"); }
// Mantissa bits beyond those of TF32 are ignored.
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, f32) { WS_MMA("m16n8k8", "tf32"); }
#undef WS_MMA

}  // namespace warpsmith
