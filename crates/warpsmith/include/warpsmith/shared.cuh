#pragma once
// Shared memory by 32-bit address, as asynchronous copies and matrix instructions want it.

#include "warpsmith/base.cuh"

namespace warpsmith {

WS_INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

WS_INLINE void store_shared(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }
WS_INLINE void store_shared(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
WS_INLINE void store_shared(u32 at, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
WS_INLINE void store_shared(u32 at, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
WS_INLINE void store_shared(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
WS_INLINE void store_shared(u32 at, const u32 (&w)[4]) { store_shared(at, w[0], w[1], w[2], w[3]); }
WS_INLINE void store_shared(u32 at, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

WS_INLINE void load_shared(u32& word, u32 at) { asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory"); }
WS_INLINE void load_shared(float& x, u32 at) { asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory"); }
WS_INLINE void load_shared(float& a, float& b, u32 at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
}
WS_INLINE void load_shared(u32 (&w)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
}
WS_INLINE void load_shared(float (&x)[4], u32 at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
template <bool kTransposed> WS_INLINE void load_matrices(u32 (&m)[4], u32 row) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
// From sm_90 on.
template <bool kTransposed> WS_INLINE void store_matrices(u32 row, u32 m0, u32 m1, u32 m2, u32 m3) {
  if (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}

}  // namespace warpsmith
