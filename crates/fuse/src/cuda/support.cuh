#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

// Macros. Of the parameters: TENSORS, OUTER (dimensions of rows, at least 1), RANK (those that there are), NAMED (sizes, an
// even number), UNUSED (words that fill them up). Of the threads: WIDTH, ITEMS, LANES, ROWS, JUMP (columns from one of a
// thread's to its next). Of the call: COLUMNS (0 if only the parameters say), EXACT (every thread's columns exist), LARGE
// (positions need 64 bits), SUMS (over rows), DIRECT (they are complete after one piece), ONE (a single row is left of those
// that are summed), GROUPS (threads that add up the pieces of a column).
[[maybe_unused]] constexpr int SPAN = ITEMS * LANES * WIDTH;  // columns of a block

// The twin of what the host writes. Tensors are those that are read, those that are written, and sums over rows.
struct FuseParams {
  u64 address[TENSORS];
  i64 rows[TENSORS][OUTER];  // bytes from one row to the next, for each outer dimension
  i64 step[TENSORS];         // elements from one column to the next
  i64 table_rows[TENSORS];
  i64 outer[OUTER];
  i64 num_rows, columns;
  i64 kept, pieces;  // sums: rows that are kept, and in how many pieces the others are summed
  u64 partials;
  float sizes[NAMED];
  u64 unused[UNUSED];
};

template <bool kLarge> struct Position { typedef i64 Type; };
template <> struct Position<false> { typedef u32 Type; };
typedef Position<LARGE>::Type Index;

WS_INLINE Index columns_of(const FuseParams& p) { return COLUMNS ? (Index)COLUMNS : (Index)p.columns; }

struct boolean { u8 bits; };

// What registers hold of a type: floats, also for bools, or 64-bit integers. `Bits` is what memory holds.
template <class T> struct Held {
  typedef float Type;
  typedef u16 Bits;
  static WS_INLINE float get(u16 bits) { return to_f32(T{bits}); }
  static WS_INLINE u16 put(float x) { return from_f32<T>(x).bits; }
};
template <> struct Held<f32> {
  typedef float Type;
  typedef u32 Bits;
  static WS_INLINE float get(u32 bits) { return bits_float(bits); }
  static WS_INLINE u32 put(float x) { return float_bits(x); }
};
template <> struct Held<boolean> {
  typedef float Type;
  typedef u8 Bits;
  static WS_INLINE float get(u8 bits) { return bits ? 1.0f : 0.0f; }
  static WS_INLINE u8 put(float x) { return (u8)(x != 0.0f); }
};
template <> struct Held<i64> {
  typedef i64 Type;
  typedef u64 Bits;
  static WS_INLINE i64 get(u64 bits) { return (i64)bits; }
  static WS_INLINE u64 put(i64 x) { return (u64)x; }
};
template <> struct Held<i32> {
  typedef i64 Type;
  typedef u32 Bits;
  static WS_INLINE i64 get(u32 bits) { return (i32)bits; }
  static WS_INLINE u32 put(i64 x) { return (u32)x; }
};

// One element in memory.
template <class T> WS_INLINE typename Held<T>::Type read(const T* at) {
  return Held<T>::get(*(const typename Held<T>::Bits*)at);
}
template <class T> WS_INLINE void write(T* at, typename Held<T>::Type x) {
  *(typename Held<T>::Bits*)at = Held<T>::put(x);
}

// WIDTH elements as memory holds them: narrow types take half the registers, or a quarter.
template <class T> struct Pack {
  typedef typename Held<T>::Bits Bits;
  static constexpr int kBytes = WIDTH * (int)sizeof(T), kWords = (kBytes + 3) / 4, kOf = sizeof(T) < 4 ? 4 / (int)sizeof(T) : 1;
  u32 words[kWords];

  WS_INLINE typename Held<T>::Type get(int j) const {
    if constexpr (sizeof(T) == 8) return Held<T>::get((u64)words[2 * j] | (u64)words[2 * j + 1] << 32);
    else return Held<T>::get((Bits)(words[j / kOf] >> (j % kOf * 8 * (int)sizeof(T))));
  }
  // In order from the first: the words begin as nothing.
  WS_INLINE void put(int j, Bits bits) {
    if constexpr (sizeof(T) == 8) {
      words[2 * j] = (u32)bits;
      words[2 * j + 1] = (u32)((u64)bits >> 32);
    } else if (j % kOf == 0) {
      words[j / kOf] = bits;
    } else {
      words[j / kOf] |= (u32)bits << (j % kOf * 8 * (int)sizeof(T));
    }
  }
};

