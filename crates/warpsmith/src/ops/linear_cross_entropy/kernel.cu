// The losses of the rows of a part, and the gradients of their logits in the place of these; and the sum of the losses.
//
// Threads to data: a block has a row of logits, which are f32 and begin at 16 bytes. Its threads take four of them in turn,
// neighbours neighbouring ones, and kItems times four at a time. The order of a sum depends on the length of the row alone. The
// sum over rows has one block, whose threads take rows in turn.
//
// Gradients are no wider than logits and take their place from the front: what a step writes lies in what it and the steps
// before it have read. The barrier between its loads and its stores makes that true of all threads.
//
// Defines: ELEM, the type of gradients; CAPPED, SMOOTH, whether there is a soft cap and label smoothing; GRADIENTS, whether they
// are wanted.

#include "warpsmith/cross_entropy.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;
using namespace warpsmith::cross_entropy;

using T = ELEM;
constexpr int kThreads = 512, kItems = 4, kStep = kThreads * kItems * 4;

struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

WS_INLINE i64 column_of_row(const LinearCrossEntropyParams& p, i64 row) {
  const i64 target = load_integer(p.targets, p.wide_targets, row_offset(p.rows, 0, row));
  return column_of(target, p.ignore_index, p.vocab);
}

// How many of the four logits from `at` on there are.
WS_INLINE int present(i64 at, i64 vocab) { return (int)max((i64)0, min((i64)4, vocab - at)); }

extern "C" __global__ void __launch_bounds__(kThreads) linear_cross_entropy_rows(const LinearCrossEntropyParams p) {
  begin_kernel();
  __shared__ float scratch[3 * kThreads / 32];
  const i64 row = p.first + blockIdx.x;
  float* x = (float*)p.logits + (i64)blockIdx.x * p.pitch;
  const i64 target = column_of_row(p, row);
  const Formula f{p.softcap, p.smoothing, p.z_loss};
  Loss found{target == -1 ? 0.0f : no_number(), no_number()};
  if (target >= 0) {
    Sums<float, CAPPED, SMOOTH> sums;
    for (i64 first = threadIdx.x * 4; first < p.vocab; first += kStep) {
      Chunk<float> chunks[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const i64 at = first + i * kThreads * 4;
        load_chunk<kAligned>(chunks[i], x, at, 1, present(at, p.vocab), 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) sums.add(chunks[i].items, present(first + i * kThreads * 4, p.vocab), f.cap);
    }
    sums.template join<kThreads>(scratch);
    found = loss_of(sums, f, x[target], p.vocab);
  }
  if (threadIdx.x == 0) ((float*)p.losses)[row] = found.loss;
#if GRADIENTS
  const Slope slope(f, found.lse, 1.0f, p.vocab);
  for (i64 start = 0; start < p.vocab; start += kStep) {
    Chunk<float> chunks[kItems];
    const i64 first = start + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + i * kThreads * 4;
      load_chunk<kAligned>(chunks[i], x, at, 1, target < 0 ? 0 : present(at, p.vocab), 0.0f);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + i * kThreads * 4;
      if (at >= p.vocab) continue;
      Four dz;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float d = slope.of<CAPPED>(f, chunks[i].items[j], at + j == target);
        dz.at[j] = from_f32<T>(target >= 0 ? d : target == -1 ? 0.0f : no_number());
      }
      // Rows have room for whole fours.
      *(Four*)((T*)x + at) = dz;
    }
  }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_cross_entropy_sum(const LinearCrossEntropyParams p) {
  begin_kernel();
  __shared__ float scratch[2 * kThreads / 32];
  float sums[2] = {0.0f, 0.0f};
  for (i64 row = threadIdx.x; row < p.num_rows; row += kThreads) {
    sums[0] += ((const float*)p.losses)[row];
    sums[1] += column_of_row(p, row) == -1 ? 0.0f : 1.0f;
  }
  block_reduce<Sum, kThreads>(sums, scratch);
  if (threadIdx.x > 0) return;
  if (p.count) *(float*)p.count = sums[1];
  *(float*)p.loss = p.is_mean ? sums[0] / sums[1] : sums[0];
}
