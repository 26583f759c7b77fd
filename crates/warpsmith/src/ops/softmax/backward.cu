// dx = scale y (dout - sum(y dout)) over rows.
//
// Threads to data, and defines: as in the forward kernels.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;

struct RowPointers {
  const T *y, *dout;
  T* dx;
  WS_INLINE RowPointers(const SoftmaxBackwardParams& p, i64 index) {
    y = row_at<const T>(p.y, p.rows, 0, index);
    dout = row_at<const T>(p.dout, p.rows, 1, index);
    dx = row_at<T>(p.dx, p.rows, 2, index);
  }
};

WS_INLINE float dot(const Chunk<T>& y, const Chunk<T>& dout) {
  float a[V], b[V], sum = 0.0f;
  unpack(a, y);
  unpack(b, dout);
#pragma unroll
  for (int j = 0; j < V; ++j) sum = fmaf(a[j], b[j], sum);
  return sum;
}

WS_INLINE void gradient(Chunk<T>& dx, const Chunk<T>& y, const Chunk<T>& dout, float scale, float total) {
  float a[V], b[V];
  unpack(a, y);
  unpack(b, dout);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = scale * a[j] * (b[j] - total);
  pack(dx, a);
}

#if !LONG

// A row in registers: memory is read once.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) softmax_backward_row(const SoftmaxBackwardParams p) {
  begin_kernel();
  __shared__ float scratch[LANES / 32];
  const ThreadRow<LANES, ROWS> own;
  const int lane = own.lane;
  const i64 index = own.index;
  if (ROWS > 1 && index >= p.num_rows) return;
  const RowPointers at(p, index);
  const T zero = from_f32<T>(0.0f);

  Chunk<T> y[ITEMS], dout[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
    load_chunk<VECTOR>(y[i], at.y, k, p.y_step, count, zero);
    load_chunk<VECTOR>(dout[i], at.dout, k, p.dout_step, count, zero);
  }
  float total[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) total[0] += dot(y[i], dout[i]);
  block_reduce<Sum, LANES>(total, scratch);

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    gradient(dout[i], y[i], dout[i], p.scale, total[0]);
    store_chunk<VECTOR>(at.dx, k, p.dx_step, min(V, p.hidden - k), dout[i]);
  }
}

#else

// A row of any length, in two passes: forwards for the sum, then backwards for the result, so that what was read last,
// and is still in L2, is read first.
extern "C" __global__ void __launch_bounds__(LANES, 1) softmax_backward_long(const SoftmaxBackwardParams p) {
  begin_kernel();
  __shared__ float scratch[LANES / 32];
  const RowPointers at(p, blockIdx.x);
  const T zero = from_f32<T>(0.0f);
  constexpr int kChunk = LANES * V;
  const int groups = (p.hidden + ITEMS * kChunk - 1) / (ITEMS * kChunk);

  float total[1] = {0.0f};
  for (int g = 0; g < groups; ++g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> y[ITEMS], dout[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk, count = min(V, p.hidden - k);
      load_chunk_l2<VECTOR>(y[i], at.y, k, p.y_step, count);
      load_chunk_l2<VECTOR>(dout[i], at.dout, k, p.dout_step, count);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) total[0] += dot(y[i], dout[i]);
  }
  block_reduce<Sum, LANES>(total, scratch);

  for (int g = groups - 1; g >= 0; --g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> y[ITEMS], dout[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk, count = min(V, p.hidden - k);
      load_chunk<VECTOR>(y[i], at.y, k, p.y_step, count, zero);
      load_chunk<VECTOR>(dout[i], at.dout, k, p.dout_step, count, zero);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk;
      gradient(dout[i], y[i], dout[i], p.scale, total[0]);
      store_chunk<VECTOR>(at.dx, k, p.dx_step, min(V, p.hidden - k), dout[i]);
    }
  }
}

#endif
