#pragma once
// The body of the elementwise kernels. A kernel gives the numbers of its inputs and outputs and the expression of one
// element. `ElementwiseParams` is the C twin of the host's struct; its streams are the inputs, then the outputs.
//
// Threads to data: a unit is 16 bytes of columns (VECTOR) or a single column. With kUnaligned, rows begin and end at any
// element, and units are those between aligned addresses of the first output. FLAT: there is one row; a block takes
// ITEMS * 256 neighbouring units, each thread every 256th of them. Otherwise a block takes `1 << lanes_log2` units of
// ITEMS * (256 >> lanes_log2) rows, and each thread the same columns of ITEMS rows, so that an input shared by all
// rows is loaded once. All loads of a thread are issued before the first result is computed. No result depends on
// which thread computes it.
//
// Addresses are computed before begin_kernel, while the kernel before may still run: that is a sixth of the time of a
// kernel of two microseconds.
//
// Defines: ELEM; ITEMS, units of a thread; FLAT; VECTOR: kAny, kAligned or kUnaligned; SHARED, the last input is the same
// in every row: with FLAT a vector of `period` elements that is repeated, with kUnaligned the only input whose neighbours
// need not be adjacent; PAIRED, the first two inputs, and the first two outputs if there are two, are the even and odd
// elements of one tensor: with VECTOR a unit is then 16 bytes of pairs, and 8 bytes of every other stream.

#include "warpsmith/rows.cuh"
#include "warpsmith/unaligned.cuh"

namespace warpsmith {

constexpr int kThreads = 256;

template <class T, int kIn, int kOut> struct Elementwise {
  static constexpr bool kPairs = PAIRED && VECTOR;
  static constexpr bool kPairsOut = kPairs && kOut == 2;
  static constexpr int kUnit = VECTOR ? kVec<T> / (kPairs ? 2 : 1) : 1;
  // Whether the last unit of a row may be incomplete.
  static constexpr bool kPartialUnits = FLAT && VECTOR;

  // Whether stream t, counting inputs and then outputs, holds the first or second element of each pair. Chunks and
  // places of the second are not used: those of the first cover both.
  static constexpr bool is_pair(int t) { return kPairs && (t < 2 || (kPairsOut && t >= kIn)); }
  static constexpr bool is_second(int t) { return is_pair(t) && (t == 1 || t == kIn + 1); }
  static constexpr bool is_shared(int t) { return SHARED && !FLAT && t == kIn - 1; }
  static constexpr bool is_repeated(int t) { return SHARED && FLAT && t == kIn - 1; }
  // Elements of stream t for each column.
  static constexpr int width(int t) { return is_pair(t) ? 2 : 1; }

  // Loads `count` columns of stream t; a whole unit lies at an aligned address.
  static WS_INLINE void load(Chunk<T>& c, const T* at, int t, int count, u64 policy) {
    if (VECTOR && (!kPartialUnits || count >= kUnit)) {
      if (kPairs && !is_pair(t)) load_half(c.words[0], c.words[1], at, policy);
      else load_words(c.words, at, policy);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit * width(t); ++j)
        if (j < count * width(t)) c.items[j] = at[j];
    }
  }
  static WS_INLINE void load_half(u32& a, u32& b, const void* at, u64 policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(a), "=r"(b) : "l"(at), "l"(policy) : "memory");
#else
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(at) : "memory");
#endif
  }

  // Loads elements of the vector that is repeated, for those from `start` on of the others. It is in L1 soon.
  static WS_INLINE void load_repeated(Chunk<T>& c, const ElementwiseParams& p, i64 start, int count) {
    u32 column = (u32)start % p.period;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      if (j < count) c.items[j] = ((const T*)p.streams[kIn - 1])[column * p.steps[kIn - 1]];
      column = column + 1 == p.period ? 0 : column + 1;
    }
  }

  static WS_INLINE void store(T* at, const Chunk<T>& c, int t, int count) {
    if (VECTOR && (!kPartialUnits || count >= kUnit)) {
      if (kPairs && !is_pair(t))
        asm volatile("st.global.v2.u32 [%2], {%0, %1};" ::"r"(c.words[0]), "r"(c.words[1]), "l"(at) : "memory");
      else store_words(at, c.words);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit * width(t); ++j)
        if (j < count * width(t)) at[j] = c.items[j];
    }
  }

  // Where the unit of columns from `column` on of a row lies in each stream, in elements.
  struct Place {
    i64 at[kIn + kOut];
    WS_INLINE Place() {}
    WS_INLINE Place(const ElementwiseParams& p, i64 row, i64 column) {
      if (FLAT) {
#pragma unroll
        for (int t = 0; t < kIn + kOut; ++t) at[t] = 0;
      } else {
        row_offsets<0>(at, p.rows, row);
      }
#pragma unroll
      for (int t = 0; t < kIn + kOut; ++t) at[t] += VECTOR ? column * width(t) : column * p.steps[t];
    }
  };

  static WS_INLINE const T* input(const ElementwiseParams& p, const Place& place, int t) {
    return (const T*)p.streams[t] + place.at[t];
  }

  // Loads the units at `place` of the shared input (`shared`) or of all others.
  static WS_INLINE void load_inputs(Chunk<T> (&in)[kIn], const ElementwiseParams& p, const Place& place, int count,
                                    bool shared, u64 policy) {
#pragma unroll
    for (int t = 0; t < kIn; ++t)
      if (is_shared(t) == shared && !is_second(t)) {
        if (is_repeated(t)) load_repeated(in[t], p, place.at[t], count);
        else load(in[t], input(p, place, t), t, count, policy);
      }
  }

  // Prefetches what load_inputs will load.
  static WS_INLINE void prefetch_inputs(const ElementwiseParams& p, const Place& place) {
#pragma unroll
    for (int t = 0; t < kIn; ++t)
      if (!is_shared(t) && !is_repeated(t) && !is_second(t)) prefetch_chunk(input(p, place, t), p.is_large);
  }

  static WS_INLINE void store_outputs(const Chunk<T> (&out)[kOut], const ElementwiseParams& p, const Place& place,
                                      int count) {
#pragma unroll
    for (int t = 0; t < kOut; ++t)
      if (!is_second(kIn + t)) store((T*)p.streams[kIn + t] + place.at[kIn + t], out[t], kIn + t, count);
  }

  template <class F> static WS_INLINE void evaluate(Chunk<T> (&out)[kOut], const Chunk<T> (&in)[kIn], F f) {
    float y[kOut][kVec<T>] = {};
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      float a[kIn], b[kOut];
#pragma unroll
      for (int t = 0; t < kIn; ++t) a[t] = to_f32(is_pair(t) ? in[0].items[2 * j + t] : in[t].items[j]);
      f(a, b);
#pragma unroll
      for (int t = 0; t < kOut; ++t) {
        if (kPairsOut) y[0][2 * j + t] = b[t];
        else y[t][j] = b[t];
      }
    }
