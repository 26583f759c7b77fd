// `linear` without tensor cores: any types, any strides.
//
// Threads to data: a block of 256 threads computes a tile of TILE rows of x by TILE rows of w. The threads form a square
// of 16 x 16; each has kEach x kEach sums: rows ty * 4 + 0..3 of every 64, and columns in the same way. Steps of kDepth
// elements of K go through two buffers in shared memory, in f32 and transposed, so that a thread reads its rows and
// columns as vectors. K is summed in ascending order with one fused multiply-add an element, whatever the tile.
//
// Defines: those of linear.cuh; TILE, 64 or 128; LOAD_X, LOAD_W, whether rows can be read in pieces of 16 bytes.

#include "warpsmith/linear.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;
using namespace warpsmith::linear;

constexpr int kThreads = 256, kDepth = 16, kEach = TILE / 16;
// The pad keeps vectors aligned and spreads columns over the banks.
constexpr int kPitch = TILE + 4;
static_assert(kScaleBlock % kDepth == 0, "a block of scales ends with a step");

// A step of one operand, on its way from global memory through registers to shared memory.
template <class T, int kVector> struct Operand {
  static constexpr int kLoads = kVector ? (TILE * kDepth / kVec<T> + kThreads - 1) / kThreads : TILE * kDepth / kThreads;
  static constexpr int kPieces = kDepth / kVec<T>;
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
      row = index % TILE;
      k = index / TILE;
    }
  }
  // `map` turns a row of the tile into a row of the matrix; rows from `count` on are zeros.
  template <class Map> WS_INLINE void load(const T* base, i64 row_stride, i64 col_stride, int count, int k0, int depth, Map map) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int row, k;
      place(i, col_stride == 1, row, k);
      const int from = map(row);
      const bool exists = from < count && k0 + k < depth && row < TILE;
      if (kVector) {
#pragma unroll
        for (int j = 0; j < 4; ++j) chunks[i].words[j] = 0;
        if (exists) load_words(chunks[i].words, base + from * row_stride + k0 + k);
      } else {
        items[i] = exists ? base[from * row_stride + (k0 + k) * col_stride] : from_f32<T>(0.0f);
      }
    }
  }
  WS_INLINE void store(float (&to)[kDepth][kPitch], i64 col_stride) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int row, k;
      place(i, col_stride == 1, row, k);
      if (kVector) {
        if (row >= TILE) break;
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

// The kEach values of a thread in one line of a step.
WS_INLINE void read_line(float (&out)[kEach], const float* line, int at) {
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    float4 v = *(const float4*)(line + i * 16 + at * 4);
    out[i] = v.x;
    out[i + 1] = v.y;
    out[i + 2] = v.z;
    out[i + 3] = v.w;
  }
}
// The row (or row of w) of the tile that value i of a thread belongs to.
WS_INLINE int place_of(int i, int at) { return i / 4 * 64 + at * 4 + i % 4; }

// Blocks per multiprocessor. Conversions, and loads element by element, need more registers than dense f32.
constexpr int kResident = sizeof(X_T) == 4 && LOAD_X && LOAD_W ? 2 : 1;

extern "C" __global__ void __launch_bounds__(kThreads, kResident) linear_generic(const LinearParams p) {
  begin_kernel();
  __shared__ __align__(16) float xs[2][kDepth][kPitch], ws[2][kDepth][kPitch];
  const Tile tile = tile_at<TILE, GATE ? TILE / 2 : TILE>(p, blockIdx.x);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  const X_T* x = (const X_T*)p.x + tile.batch * p.x_batch;
  const W_T* w = (const W_T*)p.w + tile.batch * p.w_batch;
  const int first_row = tile.m * TILE, first_w = tile.n * TILE, w_rows = num_weight_rows(p);
  auto x_row = [&](int row) { return first_row + row; };
  auto w_row = [&](int row) { return weight_row<1>(p, first_w + row, w_rows); };

  Operand<X_T, LOAD_X> x_step;
  Operand<W_T, LOAD_W> w_step;
  float sums[kEach][kEach], totals[SCALING == 2 ? kEach : 1][SCALING == 2 ? kEach : 1];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      sums[i][j] = 0.0f;
      if (SCALING == 2) totals[i][j] = 0.0f;
    }
  }
  const int steps = (p.k + kDepth - 1) / kDepth;
  if (steps > 0) {
    x_step.load(x, p.x_row, p.x_col, p.m, 0, p.k, x_row);
    w_step.load(w, p.w_row, p.w_col, w_rows, 0, p.k, w_row);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int buffer = step & 1;
    x_step.store(xs[buffer], p.x_col);
    w_step.store(ws[buffer], p.w_col);
    __syncthreads();
    if (step + 1 < steps) {
      x_step.load(x, p.x_row, p.x_col, p.m, (step + 1) * kDepth, p.k, x_row);
      w_step.load(w, p.w_row, p.w_col, w_rows, (step + 1) * kDepth, p.k, w_row);
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[kEach], b[kEach];
      read_line(a, xs[buffer][k], ty);
      read_line(b, ws[buffer][k], tx);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    if (SCALING == 2 && ((step + 1) % (kScaleBlock / kDepth) == 0 || step + 1 == steps)) {
      const int block = step / (kScaleBlock / kDepth);
      float w_scales[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int row = w_row(place_of(j, tx));
        w_scales[j] = row < w_rows ? w_scale_at(p, tile.batch, row, block) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = first_row + place_of(i, ty);
        const float x_scale = row < p.m ? x_scale_at(p, tile.batch, row, block) : 0.0f;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          totals[i][j] = add_block(totals[i][j], sums[i][j], x_scale, w_scales[j]);
          sums[i][j] = 0.0f;
        }
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kEach; j += GATE ? 2 : 1) {
    const int column = column_of<1>(first_w + place_of(j, tx));
    if (column >= p.n) continue;
    const ColumnTerms terms = column_terms(p, tile.batch, column);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = first_row + place_of(i, ty);
      if (row >= p.m) continue;
      const float* of = SCALING == 2 ? totals[SCALING == 2 ? i : 0] : sums[i];
      write_element(p, tile.batch, row, column, of[j], GATE ? of[j + 1] : 0.0f, row_term(p, tile.batch, row), terms);
    }
  }
}
