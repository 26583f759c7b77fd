#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

// The twin of the host's struct. Tensors are those that are read, those that are written, and sums over rows.
struct FuseParams {
  u64 address[26];
  i64 rows[26][7];  // bytes from one row to the next, for each outer dimension
  i64 step[26];     // elements from one column to the next
  i64 table_rows[26];
  i64 outer[7];
  i64 num_rows, columns;
  i64 kept, pieces;  // sums: rows that are kept, and in how many pieces the others are summed
  u64 partials, astray;
  float sizes[8];
  int rank, unused;
};

struct boolean { u8 bits; };

// What registers hold of a type: floats, also for bools, or 64-bit integers.
template <class T> struct Held {
  typedef float Type;
  static WS_INLINE float get(T x) { return to_f32(x); }
  static WS_INLINE T put(float x) { return from_f32<T>(x); }
};
template <> struct Held<boolean> {
  typedef float Type;
  static WS_INLINE float get(boolean x) { return x.bits ? 1.0f : 0.0f; }
  static WS_INLINE boolean put(float x) { return {(u8)(x != 0.0f)}; }
};
template <> struct Held<i64> {
  typedef i64 Type;
  static WS_INLINE i64 get(i64 x) { return x; }
  static WS_INLINE i64 put(i64 x) { return x; }
};
template <> struct Held<i32> {
  typedef i64 Type;
  static WS_INLINE i64 get(i32 x) { return x; }
  static WS_INLINE i32 put(i64 x) { return (i32)x; }
};

// Where row `index` of tensor t begins.
template <class T> WS_INLINE T* row_of(const FuseParams& p, int t, i64 index) {
  i64 offset = 0;
  for (int d = p.rank - 1; d > 0; --d) {
    const i64 rest = index / p.outer[d];
    offset += (index - rest * p.outer[d]) * p.rows[t][d];
    index = rest;
  }
  if (p.rank > 0) offset += index * p.rows[t][0];
  return (T*)(p.address[t] + offset);
}

// The row of a table that is `index`, or the first and a note that there is none.
template <class T> WS_INLINE const T* table_row(const FuseParams& p, int t, i64 index) {
  if (index < 0 || index >= p.table_rows[t]) {
    *(volatile i64*)p.astray = index;
    index = 0;
  }
  return (const T*)(p.address[t] + index * p.rows[t][0]);
}

// The next kV columns of a row, of which `count` exist; the others become 0.
template <class T, int kV, bool kDense>
WS_INLINE void load(typename Held<T>::Type (&x)[kV], const T* row, i64 step, i64 column, int count) {
  if constexpr (kDense && kV * sizeof(T) % 16 == 0) {
#pragma unroll
    for (int c = 0; c < kV / kVec<T>; ++c) {
      Chunk<T> chunk;
      load_chunk<kAligned>(chunk, row, column + c * kVec<T>, 1, count, T{});
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) x[c * kVec<T> + i] = Held<T>::get(chunk.items[i]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kV; ++j) x[j] = j < count ? Held<T>::get(row[(column + j) * step]) : 0;
  }
}

template <class T, int kV, bool kDense>
WS_INLINE void store(T* row, i64 step, i64 column, int count, const typename Held<T>::Type (&x)[kV]) {
  if constexpr (kDense && kV * sizeof(T) % 16 == 0) {
#pragma unroll
    for (int c = 0; c < kV / kVec<T>; ++c) {
      Chunk<T> chunk;
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) chunk.items[i] = Held<T>::put(x[c * kVec<T> + i]);
      if (count > 0) store_words(row + column + c * kVec<T>, chunk.words);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kV; ++j)
      if (j < count) row[(column + j) * step] = Held<T>::put(x[j]);
  }
}

// Over the threads of a row: a warp, or the whole block.
template <class R, int kLanes> WS_INLINE float over_row(float x, float* scratch) {
  float one[1] = {x};
  block_reduce<R, kLanes, 1>(one, scratch);
  return one[0];
}

// The larger and the smaller, the first where they are equal; NaN if one is.
WS_INLINE float larger(float a, float b) { return b != b ? b : (b > a ? b : a); }
WS_INLINE float smaller(float a, float b) { return b != b ? b : (b < a ? b : a); }
WS_INLINE float sigmoid(float x) {
  const Sigmoid s = sigmoid_parts<f32>(x);
  return s.numerator / s.denominator;
}
WS_INLINE float softplus(float x) { return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))); }
// Numbers that an integer type does not hold become its smallest, as on the CPU.
WS_INLINE i64 to_i32(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (i64)(i32)x : -2147483648ll; }
WS_INLINE i64 to_i64(float x) {
  return x >= -9223372036854775808.0f && x < 9223372036854775808.0f ? (i64)x : (i64)0x8000000000000000ull;
}
WS_INLINE float truth(bool x) { return x ? 1.0f : 0.0f; }
