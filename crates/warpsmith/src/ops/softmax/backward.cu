// dx = scale y (dout - sum(y dout)) over rows.
//
// Threads to data, and defines: as in the forward kernels. With SPLIT, the threads of a row are LANES of each of SPLIT
// blocks of a cluster. Only the number of threads and chunks of a row matters for its bits, not how they are shared out
// over blocks.

#include "warpsmith/dense.cuh"
#include "warpsmith/exchange.cuh"
#include "warpsmith/group.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/spread.cuh"

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
  unpack_words(a, y);
  unpack_words(b, dout);
#pragma unroll
  for (int j = 0; j < V; ++j) sum = fmaf(a[j], b[j], sum);
  return sum;
}

WS_INLINE void gradient(Chunk<T>& dx, const Chunk<T>& y, const Chunk<T>& dout, float scale, float total) {
  float a[V], b[V];
  unpack_words(a, y);
  unpack_words(b, dout);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = scale * a[j] * (b[j] - total);
  pack(dx, a);
}

#if SPLIT > 1

// A row in the registers of a cluster: memory is read once.
extern "C" __global__ void __launch_bounds__(LANES) softmax_backward_split(const SoftmaxBackwardParams p) {
  constexpr int kWarps = LANES / 32, kRowLanes = SPLIT * LANES;
  using Share = WarpShare<SPLIT * kWarps>;
  __shared__ Exchange<SPLIT, kWarps, 1> exchange;
  exchange.begin();
  begin_kernel();
  const RowsOfThread<LANES, 1, 1, SPLIT> own;
  const RowPointers at(p, own.index);
  const u64 policy = load_policy(false);

  // Where a row is too much for the registers, each thread leaves its chunks of dout in shared memory.
  constexpr bool kKeeps = ITEMS > 4;
  constexpr int kAtOnce = kKeeps ? 4 : ITEMS;
  extern __shared__ __align__(16) u8 memory[];
  Chunk<T>* kept = (Chunk<T>*)memory + threadIdx.x;
  Chunk<T> y[ITEMS], dout[kAtOnce];
  float sum[1] = {0.0f};
#pragma unroll
  for (int first = 0; first < ITEMS; first += kAtOnce) {
    u32 y_edge[kAtOnce], dout_edge[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = ((first + i) * kRowLanes + own.lane) * V;
      begin_part<VECTOR, 32>(y[first + i], y_edge[i], at.y, k, p.y_step, p.hidden, policy);
      begin_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, k, p.dout_step, p.hidden, policy);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = ((first + i) * kRowLanes + own.lane) * V;
      end_part<VECTOR, 32>(y[first + i], y_edge[i], at.y, k, p.hidden);
      end_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, k, p.hidden);
      sum[0] += dot(y[first + i], dout[i]);
      if (kKeeps) {
        kept[(first + i) * LANES] = dout[i];
        forget(y[first + i]);
      }
    }
  }
  sum[0] = warp_reduce<Sum>(sum[0]);
  const auto* sums = exchange.swap(sum, 0);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < Share::kShare; ++i) total += sums[Share::warp(i)].at[0];
  total = warp_reduce<Sum, Share::kWidth>(total);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (kKeeps) dout[i % kAtOnce] = kept[i * LANES];
    gradient(y[i], y[i], dout[i % kAtOnce], p.scale, total);
    put_part<VECTOR, 32>(at.dx, (i * kRowLanes + own.lane) * V, p.dx_step, p.hidden, y[i]);
  }
}

#elif !LONG

constexpr int kWarps = LANES < 32 ? 1 : LANES / 32;
constexpr int kWidth = LANES < 32 ? LANES : 32;

