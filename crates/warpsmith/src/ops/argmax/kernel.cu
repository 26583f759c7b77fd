// out[i] = the place of the largest x[i, :], the lowest of equal ones; NaN is below all numbers.
//
// An element and its index are one number of 64 bits: in the upper half bits whose unsigned order is that of the
// numbers, with zero for NaN; in the lower half the index with its bits flipped, so that of equal elements the first
// is the largest. The largest of these numbers is the result, in whatever order they are compared.
//
// Threads to data: block b has piece b % pieces of row b / pieces. Its threads take chunks of 16 bytes in turn,
// neighbours neighbouring ones. The second launch has a warp for each row, whose lanes take the pieces in turn.
//
// Defines: ELEM (element type), VECTOR (rows are dense, 16-byte aligned and a multiple of 16 bytes long).

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr int kThreads = 256;

WS_INLINE u64 key(float x, u32 index) {
  // Zeros of either sign are equal.
  const u32 bits = float_bits(x + 0.0f);
  const u32 ordered = x != x ? 0u : bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
  return (u64)ordered << 32 | ~index;
}

struct Largest {
  static WS_INLINE u64 join(u64 a, u64 b) { return a > b ? a : b; }
};

WS_INLINE void store_place(const ArgmaxParams& p, i64 row, u64 best) {
  const u32 index = ~(u32)best;
  const i64 at = row_offset(p.rows, 1, row);
  if (p.wide_out)
    ((i64*)p.out)[at] = index;
  else
    ((i32*)p.out)[at] = (i32)index;
}

extern "C" __global__ void __launch_bounds__(kThreads) argmax(const ArgmaxParams p) {
  begin_kernel();
  __shared__ u64 scratch[kThreads / 32];
  const u32 row = blockIdx.x / p.pieces, piece = blockIdx.x - row * p.pieces;
  const T* x = row_at<const T>(p.x, p.rows, 0, row);
  const i64 first = piece * p.piece, end = min(first + p.piece, p.n);
  // Below every element's number.
  u64 best = 0;
#pragma unroll 2
  for (i64 at = first + threadIdx.x * V; at < end; at += kThreads * V) {
    Chunk<T> chunk;
    const int count = (int)min((i64)V, end - at);
    load_chunk<VECTOR>(chunk, x, at, p.step, count, from_f32<T>(0.0f));
    float a[V];
    unpack(a, chunk);
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (VECTOR || j < count) best = Largest::join(best, key(a[j], (u32)(at + j)));
  }
  best = warp_reduce<Largest>(best);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = warp_reduce<Largest, kThreads / 32>(scratch[threadIdx.x % (kThreads / 32)]);
  if (threadIdx.x > 0) return;
  if (p.pieces == 1)
    store_place(p, row, best);
  else
    ((u64*)p.found)[blockIdx.x] = best;
}

extern "C" __global__ void __launch_bounds__(kThreads) argmax_join(const ArgmaxParams p) {
  begin_kernel();
  const u32 row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (row >= p.num_rows) return;
  u64 best = 0;
  for (u32 piece = threadIdx.x % 32; piece < p.pieces; piece += 32)
    best = Largest::join(best, ((const u64*)p.found)[(i64)row * p.pieces + piece]);
  best = warp_reduce<Largest>(best);
  if (threadIdx.x % 32 == 0) store_place(p, row, best);
}