#pragma unroll
    for (int t = 0; t < kOut; ++t) {
      if constexpr (VECTOR) pack(out[t], y[t]);
      else out[t].items[0] = from_f32<T>(y[t][0]);
    }
  }

  // The units of a thread, those that exist first.
  struct Units {
    i64 column, row;
    // The distance between units, and from the first unit to the end: in columns if FLAT, else in rows.
    i64 step, left;

    WS_INLINE explicit Units(const ElementwiseParams& p) {
      if (FLAT) {
        row = 0;
        column = ((i64)blockIdx.x * (kThreads * ITEMS) + threadIdx.x) * kUnit;
        step = kThreads * kUnit;
        left = p.columns - column;
      } else {
        const BlockPlace tile(p.column_tiles);
        const Lines<kThreads> lines{p.lanes_log2};
        const u32 lane = lines.lane(), count = lines.count();
        column = (((i64)tile.column << p.lanes_log2) + lane) * kUnit;
        row = (i64)tile.row * (count * ITEMS) + lines.line();
        step = count;
        left = column < p.columns ? p.num_rows - row : 0;
      }
    }
    WS_INLINE bool exists(int i) const { return left > i * step; }
    WS_INLINE Place place(const ElementwiseParams& p, int i) const {
      return FLAT ? Place(p, 0, column + i * step) : Place(p, row + i * step, column);
    }
  };

  template <class F> static WS_INLINE void run(const ElementwiseParams& p, F f) {
    const Units units(p);
    const u64 policy = load_policy(p.is_large);
    Chunk<T> in[ITEMS][kIn], out[kOut];
    if (!kPartialUnits || units.left >= (ITEMS - 1) * units.step + kUnit) {
      Place place[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!units.exists(i)) break;
        place[i] = units.place(p, i);
        if (VECTOR && (int)blockIdx.x < p.blocks_ahead) prefetch_inputs(p, place[i]);
      }
      begin_kernel();
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        if (units.exists(i)) load_inputs(in[i], p, place[i], kUnit, false, policy);
      if (!units.exists(0)) return;
      load_inputs(in[0], p, place[0], kUnit, true, policy);
      // Each result is stored before the next is computed: the branch keeps the compiler from delaying the stores.
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!units.exists(i)) return;
        if (is_shared(kIn - 1)) in[i][kIn - 1] = in[0][kIn - 1];
        evaluate(out, in[i], f);
        store_outputs(out, p, place[i], kUnit);
      }
      return;
    }
    // The end of the row: unit by unit.
    begin_kernel();
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i) {
      if (!units.exists(i)) return;
      const int count = (int)min((i64)kUnit, units.left - i * units.step);
      const Place place = units.place(p, i);
      load_inputs(in[0], p, place, count, false, policy);
      evaluate(out, in[0], f);
      store_outputs(out, p, place, count);
    }
  }
};

