// The divergences of rows of logits, and their sum.
//
// Threads to data: a block has a row of both tensors. Its threads take chunks of 16 bytes in turn, neighbours neighbouring ones,
// and kItems of them at a time; the order of a sum depends on the length of the row alone. The sum over rows has one block,
// whose threads take rows in turn.
//
// Defines: ELEM, the type of logits; VECTOR, whether rows of both are dense, aligned and whole chunks.

#include "warpsmith/kl_div.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;
using namespace warpsmith::kl_div;

using T = ELEM;
// With fewer in flight where elements are loaded one by one, which takes registers; the order of sums is the same.
constexpr int V = kVec<T>, kThreads = 512, kItems = VECTOR ? 2 : 1;

WS_INLINE bool counts(const KlDivParams& p, i64 row) {
  return !p.targets || load_integer(p.targets, p.wide_targets, row_offset(p.rows, 2, row)) != p.ignore_index;
}

extern "C" __global__ void __launch_bounds__(kThreads) kl_div(const KlDivParams p) {
  begin_kernel();
  __shared__ float scratch[6 * kThreads / 32];
  const i64 row = blockIdx.x;
  Loss found = {0.0f, {0.0f, 0.0f}};
  if (counts(p, row)) {
    const T* x = row_at<const T>(p.first, p.rows, 0, row);
    const T* y = row_at<const T>(p.second, p.rows, 1, row);
    Sums<T> sums;
    for (i64 first = (i64)threadIdx.x * V; first < p.vocab; first += (i64)kThreads * V * kItems) {
      Chunk<T> of_x[kItems], of_y[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const i64 at = first + (i64)i * kThreads * V;
        const int present = (int)max((i64)0, min((i64)V, p.vocab - at));
        load_chunk<VECTOR>(of_x[i], x, at, p.first_step, present, from_f32<T>(0.0f));
        load_chunk<VECTOR>(of_y[i], y, at, p.second_step, present, from_f32<T>(0.0f));
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const i64 at = first + (i64)i * kThreads * V;
        float a[V], b[V];
        unpack(a, of_x[i]);
        unpack(b, of_y[i]);
        sums.add(a, b, (int)max((i64)0, min((i64)V, p.vocab - at)), p.inverse);
      }
    }
    sums.template join<kThreads>(scratch, p.inverse);
    found = loss_of(sums, p.temperature);
  }
  if (threadIdx.x > 0) return;
  *(p.by_row ? row_at<float>(p.losses, p.rows, 3, row) : (float*)p.losses + row) = found.loss;
  if (p.first_lse) *row_at<float>(p.first_lse, p.values, 0, row) = found.lse[0];
  if (p.second_lse) *row_at<float>(p.second_lse, p.values, 1, row) = found.lse[1];
  if (p.row_losses) *row_at<float>(p.row_losses, p.values, 2, row) = found.loss;
}

// The sum of the losses, or their mean, and the number of rows that count.
extern "C" __global__ void __launch_bounds__(kThreads) kl_div_sum(const KlDivParams p) {
  begin_kernel();
  __shared__ float scratch[2 * kThreads / 32];
  float sums[2] = {0.0f, 0.0f};
  for (i64 row = threadIdx.x; row < p.num_rows; row += kThreads) {
    if (p.loss) sums[0] += ((const float*)p.losses)[row];
    sums[1] += counts(p, row) ? 1.0f : 0.0f;
  }
  block_reduce<Sum, kThreads>(sums, scratch);
  if (threadIdx.x > 0) return;
  if (p.count) *(float*)p.count = sums[1];
  if (p.loss) *(float*)p.loss = p.is_mean ? sums[0] / sums[1] : sums[0];
}
