// The gradients of rows of a student's logits.
//
// Threads to data: a block has a row. Its threads take chunks of 16 bytes in turn, neighbours neighbouring ones; each is read
// before its gradient is written, which may be in its place.
//
// Defines: ELEM, the type of logits; VECTOR, whether rows of all three tensors are dense, aligned and whole chunks; REVERSE,
// whether the student's distribution weighs.

#include "warpsmith/kl_div.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;
using namespace warpsmith::kl_div;

using T = ELEM;
constexpr int V = kVec<T>, kThreads = 512, kItems = VECTOR ? 2 : 1;

extern "C" __global__ void __launch_bounds__(kThreads) kl_div_backward(const KlDivBackwardParams p) {
  begin_kernel();
  const i64 row = blockIdx.x;
  const bool counts = !p.targets || load_integer(p.targets, p.wide_targets, row_offset(p.rows, 3, row)) != p.ignore_index;
  const T* x = row_at<const T>(p.student, p.rows, 0, row);
  const T* y = row_at<const T>(p.teacher, p.rows, 1, row);
  T* out = row_at<T>(p.dstudent, p.rows, 2, row);
  const float given = p.by_row ? *row_at<const float>(p.dloss, p.values, 3, row) : *(const float*)p.dloss;
  const float dloss = p.is_mean ? given / *(const float*)p.count : given;
  const Slope<REVERSE> slope(*row_at<const float>(p.lse, p.values, 0, row), *row_at<const float>(p.teacher_lse, p.values, 1, row),
                             *row_at<const float>(p.row_losses, p.values, 2, row), p.inverse, dloss);
  for (i64 first = (i64)threadIdx.x * V; first < p.vocab; first += (i64)kThreads * V * kItems) {
    Chunk<T> of_x[kItems], of_y[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      const int present = counts ? (int)max((i64)0, min((i64)V, p.vocab - at)) : 0;
      load_chunk<VECTOR>(of_x[i], x, at, p.step, present, from_f32<T>(0.0f));
      load_chunk<VECTOR>(of_y[i], y, at, p.teacher_step, present, from_f32<T>(0.0f));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const i64 at = first + (i64)i * kThreads * V;
      float a[V], b[V];
      unpack(a, of_x[i]);
      unpack(b, of_y[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) a[j] = counts ? slope.of(a[j], b[j]) : 0.0f;
      pack(of_x[i], a);
      store_chunk<VECTOR>(out, at, p.out_step, (int)max((i64)0, min((i64)V, p.vocab - at)), of_x[i]);
    }
  }
}
