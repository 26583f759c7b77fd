#pragma once
// Types and conversions. No CUDA header is included anywhere: libnvrtc alone compiles every kernel.

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

#define WS_INLINE __device__ __forceinline__

// The first statement of every kernel. Launches overlap on Hopper and later: a kernel may start while the one
// before it in the stream still runs, so that its blocks are in place when that one ends. Nothing may be read or
// written before this returns; and the next kernel may start in its turn.
WS_INLINE void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

WS_INLINE u32 float_bits(float x) { return __float_as_uint(x); }
WS_INLINE float bits_float(u32 x) { return __uint_as_float(x); }

WS_INLINE float to_f32(f32 x) { return x; }
WS_INLINE float to_f32(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
WS_INLINE float to_f32(bf16 x) { return bits_float((u32)x.bits << 16); }

// Rounding to nearest, ties to even; NaN stays NaN.
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
  // 0x7fff is the NaN that the instruction above gives, so that every architecture agrees.
  y.bits = x != x ? 0x7fff : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
#endif
  return y;
}

// Value as it is after a store to a tensor of T.
template <class T> WS_INLINE float rounded(float x) { return to_f32(from_f32<T>(x)); }
