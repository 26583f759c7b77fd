// out = exp(t - max(t)) / sum(exp(t - max(t))) with t = scale x, over rows.
//
// The scale comes as a sign and a magnitude. With the sign applied first, the row's largest element is the pivot, and
// exp(t - max) = 2^((sign x - pivot) magnitude log2(e)): the argument is exact up to two roundings relative to itself.
// The pivot is never below the lowest finite number: with a pivot of -inf, a thread or a part of the row that holds
// nothing larger would compute NaN. The maximum ignores NaN, which the sum then propagates. The sum over a row that is
// all -inf is zero, which makes the row NaN.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... Where no vector divides the row, the lanes of a warp share its chunks out differently: spread.cuh. The
// mapping depends only on the row length, never on alignment or the number of rows, so a row has the
// same bits in any batch.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (rows a block has side by side), BATCH (how often), ITEMS
// (chunks of a row that a thread has in flight), VECTOR (kAny, kAligned, kExact, kDense, kSpread or kSpreadAny), STAGES (of dense rows in
// shared memory), LONG (1: the kernel for rows of any length; 0: the one that keeps a row in registers).

#include "warpsmith/dense.cuh"
#include "warpsmith/group.cuh"
#include "warpsmith/math.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/shared_row.cuh"
#include "warpsmith/spread.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr bool kWhole = is_whole_chunks(VECTOR);

// Whether a thread has work with a chunk of `count` elements. Lanes of dense rows work together, so all of them have.
WS_INLINE bool takes_part(int count) { return VECTOR == kExact || VECTOR == kDense || count > 0; }

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
    if (j < (kWhole ? V : count)) pivot = fmaxf(pivot, a[j] * sign);
  return pivot;
}

// Powers of the elements of a chunk, zero past the end of the row; returns their sum.
WS_INLINE float powers(float (&e)[V], const Chunk<T>& c, const SoftmaxParams& p, float pivot, int count) {
  float sum = 0.0f;
  unpack_words(e, c);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float power_j = power(fmaf(e[j], p.sign, -pivot), p.magnitude);
    e[j] = j < (kWhole ? V : count) ? power_j : 0.0f;
    sum += e[j];
  }
  return sum;
}

WS_INLINE void scale_chunk(Chunk<T>& c, float (&e)[V], float inverse) {
#pragma unroll
  for (int j = 0; j < V; ++j) e[j] *= inverse;
  pack(c, e);
}

#if !LONG

constexpr int kWarps = LANES < 32 ? 1 : LANES / 32;
constexpr int kWidth = LANES < 32 ? LANES : 32;

// Each warp used a pivot of its own. What its powers `e` must be multiplied with, from its pivot and sum and, if there are
// several, from what all of them left.
WS_INLINE float join_warps(float (&e)[ITEMS][V], float pivot, float total, const float (&pivots)[kWarps],
                           const float (&sums)[kWarps], float magnitude) {
  if (kWarps == 1) return 1.0f / total;
  const float theirs = pivots[threadIdx.x % kWarps];
  const float highest = warp_reduce<Pivot, kWarps>(theirs);
  const float sum = sums[threadIdx.x % kWarps] * exp2_approx((theirs - highest) * magnitude);
  float all = warp_reduce<Sum, kWarps>(sum);
  const float below = (pivot - highest) * magnitude;
  // For a warp far below the highest, the factor of the powers would leave nothing of their product with the sum's inverse.
  if (sizeof(T) == 2 && below < -32.0f) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
      for (int j = 0; j < V; ++j) e[i][j] *= 0x1p-64f;
    all *= 0x1p-64f;
  }
  return exp2_approx(below) / all;
}

#if VECTOR == 3

// Dense rows that begin anywhere, by way of shared memory. A block has rows every gridDim.x * ROWS apart. With STAGES
// of two, the next is being copied meanwhile.
using Staged = SharedRow<T, LANES * ITEMS>;