// A number as an address of global memory, which loads and stores need not find out then. Both are the same number.
template <class T> WS_INLINE T* in_global_memory(u64 address) { return (T*)__cvta_global_to_generic(address); }

// Where row `index` of tensor t begins.
template <class T> WS_INLINE T* row_of(const FuseParams& p, int t, Index index) {
  i64 offset = 0;
#pragma unroll
  for (int d = RANK - 1; d > 0; --d) {
    const Index rest = index / (Index)p.outer[d];
    offset += (i64)(index - rest * (Index)p.outer[d]) * p.rows[t][d];
    index = rest;
  }
  if (RANK > 0) offset += (i64)index * p.rows[t][0];
  return in_global_memory<T>(p.address[t] + offset);
}

// Where a block leaves its sums.
WS_INLINE float* partial(const FuseParams& p, i64 piece, Index kept_row, int sum) {
  return in_global_memory<float>(p.partials) + ((piece * SUMS + sum) * p.kept + kept_row) * p.columns;
}

// The row of a table that is `index`, or the first if there is none.
template <class T> WS_INLINE const T* table_row(const FuseParams& p, int t, i64 index) {
  if (index < 0 || index >= p.table_rows[t]) index = 0;
  return in_global_memory<const T>(p.address[t] + index * p.rows[t][0]);
}

// A thread's columns from `column` on, one by one; those from `count` on become 0.
template <class T> WS_INLINE void load_each(Pack<T>& x, const T* row, i64 step, Index column, int count) {
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    const typename Held<T>::Bits* at = (const typename Held<T>::Bits*)row + (i64)(column + (Index)j * JUMP) * step;
    x.put(j, EXACT || j < count ? *at : (typename Held<T>::Bits)0);
  }
}

// Whether a thread's columns of a dense row are moved as a whole.
template <class T, bool kDense> constexpr bool kWhole = kDense && JUMP == 1 && Pack<T>::kBytes >= 4;

template <class T> WS_INLINE void load_whole(Pack<T>& x, const T* from) {
  constexpr int kBytes = Pack<T>::kBytes;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int c = 0; c < kBytes / 16; ++c) {
      u32 words[4];
      load_words(words, (const char*)from + c * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) x.words[c * 4 + i] = words[i];
    }
  } else if constexpr (kBytes == 8) {
    const u64 words = *(const volatile u64*)from;
    x.words[0] = (u32)words;
    x.words[1] = (u32)(words >> 32);
  } else {
    x.words[0] = *(const volatile u32*)from;
  }
}

template <class T, bool kDense> WS_INLINE void load(Pack<T>& x, const T* row, i64 step, Index column, int count) {
  if constexpr (kWhole<T, kDense> && EXACT) {
    load_whole(x, row + column);
  } else if constexpr (kWhole<T, kDense>) {
    if (count >= WIDTH) load_whole(x, row + column);
    else load_each(x, row, 1, column, count);
  } else {
    load_each(x, row, kDense ? 1 : step, column, count);
  }
}

// The same columns of the other half of the row.
template <class T, bool kDense>
WS_INLINE void load_across(Pack<T>& x, const T* row, i64 step, Index column, int count, Index columns) {
  const Index half = columns / 2;
  if constexpr (COLUMNS > 0 && COLUMNS % (2 * WIDTH) == 0 && JUMP == 1) {
    load<T, kDense>(x, row, step, column < half ? column + half : column - half, count);
  } else {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const Index own = column + (Index)j * JUMP, other = own < half ? own + half : own - half;
      const typename Held<T>::Bits* at = (const typename Held<T>::Bits*)row + (i64)other * (kDense ? 1 : step);
      x.put(j, EXACT || j < count ? *at : (typename Held<T>::Bits)0);
    }
  }
}

template <class T> WS_INLINE Pack<T> packed(const typename Held<T>::Type (&x)[WIDTH]) {
  Pack<T> result;
  if constexpr (sizeof(T) == 2 && WIDTH % 2 == 0) {
#pragma unroll
    for (int j = 0; j < WIDTH; j += 2) result.words[j / 2] = pack_pair(x[j], x[j + 1], T());
  } else {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) result.put(j, Held<T>::put(x[j]));
  }
  return result;
}

template <class T> WS_INLINE void store_whole(T* to, const Pack<T>& x) {
  constexpr int kBytes = Pack<T>::kBytes;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int c = 0; c < kBytes / 16; ++c) {
      const u32 words[4] = {x.words[c * 4], x.words[c * 4 + 1], x.words[c * 4 + 2], x.words[c * 4 + 3]};
      store_words((char*)to + c * 16, words);
    }
  } else if constexpr (kBytes == 8) {
    *(u64*)to = (u64)x.words[0] | (u64)x.words[1] << 32;
  } else {
    *(u32*)to = x.words[0];
  }
}

