// out = x - mean(x), row by row.
//
// Threads to data: block b has row b. Its threads take 16-byte chunks of the row in turn, neighbours neighbouring ones,
// and read the row twice: once for the sum and once, mostly from L2, for the result.
//
// Defines: ELEM (element type), THREADS (per block), VECTOR (rows are dense, 16-byte aligned and a multiple of 16 bytes
// long).

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;

extern "C" __global__ void __launch_bounds__(THREADS) new_op(const NewOpParams p) {
  begin_kernel();
  __shared__ float scratch[THREADS / 32];
  const T* x = row_at<const T>(p.x, p.rows, 0, blockIdx.x);
  T* out = row_at<T>(p.out, p.rows, 1, blockIdx.x);
  const T zero = from_f32<T>(0.0f);
  float sum[1] = {0.0f};
  for (i64 at = (i64)threadIdx.x * V; at < p.hidden; at += THREADS * V) {
    Chunk<T> chunk;
    load_chunk<VECTOR>(chunk, x, at, p.x_step, (int)min((i64)V, p.hidden - at), zero);
    float a[V];
    unpack(a, chunk);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[0] += a[j];
  }
  block_reduce<Sum, THREADS>(sum, scratch);
  const float mean = sum[0] / (float)p.hidden;
  for (i64 at = (i64)threadIdx.x * V; at < p.hidden; at += THREADS * V) {
    const int count = (int)min((i64)V, p.hidden - at);
    Chunk<T> chunk;
    load_chunk<VECTOR>(chunk, x, at, p.x_step, count, zero);
    float a[V];
    unpack(a, chunk);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] -= mean;
    pack(chunk, a);
    store_chunk<VECTOR>(out, at, p.out_step, count, chunk);
  }
}
