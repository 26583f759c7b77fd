#pragma once
// Types, conversions and the order of kernels in a stream. No header of CUDA is included anywhere: libnvrtc alone
// compiles every kernel.
//
// Everything shared by kernels is in `namespace warpsmith`; what only one family of kernels uses is in a namespace
// inside it. The parameter structs, generated from the host's, come first in the program and are global.

#define WS_INLINE __device__ __forceinline__

namespace warpsmith {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;

// 16-bit and 8-bit floats are plain bits with conversions; arithmetic is always done in f32.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct f8e4m3 { u8 bits; };
struct f8e5m2 { u8 bits; };

// Programmatic dependent launch (Hopper and later): a kernel may start while the kernel before it in the stream still
// runs. Until this returns, nothing may be written, and nothing read that the earlier kernel could still write;
// prefetches to L2 are allowed. At least one thread of every grid must call it: the kernel after this one relies on
// everything before this one being complete.
WS_INLINE void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel starts once every block has called this or has ended.
WS_INLINE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Both at once: the first statement of a kernel that has nothing to do ahead of its memory accesses.
WS_INLINE void begin_kernel() {
  await_kernel_before();
  let_next_kernel_start();
}

WS_INLINE u32 float_bits(float x) { return __float_as_uint(x); }
WS_INLINE float bits_float(u32 x) { return __uint_as_float(x); }
WS_INLINE float minus_infinity() { return bits_float(0xff800000u); }

WS_INLINE float to_f32(f32 x) { return x; }
WS_INLINE float to_f32(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
WS_INLINE float to_f32(bf16 x) { return bits_float((u32)x.bits << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T> WS_INLINE T from_f32(float x);
template <> WS_INLINE f32 from_f32<f32>(float x) { return x; }
template <> WS_INLINE f16 from_f32<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> WS_INLINE bf16 from_f32<bf16>(float x) {
  bf16 y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  u32 b = float_bits(x);
  // The instruction above gives 0x7fff for NaN; every architecture must agree.
  y.bits = x != x ? 0x7fff : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
#endif
  return y;
}

// Two values rounded to 16 bits and packed into one word, `low` in its lower half. The last argument only selects the
// type.
template <class T> WS_INLINE u32 pack_pair_by_element(float low, float high) {
  return from_f32<T>(low).bits | ((u32)from_f32<T>(high).bits << 16);
}
WS_INLINE u32 pack_pair(float low, float high, f16) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return pack_pair_by_element<f16>(low, high);
#endif
}
WS_INLINE u32 pack_pair(float low, float high, bf16) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return pack_pair_by_element<bf16>(low, high);
#endif
}

template <class T> WS_INLINE u32 pack_pair(const float (&pair)[2], T type) { return pack_pair(pair[0], pair[1], type); }

// The value that is read back after x is stored as T.
template <class T> WS_INLINE float rounded(float x) { return to_f32(from_f32<T>(x)); }

}  // namespace warpsmith
