// The gradients of rows of logits.
//
// Threads to data: a block has a row. Its threads take chunks of 16 bytes in turn, neighbours neighbouring ones; each is read
// before its gradient is written, which may be in its place.
//
// Defines: ELEM, the type of logits; VECTOR, whether rows of both tensors are dense, aligned and whole chunks; CAPPED, whether
// there is a soft cap.

#include "warpsmith/cross_entropy.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;
using namespace warpsmith::cross_entropy;

using T = ELEM;
constexpr int V = kVec<T>, kThreads = 512, kItems = 2;

extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy_backward(const CrossEntropyBackwardParams p) {
  begin_kernel();
  const i64 row = blockIdx.x;
  const i64 given = load_integer(p.targets, p.wide_targets, row_offset(p.rows, 1, row));
  const i64 target = column_of(given, p.ignore_index, p.vocab);
  const T* x = row_at<const T>(p.logits, p.rows, 0, row);
  T* out = row_at<T>(p.dlogits, p.rows, 3, row);
  const Formula f{p.softcap, p.smoothing, p.z_loss};
  const float dloss = p.by_row ? *row_at<const float>(p.dloss, p.dloss_rows, 0, row) : *(const float*)p.dloss;
  const float factor = p.is_mean ? dloss / *(const float*)p.count : dloss;
  const Slope slope(f, *row_at<const float>(p.lse, p.rows, 2, row), factor, p.vocab);
  for (i64 first = (i64)threadIdx.x * V; first < p.vocab; first += (i64)kThreads * V * kItems) {
    Chunk<T> chunks[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      const int count = target < 0 ? 0 : (int)max((i64)0, min((i64)V, p.vocab - at));
      load_chunk<VECTOR>(chunks[i], x, at, p.step, count, from_f32<T>(0.0f));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      float values[V];
      unpack(values, chunks[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = slope.of<CAPPED>(f, values[j], at + j == target);
        values[j] = target >= 0 ? d : target == -1 ? 0.0f : no_number();
      }
      pack(chunks[i], values);
      store_chunk<VECTOR>(out, at, p.out_step, (int)max((i64)0, min((i64)V, p.vocab - at)), chunks[i]);
    }
  }
}
