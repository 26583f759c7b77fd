// dx = dout gelu'(x + bias), and for each group of rows the sum of its dx in f32; `column_sum` adds these up
// unless there is one group alone.
//
// Threads to data: a unit is 16 bytes of columns (VECTOR) or a single column. A block takes `1 << lanes_log2` units;
// each of its `256 >> lanes_log2` rows of threads is a group, which takes every num_groups-th row, ITEMS at a time, and
// keeps the sums of its columns in registers. The number of groups depends only on the number of rows and the device,
// and nothing is added atomically: every run gives the same bits, and dx of a row does not depend on other rows.
//
// Defines: ELEM, ITEMS, VECTOR, FUNCTION (Gelu or GeluTanh), SUMS (what becomes of the sums: see below).

#include "warpsmith/math.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kUnit = VECTOR ? kVec<T> : 1;
constexpr int kThreads = 256;
// Values of SUMS.
constexpr int kPartial = 1;  // one row of them a group
constexpr int kFinal = 2;    // there is one group, whose sums are dbias

WS_INLINE void load(Chunk<T>& c, const T* at) {
  if (VECTOR) load_words(c.words, at);
  else c.items[0] = *at;
}

extern "C" __global__ void __launch_bounds__(kThreads) add_gelu_backward(const AddGeluBackwardParams p) {
  begin_kernel();
  const BlockPlace tile(p.column_tiles);
  const u32 lane = threadIdx.x & ((1u << p.lanes_log2) - 1);
  const i64 column = (((i64)tile.column << p.lanes_log2) + lane) * kUnit;
  const i64 group = (i64)tile.row * (kThreads >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
  if (column >= p.hidden || group >= p.num_groups) return;
  float bias[kUnit], sum[kUnit];
  Chunk<T> biases;
  const T* at_bias = (const T*)p.bias + column * p.bias_step;
  if (VECTOR && p.bias_step == 1 && (u64)at_bias % 16 == 0) {
    load_words(biases.words, at_bias);
  } else {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) biases.items[j] = at_bias[j * p.bias_step];
  }
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    bias[j] = to_f32(biases.items[j]);
    sum[j] = 0.0f;
  }
  for (i64 row = group; row < p.num_rows; row += ITEMS * p.num_groups) {
    Chunk<T> x[ITEMS], dout[ITEMS];
    i64 at[ITEMS][3];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const i64 r = row + i * p.num_groups;
      if (r >= p.num_rows) break;
      row_offsets<0>(at[i], p.rows, r);
      load(x[i], (const T*)p.x + at[i][0] + column * p.x_step);
      load(dout[i], (const T*)p.dout + at[i][1] + column * p.dout_step);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (row + i * p.num_groups >= p.num_rows) break;
      float d[kVec<T>];  // kUnit of them are used
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        d[j] = to_f32(dout[i].items[j]) * FUNCTION::derivative<ELEM>(to_f32(x[i].items[j]) + bias[j]);
        sum[j] += d[j];
      }
      T* dx = (T*)p.dx + at[i][2] + column * p.dx_step;
      if constexpr (VECTOR) {
        pack(x[i], d);
        store_words(dx, x[i].words);
      } else {
        *dx = from_f32<T>(d[0]);
      }
    }
  }
  if (SUMS == kFinal) {
    T* dbias = (T*)p.dbias + column * p.dbias_step;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) dbias[j * p.dbias_step] = from_f32<T>(sum[j]);
  }
  if (SUMS == kPartial) {
    float* partial = (float*)p.partial + group * p.hidden + column;
    if constexpr (VECTOR) {
      // Rows are whole units, so the sums of a unit start at a multiple of 16 bytes.
#pragma unroll
      for (int j = 0; j < kUnit; j += 4) {
        Chunk<f32> sums;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.items[i] = sum[j + i];
        store_words(partial + j, sums.words);
      }
    } else {
      partial[0] = sum[0];
    }
  }
}
