#pragma once
// Sixteen bytes at an address that is not a multiple of 16: they lie in two vectors.

#include "warpsmith/l2.cuh"

namespace warpsmith {

// The 16 bytes that begin `shift` elements into `low`, which `high` follows.
template <class T> WS_INLINE void join_from(Chunk<T>& c, const Chunk<T>& low, const Chunk<T>& high, int shift) {
  const int bytes = shift * (int)sizeof(T);
  const bool two = bytes & 8, one = bytes & 4;
  u32 w[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const u32 near = i < 4 ? low.words[i % 4] : high.words[i % 4];
    const u32 far = i < 2 ? low.words[(i + 2) % 4] : high.words[(i + 2) % 4];
    w[i] = two ? far : near;
  }
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = one ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) c.words[i] = sizeof(T) == 4 ? w[i] : __funnelshift_r(w[i], w[i + 1], 8 * (bytes & 2));
}

// The last `shift` elements of `low` and, after them, the first of `high`.
template <class T> WS_INLINE void join_last(Chunk<T>& c, const Chunk<T>& low, const Chunk<T>& high, int shift) {
  const int bytes = shift * (int)sizeof(T);
  const bool two = bytes & 8, one = bytes & 4;
  u32 w[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const u32 near = i < 2 ? low.words[(i + 2) % 4] : high.words[(i + 2) % 4];
    const u32 far = i < 4 ? low.words[i % 4] : high.words[i % 4];
    w[i] = two ? far : near;
  }
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = one ? w[i] : w[i + 1];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    c.words[i] = sizeof(T) == 4 ? w[i + 1] : __funnelshift_l(w[i], w[i + 1], 8 * (bytes & 2));
}

// The kVec elements at an address. The row has `before` elements before it, or begins `-before` after it, and `after` from
// it on.
template <class T> struct UnalignedUnit {
  static constexpr int V = kVec<T>;
  Chunk<T> low, high;
  int skip;  // elements of `low` that come before the unit

  // Starts to load.
  WS_INLINE void fetch(const T* at, int before, int after, u64 policy) {
    skip = (int)((u64)at % 16) / (int)sizeof(T);
    if (before >= skip && after >= (skip ? 2 * V - skip : V)) {
      load_words(low.words, at - skip, policy);
      if (skip) load_words(high.words, at - skip + V, policy);
      return;
    }
    gather(at, 1, before, after);
  }
  // The same of elements that lie `step` apart.
  WS_INLINE void gather(const T* at, i64 step, int before, int after) {
    skip = 0;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= -before && j < after) low.items[j] = at[j * step];
  }

  // The elements; those that are not the row's may be anything.
  WS_INLINE void get(Chunk<T>& c) const { join_from(c, low, high, skip); }
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
