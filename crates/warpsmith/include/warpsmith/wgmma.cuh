#pragma once
// Matrix products of a warpgroup (sm_90a): D[64, N] += A[64, K] B[N, K]^T in f32, both operands in shared memory in the
// 128-byte swizzle of the copy engine. A step is 32 bytes of K: 16 elements of 16 bits, 8 of tf32, 32 of 8 bits.
//
// Warp w and lane l of the warpgroup hold rows 16 w + l / 4 + 8 h, columns 8 j + 2 (l % 4) + c, in d[4 j + 2 h + c].
//
// Between `wgmma_fence` and `wgmma_wait` the accumulators belong to the tensor cores. `pin` keeps the compiler from
// moving accesses to them across.

#include "warpsmith/base.cuh"

namespace warpsmith {

WS_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
WS_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are unfinished.
template <int kPending> WS_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount> WS_INLINE void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The descriptor of an operand whose tile starts at `address`, a multiple of 1024. K-major: rows of 128 bytes of K; the
// next step is 32 bytes on. MN-major: rows of 64 elements of M or N, one row for each of kBlockK values of K; further
// 64 elements follow in blocks of kBlockK rows; the next step of 16 is 2048 bytes on. Offsets are added in units of 16.
template <bool kMajorMN, int kBlockK = 64> WS_INLINE u64 wgmma_descriptor(u32 address) {
  constexpr u64 kGroup = 1024 >> 4, kLeading = kMajorMN ? (kBlockK * 128) >> 4 : 1, kSwizzle128 = 1;
  return (u64)((address & 0x3ffff) >> 4) | kLeading << 16 | kGroup << 32 | kSwizzle128 << 62;
}
constexpr int kKMajorStep = 32 >> 4, kMNMajorStep = 2048 >> 4;

// Wgmma<A, B, N>::mma<kAMajorMN, kBMajorMN>(d, a, b, accumulate): one step; `accumulate` 0 ignores what d holds. Only
// 16-bit operands can be MN-major. f32 operands are read as tf32: the lower 13 bits of the mantissa are dropped.
template <class A, class B, int kN> struct Wgmma;

// Register lists of the asm statements, 8 registers for 16 columns.
#define WS_ROW0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WS_ROW1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WS_ROW2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WS_ROW3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WS_ROW4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WS_ROW5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WS_ROW6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WS_ROW7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WS_ROW8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WS_ROW9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WS_ROW10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WS_ROW11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WS_ROW12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WS_ROW13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WS_ROW14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WS_ROW15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WS_ROWS1 WS_ROW0
#define WS_ROWS2 WS_ROWS1 ", " WS_ROW1
#define WS_ROWS3 WS_ROWS2 ", " WS_ROW2
#define WS_ROWS4 WS_ROWS3 ", " WS_ROW3
#define WS_ROWS5 WS_ROWS4 ", " WS_ROW4
#define WS_ROWS6 WS_ROWS5 ", " WS_ROW5
#define WS_ROWS7 WS_ROWS6 ", " WS_ROW6
#define WS_ROWS8 WS_ROWS7 ", " WS_ROW7
#define WS_ROWS9 WS_ROWS8 ", " WS_ROW8
#define WS_ROWS10 WS_ROWS9 ", " WS_ROW9
#define WS_ROWS11 WS_ROWS10 ", " WS_ROW10
#define WS_ROWS12 WS_ROWS11 ", " WS_ROW11
#define WS_ROWS13 WS_ROWS12 ", " WS_ROW12
#define WS_ROWS14 WS_ROWS13 ", " WS_ROW13
#define WS_ROWS15 WS_ROWS14 ", " WS_ROW14
#define WS_ROWS16 WS_ROWS15 ", " WS_ROW15
#define WS_OUT8(b) \
  "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define WS_OUTS1 WS_OUT8(0)
#define WS_OUTS2 WS_OUTS1, WS_OUT8(8)
#define WS_OUTS3 WS_OUTS2, WS_OUT8(16)
#define WS_OUTS4 WS_OUTS3, WS_OUT8(24)
#define WS_OUTS5 WS_OUTS4, WS_OUT8(32)
#define WS_OUTS6 WS_OUTS5, WS_OUT8(40)
#define WS_OUTS7 WS_OUTS6, WS_OUT8(48)
#define WS_OUTS8 WS_OUTS7, WS_OUT8(56)
#define WS_OUTS9 WS_OUTS8, WS_OUT8(64)
#define WS_OUTS10 WS_OUTS9, WS_OUT8(72)
#define WS_OUTS11 WS_OUTS10, WS_OUT8(80)
#define WS_OUTS12 WS_OUTS11, WS_OUT8(88)
#define WS_OUTS13 WS_OUTS12, WS_OUT8(96)
#define WS_OUTS14 WS_OUTS13, WS_OUT8(104)
#define WS_OUTS15 WS_OUTS14, WS_OUT8(112)
#define WS_OUTS16 WS_OUTS15, WS_OUT8(120)

// WgmmaA<T, N>::mma<kBMajorMN>(d, a, b, accumulate): the same for 16-bit types with a step of A in registers: those of a
// thread hold its rows of A in the layout of sums of 16 columns, d[2 i] and d[2 i + 1] packed into a[i]. They too belong
// to the tensor cores until the wait.
template <class T, int kN> struct WgmmaA;

// a, b, p, ta, tb: numbers of the operands that follow the 8 * rows registers.
#define WS_WGMMA_16(type_a, type_b, kind, rows, n, a, b, p, ta, tb)                                                    \
  template <> struct Wgmma<type_a, type_b, n> {                                                                        \
    template <bool kAMajorMN, bool kBMajorMN>                                                                          \
    static WS_INLINE void mma(float (&d)[n / 2], u64 desc_a, u64 desc_b, int accumulate) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." kind \
                   " {" WS_ROWS##rows "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb ";\n}"                           \
                   : WS_OUTS##rows                                                                                     \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"((int)kAMajorMN), "n"((int)kBMajorMN));            \
    }                                                                                                                  \
  };
#define WS_WGMMA_K(type_a, type_b, kind, rows, n, a, b, p, ta, tb)                                                     \
  template <> struct Wgmma<type_a, type_b, n> {                                                                        \
    template <bool kAMajorMN, bool kBMajorMN>                                                                          \
    static WS_INLINE void mma(float (&d)[n / 2], u64 desc_a, u64 desc_b, int accumulate) {                             \
      static_assert(!kAMajorMN && !kBMajorMN, "only 16-bit operands can be MN-major");                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n kind           \
                   " {" WS_ROWS##rows "}, %" #a ", %" #b ", p, 1, 1;\n}"                                               \
                   : WS_OUTS##rows                                                                                     \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate));                                                       \
    }                                                                                                                  \
  };
// a0 to a3, b, p, tb: numbers of the operands that follow the 8 * rows registers.
#define WS_WGMMA_A(type, kind, rows, n, a0, a1, a2, a3, b, p, tb)                                                      \
  template <> struct WgmmaA<type, n> {                                                                                 \
    template <bool kBMajorMN> static WS_INLINE void mma(float (&d)[n / 2], const u32* a, u64 desc_b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." kind \
                   " {" WS_ROWS##rows "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, %" #tb ";\n}"    \
                   : WS_OUTS##rows                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate), "n"((int)kBMajorMN));  \
    }                                                                                                                  \
  };
#define WS_WGMMA_A_WIDTHS(type, kind)                              \
  WS_WGMMA_A(type, kind, 2, 32, 16, 17, 18, 19, 20, 21, 22)        \
  WS_WGMMA_A(type, kind, 4, 64, 32, 33, 34, 35, 36, 37, 38)        \
  WS_WGMMA_A(type, kind, 5, 80, 40, 41, 42, 43, 44, 45, 46)        \
  WS_WGMMA_A(type, kind, 6, 96, 48, 49, 50, 51, 52, 53, 54)        \
  WS_WGMMA_A(type, kind, 8, 128, 64, 65, 66, 67, 68, 69, 70)       \
  WS_WGMMA_A(type, kind, 10, 160, 80, 81, 82, 83, 84, 85, 86)      \
  WS_WGMMA_A(type, kind, 12, 192, 96, 97, 98, 99, 100, 101, 102)   \
  WS_WGMMA_A(type, kind, 16, 256, 128, 129, 130, 131, 132, 133, 134)

#define WS_WGMMA_WIDTHS(define, type_a, type_b, kind)            \
  define(type_a, type_b, kind, 1, 16, 8, 9, 10, 11, 12)          \
  define(type_a, type_b, kind, 2, 32, 16, 17, 18, 19, 20)        \
  define(type_a, type_b, kind, 3, 48, 24, 25, 26, 27, 28)        \
  define(type_a, type_b, kind, 4, 64, 32, 33, 34, 35, 36)        \
  define(type_a, type_b, kind, 5, 80, 40, 41, 42, 43, 44)        \
  define(type_a, type_b, kind, 6, 96, 48, 49, 50, 51, 52)        \
  define(type_a, type_b, kind, 7, 112, 56, 57, 58, 59, 60)       \
  define(type_a, type_b, kind, 8, 128, 64, 65, 66, 67, 68)       \
  define(type_a, type_b, kind, 9, 144, 72, 73, 74, 75, 76)       \
  define(type_a, type_b, kind, 10, 160, 80, 81, 82, 83, 84)      \
  define(type_a, type_b, kind, 11, 176, 88, 89, 90, 91, 92)      \
  define(type_a, type_b, kind, 12, 192, 96, 97, 98, 99, 100)     \
  define(type_a, type_b, kind, 13, 208, 104, 105, 106, 107, 108) \
  define(type_a, type_b, kind, 14, 224, 112, 113, 114, 115, 116) \
  define(type_a, type_b, kind, 15, 240, 120, 121, 122, 123, 124) \
  define(type_a, type_b, kind, 16, 256, 128, 129, 130, 131, 132)

WS_WGMMA_WIDTHS(WS_WGMMA_16, bf16, bf16, "bf16.bf16")
WS_WGMMA_WIDTHS(WS_WGMMA_16, f16, f16, "f16.f16")
WS_WGMMA_WIDTHS(WS_WGMMA_K, f32, f32, "k8.f32.tf32.tf32")
WS_WGMMA_WIDTHS(WS_WGMMA_K, f8e4m3, f8e4m3, "k32.f32.e4m3.e4m3")
WS_WGMMA_WIDTHS(WS_WGMMA_K, f8e4m3, f8e5m2, "k32.f32.e4m3.e5m2")
WS_WGMMA_WIDTHS(WS_WGMMA_K, f8e5m2, f8e4m3, "k32.f32.e5m2.e4m3")
WS_WGMMA_WIDTHS(WS_WGMMA_K, f8e5m2, f8e5m2, "k32.f32.e5m2.e5m2")

WS_WGMMA_A_WIDTHS(bf16, "bf16.bf16")
WS_WGMMA_A_WIDTHS(f16, "f16.f16")

}  // namespace warpsmith
