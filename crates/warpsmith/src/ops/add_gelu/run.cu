// dx = dout gelu'(x + bias) and the sums of dx over rows, where x, dout and dx are one run of elements each: all
// rows one after the other, whatever their length. `column_sum` adds the sums up unless one row of them is left.
//
// Threads to data: a unit is 16 bytes at an aligned address, also where the run begins `shift` elements after one.
// Thread t of the num_threads of the grid takes units t, t + num_threads, ..., ITEMS at a time. num_threads units
// are whole rows, so a thread has the same columns in all its units: their biases are loaded once, and their sums
// are in registers. (With no more units than that, each thread has one.) Units at the ends of the run may be
// incomplete; their elements are moved one by one.
//
// What the threads have summed up lies in the order of the run, so that sums of a column are `hidden` apart. A block
// leaves them like that in `partial`, as rows, or first adds up those of a column if it has several of each:
// is_narrow. Nothing is added atomically: every run gives the same bits, and dx of a row does not depend on other
// rows.
//
// Defines: ELEM, ITEMS, FUNCTION (Gelu or GeluTanh), SUMS (what becomes of the sums: see below).

#include "warpsmith/l2.cuh"
#include "warpsmith/math.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kUnit = kVec<T>;
constexpr int kThreads = 256;
constexpr u32 kBlockElements = kThreads * kUnit;
// Values of SUMS; otherwise several rows of them are left.
constexpr int kNone = 0;   // they are not wanted
constexpr int kFinal = 2;  // one row is left, which is dbias

WS_INLINE bool is_whole(const AddGeluRunParams& p, i64 at) { return at >= 0 && at + kUnit <= p.length; }

// Loads the units at element `at`. Where they are not of the run there are zeros: what is computed from those is zero,
// or NaN if all of the column is.
WS_INLINE void load_units(Chunk<T>& x, Chunk<T>& dout, const AddGeluRunParams& p, i64 at) {
  const T *from_x = (const T*)p.x + at, *from_dout = (const T*)p.dout + at;
  if (is_whole(p, at)) {
    load_words(x.words, from_x);
    load_words(dout.words, from_dout);
    return;
  }
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    const bool exists = at + j >= 0 && at + j < p.length;
    x.items[j] = exists ? from_x[j] : T{};
    dout.items[j] = exists ? from_dout[j] : T{};
  }
}

WS_INLINE void store_unit(const AddGeluRunParams& p, i64 at, const Chunk<T>& dx) {
  T* to = (T*)p.dx + at;
  if (is_whole(p, at)) {
    store_words(to, dx.words);
    return;
  }
#pragma unroll
  for (int j = 0; j < kUnit; ++j)
    if (at + j >= 0 && at + j < p.length) to[j] = dx.items[j];
}

// The sum of a column, in row `row` of those that are left.
WS_INLINE void put_sum(const AddGeluRunParams& p, u32 row, u32 column, float sum) {
  if (SUMS == kFinal) ((T*)p.dbias)[column * p.dbias_step] = from_f32<T>(sum);
  else ((float*)p.partial)[(u64)row * p.hidden + column] = sum;
}

// Leaves the sums of a block, `count` of them.
WS_INLINE void put_sums(const AddGeluRunParams& p, float* sums, u32 count) {
  const u32 begin = blockIdx.x * kBlockElements;
  if (!p.is_narrow) {
    for (u32 i = threadIdx.x; i < count; i += kThreads) {
      // Before the run's first element, there are columns of its later rows.
      const u32 at = begin + i >= p.shift ? begin + i - p.shift : p.num_threads * kUnit - p.shift + i;
      if (at < p.num_sums) put_sum(p, 0, at, sums[i]);
    }
    return;
  }
  // First as many columns side by side as there are threads, so that none has much to add.
  const u32 width = kThreads / p.hidden * p.hidden;
  if (width > 0) {
    float sum = 0.0f;
    if (threadIdx.x < width)
      for (u32 i = threadIdx.x; i < count; i += width) sum += sums[i];
    __syncthreads();
    sums[threadIdx.x] = sum;
    __syncthreads();
    count = min(count, width);
  }
  const u32 first = (begin + p.first_column) % p.hidden;
  for (u32 i = threadIdx.x; i < p.hidden; i += kThreads) {
    float sum = 0.0f;
    for (u32 j = i; j < count; j += p.hidden) sum += sums[j];
    const u32 column = first + i;
    put_sum(p, blockIdx.x, column < p.hidden ? column : column - p.hidden, sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) add_gelu_backward_run(const AddGeluRunParams p) {
  const u32 thread = blockIdx.x * kThreads + threadIdx.x;
  const i64 start = (i64)thread * kUnit - p.shift;
  // Not the further units: of a large tensor they would be evicted again.
  if (is_whole(p, start)) {
    prefetch_chunk((const T*)p.x + start);
    prefetch_chunk((const T*)p.dout + start);
  }
  begin_kernel();
  float bias[kUnit], sum[kUnit];
  u32 column = (thread * kUnit + p.first_column) % p.hidden;
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    bias[j] = to_f32(((const T*)p.bias)[column * p.bias_step]);
    sum[j] = 0.0f;
    column = column + 1 == p.hidden ? 0 : column + 1;
  }
  if (thread < p.num_threads) {
    const i64 step = (i64)p.num_threads * kUnit;
    for (i64 first = start; first < p.length; first += ITEMS * step) {
      Chunk<T> x[ITEMS], dout[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (first + i * step >= p.length) break;
        load_units(x[i], dout[i], p, first + i * step);
      }
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (first + i * step >= p.length) break;
        float d[kUnit];
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          d[j] = to_f32(dout[i].items[j]) * FUNCTION::derivative<T>(to_f32(x[i].items[j]) + bias[j]);
          sum[j] += d[j];
        }
        pack(x[i], d);
        store_unit(p, first + i * step, x[i]);
      }
    }
  }

  if constexpr (SUMS != kNone) {
    __shared__ Chunk<f32> sums[kThreads * kUnit / 4];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sums[threadIdx.x * (kUnit / 4) + j / 4].items[j % 4] = sum[j];
    __syncthreads();
    put_sums(p, (float*)sums, min(kBlockElements, (p.num_threads - blockIdx.x * kThreads) * kUnit));
  }
}