extern "C" __global__ void __launch_bounds__(LANES * ROWS, staged_blocks(LANES * ROWS, ITEMS))
    softmax_row(const SoftmaxParams p) {
  __shared__ float scratch[2][ROWS][kWarps];
  extern __shared__ __align__(16) u8 memory[];
  const RowsOfThread<LANES, ROWS> own;
  const int lane = own.lane;
  Staged* const staged = (Staged*)memory + own.place;
  const i64 step = (i64)gridDim.x * ROWS;
  // Rows that share a warp go on together as long as the first of them exists. A row past the last is the last one
  // again, and is not stored.
  const i64 ahead = own.place % (32 / kWidth);
  const auto x_row = [&](i64 index) { return row_at<const T>(p.x, p.rows, 0, min(index, p.num_rows - 1)); };
  const T* x = x_row(own.index);
  const auto prefetch_row = [&]() {
#pragma unroll 1
    for (int k = lane * V; k < p.hidden; k += LANES * V) prefetch_chunk(x + k, p.is_large);
  };
  if ((int)blockIdx.x < p.blocks_ahead) prefetch_row();
  begin_kernel();
  const auto copy_row = [&](Staged* to) {
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i) to->copy(i * LANES + lane, i * LANES + lane, x, p.hidden);
    commit_copies();
  };
  if (own.index - ahead < p.num_rows) copy_row(staged);

  int stage = 0;
  for (i64 index = own.index; index - ahead < p.num_rows; index += step) {
    wait_copies<0>();
    meet<kWarps>();
    Staged* const at = staged + stage * ROWS;
    const bool goes_on = index - ahead + step < p.num_rows;
    const int shift = row_shift(x);
    if (goes_on) x = x_row(index + step);
    // The other stage is free: all have come past the barrier. With one stage, the next row gets as far as L2.
    if (STAGES == 2 && goes_on) copy_row(staged + (stage ^= 1) * ROWS);
    if (STAGES == 1 && goes_on) prefetch_row();
    Chunk<T> row[ITEMS];
    float pivot = kLowest, total = 0.0f, e[ITEMS][V];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      at->get(row[i], i * LANES + lane, shift);
      pivot = raise_pivot(pivot, row[i], p.sign, p.hidden - (i * LANES + lane) * V);
    }
    pivot = warp_reduce<Pivot, kWidth>(pivot);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) total += powers(e[i], row[i], p, pivot, p.hidden - (i * LANES + lane) * V);
    total = warp_reduce<Sum, kWidth>(total);
    if (kWarps > 1 && lane % 32 == 0) {
      scratch[0][own.place][lane / 32] = pivot;
      scratch[1][own.place][lane / 32] = total;
    }
    meet<kWarps>();
    const float inverse = join_warps(e, pivot, total, scratch[0][own.place], scratch[1][own.place], p.magnitude);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      scale_chunk(row[i], e[i], inverse);
      at->leave(i * LANES + lane, row[i]);
    }
    meet<kWarps>();
    if (index < p.num_rows) {
      T* out = row_at<T>(p.out, p.rows, 1, index);
#pragma unroll 1
      for (int i = 0; i < ITEMS; ++i) at->store(i * LANES + lane, i * LANES + lane, out, p.hidden);
    }
    if (STAGES == 1 && goes_on) {
      meet<kWarps>();
      copy_row(staged);
    }
  }
}

#else

