// dx = dout gelu'(x + bias), and for each group of rows the sum of its dx in f32; `column_sum` adds these up
// unless there is one group alone.
//
// Threads to data: a unit is 16 bytes of columns (VECTOR), or kColumns of them that lie as far apart as a block has
// units, so that neighbouring threads access neighbouring columns wherever rows begin. A block takes `1 << lanes_log2`
// units; each of its `256 >> lanes_log2` rows of threads is a group, which takes every num_groups-th row, ITEMS at a
// time, and keeps the sums of its columns in registers. The number of groups depends only on the shape, the kind of
// unit and the device, and nothing is added atomically: every run gives the same bits, and dx of a row does not depend
// on other rows. Rows that lie one after the other and are short or no whole vectors are one run instead: run.cu.
//
// Defines: ELEM, ITEMS, VECTOR, FUNCTION (Gelu or GeluTanh), SUMS (what becomes of the sums: see below).

#include "warpsmith/math.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/spread.cuh"

using namespace warpsmith;

using T = ELEM;
// Enough loads in flight, few enough registers for four blocks of a multiprocessor. The host says the same.
constexpr int kColumns = 4;
constexpr int kUnit = VECTOR ? kVec<T> : kColumns;
constexpr int kThreads = 256;
// Values of SUMS.
constexpr int kPartial = 1;  // one row of them a group
constexpr int kFinal = 2;    // there is one group, whose sums are dbias

// Blocks that a multiprocessor must have room for; none is what the compiler does best with vectors, and for sm_100 it
// needs more registers than four leave.
constexpr int kResident = VECTOR ? 0 : __CUDA_ARCH__ >= 1000 ? 3 : 4;

// Loads the first `count` elements of a unit, which are `apart`.
WS_INLINE void load(Chunk<T>& c, const T* at, i64 apart, int count) {
  if constexpr (VECTOR) {
    load_words(c.words, at);
  } else {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      if (j < count) c.items[j] = *at;
      walk(at, apart);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) add_gelu_backward(const AddGeluBackwardParams p) {
  begin_kernel();
  const BlockPlace tile(p.column_tiles);
  const u32 lanes = 1u << p.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const i64 first = ((i64)tile.column << p.lanes_log2) * kUnit, column = first + lane * (VECTOR ? kUnit : 1);
  const i64 group = (i64)tile.row * (kThreads >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
  if (column >= p.hidden || group >= p.num_groups) return;
  const i64 apart = VECTOR ? 1 : lanes;
  const int count = VECTOR ? kUnit : (int)min((p.hidden - column + lanes - 1) >> p.lanes_log2, (i64)kUnit);
  float bias[kUnit], sum[kUnit];
  Chunk<T> biases;
  const T* at_bias = (const T*)p.bias + column * p.bias_step;
  if (VECTOR && p.bias_step == 1 && (u64)at_bias % 16 == 0) {
    load_words(biases.words, at_bias);
  } else {
#pragma unroll
    for (int j = 0; j < kUnit; ++j)
      if (j < count) biases.items[j] = at_bias[j * apart * p.bias_step];
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
      load(x[i], (const T*)p.x + at[i][0] + column * p.x_step, apart * p.x_step, count);
      load(dout[i], (const T*)p.dout + at[i][1] + column * p.dout_step, apart * p.dout_step, count);
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
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          if (j < count) *dx = from_f32<T>(d[j]);
          walk(dx, apart * p.dx_step);
        }
      }
    }
  }
  if (SUMS == kFinal) {
    T* dbias = (T*)p.dbias + column * p.dbias_step;
#pragma unroll
    for (int j = 0; j < kUnit; ++j)
      if (j < count) dbias[j * apart * p.dbias_step] = from_f32<T>(sum[j]);
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
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        if (j < count) partial[j * apart] = sum[j];
    }
  }
}
