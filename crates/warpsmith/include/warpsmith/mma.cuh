#pragma once
// Tensor cores of sm_80 and later through shared memory: asynchronous copies, matrix loads, products.

#include "warpsmith/base.cuh"

WS_INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Sixteen bytes into shared memory; zeros if the source does not exist.
WS_INLINE void copy_async(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
WS_INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> WS_INLINE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// Four 8 x 8 matrices of 16-bit elements; lanes 0-7 give the addresses of the rows of the first, and so on.
template <bool kTransposed> WS_INLINE void load_matrices(u32 (&r)[4], u32 at) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

#define WS_MMA(SHAPE, TYPE)                                                                                \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                     \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                       \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
// d += a b, a of 16 rows and b of 8 columns, over 32 bytes. A thread has rows lane / 4 and 8 more, columns
// 2 (lane % 4) and the next.
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) { WS_MMA("m16n8k16", "bf16"); }
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) { WS_MMA("m16n8k16", "f16"); }
// The bits that TF32 does not have are not read.
WS_INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, f32) { WS_MMA("m16n8k8", "tf32"); }
#undef WS_MMA