// A row in registers: memory is read once. With BATCH, the loads of several rows are in flight at once, and their warps
// meet at one barrier. A row past the last is the last one again, and is not stored.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) softmax_backward_row(const SoftmaxBackwardParams p) {
  begin_kernel();
  __shared__ float scratch[BATCH][ROWS][kWarps];
  const RowsOfThread<LANES, ROWS, BATCH> own;
  const int lane = own.lane;
  const auto exists = [&](int b) { return ROWS * BATCH == 1 || own.index + b * ROWS < p.num_rows; };
  const auto row = [&](int b) { return RowPointers(p, exists(b) ? own.index + b * ROWS : p.num_rows - 1); };
  const u64 policy = load_policy(false);

  Chunk<T> y[BATCH][ITEMS], dout[BATCH][ITEMS];
  u32 y_edge[BATCH][ITEMS], dout_edge[BATCH][ITEMS];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const RowPointers at = row(b);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * LANES + lane) * V;
      begin_part<VECTOR, kWidth>(y[b][i], y_edge[b][i], at.y, k, p.y_step, p.hidden, policy);
      begin_part<VECTOR, kWidth>(dout[b][i], dout_edge[b][i], at.dout, k, p.dout_step, p.hidden, policy);
    }
  }
  float total[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const RowPointers at = row(b);
    total[b] = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * LANES + lane) * V;
      end_part<VECTOR, kWidth>(y[b][i], y_edge[b][i], at.y, k, p.hidden);
      end_part<VECTOR, kWidth>(dout[b][i], dout_edge[b][i], at.dout, k, p.hidden);
      total[b] += dot(y[b][i], dout[b][i]);
    }
    total[b] = warp_reduce<Sum, kWidth>(total[b]);
    if (kWarps > 1 && lane % 32 == 0) scratch[b][own.place][lane / 32] = total[b];
  }
  if (kWarps > 1) __syncthreads();
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    if (kWarps > 1) total[b] = warp_reduce<Sum, kWarps>(scratch[b][own.place][lane % kWarps]);
    if (VECTOR != kDense && !exists(b)) continue;
    T* dx = row(b).dx;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      gradient(dout[b][i], y[b][i], dout[b][i], p.scale, total[b]);
      put_part<VECTOR, kWidth>(dx, (i * LANES + lane) * V, p.dx_step, exists(b) ? p.hidden : 0, dout[b][i]);
    }
  }
}

#else

// A row of any length, in two passes: forwards for the sum, then backwards for the result, so that what was read last,
// and is still in L2, is read first.
extern "C" __global__ void __launch_bounds__(LANES, 1) softmax_backward_long(const SoftmaxBackwardParams p) {
  begin_kernel();
  __shared__ float scratch[LANES / 32];
  const RowPointers at(p, blockIdx.x);
  const u64 policy = load_policy(false);
  constexpr int kChunk = LANES * V;
  const int groups = (p.hidden + ITEMS * kChunk - 1) / (ITEMS * kChunk);

  float total[1] = {0.0f};
  for (int g = 0; g < groups; ++g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> y[ITEMS], dout[ITEMS];
    u32 y_edge[ITEMS], dout_edge[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk, count = min(V, p.hidden - k);
      if (VECTOR >= kDense) {
        begin_part<VECTOR, 32>(y[i], y_edge[i], at.y, k, p.y_step, p.hidden, policy);
        begin_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, k, p.dout_step, p.hidden, policy);
      } else {
        load_chunk_l2<VECTOR>(y[i], at.y, k, p.y_step, count);
        load_chunk_l2<VECTOR>(dout[i], at.dout, k, p.dout_step, count);
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      end_part<VECTOR, 32>(y[i], y_edge[i], at.y, first + i * kChunk, p.hidden);
      end_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, first + i * kChunk, p.hidden);
      total[0] += dot(y[i], dout[i]);
    }
  }
  block_reduce<Sum, LANES>(total, scratch);

  for (int g = groups - 1; g >= 0; --g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> y[ITEMS], dout[ITEMS];
    u32 y_edge[ITEMS], dout_edge[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk;
      begin_part<VECTOR, 32>(y[i], y_edge[i], at.y, k, p.y_step, p.hidden, policy);
      begin_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, k, p.dout_step, p.hidden, policy);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk;
      end_part<VECTOR, 32>(y[i], y_edge[i], at.y, k, p.hidden);
      end_part<VECTOR, 32>(dout[i], dout_edge[i], at.dout, k, p.hidden);
      gradient(dout[i], y[i], dout[i], p.scale, total[0]);
      put_part<VECTOR, 32>(at.dx, k, p.dx_step, p.hidden, dout[i]);
    }
  }
}

#endif
