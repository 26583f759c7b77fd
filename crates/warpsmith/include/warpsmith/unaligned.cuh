#pragma once
// 16 bytes of a dense row that begins and ends at any element, for threads that work alone.
//
// The elements at an unaligned address lie in two aligned vectors. A thread loads both: one of them is its neighbour's too,
// and comes from L1. Vectors that are not all the row's, at its ends, are moved element by element, so that nothing
// outside the row is read or written.

#include "warpsmith/l2.cuh"

namespace warpsmith {

// What is known about rows, beside the values in vec.cuh: they are dense, but start and length are arbitrary.
constexpr int kUnaligned = 3;

// The kVec elements at an address. The row has `before` elements before it, or begins `-before` after it, and `after` from
// it on.
template <class T> struct UnalignedUnit {
  static constexpr int V = kVec<T>;
  Chunk<T> low, high;
  int bytes;  // of `low` that come before the unit

  // Starts to load.
  WS_INLINE void fetch(const T* at, int before, int after, u64 policy) {
    const int skip = (int)((u64)at % 16) / (int)sizeof(T);
    bytes = skip * (int)sizeof(T);
    if (before >= skip && after >= (skip ? 2 * V - skip : V)) {
      load_words(low.words, at - skip, policy);
      if (skip) load_words(high.words, at - skip + V, policy);
      return;
    }
    bytes = 0;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= -before && j < after) low.items[j] = at[j];
  }

  // The elements; those that are not the row's may be anything.
  WS_INLINE void get(Chunk<T>& c) const {
    const bool two = bytes & 8, one = bytes & 4;
    u32 w[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const u32 near = i < 4 ? low.words[i % 4] : high.words[i % 4], far = i < 2 ? low.words[(i + 2) % 4] : high.words[(i + 2) % 4];
      w[i] = two ? far : near;
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = one ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) c.words[i] = sizeof(T) == 4 ? w[i] : __funnelshift_r(w[i], w[i + 1], 8 * (bytes & 2));
  }
};

template <class T> WS_INLINE void store_unaligned(T* at, int before, int after, const Chunk<T>& c) {
  if (before >= 0 && after >= kVec<T> && (u64)at % 16 == 0) {
    store_words(at, c.words);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j)
    if (j >= -before && j < after) at[j] = c.items[j];
}

}  // namespace warpsmith
