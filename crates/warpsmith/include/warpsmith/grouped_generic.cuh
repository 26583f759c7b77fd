#pragma once
// Products without tensor cores, of any types and strides: steps of both operands in shared memory, and the sums of a thread.
//
// Threads to data: a block of 256 threads computes a tile of some rows of the first operand by some rows of the second. The threads
// form a square of 16 x 16. Steps of kDepth elements of K go through two buffers in shared memory, in f32 and transposed, so that a
// thread reads its rows and columns as vectors. K is summed in ascending order with one fused multiply-add an element, whatever the
// tile.

#include "warpsmith/vec.cuh"

namespace warpsmith::grouped {

constexpr int kGenericThreads = 256, kDepth = 16;

// A step of one operand, on its way from global memory through registers to shared memory, where the pad keeps vectors aligned and
// spreads columns over the banks.
template <class T, int kTile, int kVector> struct Operand {
  static constexpr int kPitch = kTile + 4, kPieces = kDepth / kVec<T>;
  static constexpr int kItems = kVector ? kTile * kPieces : kTile * kDepth, kLoads = (kItems + kGenericThreads - 1) / kGenericThreads;
  typedef float Step[kDepth][kPitch];

  T items[kVector ? 1 : kLoads];
  Chunk<T> chunks[kVector ? kLoads : 1];

  // Which element or chunk of the step a thread moves. Neighbouring threads go along the smaller stride.
  static WS_INLINE void place(int i, bool along_k, int& row, int& k) {
    const int index = threadIdx.x + i * kGenericThreads;
    if (kVector) {
      row = index / kPieces;
      k = index % kPieces * kVec<T>;
    } else if (along_k) {
      row = index / kDepth;
      k = index % kDepth;
    } else {
      row = index % kTile;
      k = index / kTile;
    }
  }
  // `map` turns a row of the tile into a row of the matrix, and `line` a number along K below `depth` into a column; -1 means zeros.
  template <class Map, class Line>
  WS_INLINE void load(const T* base, i64 row_stride, i64 col_stride, int k0, int depth, Map map, Line line) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int row, k;
      place(i, col_stride == 1, row, k);
      const int from = row < kTile && k < kDepth ? map(row) : -1;
      const int column = from >= 0 && k0 + k < depth ? line(k0 + k) : -1;
      const bool exists = column >= 0;
      if (kVector) {
#pragma unroll
        for (int j = 0; j < 4; ++j) chunks[i].words[j] = 0;
        if (exists) load_words(chunks[i].words, base + from * row_stride + column);
      } else {
        items[i] = exists ? base[from * row_stride + column * col_stride] : from_f32<T>(0.0f);
      }
    }
  }
  WS_INLINE void store(Step& to, i64 col_stride) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int row, k;
      place(i, col_stride == 1, row, k);
      if (row >= kTile || k >= kDepth) break;
      if (kVector) {
        float values[kVec<T>];
        unpack(values, chunks[i]);
#pragma unroll
        for (int j = 0; j < kVec<T>; ++j) to[k + j][row] = values[j];
      } else {
        to[k][row] = to_f32(items[i]);
      }
    }
  }
};

// The place in a tile of value i of a thread that is number `at` along the tile: a vector of every 64, or one of 16 places.
template <int kEach> WS_INLINE int place_of(int i, int at) { return kEach == 1 ? at : i / 4 * 64 + at * 4 + i % 4; }

// A thread's values in one line of a step.
template <int kEach> WS_INLINE void read_line(float (&out)[kEach], const float* line, int at) {
  if constexpr (kEach == 1) {
    out[0] = line[at];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const float4 v = *(const float4*)(line + place_of<kEach>(i, at));
      out[i] = v.x;
      out[i + 1] = v.y;
      out[i + 2] = v.z;
      out[i + 3] = v.w;
    }
  }
}

// Multiplies all steps. `load` starts to load one; X and W are the types of the operands.
template <class X, class W, int kRows, int kColumns, class Load>
WS_INLINE void multiply_steps(float (&sums)[kRows][kColumns], X& x, W& w, i64 x_col, i64 w_col, int depth, Load load) {
  __shared__ __align__(16) typename X::Step xs[2];
  __shared__ __align__(16) typename W::Step ws[2];
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[i][j] = 0.0f;
  const int steps = (depth + kDepth - 1) / kDepth;
  if (steps > 0) load(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int buffer = step & 1;
    x.store(xs[buffer], x_col);
    w.store(ws[buffer], w_col);
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[kRows], b[kColumns];
      read_line(a, xs[buffer][k], ty);
      read_line(b, ws[buffer][k], tx);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
  }
}

}  // namespace warpsmith::grouped
