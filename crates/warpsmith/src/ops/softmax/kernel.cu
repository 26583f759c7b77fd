// out = exp(t - max(t)) / sum(exp(t - max(t))) with t = scale x, over rows.
//
// The scale comes as a sign and a magnitude. With the sign applied first, the row's largest element is the pivot, and
// exp(t - max) = 2^((sign x - pivot) magnitude log2(e)): the argument is exact up to two roundings relative to itself.
// The pivot is never below the lowest finite number: with a pivot of -inf, a thread or a part of the row that holds
// nothing larger would compute NaN. The maximum ignores NaN, which the sum then propagates. The sum over a row that is
// all -inf is zero, which makes the row NaN.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... The mapping depends only on the row length, never on alignment or the number of rows, so a row has the
// same bits in any batch.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (rows a block), ITEMS (chunks a thread has in flight),
// VECTOR (kAny, kAligned or kExact), LONG (1: the kernel for rows of any length; 0: the one that keeps a row in
// registers).

#include "warpsmith/group.cuh"
#include "warpsmith/l2.cuh"
#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr float kLowest = -3.402823466e38f;

struct Pivot {
  static WS_INLINE float identity() { return kLowest; }
  static WS_INLINE float join(float a, float b) { return fmaxf(a, b); }
};

// 2^(x magnitude), up to a factor that is the same for all elements. In f32 subnormal results can still matter. For
// 16-bit results the factor is 2^64: it keeps whatever can matter normal, so that the flushed power, a single
// instruction, is enough. The rounding of the sum would be too large an error for f32.
WS_INLINE float power(float x, float magnitude) {
  if (sizeof(T) == 4) return exp2_approx(x * magnitude);
  return exp2_flushed(fmaf(x, magnitude, 64.0f));
}

// The largest of `pivot` and the elements of a chunk, of which `count` are in the row.
WS_INLINE float raise_pivot(float pivot, const Chunk<T>& c, float sign, int count) {
  float a[V];
  unpack_words(a, c);
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (j < (VECTOR ? V : count)) pivot = fmaxf(pivot, a[j] * sign);
  return pivot;
}

// Powers of the elements of a chunk, zero past the end of the row; returns their sum.
WS_INLINE float powers(float (&e)[V], const Chunk<T>& c, const SoftmaxParams& p, float pivot, int count) {
  float sum = 0.0f;
  unpack_words(e, c);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float power_j = power(fmaf(e[j], p.sign, -pivot), p.magnitude);
    e[j] = j < (VECTOR ? V : count) ? power_j : 0.0f;
    sum += e[j];
  }
  return sum;
}

WS_INLINE void store_scaled(T* row, int k, i64 step, int count, float (&e)[V], float inverse) {
  Chunk<T> c;
#pragma unroll
  for (int j = 0; j < V; ++j) e[j] *= inverse;
  pack(c, e);
  store_chunk<VECTOR>(row, k, step, count, c);
}

#if !LONG

// A row in registers: memory is read once, and each power is computed once.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) softmax_row(const SoftmaxParams p) {
  __shared__ float scratch[2][LANES / 32];
  const ThreadRow<LANES, ROWS> own;
  const int lane = own.lane;
  const i64 index = own.index;
  const bool exists = ROWS == 1 || index < p.num_rows;
  const T* x = row_at<const T>(p.x, p.rows, 0, index);
  if (VECTOR && exists && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (VECTOR == kExact || (i * LANES + lane) * V < p.hidden) prefetch_chunk(x + (i * LANES + lane) * V, p.is_large);
  }
  begin_kernel();
  if (!exists) return;
  const u64 policy = load_policy(p.is_large);
  T* out = row_at<T>(p.out, p.rows, 1, index);

  Chunk<T> row[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    load_chunk<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k), from_f32<T>(0.0f), policy);
  }
  float pivot = kLowest;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int count = p.hidden - (i * LANES + lane) * V;
    if (VECTOR == kExact || count > 0) pivot = raise_pivot(pivot, row[i], p.sign, count);
  }
  pivot = warp_reduce<Pivot>(pivot);

  float e[ITEMS][V], total = 0.0f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int count = p.hidden - (i * LANES + lane) * V;
    if (VECTOR == kExact || count > 0) total += powers(e[i], row[i], p, pivot, count);
  }
  total = warp_reduce<Sum>(total);
  float inverse = 1.0f / total;

  // Each warp used a pivot of its own; one barrier joins them.
  constexpr int kWarps = LANES / 32;
  if (kWarps > 1) {
    if (lane % 32 == 0) {
      scratch[0][lane / 32] = pivot;
      scratch[1][lane / 32] = total;
    }
    __syncthreads();
    const float theirs = scratch[0][lane % kWarps];
    const float highest = warp_reduce<Pivot, kWarps>(theirs);
    total = warp_reduce<Sum, kWarps>(scratch[1][lane % kWarps] * exp2_approx((theirs - highest) * p.magnitude));
    inverse = exp2_approx((pivot - highest) * p.magnitude) / total;
  }

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
    if (VECTOR == kExact || count > 0) store_scaled(out, k, p.out_step, count, e[i], inverse);
  }
}

#else

// A row of any length, in two passes: forwards for the sum, which each thread scales down whenever its pivot rises; then
// backwards for the result, so that what was read last, and is still in L2, is read first. The first p.cached chunks of
// each thread stay in shared memory and are not read again at all.
extern "C" __global__ void __launch_bounds__(LANES, 1) softmax_long(const SoftmaxParams p) {
  begin_kernel();
  __shared__ float scratch[2][LANES / 32];
  extern __shared__ __align__(16) u8 shared[];
  Chunk<T>* cache = (Chunk<T>*)shared + threadIdx.x;
  const T* x = row_at<const T>(p.x, p.rows, 0, blockIdx.x);
  T* out = row_at<T>(p.out, p.rows, 1, blockIdx.x);
  constexpr int kChunk = LANES * V;
  const int groups = (p.hidden + ITEMS * kChunk - 1) / (ITEMS * kChunk);

  float pivot[1] = {kLowest}, total[1] = {0.0f};
  for (int g = 0; g < groups; ++g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> row[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk;
      load_chunk_l2<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k));
    }
    float higher = pivot[0];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int count = p.hidden - (first + i * kChunk);
      if (g * ITEMS + i < p.cached) cache[(g * ITEMS + i) * LANES] = row[i];
      if (count > 0) higher = raise_pivot(higher, row[i], p.sign, count);
    }
    total[0] *= exp2_approx((pivot[0] - higher) * p.magnitude);
    pivot[0] = higher;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int count = p.hidden - (first + i * kChunk);
      float e[V];
      if (count > 0) total[0] += powers(e, row[i], p, higher, count);
    }
  }
  const float own = pivot[0];
  block_reduce<Pivot, LANES>(pivot, scratch[0]);
  total[0] *= exp2_approx((own - pivot[0]) * p.magnitude);
  block_reduce<Sum, LANES>(total, scratch[1]);
  const float inverse = 1.0f / total[0];

  for (int g = groups - 1; g >= 0; --g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> row[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk;
      if (g * ITEMS + i < p.cached) {
        row[i] = cache[(g * ITEMS + i) * LANES];
      } else {
        load_chunk<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k), from_f32<T>(0.0f));
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = first + i * kChunk, count = min(V, p.hidden - k);
      float e[V];
      if (count > 0) {
        powers(e, row[i], p, pivot[0], count);
        store_scaled(out, k, p.out_step, count, e, inverse);
      }
    }
  }
}

#endif
