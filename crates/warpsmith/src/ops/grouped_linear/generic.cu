// `grouped_linear` without tensor cores: any types, any strides.
//
// Threads to data: a block of 256 threads computes a tile of TILE_M rows of a group by TILE_N rows of its matrix. The threads form a
// square of 16 x 16; each has kRows x kColumns sums. Steps of kDepth elements of K go through two buffers in shared memory, in f32
// and transposed, so that a thread reads its rows and columns as vectors. K is summed in ascending order with one fused
// multiply-add an element, whatever the tile.
//
// Defines: those of linear.cuh; TILE_M, 16, 64 or 128; TILE_N, 64 or 128; LOAD_X, LOAD_W, whether rows can be read in pieces of 16
// bytes.

#include "warpsmith/grouped_linear.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kThreads = 256, kDepth = 16, kRows = TILE_M / 16, kColumns = TILE_N / 16;
constexpr int kOutN = GATE ? TILE_N / 2 : TILE_N;

// A step of one operand, on its way from global memory through registers to shared memory, where the pad keeps vectors aligned and
// spreads columns over the banks.
template <class T, int kTile, int kVector> struct Operand {
  static constexpr int kPitch = kTile + 4, kPieces = kDepth / kVec<T>;
  static constexpr int kItems = kVector ? kTile * kPieces : kTile * kDepth, kLoads = (kItems + kThreads - 1) / kThreads;
  typedef float Step[kDepth][kPitch];

  T items[kVector ? 1 : kLoads];
  Chunk<T> chunks[kVector ? kLoads : 1];

  // Which element or chunk of the step a thread moves. Neighbouring threads go along the smaller stride.
  static WS_INLINE void place(int i, bool along_k, int& row, int& k) {
    const int index = threadIdx.x + i * kThreads;
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
  // `map` turns a row of the tile into a row of the matrix, -1 for a row of zeros.
  template <class Map> WS_INLINE void load(const T* base, i64 row_stride, i64 col_stride, int k0, int depth, Map map) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int row, k;
      place(i, col_stride == 1, row, k);
      const int from = row < kTile && k < kDepth ? map(row) : -1;
      const bool exists = from >= 0 && k0 + k < depth;
      if (kVector) {
#pragma unroll
        for (int j = 0; j < 4; ++j) chunks[i].words[j] = 0;
        if (exists) load_words(chunks[i].words, base + from * row_stride + k0 + k);
      } else {
        items[i] = exists ? base[from * row_stride + (k0 + k) * col_stride] : from_f32<T>(0.0f);
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

extern "C" __global__ void __launch_bounds__(kThreads) grouped_linear_generic(const __grid_constant__ GroupedLinearParams p) {
  begin_kernel();
  typedef Operand<X_T, TILE_M, LOAD_X> X;
  typedef Operand<W_T, TILE_N, LOAD_W> W;
  __shared__ __align__(16) typename X::Step xs[2];
  __shared__ __align__(16) typename W::Step ws[2];
  __shared__ int x_rows[TILE_M];
  GroupWalk<TILE_M, 4, GroupedLinearParams> walk(p);
  const GroupTile tile = group_tile<TILE_M>(walk, blockIdx.x, (p.linear.n + kOutN - 1) / kOutN);
  if (tile.row >= tile.end) return;
  if (tile.group == p.groups) return clear_tile<kOutN, kThreads>(p, tile);
  for (int i = threadIdx.x; i < TILE_M; i += kThreads) x_rows[i] = x_row_of(p, tile, tile.row + i);
  __syncthreads();

  const LinearParams product = product_of(p, tile);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  const X_T* x = (const X_T*)product.x;
  const W_T* w = (const W_T*)product.w + tile.group * product.w_batch;
  const int first_w = tile.column * TILE_N, depth = product.k;
  auto x_row = [&](int row) { return x_rows[row]; };
  auto w_row = [&](int row) { return weight_row<1>(product, first_w + row, -1); };
  X x_step;
  W w_step;
  auto load = [&](int step) {
    x_step.load(x, product.x_row, product.x_col, step * kDepth, depth, x_row);
    w_step.load(w, product.w_row, product.w_col, step * kDepth, depth, w_row);
  };

  float sums[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[i][j] = 0.0f;
  const int steps = (depth + kDepth - 1) / kDepth;
  if (steps > 0) load(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int buffer = step & 1;
    x_step.store(xs[buffer], product.x_col);
    w_step.store(ws[buffer], product.w_col);
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

#pragma unroll
  for (int j = 0; j < kColumns; j += GATE ? 2 : 1) {
    const int column = column_of<1>(first_w + place_of<kColumns>(j, tx));
    if (column >= product.n) continue;
    const ColumnTerms terms = column_terms(product, 0, column);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = tile.row + place_of<kRows>(i, ty);
      if (row >= tile.end) continue;
      write_row_element(product, row, column, sums[i][j], GATE ? sums[i][j + 1] : 0.0f, factor_of(p, row), terms);
    }
  }
}
