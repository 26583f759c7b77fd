// dx = scale y (dout - sum(y dout)) over rows.
//
// Threads to data and defines: as in the forward kernels.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using T = ELEM;
constexpr int V = kVec<T>;

struct RowPointers {
  const T *y, *dout;
  T* dx;
  WS_INLINE RowPointers(const SoftmaxBackwardParams& p, i64 index) {
    y = (const T*)p.y + row_offset(p.rows, 0, index);
    dout = (const T*)p.dout + row_offset(p.rows, 1, index);
    dx = (T*)p.dx + row_offset(p.rows, 2, index);
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
  static_assert(ROWS == 1 || LANES == 32, "several rows a block only with a warp a row");
  __shared__ float scratch[LANES / 32];
  const int lane = threadIdx.x % LANES;
  const i64 index = (i64)blockIdx.x * ROWS + threadIdx.x / LANES;
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

// As load_chunk, but what is loaded will be needed again: it stays in L2.
WS_INLINE void load_kept_chunk(Chunk<T>& c, const T* row, int k, i64 step, int count) {
  if (VECTOR && count > 0) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.words[0]), "=r"(c.words[1]), "=r"(c.words[2]), "=r"(c.words[3])
                 : "l"(row + k)
                 : "memory");
  } else {
    load_chunk<VECTOR>(c, row, k, step, count, from_f32<T>(0.0f));
  }
}

// A row of any length, gone through twice: forward for the sum, then backward for the result, so that what was read
// last, and is still in L2, is read first.
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
      load_kept_chunk(y[i], at.y, k, p.y_step, count);
      load_kept_chunk(dout[i], at.dout, k, p.dout_step, count);
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
