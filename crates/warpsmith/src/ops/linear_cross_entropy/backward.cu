// A gradient of the sum of losses, times what makes it that of the loss.
//
// Threads to data: 2^lane_bits neighbouring threads have a row, and take its chunks of 16 bytes in turn; each is read before it
// is written, which may be in place.
//
// Defines: ELEM; VECTOR, whether rows of both tensors are dense, aligned and whole chunks.

#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>, kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
linear_cross_entropy_backward(const LinearCrossEntropyBackwardParams p) {
  begin_kernel();
  const Lines<kThreads> lines{p.lane_bits};
  const i64 row = (i64)blockIdx.x * lines.count() + lines.line();
  if (row >= p.num_rows) return;
  const float dloss = *(const float*)p.dloss, count = *(const float*)p.count;
  const float factor = !p.is_mean ? dloss : count == 0.0f ? 0.0f : dloss / count;
  const T* from = row_at<const T>(p.from, p.rows, 0, row);
  T* to = row_at<T>(p.to, p.rows, 1, row);
  for (i64 at = (i64)lines.lane() * V; at < p.hidden; at += (i64)V << p.lane_bits) {
    const int present = (int)min((i64)V, p.hidden - at);
    Chunk<T> chunk;
    load_chunk<VECTOR>(chunk, from, at, p.from_step, present, from_f32<T>(0.0f));
    float values[V];
    unpack(values, chunk);
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] *= factor;
    pack(chunk, values);
    store_chunk<VECTOR>(to, at, p.to_step, present, chunk);
  }
}