// Rows that begin and end at any element. The elements at an unaligned address lie in two aligned vectors. A thread loads
// both: one of them is its neighbour's too, and comes from L1. Vectors that are not all the row's, at its ends, are moved
// element by element, so that nothing outside the row is read or written.

// What is known about rows, beside the values in vec.cuh: they are dense, but start and length are arbitrary.
constexpr int kUnaligned = 3;

// Units are counted from the last aligned address of the first output at or before the row, so its pieces are whole but
// for the ends of the row; inputs that lie otherwise are shifted. A shared input is one of these.
template <class T, int kIn, int kOut, class F> WS_INLINE void elementwise_unaligned(const ElementwiseParams& p, F f) {
  using Kernel = Elementwise<T, kIn, kOut>;
  static_assert(ITEMS == 1 && !PAIRED, "a unit of each row");
  constexpr int kFar = 4 * kVec<T>;  // more columns on either side make no difference
  const typename Kernel::Units units(p);
  const typename Kernel::Place place(p, units.row, units.column);
  const int shift = (int)((u64)((const T*)p.streams[kIn] + place.at[kIn]) % 16) / (int)sizeof(T);
  const auto stream = [&](int t) { return (T*)p.streams[t] + place.at[t] - shift; };
  const auto is_strided = [](int t) { return SHARED && t == kIn - 1; };
  const int before = (int)min(units.column - shift, (i64)kFar), after = (int)min(p.columns - units.column + shift, (i64)kFar);
  const bool exists = after > 0 && (FLAT || units.row < p.num_rows);
  if (exists && before >= 0 && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int t = 0; t < kIn; ++t)
      if (!is_strided(t)) prefetch_chunk(stream(t), p.is_large);
  }
  begin_kernel();
  if (!exists) return;
  const u64 policy = load_policy(p.is_large);
  UnalignedUnit<T> units_in[kIn];
  Chunk<T> in[kIn], out[kOut];
#pragma unroll
  for (int t = 0; t < kIn; ++t) {
    // The stream with as many steps as columns.
    const i64 more = is_strided(t) ? p.steps[t] - 1 : 0;
    if (is_strided(t)) units_in[t].gather(stream(t) + (units.column - shift) * more, more + 1, before, after);
    else units_in[t].fetch(stream(t), before, after, policy);
  }
#pragma unroll
  for (int t = 0; t < kIn; ++t) units_in[t].get(in[t]);
  Kernel::evaluate(out, in, f);
#pragma unroll
  for (int t = 0; t < kOut; ++t) store_unaligned(stream(kIn + t), before, after, out[t]);
}

// The whole kernel. f(const float (&inputs)[kIn], float (&outputs)[kOut]) is the expression of one element.
template <class T, int kIn, int kOut, class F> WS_INLINE void elementwise(const ElementwiseParams& p, F f) {
  if constexpr (VECTOR == kUnaligned) elementwise_unaligned<T, kIn, kOut>(p, f);
  else Elementwise<T, kIn, kOut>::run(p, f);
}

}  // namespace warpsmith
