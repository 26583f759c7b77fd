#pragma once
// Chunks of dense rows that begin and end at any element: kDense.
//
// kWidth neighbouring lanes own kWidth neighbouring chunks, a segment of the row. Which lane owns which element depends
// on its position in the row alone, so results do not depend on addresses. Memory is accessed in aligned vectors of 16
// bytes all the same: a lane moves the vector that holds the beginning of its chunk, and lanes exchange what belongs to
// their neighbours.
//
//   memory    |  .  . a0 a1 | a2 a3 b0 b1 | b2 b3 c0 c1 | c2 c3  .  . |     a, b, c: chunks of lanes 0, 1, 2
//   vector         lane 0        lane 1        lane 2        edge
//
// The first and the last vector of a segment are its edges. They may belong to other rows in part, so their elements are
// moved one by one, each by a lane of its own: the first kVec lanes have those of the first vector and, in the gap before
// the segment's beginning, those of a vector past the last lane; the next kVec lanes have those of a last vector that
// is some lane's. Nothing outside the segment is read or written.
//
// All lanes of a warp must call the functions for dense rows together.

#include "warpsmith/l2.cuh"
#include "warpsmith/reduce.cuh"

namespace warpsmith {

// What is known about rows, beside the values in vec.cuh: they are dense, but start and length are arbitrary.
constexpr int kDense = 3;

// Chunks are whole or absent.
constexpr bool is_whole_chunks(int vector) { return vector == kAligned || vector == kExact; }

// Hides from the compiler what it knows about a chunk: what follows from it is computed again rather than kept in
// registers.
template <class T> WS_INLINE void forget(Chunk<T>& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(c.words[i]));
}

// The rows of a thread where kLanes threads work on a row, and a block on kRows of them side by side, kBatch times. With
// kSplit, kLanes threads of each of kSplit neighbouring blocks do.
template <int kLanes, int kRows, int kBatch = 1, int kSplit = 1> struct RowsOfThread {
  int lane;   // of the threads of the row
  int place;  // of the row in the block
  i64 index;  // of the first row; the others follow kRows apart

  WS_INLINE RowsOfThread()
      : lane(threadIdx.x % kLanes + blockIdx.x % kSplit * kLanes),
        place(kRows == 1 ? 0 : threadIdx.x / kLanes),
        index((i64)(blockIdx.x / kSplit) * (kRows * kBatch) + place) {}
};

