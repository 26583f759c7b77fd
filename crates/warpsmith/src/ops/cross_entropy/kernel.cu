// The losses of rows of logits, their gradients, and the sum of the losses.
//
// Threads to data: a block has a row. Its threads take chunks of 16 bytes in turn, neighbours neighbouring ones, and kItems of
// them at a time; the order of a sum depends on the length of the row alone. The sum over rows has one block, whose threads
// take rows in turn.
//
// Defines: ELEM, the type of logits; VECTOR, whether rows are dense, aligned and whole chunks; CAPPED, SMOOTH, whether there is
// a soft cap and label smoothing.

#include "warpsmith/cross_entropy.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;
using namespace warpsmith::cross_entropy;

using T = ELEM;
// With fewer in flight where elements are loaded one by one, which takes registers; the order of sums is the same.
constexpr int V = kVec<T>, kThreads = 512, kItems = VECTOR ? 4 : 1;

WS_INLINE i64 column_of_row(const CrossEntropyParams& p, i64 row) {
  const i64 target = load_integer(p.targets, p.wide_targets, row_offset(p.rows, 1, row));
  return column_of(target, p.ignore_index, p.vocab);
}

extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy(const CrossEntropyParams p) {
  begin_kernel();
  __shared__ float scratch[3 * kThreads / 32];
  const i64 row = blockIdx.x;
  const i64 target = column_of_row(p, row);
  float* loss = p.by_row ? row_at<float>(p.losses, p.rows, 3, row) : (float*)p.losses + row;
  float* lse = p.lse ? row_at<float>(p.lse, p.rows, 2, row) : nullptr;
  if (target < 0) {
    const float value = target == -1 ? 0.0f : no_number();
    if (threadIdx.x == 0) *loss = value;
    if (threadIdx.x == 0 && lse) *lse = value;
    return;
  }
  const T* x = row_at<const T>(p.logits, p.rows, 0, row);
  const Formula f{p.softcap, p.smoothing, p.z_loss};
  Sums<T, CAPPED, SMOOTH> sums;
  for (i64 first = (i64)threadIdx.x * V; first < p.vocab; first += (i64)kThreads * V * kItems) {
    Chunk<T> chunks[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      load_chunk<VECTOR>(chunks[i], x, at, p.step, (int)max((i64)0, min((i64)V, p.vocab - at)), from_f32<T>(0.0f));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      float values[V];
      unpack(values, chunks[i]);
      sums.add(values, (int)max((i64)0, min((i64)V, p.vocab - at)), f.cap);
    }
  }
  sums.join<kThreads>(scratch);
  if (threadIdx.x > 0) return;
  const Loss found = loss_of(sums, f, to_f32(x[target * p.step]), p.vocab);
  *loss = found.loss;
  if (lse) *lse = found.lse;
}

// The sum of the losses, or their mean, and the number of rows that count.
extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy_sum(const CrossEntropyParams p) {
  begin_kernel();
  __shared__ float scratch[2 * kThreads / 32];
  float sums[2] = {0.0f, 0.0f};
  for (i64 row = threadIdx.x; row < p.num_rows; row += kThreads) {
    if (p.loss) sums[0] += ((const float*)p.losses)[row];
    sums[1] += column_of_row(p, row) == -1 ? 0.0f : 1.0f;
  }
  block_reduce<Sum, kThreads>(sums, scratch);
  if (threadIdx.x > 0) return;
  if (p.count) *(float*)p.count = sums[1];
  if (p.loss) *(float*)p.loss = p.is_mean ? sums[0] / sums[1] : sums[0];
}