// A row in registers: memory is read once, and each power is computed once. With BATCH, the loads of several rows are in
// flight at once, and their warps meet at one barrier. A row past the last is the last one again, and is not stored.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) softmax_row(const SoftmaxParams p) {
  __shared__ float scratch[BATCH][2][ROWS][kWarps];
  const RowsOfThread<LANES, ROWS, BATCH> own;
  const int lane = own.lane;
  const auto exists = [&](int b) { return ROWS * BATCH == 1 || own.index + b * ROWS < p.num_rows; };
  const auto x_row = [&](int b) {
    const i64 index = own.index + b * ROWS;
    return row_at<const T>(p.x, p.rows, 0, exists(b) ? index : p.num_rows - 1);
  };
  if (VECTOR && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const T* x = x_row(b);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        if (VECTOR == kExact || (i * LANES + lane) * V < p.hidden) prefetch_chunk(x + (i * LANES + lane) * V, p.is_large);
    }
  }
  begin_kernel();
  const u64 policy = load_policy(p.is_large);

  Chunk<T> row[BATCH][ITEMS];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const T* x = x_row(b);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      get_part<VECTOR, kWidth>(row[b][i], x, (i * LANES + lane) * V, p.x_step, p.hidden, policy);
  }
  float pivot[BATCH], total[BATCH], e[BATCH][ITEMS][V];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    pivot[b] = kLowest;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int count = part_count<VECTOR, kWidth, T>((i * LANES + lane) * V, p.hidden);
      if (takes_part(count)) pivot[b] = raise_pivot(pivot[b], row[b][i], p.sign, count);
    }
    pivot[b] = warp_reduce<Pivot, kWidth>(pivot[b]);
    total[b] = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int count = part_count<VECTOR, kWidth, T>((i * LANES + lane) * V, p.hidden);
      if (takes_part(count)) total[b] += powers(e[b][i], row[b][i], p, pivot[b], count);
    }
    total[b] = warp_reduce<Sum, kWidth>(total[b]);
  }

  // Each warp used a pivot of its own; one barrier joins them.
  if (kWarps > 1) {
    if (lane % 32 == 0) {
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        scratch[b][0][own.place][lane / 32] = pivot[b];
        scratch[b][1][own.place][lane / 32] = total[b];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const float inverse =
        join_warps(e[b], pivot[b], total[b], scratch[b][0][own.place], scratch[b][1][own.place], p.magnitude);
    T* out = row_at<T>(p.out, p.rows, 1, own.index + b * ROWS);
    if (!exists(b)) continue;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * LANES + lane) * V;
      if (!takes_part(part_count<VECTOR, kWidth, T>(k, p.hidden))) continue;
      scale_chunk(row[b][i], e[b][i], inverse);
      put_part<VECTOR, kWidth>(out, k, p.out_step, p.hidden, row[b][i]);
    }
  }
}

#endif

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
  const u64 policy = load_policy(false);
  constexpr bool is_arranged = VECTOR >= kDense;

  float pivot[1] = {kLowest}, total[1] = {0.0f};
  for (int g = 0; g < groups; ++g) {
    const int first = g * ITEMS * kChunk + threadIdx.x * V;
    Chunk<T> row[ITEMS];
    u32 edge[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk;
      if (is_arranged) begin_part<VECTOR, 32>(row[i], edge[i], x, k, p.x_step, p.hidden, policy);
      else load_chunk_l2<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k));
    }
    float higher = pivot[0];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk, count = part_count<VECTOR, 32, T>(k, p.hidden);
      end_part<VECTOR, 32>(row[i], edge[i], x, k, p.hidden);
      if (g * ITEMS + i < p.cached) cache[(g * ITEMS + i) * LANES] = row[i];
      if (count > 0) higher = raise_pivot(higher, row[i], p.sign, count);
    }
    total[0] *= exp2_approx((pivot[0] - higher) * p.magnitude);
    pivot[0] = higher;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int count = part_count<VECTOR, 32, T>(first + i * kChunk, p.hidden);
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
    u32 edge[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk;
      if (g * ITEMS + i < p.cached) {
        row[i] = cache[(g * ITEMS + i) * LANES];
      } else if (is_arranged) {
        begin_part<VECTOR, 32>(row[i], edge[i], x, k, p.x_step, p.hidden, policy);
      } else {
        load_chunk<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k), from_f32<T>(0.0f));
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = first + i * kChunk, count = part_count<VECTOR, 32, T>(k, p.hidden);
      float e[V];
      if (g * ITEMS + i >= p.cached) end_part<VECTOR, 32>(row[i], edge[i], x, k, p.hidden);
      if (!takes_part(count)) continue;
      powers(e, row[i], p, pivot[0], count);
      scale_chunk(row[i], e, inverse);
      put_part<VECTOR, 32>(out, k, p.out_step, p.hidden, row[i]);
    }
  }
}

#endif
