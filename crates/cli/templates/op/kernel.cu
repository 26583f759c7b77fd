// out = x * alpha, element by element.
//
// Threads to data: the elements, in row-major order, are cut into 16-byte chunks; thread t of block b owns chunks
// (b * ITEMS + i) * THREADS + t for i below ITEMS, so that neighbours touch neighbouring memory and every thread has
// ITEMS loads in flight.
//
// Defines: ELEM (element type), THREADS (of a block), ITEMS (chunks a thread), VECTOR (x and out are dense, 16-byte
// aligned and whole chunks).

#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using T = ELEM;
constexpr int V = kVec<T>;

extern "C" __global__ void __launch_bounds__(THREADS) new_op(const NewOpParams p) {
  const T *x = (const T*)p.x;
  T *out = (T*)p.out;
  const T zero = from_f32<T>(0.0f);
  const i64 first = (i64)blockIdx.x * (ITEMS * THREADS) + threadIdx.x;

  Chunk<T> chunks[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = (first + i * THREADS) * V;
    if (VECTOR) {
      load_chunk<true>(chunks[i], x, at, 1, at < p.count ? V : 0, zero);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        chunks[i].items[j] = at + j < p.count ? x[row_offset(p.elements, 0, at + j)] : zero;
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = (first + i * THREADS) * V;
    float a[V];
    unpack(a, chunks[i]);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] *= p.alpha;
    pack(chunks[i], a);
    if (VECTOR) {
      store_chunk<true>(out, at, 1, at < p.count ? V : 0, chunks[i]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (at + j < p.count) out[row_offset(p.elements, 1, at + j)] = chunks[i].items[j];
    }
  }
}