template <class T, bool kDense>
WS_INLINE void store(T* row, i64 step, Index column, int count, const typename Held<T>::Type (&values)[WIDTH]) {
  if constexpr (kWhole<T, kDense>) {
    if (count >= WIDTH) {
      store_whole(row + column, packed<T>(values));
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < WIDTH; ++j)
    if (j < count) write(row + (i64)(column + (Index)j * JUMP) * (kDense ? 1 : step), values[j]);
}

// The first column of a thread's item, and how many of the WIDTH from there exist.
WS_INLINE Index column_of(Index first, int item, int lane) {
  return first + (Index)(JUMP == 1 ? (item * LANES + lane) * WIDTH : item * LANES * WIDTH + lane);
}
WS_INLINE int count_of(Index column, Index columns) {
  if (EXACT) return WIDTH;
  if (column >= columns) return 0;
  const Index left = (columns - column + (JUMP - 1)) / JUMP;
  return left < (Index)WIDTH ? (int)left : WIDTH;
}

struct SumWhole {
  static WS_INLINE i64 join(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
};
struct MaxWhole {
  static WS_INLINE i64 join(i64 a, i64 b) { return a > b ? a : b; }
};
struct MinWhole {
  static WS_INLINE i64 join(i64 a, i64 b) { return a < b ? a : b; }
};
// NaN wins.
struct Min {
  static WS_INLINE float identity() { return -minus_infinity(); }
  static WS_INLINE float join(float a, float b) { return (a < b || a != a) ? a : b; }
};
[[maybe_unused]] constexpr i64 kSmallest = (i64)0x8000000000000000ull, kLargest = 0x7fffffffffffffffll;

// Over the threads of a row: part of a warp, or the whole block. `scratch` has room for a value of each warp; two are used in
// turn.
template <class R, class V> WS_INLINE V over_row(V x, V* scratch) {
  x = warp_reduce<R, (LANES < 32 ? LANES : 32)>(x);
  if constexpr (LANES > 32) {
    constexpr int kWarps = LANES > 32 ? LANES / 32 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if constexpr ((kWarps & (kWarps - 1)) == 0) {
      x = warp_reduce<R, kWarps>(scratch[lane % kWarps]);
    } else {
      x = scratch[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x = R::join(x, scratch[w]);
    }
  }
  return x;
}

// The larger and the smaller, the first where they are equal; NaN if one is.
WS_INLINE float larger(float a, float b) { return b != b ? b : (b > a ? b : a); }
WS_INLINE float smaller(float a, float b) { return b != b ? b : (b < a ? b : a); }
// a / b, rounded as IEEE 754 has it; results below 2^-126 may err by their last bit. The compiler's own division branches,
// and those of a thread's columns would wait for each other.
WS_INLINE float divided(float a, float b) {
  // So that neither 1 / b nor what a division leaves of `a` is below 2^-126.
  const float size = fabsf(b);
  const bool small = fminf(fabsf(a), size) < 0x1p-64f && size < 0x1p60f;
  const float scale = size > 0x1p96f ? 0x1p-32f : (small ? 0x1p64f : 1.0f);
  a *= scale;
  b *= scale;
  const float inverse = reciprocal(b), near = a * inverse;
  const float nearest = fmaf(fmaf(-near, b, a), inverse, near);
  // Zeros keep their sign; infinities and NaN are what they are.
  return fabsf(near) > 0.0f && fabsf(near) < -minus_infinity() ? nearest : near;
}
// The denominator is from 1 to 2.
WS_INLINE float sigmoid(float x) {
  const Sigmoid s = sigmoid_parts<f32>(x);
  const float inverse = reciprocal(s.denominator), near = s.numerator * inverse;
  return fmaf(fmaf(-near, s.denominator, s.numerator), inverse, near);
}
WS_INLINE float softplus(float x) { return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))); }
// Numbers that an integer type does not hold become its smallest, as on the CPU.
WS_INLINE i64 to_i32(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (i64)(i32)x : -2147483648ll; }
WS_INLINE i64 to_i64(float x) {
  return x >= -9223372036854775808.0f && x < 9223372036854775808.0f ? (i64)x : (i64)0x8000000000000000ull;
}
WS_INLINE float truth(bool x) { return x ? 1.0f : 0.0f; }
