// out = x * alpha, element by element.
//
// Threads to data: the elements, in row-major order, are cut into 16-byte chunks; thread t of block b owns chunks
// (b * ITEMS + i) * THREADS + t for i below ITEMS, so that neighbours touch neighbouring memory and every thread has
// ITEMS loads in flight.
//
// Defines: ELEM (element type), THREADS (per block), ITEMS (chunks per thread), VECTOR (x and out are dense, 16-byte
// aligned and a multiple of 16 bytes long).

#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;

// Elements of chunk `index`, one by one: for any strides, and for what is left at the end.
WS_INLINE void by_element(const NewOpParams& p, i64 index) {
  // Not unrolled: the offsets of many elements would not fit in registers.
#pragma unroll 1
  for (i64 at = index * V; at < min((index + 1) * V, p.count); ++at) {
    const T x = ((const T*)p.x)[row_offset(p.elements, 0, at)];
    ((T*)p.out)[row_offset(p.elements, 1, at)] = from_f32<T>(to_f32(x) * p.alpha);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) new_op(const NewOpParams p) {
  begin_kernel();
  const i64 first = (i64)blockIdx.x * (ITEMS * THREADS) + threadIdx.x;
  if (!VECTOR) {
    for (int i = 0; i < ITEMS; ++i) by_element(p, first + i * THREADS);
    return;
  }
  const T zero = from_f32<T>(0.0f);
  Chunk<T> chunks[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = (first + i * THREADS) * V;
    load_chunk<true>(chunks[i], (const T*)p.x, at, 1, at < p.count ? V : 0, zero);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = (first + i * THREADS) * V;
    float a[V];
    unpack(a, chunks[i]);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] *= p.alpha;
    pack(chunks[i], a);
    store_chunk<true>((T*)p.out, at, 1, at < p.count ? V : 0, chunks[i]);
  }
}
