#pragma once
// Sixteen bytes of elements at a time.

#include "warpsmith/base.cuh"

// Elements of T in 16 bytes: the unit in which threads own data, whatever the width of the actual accesses.
template <class T> constexpr int kVec = 16 / (int)sizeof(T);

template <class T> struct alignas(16) Chunk {
  union {
    u32 words[4];
    T items[kVec<T>];
  };
  WS_INLINE Chunk() {}
};

// Never `.nc`: outputs may be written in place of inputs, and launches overlap. Never evict-first (`.cs`): it gained next
// to nothing here, and the next kernel often finds results in L2.
WS_INLINE void load_words(u32 (&w)[4], const void* p) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
WS_INLINE void store_words(void* p, const u32 (&w)[4]) {
  asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(p) : "memory");
}

template <class T> WS_INLINE void unpack(float (&out)[kVec<T>], const Chunk<T>& c) {
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) out[i] = to_f32(c.items[i]);
}

template <class T> WS_INLINE void pack(Chunk<T>& c, const float (&in)[kVec<T>]) {
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) c.items[i] = from_f32<T>(in[i]);
}
#if __CUDA_ARCH__ >= 800
template <> WS_INLINE void pack<bf16>(Chunk<bf16>& c, const float (&in)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c.words[i]) : "f"(in[2 * i + 1]), "f"(in[2 * i]));
}
template <> WS_INLINE void pack<f16>(Chunk<f16>& c, const float (&in)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c.words[i]) : "f"(in[2 * i + 1]), "f"(in[2 * i]));
}
#endif

// What is known of rows, as the value of kVector below.
constexpr int kAny = 0;      // elements may be apart and start anywhere: they are moved one by one
constexpr int kAligned = 1;  // dense, and start and length are multiples of 16 bytes: chunks are whole or absent
constexpr int kExact = 2;    // aligned, and every chunk a thread owns exists: nothing is checked

// Loads the `count` elements (at most kVec) that start `at` elements into a row, `step` apart; the rest become
// `fill`.
template <int kVector, class T>
WS_INLINE void load_chunk(Chunk<T>& c, const T* row, i64 at, i64 step, int count, T fill) {
  if (kVector) {
    if (kVector == kExact || count > 0) {
      load_words(c.words, row + at);
    } else {
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) c.items[i] = fill;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) c.items[i] = i < count ? row[(at + i) * step] : fill;
  }
}

template <int kVector, class T>
WS_INLINE void store_chunk(T* row, i64 at, i64 step, int count, const Chunk<T>& c) {
  if (kVector) {
    if (kVector == kExact || count > 0) store_words(row + at, c.words);
  } else {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i)
      if (i < count) row[(at + i) * step] = c.items[i];
  }
}

// As load_chunk, for small data that every row uses again (weights, biases): kept in the caches.
template <int kVector, class T> WS_INLINE void load_cached_chunk(Chunk<T>& c, const T* row, i64 at, i64 step, int count) {
  if (kVector) {
    if (kVector == kExact || count > 0)
      load_words(c.words, row + at);
  } else {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i)
      if (i < count) c.items[i] = row[(at + i) * step];
  }
}
