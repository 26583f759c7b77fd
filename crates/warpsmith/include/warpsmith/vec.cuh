#pragma once
// Sixteen bytes of elements at a time.

#include "warpsmith/base.cuh"

namespace warpsmith {

// Elements of T in 16 bytes: the unit in which threads own data, whatever the width of the actual accesses.
template <class T> constexpr int kVec = 16 / (int)sizeof(T);

template <class T> struct alignas(16) Chunk {
  union {
    u32 words[4];
    T items[kVec<T>];
  };
  WS_INLINE Chunk() {}
};

// Never `.nc`: outputs may be written in place of inputs, and launches overlap. Never evict-first (`.cs`): it gained
// next to nothing, and the next kernel often finds results in L2.
WS_INLINE void load_words(u32 (&w)[4], const void* p) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
// Past L1: for data that is read again when L1 has long forgotten it.
WS_INLINE void load_words_l2(u32 (&w)[4], const void* p) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
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
  for (int i = 0; i < 4; ++i) c.words[i] = pack_pair(in[2 * i], in[2 * i + 1], bf16());
}
template <> WS_INLINE void pack<f16>(Chunk<f16>& c, const float (&in)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) c.words[i] = pack_pair(in[2 * i], in[2 * i + 1], f16());
}
#endif

// What is known about rows: the values of kVector below.
constexpr int kAny = 0;      // strides and alignment are arbitrary: elements are moved one by one
constexpr int kAligned = 1;  // dense, and start and length are multiples of 16 bytes: chunks are whole or absent
constexpr int kExact = 2;    // aligned, and every chunk that a thread owns exists: nothing is checked

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

// The same, filled with zeros, and past L1 where chunks are whole.
template <int kVector, class T> WS_INLINE void load_chunk_l2(Chunk<T>& c, const T* row, int at, i64 step, int count) {
  if (kVector && count > 0) load_words_l2(c.words, row + at);
  else load_chunk<kVector>(c, row, at, step, count, from_f32<T>(0.0f));
}

// The same, but elements past `count` are left as they are.
template <int kVector, class T> WS_INLINE void load_chunk_unfilled(Chunk<T>& c, const T* row, i64 at, i64 step, int count) {
  if (kVector) {
    if (kVector == kExact || count > 0) load_words(c.words, row + at);
  } else {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i)
      if (i < count) c.items[i] = row[(at + i) * step];
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

}  // namespace warpsmith
