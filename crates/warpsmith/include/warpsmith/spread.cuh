#pragma once
// Rows whose length no vector divides. Dense ones (kSpread) begin at any element; of others (kSpreadAny) neighbours need
// not be adjacent.
//
// Of other rows, kWidth neighbouring lanes own kWidth neighbouring chunks. Here they share the same elements out one by
// one instead: lane l owns elements l, l + kWidth, l + 2 kWidth, ... of them. Neighbouring lanes then access neighbouring
// elements, wherever the row begins, and nothing has to be arranged. A part is what a lane owns at a time: kVec elements,
// a chunk or spread. Warps have the same elements either way.

#include "warpsmith/dense.cuh"
#include "warpsmith/shared_row.cuh"

namespace warpsmith {

// What is known about rows, beside the values in vec.cuh and dense.cuh.
constexpr int kSpread = 4, kSpreadAny = 5;
constexpr bool is_spread(int vector) { return vector >= kSpread; }

// How many of the kVec elements of the part at element `at` of a row exist: less than one if none, kVec or more if all.
// `at` is where this lane's chunk would begin.
template <int kVector, int kWidth, class T> WS_INLINE int part_count(int at, int length) {
  if (!is_spread(kVector)) return length - at;
  const int left = length - at + (int)(threadIdx.x % kWidth) * (kVec<T> - 1);
  return (int)((u32)(max(left, 0) + kWidth - 1) / kWidth);
}

// From the first element of a row to the lane's first of the part at `at`.
template <int kWidth, class T> WS_INLINE int part_start(int at) { return at - (int)(threadIdx.x % kWidth) * (kVec<T> - 1); }

WS_INLINE u32 element_bits(f32 x) { return float_bits(x); }
template <class T> WS_INLINE u32 element_bits(T x) { return x.bits; }

// The next of elements that lie apart. Of those that the compiler does not know to be near, it must not find the addresses
// ahead: they would take two registers each.
template <class P> WS_INLINE void walk(P& to, int apart) { to += apart; }
template <class P> WS_INLINE void walk(P& to, i64 apart) {
  to += apart;
  asm volatile("" : "+l"(to));
}

// `count` elements of which each is `apart` from the one before, and zeros.
template <class T, class I> WS_INLINE void gather_part(Chunk<T>& c, const T* from, I apart, int count) {
  constexpr int kPerWord = 4 / (int)sizeof(T);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if (i * kPerWord + j < count) word |= element_bits(*from) << (j * 16);
      walk(from, apart);
    }
    c.words[i] = word;
  }
}
template <class T, class I> WS_INLINE void scatter_part(T* to, I apart, const Chunk<T>& c, int count) {
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j) {
    if (j < count) *to = c.items[j];
    walk(to, apart);
  }
}

// The functions of dense.cuh for parts of rows of any kind.
template <int kVector, int kWidth, class T>
WS_INLINE void begin_part(Chunk<T>& c, u32& edge, const T* row, int at, i64 step, int length, u64 policy) {
  if constexpr (is_spread(kVector)) {
    const int start = part_start<kWidth, T>(at), count = part_count<kVector, kWidth, T>(at, length);
    if (kVector == kSpread) gather_part(c, row + start, kWidth, count);
    else gather_part(c, row + start * step, kWidth * step, count);
  } else {
    begin_chunk<kVector, kWidth>(c, edge, row, at, step, length, policy);
  }
}
template <int kVector, int kWidth, class T>
WS_INLINE void end_part(Chunk<T>& c, u32 edge, const T* row, int at, int length) {
  if constexpr (!is_spread(kVector)) end_chunk<kVector, kWidth>(c, edge, row, at, length);
}
template <int kVector, int kWidth, class T>
WS_INLINE void get_part(Chunk<T>& c, const T* row, int at, i64 step, int length, u64 policy) {
  u32 edge;
  begin_part<kVector, kWidth>(c, edge, row, at, step, length, policy);
  end_part<kVector, kWidth>(c, edge, row, at, length);
}
template <int kVector, int kWidth, class T>
WS_INLINE void put_part(T* row, int at, i64 step, int length, const Chunk<T>& c) {
  if constexpr (is_spread(kVector)) {
    const int start = part_start<kWidth, T>(at), count = part_count<kVector, kWidth, T>(at, length);
    if (kVector == kSpread) scatter_part(row + start, kWidth, c, count);
    else scatter_part(row + start * step, kWidth * step, c, count);
  } else {
    put_chunk<kVector, kWidth>(row, at, step, length, c);
  }
}

// The part of a slot of a row in shared memory, when the copies have arrived. `count`: of its elements.
template <int kWidth, class T, int kSlots>
WS_INLINE void get_staged_part(Chunk<T>& c, const SharedRow<T, kSlots>& row, int slot, int shift, int count) {
  gather_part(c, (const T*)(row.chunks + 1) + shift + part_start<kWidth, T>(slot * kVec<T>), kWidth, count);
}

}  // namespace warpsmith