template <class T, int kWidth> struct Segment {
  static constexpr int V = kVec<T>;
  static constexpr int kPerWord = 4 / (int)sizeof(T);
  static_assert(kPerWord == 1 || kPerWord == 2, "elements of two or four bytes");
  static_assert(kWidth >= 2 * V && kWidth <= 32, "a lane for each element of both edges");

  const T* base;  // the vector with the segment's first element
  int shift;      // elements of it before the segment
  int end;        // of the segment, in elements from `base`

  // The segment of `count` elements at `start`; more than kWidth chunks are cut off, and less than zero is zero.
  WS_INLINE Segment(const T* start, int count) {
    shift = (int)((u64)start % 16) / (int)sizeof(T);
    base = start - shift;
    end = shift + max(0, min(count, kWidth * V));
  }

  WS_INLINE static int place() { return threadIdx.x % kWidth; }
  WS_INLINE static int lane_of(int place) { return (threadIdx.x % 32 - threadIdx.x % kWidth) + (place & (kWidth - 1)); }

  // The last vector, if it is not whole; kWidth is the vector past the last lane.
  WS_INLINE int last() const { return end / V; }
  WS_INLINE bool is_whole(int vector) const { return (vector > 0 || shift == 0) && (vector + 1) * V <= end; }
  WS_INLINE bool is_edge(int vector) const { return !is_whole(vector) && (vector == 0 || vector == last()); }
  // No lane of the warp has to exchange anything.
  WS_INLINE bool is_plain() const { return !__any_sync(kAllLanes, shift != 0 || end % V != 0); }

  // The element of an edge that this lane moves, counted from `base`; negative if none.
  WS_INLINE int edge_element() const {
    const int j = place() % V;
    int at = j < shift ? kWidth * V + j : j;
    bool has = place() < V && !is_whole(0);
    if (place() >= V) {
      at = last() * V + j;
      has = place() < 2 * V && last() > 0 && last() < kWidth;
    }
    return has && at < end ? at : -1;
  }

  // Starts to load: `c` gets this lane's vector, or zeros, and `edge` its element of an edge.
  WS_INLINE void fetch(Chunk<T>& c, u32& edge, u64 policy) const {
    edge = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.words[i] = 0;
    if (is_whole(place())) load_words(c.words, base + place() * V, policy);
    const int at = edge_element();
    if (at >= 0) load_element(edge, base + at);
  }

  // From what `fetch` loaded to the chunk this lane owns, with zeros past the end.
  WS_INLINE void arrange(Chunk<T>& c, u32 edge) const {
    if (is_plain()) return;
    if (kPerWord == 2) edge |= __shfl_xor_sync(kAllLanes, edge, 1) << 16;
    const bool takes = is_edge(place());
    const int from = place() > 0 ? V : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = __shfl_sync(kAllLanes, edge, lane_of(from + i * kPerWord));
      if (takes) c.words[i] = word;
    }
    const int bytes = shift * (int)sizeof(T), words = bytes / 4;
    rotate(c.words, words);
    u32 f[5];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 next = __shfl_sync(kAllLanes, c.words[i], lane_of(place() + 1));
      f[i] = i + words < 4 ? c.words[i] : next;
      if (i == 0) f[4] = next;
    }
    funnel(c.words, f, bytes % 4);
  }

  // Stores the chunks that the lanes own to a segment of the same place and length in the row.
  WS_INLINE void store(const Chunk<T>& c) const {
    u32 w[4] = {c.words[0], c.words[1], c.words[2], c.words[3]};
    T* to = (T*)base;
    if (is_plain()) {
      if (is_whole(place())) store_words(to + place() * V, w);
      return;
    }
    // The vector is the end of the chunk before and the beginning of this lane's. The lane before the first is the last:
    // its end belongs to the vector past the last lane, of which the first lane's edge has the elements.
    const int bytes = 16 - shift * (int)sizeof(T), words = bytes / 4;
    rotate(w, words);
    u32 f[5];
    f[4] = w[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 before = __shfl_sync(kAllLanes, w[i], lane_of(place() - 1));
      f[i] = i + words < 4 ? before : w[i];
    }
    funnel(w, f, bytes % 4);
    if (is_whole(place())) store_words(to + place() * V, w);

    const int from = lane_of(place() < V ? 0 : last()), j = place() % V;
    u32 edge = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = __shfl_sync(kAllLanes, w[i], from);
      if (j / kPerWord == i) edge = word;
    }
    if (j % kPerWord != 0) edge >>= 16;
    const int at = edge_element();
    if (at >= 0) store_element(to + at, edge);
  }

 private:
  WS_INLINE static void load_element(u32& bits, const T* p) {
    if (kPerWord == 1) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
    } else {
      u16 half;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(p) : "memory");
      bits = half;
    }
  }
  WS_INLINE static void store_element(T* p, u32 bits) {
    if (kPerWord == 1) asm volatile("st.global.u32 [%1], %0;" ::"r"(bits), "l"(p) : "memory");
    else asm volatile("st.global.u16 [%1], %0;" ::"h"((u16)bits), "l"(p) : "memory");
  }

  // w[i] becomes w[(i + by) % 4].
  WS_INLINE static void rotate(u32 (&w)[4], int by) {
    const bool one = by & 1, two = by & 2;
    const u32 a[4] = {one ? w[1] : w[0], one ? w[2] : w[1], one ? w[3] : w[2], one ? w[0] : w[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = two ? a[(i + 2) % 4] : a[i];
  }
  // The four words that begin `bytes` into the five of `f`.
  WS_INLINE static void funnel(u32 (&w)[4], const u32 (&f)[5], int bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = kPerWord == 1 ? f[i] : __funnelshift_r(f[i], f[i + 1], 8 * bytes);
  }
};

// Chunks of rows of any of the kinds of vec.cuh, in two steps for those that take two: `begin_chunk` for all chunks of a
// thread, then `end_chunk` for all, so that their loads are in flight together. The chunk is the one `at` elements into
// a row of `length`; past its end there are zeros.
template <int kVector, int kWidth, class T>
WS_INLINE void begin_chunk(Chunk<T>& c, u32& edge, const T* row, int at, i64 step, int length, u64 policy) {
  if constexpr (kVector == kDense) {
    const int first = at - (int)(threadIdx.x % kWidth) * kVec<T>;
    Segment<T, kWidth>(row + first, length - first).fetch(c, edge, policy);
  } else if constexpr (is_whole_chunks(kVector)) {
    // Whole words, also where there are zeros: elements of 16 bits would take a register each.
    if (kVector == kExact || at < length) {
      load_words(c.words, row + at, policy);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) c.words[i] = 0;
    }
  } else {
    load_chunk<kVector>(c, row, at, step, min(kVec<T>, length - at), from_f32<T>(0.0f), policy);
  }
}
template <int kVector, int kWidth, class T>
WS_INLINE void end_chunk(Chunk<T>& c, u32 edge, const T* row, int at, int length) {
  if constexpr (kVector == kDense) {
    const int first = at - (int)(threadIdx.x % kWidth) * kVec<T>;
    Segment<T, kWidth>(row + first, length - first).arrange(c, edge);
  }
}
// Both at once.
template <int kVector, int kWidth, class T>
WS_INLINE void get_chunk(Chunk<T>& c, const T* row, int at, i64 step, int length, u64 policy) {
  u32 edge;
  begin_chunk<kVector, kWidth>(c, edge, row, at, step, length, policy);
  end_chunk<kVector, kWidth>(c, edge, row, at, length);
}
template <int kVector, int kWidth, class T>
WS_INLINE void put_chunk(T* row, int at, i64 step, int length, const Chunk<T>& c) {
  if constexpr (kVector == kDense) {
    const int first = at - (int)(threadIdx.x % kWidth) * kVec<T>;
    Segment<T, kWidth>(row + first, length - first).store(c);
  } else {
    store_chunk<kVector>(row, at, step, min(kVec<T>, length - at), c);
  }
}

}  // namespace warpsmith
