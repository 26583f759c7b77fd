#pragma once
// The engine of the elementwise kernels. A kernel names its numbers of inputs and outputs and gives the expression of
// one element; `ElementwiseParams` is the C twin of the host's struct: the streams are the inputs, then the outputs.
//
// Threads to data: a unit is 16 bytes of columns (VECTOR) or a single column. FLAT: there is one row; a block takes
// ITEMS * 256 neighbouring units, each thread every 256th of them. Otherwise a block takes `1 << lanes_log2` units of
// ITEMS * (256 >> lanes_log2) rows, and each thread the same columns of ITEMS rows, so that an input shared by all
// rows is loaded once. All loads of a thread are issued before the first result is computed. No result depends on
// which thread computes it.
//
// Defines: ELEM; ITEMS, units of a thread; FLAT; VECTOR; SHARED, the last input is the same in every row; PAIRED,
// the first two inputs, and the first two outputs if there are two, are the even and odd elements of one tensor.

#include "warpsmith/l2.cuh"
#include "warpsmith/rows.cuh"

constexpr int kThreads = 256;

template <class T, int kIn, int kOut> struct Elementwise {
  static constexpr int kUnit = VECTOR ? kVec<T> : 1;
  static constexpr bool kPairs = PAIRED && VECTOR;
  static constexpr bool kPairsOut = kPairs && kOut == 2;

  // Loads `count` elements; they are 16 bytes at an aligned address unless count is smaller than a unit.
  static WS_INLINE void load(Chunk<T>& c, const T* at, int count) {
    if (VECTOR && count >= kUnit) {
      load_words(c.words, at);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        if (j < count) c.items[j] = at[j];
    }
  }

  static WS_INLINE void store(T* at, const Chunk<T>& c, int count) {
    if (VECTOR && count >= kUnit) {
      store_words(at, c.words);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        if (j < count) at[j] = c.items[j];
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
      for (int t = 0; t < kIn + kOut; ++t) at[t] += column * p.steps[t];
    }
  };

  // The unit at `place` of input t. Of a pair, two neighbouring chunks hold the elements of both.
  static WS_INLINE const T* input(const ElementwiseParams& p, const Place& place, int t) {
    const bool second = kPairs && t == 1;
    const int stream = second ? 0 : t;
    return (const T*)p.streams[stream] + place.at[stream] + (second ? kUnit : 0);
  }
  static constexpr bool is_shared(int t) { return SHARED && !FLAT && t == kIn - 1; }

  // The units at `place` of every input but a shared one (`shared` false) or of that (true).
  static WS_INLINE void load_inputs(Chunk<T> (&in)[kIn], const ElementwiseParams& p, const Place& place, int count,
                                    bool shared) {
#pragma unroll
    for (int t = 0; t < kIn; ++t) {
      if (is_shared(t) != shared) continue;
      const T* at = input(p, place, t);
      if (shared) load_cached_chunk<VECTOR>(in[t], at, 0, 0, kUnit);
      else load(in[t], at, count);
    }
  }

  // Asks for what load_inputs will load.
  static WS_INLINE void fetch_inputs(const ElementwiseParams& p, const Place& place) {
#pragma unroll
    for (int t = 0; t < kIn; ++t)
      if (!is_shared(t)) fetch_ahead(input(p, place, t));
  }

  static WS_INLINE void store_outputs(const Chunk<T> (&out)[kOut], const ElementwiseParams& p, const Place& place,
                                      int count) {
#pragma unroll
    for (int t = 0; t < kOut; ++t) {
      const bool second = kPairsOut && t == 1;
      const int stream = kIn + (second ? 0 : t);
      store((T*)p.streams[stream] + place.at[stream] + (second ? kUnit : 0), out[t], count);
    }
  }

  // Lane j of value t of a pair is item 2 j + t of the two chunks together.
  static WS_INLINE T& item(Chunk<T>* chunks, bool pairs, int t, int j) {
    if (!pairs || t >= 2) return chunks[t].items[j];
    const int at = 2 * j + t;
    return chunks[at / kUnit].items[at % kUnit];
  }

  template <class F> static WS_INLINE void evaluate(Chunk<T> (&out)[kOut], Chunk<T> (&in)[kIn], F f) {
    float y[kOut][kUnit];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      float a[kIn], b[kOut];
#pragma unroll
      for (int t = 0; t < kIn; ++t) a[t] = to_f32(item(in, kPairs, t, j));
      f(a, b);
#pragma unroll
      for (int t = 0; t < kOut; ++t) {
        if (kPairsOut) y[(2 * j + t) / kUnit][(2 * j + t) % kUnit] = b[t];
        else y[t][j] = b[t];
      }
    }
#pragma unroll
    for (int t = 0; t < kOut; ++t) pack_unit(out[t], y[t]);
  }

  static WS_INLINE void pack_unit(Chunk<T>& c, const float (&y)[kUnit]) {
    if constexpr (VECTOR) pack(c, y);
    else c.items[0] = from_f32<T>(y[0]);
  }

  static WS_INLINE i64 flat_tile() { return (i64)blockIdx.x * (kThreads * ITEMS * kUnit); }

  static WS_INLINE void fetch_flat(const ElementwiseParams& p) {
    const i64 tile = flat_tile(), column = tile + threadIdx.x * kUnit;
    if ((int)blockIdx.x >= p.blocks_ahead || tile + kThreads * ITEMS * kUnit > p.columns) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) fetch_inputs(p, Place(p, 0, column + i * (kThreads * kUnit)));
  }

  template <class F> static WS_INLINE void run_flat(const ElementwiseParams& p, F f) {
    const i64 tile = flat_tile();
    const i64 column = tile + threadIdx.x * kUnit;
    const i64 left = p.columns - column;
    Chunk<T> in[ITEMS][kIn], out[kOut];
    if (tile + kThreads * ITEMS * kUnit <= p.columns) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        load_inputs(in[i], p, Place(p, 0, column + i * (kThreads * kUnit)), kUnit, false);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        evaluate(out, in[i], f);
        store_outputs(out, p, Place(p, 0, column + i * (kThreads * kUnit)), kUnit);
      }
      return;
    }
    // The last block: item by item.
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i) {
      const i64 skip = (i64)i * (kThreads * kUnit);
      const int count = (int)min((i64)kUnit, left - skip);
      if (count <= 0) return;
      const Place place(p, 0, column + skip);
      load_inputs(in[0], p, place, count, false);
      evaluate(out, in[0], f);
      store_outputs(out, p, place, count);
    }
  }

  // What a thread takes without FLAT: the unit of columns from `column` on of ITEMS rows, `down` apart.
  struct Tile {
    u32 down;
    i64 column, row;
    WS_INLINE explicit Tile(const ElementwiseParams& p) {
      const u32 row_tile = blockIdx.x / p.column_tiles, column_tile = blockIdx.x - row_tile * p.column_tiles;
      const u32 lane = threadIdx.x & ((1u << p.lanes_log2) - 1);
      down = kThreads >> p.lanes_log2;
      column = (((i64)column_tile << p.lanes_log2) + lane) * kUnit;
      row = (i64)row_tile * (down * ITEMS) + (threadIdx.x >> p.lanes_log2);
    }
  };

  static WS_INLINE void fetch_rows(const ElementwiseParams& p) {
    // Where rows lie is only found out ahead if that takes no division.
    if ((int)blockIdx.x >= p.blocks_ahead || p.rows.rank > 1) return;
    const Tile tile(p);
    if (tile.column >= p.columns) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (tile.row + i * tile.down < p.num_rows) fetch_inputs(p, Place(p, tile.row + i * tile.down, tile.column));
  }

  template <class F> static WS_INLINE void run_rows(const ElementwiseParams& p, F f) {
    const Tile tile(p);
    const u32 down = tile.down;
    const i64 column = tile.column, row = tile.row;
    if (column >= p.columns) return;
    Chunk<T> in[ITEMS][kIn], out[kOut];
    Place place[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (row + i * down >= p.num_rows) break;
      place[i] = Place(p, row + i * down, column);
      load_inputs(in[i], p, place[i], kUnit, false);
    }
    if (row >= p.num_rows) return;
    if (SHARED) {
      load_inputs(in[0], p, place[0], kUnit, true);
#pragma unroll
      for (int i = 1; i < ITEMS; ++i) in[i][kIn - 1] = in[0][kIn - 1];
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (row + i * down >= p.num_rows) return;
      evaluate(out, in[i], f);
      store_outputs(out, p, place[i], kUnit);
    }
  }
};

// Before `begin_kernel`: asks for the inputs.
template <class T, int kIn, int kOut> WS_INLINE void fetch_elements(const ElementwiseParams& p) {
  if constexpr (FLAT && VECTOR) Elementwise<T, kIn, kOut>::fetch_flat(p);
  else if constexpr (VECTOR) Elementwise<T, kIn, kOut>::fetch_rows(p);
}

// f(const float (&inputs)[kIn], float (&outputs)[kOut]) is the expression of one element.
template <class T, int kIn, int kOut, class F> WS_INLINE void elementwise(const ElementwiseParams& p, F f) {
  if constexpr (FLAT) Elementwise<T, kIn, kOut>::run_flat(p, f);
  else Elementwise<T, kIn, kOut>::run_rows(p, f);
}
