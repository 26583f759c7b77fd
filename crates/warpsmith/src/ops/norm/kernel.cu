// s = x + residual; out = (s - mean(s)) / sqrt(var + eps) * weight + bias. With CENTER this is layer_norm; without, the
// mean counts as zero, and this is rms_norm. Weight and bias may be null.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... Where no vector divides the row, the lanes of a warp share its chunks out differently: spread.cuh. The
// mapping depends only on the row length, never on alignment or the number of rows, so a row has the same bits in any
// batch.
//
// With CENTER each warp computes the mean of its own elements and the squares around that mean, without waiting for the
// other warps; the block then joins the warps' moments, with a single barrier for both.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (rows a block has side by side), BATCH (how often), ITEMS
// (chunks of a row that a thread has), VECTOR (kAny, kAligned, kExact, kDense, kSpread or kSpreadAny), CENTER, HAS_RESIDUAL,
// PREFETCH (weight and bias are loaded with the row), STAGES (of dense rows in shared memory), APART (rows are dense, but
// neighbours of weight and bias may be apart).

#include "warpsmith/dense.cuh"
#include "warpsmith/group.cuh"
#include "warpsmith/norm.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/shared_row.cuh"
#include "warpsmith/spread.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr int kWarps = LANES < 32 ? 1 : LANES / 32;
constexpr int kWidth = LANES < 32 ? LANES : 32;

// s for one chunk, rounded as it is stored: the result is the same as with a separate addition.
WS_INLINE void add_residual(Chunk<T>& c, const Chunk<T>& residual) {
  float a[V], b[V];
  unpack_words(a, c);
  unpack_words(b, residual);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] += b[j];
  pack(c, a);
}

// Adds the squares of a chunk's elements around `mean` to `sum`; elements past the end of the row do not count.
WS_INLINE float squares(const Chunk<T>& c, float mean, int count, float sum) {
  float a[V];
  unpack_words(a, c);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    float d = !CENTER ? a[j] : VECTOR == kExact || j < count ? a[j] - mean : 0.0f;
    sum = fmaf(d, d, sum);
  }
  return sum;
}

// How many of the row's elements belong to a warp, at least one.
WS_INLINE float warp_elements(int warp, int hidden) {
  if (VECTOR == kExact) return (float)(kWidth * V * ITEMS);
  if (kWarps == 1) return (float)hidden;
  int n = 0;
  for (int first = warp * 32 * V; first < hidden; first += LANES * V) n += min(32 * V, hidden - first);
  return (float)max(n, 1);
}

// The mean of a warp's own elements, whose sum over the warp is `total`.
WS_INLINE float warp_mean(float total, int warp, int hidden) { return total / warp_elements(warp, hidden); }

struct Moments {
  float mean, variance;
};
// Joins the warps' sums: of their elements (zero unless CENTER), and of the squares around their own means. The first
// half leaves them in `scratch`, the second half, after a barrier, finds them there.
WS_INLINE void leave_sums(float total, float square, float (&scratch)[2][kWarps], int lane) {
  if (lane % 32 != 0) return;
  if (CENTER) scratch[0][lane / 32] = total;
  scratch[1][lane / 32] = square;
}
WS_INLINE Moments join_warps(float total, float square, const float (&scratch)[2][kWarps], int hidden) {
  const float n = (float)hidden;
  if (kWarps == 1) return {CENTER ? total / n : 0.0f, square / n};
  const int warp = threadIdx.x % kWarps;
  if (!CENTER) return {0.0f, warp_reduce<Sum, kWarps>(scratch[1][warp]) / n};
  total = scratch[0][warp];
  const float mean = warp_reduce<Sum, kWarps>(total) / n;
  const float elements = warp_elements(warp, hidden), off = total / elements - mean;
  return {mean, warp_reduce<Sum, kWarps>(fmaf(elements * off, off, scratch[1][warp])) / n};
}

// What is known about weight and bias.
constexpr int kWeights = !APART ? VECTOR : is_spread(VECTOR) ? kSpreadAny : kAny;

struct Affine {
  Chunk<T> weight, bias;
  WS_INLINE void load(const NormParams& p, int at) {
    if (p.weight) load_vector(weight, (const T*)p.weight, p.weight_step, at, p.hidden);
    if (CENTER && p.bias) load_vector(bias, (const T*)p.bias, p.bias_step, at, p.hidden);
  }
  WS_INLINE static void load_vector(Chunk<T>& c, const T* vector, i64 step, int at, int hidden) {
    if constexpr (kWeights >= kDense) get_part<kWeights, kWidth>(c, vector, at, step, hidden, load_policy(false));
    else load_chunk_unfilled<kWeights>(c, vector, at, step, min(V, hidden - at));
  }
};

WS_INLINE void normalise(Chunk<T>& c, const NormParams& p, const Affine& affine, const Moments& m, float scale) {
  float a[V], b[V];
  unpack_words(a, c);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = (CENTER ? a[j] - m.mean : a[j]) * scale;
  if (CENTER && p.weight && p.bias) {
    float d[V];
    unpack_words(b, affine.weight);
    unpack_words(d, affine.bias);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = fmaf(a[j], b[j], d[j]);
  } else if (p.weight) {
    unpack_words(b, affine.weight);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] *= b[j];
  } else if (CENTER && p.bias) {
    unpack_words(b, affine.bias);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] += b[j];
  }
  pack(c, a);
}

WS_INLINE float add_elements(const Chunk<T>& c, float total) {
  float a[V];
  unpack_words(a, c);
#pragma unroll
  for (int j = 0; j < V; ++j) total += a[j];
  return total;
}

#if VECTOR == 3

// Dense rows that begin anywhere, by way of shared memory. A block has rows every gridDim.x * ROWS apart. With STAGES
// of two, the next is being copied meanwhile.
constexpr int kChunks = LANES * ITEMS;
using Staged = SharedRow<T, kChunks>;
constexpr int kInputs = HAS_RESIDUAL ? 2 : 1;

extern "C" __global__ void __launch_bounds__(LANES * ROWS, staged_blocks(LANES * ROWS, ITEMS)) norm_row(const NormParams p) {
  __shared__ float scratch[ROWS][2][kWarps];
  extern __shared__ __align__(16) u8 memory[];
  const bool has_weight = p.weight != 0, has_bias = CENTER && p.bias != 0;
  const T *weight_row = (const T*)p.weight, *bias_row = (const T*)p.bias;
  // [weight], [bias], then of each stage and row: x, [residual]
  Staged* const weight = (Staged*)memory;
  Staged* const bias = weight + has_weight;
  const RowsOfThread<LANES, ROWS> own;
  const int lane = own.lane;
  Staged* const staged = bias + has_bias + own.place * kInputs;
  // Rows are fewer than 2^31, so that a step more has room.
  const u32 num_rows = (u32)p.num_rows, step = gridDim.x * ROWS;
  // Rows that share a warp go on together as long as the first of them exists. A row past the last is the last one
  // again, and is not stored.
  constexpr int kTogether = 32 / kWidth;
  const u32 ahead = own.place % kTogether;
  const T *x, *residual;
  const auto find_row = [&](u32 index) {
    index = min(index, num_rows - 1);
    x = row_at<const T>(p.x, p.rows, 0, index);
    residual = HAS_RESIDUAL ? row_at<const T>(p.residual, p.rows, 2, index) : nullptr;
  };
  find_row((u32)own.index);
  const auto prefetch_row = [&]() {
#pragma unroll 1
    for (int k = lane * V; k < p.hidden; k += LANES * V) {
      prefetch_chunk(x + k, p.is_large);
      if (HAS_RESIDUAL) prefetch_chunk(residual + k, p.is_large);
    }
  };
  if ((int)blockIdx.x < p.blocks_ahead) prefetch_row();
  if (p.num_rows <= 64) let_next_kernel_start();
  begin_kernel();

  const auto copy_row = [&](Staged* to) {
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i) {
      const int chunk = i * LANES + lane;
      to[0].copy(chunk, chunk, x, p.hidden);
      if (HAS_RESIDUAL) to[kInputs - 1].copy(chunk, chunk, residual, p.hidden);
    }
    commit_copies();
  };
  if (own.place == 0) {
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i) {
      const int chunk = i * LANES + lane;
      if (APART) {
        Affine affine;
        affine.load(p, chunk * V);
        if (has_weight) weight->leave(chunk, affine.weight);
        if (has_bias) bias->leave(chunk, affine.bias);
        continue;
      }
      if (has_weight) weight->copy(chunk, chunk, weight_row, p.hidden);
      if (has_bias) bias->copy(chunk, chunk, bias_row, p.hidden);
    }
  }
  copy_row(staged);
  // Weight and bias are for the other rows of the block too.
  wait_copies<0>();
  __syncthreads();

  int stage = 0;
  for (u32 index = (u32)own.index; index - ahead < num_rows; index += step) {
    Staged* const at = staged + stage * (ROWS * kInputs);
    const bool goes_on = index - ahead + step < num_rows;
    const int x_shift = row_shift(x), residual_shift = row_shift(residual);
    if (goes_on) find_row(index + step);
    // The other stage is free: all have come past the barrier before. With one stage, the next row gets as far as L2.
    if (STAGES == 2 && goes_on) copy_row(staged + (stage ^= 1) * (ROWS * kInputs));
    if (STAGES == 1 && goes_on) prefetch_row();
    Chunk<T> row[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      at[0].get(row[i], i * LANES + lane, x_shift);
      if (HAS_RESIDUAL) {
        Chunk<T> other;
        at[kInputs - 1].get(other, i * LANES + lane, residual_shift);
        add_residual(row[i], other);
      }
    }
    float own_mean = 0.0f, total = 0.0f, square = 0.0f;
    if (CENTER) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) total = add_elements(row[i], total);
      total = warp_reduce<Sum, kWidth>(total);
      own_mean = warp_mean(total, lane / 32, p.hidden);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      // Widened again in each pass: kept, the elements of many chunks would take too many registers.
      if (ITEMS > 2) forget(row[i]);
      square = squares(row[i], own_mean, p.hidden - (i * LANES + lane) * V, square);
      if (ITEMS > 2) forget(row[i]);
    }
    square = warp_reduce<Sum, kWidth>(square);
    if (kWarps > 1) leave_sums(total, square, scratch[own.place], lane);
    meet<kWarps>();
    const Moments moments = join_warps(total, square, scratch[own.place], p.hidden);
    const float scale = inverse_sqrt(moments.variance + p.eps);
    const int weight_shift = APART ? 0 : row_shift(weight_row), bias_shift = APART ? 0 : row_shift(bias_row);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int chunk = i * LANES + lane;
      if (HAS_RESIDUAL) at[0].leave(chunk, row[i]);
      Affine affine;
      if (has_weight) weight->get(affine.weight, chunk, weight_shift);
      if (has_bias) bias->get(affine.bias, chunk, bias_shift);
      normalise(row[i], p, affine, moments, scale);
      at[kInputs - 1].leave(chunk, row[i]);
    }
    meet<kWarps>();
    if (index < num_rows) {
      T* out = row_at<T>(p.out, p.rows, 1, index);
      T* sum = HAS_RESIDUAL ? row_at<T>(p.sum, p.rows, 3, index) : nullptr;
#pragma unroll 1
      for (int i = 0; i < ITEMS; ++i) {
        const int chunk = i * LANES + lane;
        if (HAS_RESIDUAL) at[0].store(chunk, chunk, sum, p.hidden);
        at[kInputs - 1].store(chunk, chunk, out, p.hidden);
      }
    }
    if (!goes_on) return;
    if (STAGES == 1) {
      meet<kWarps>();
      copy_row(staged);
    }
    wait_copies<0>();
    meet<kWarps>();
  }
}

#else

// A row in registers: memory is read once. With BATCH, the loads of several rows are in flight at once, weight and bias
// are loaded once for all of them, and their warps meet at one barrier. A row past the last is the last one again, and
// is not stored.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_row(const NormParams p) {
  __shared__ float scratch[BATCH][ROWS][2][kWarps];
  const RowsOfThread<LANES, ROWS, BATCH> own;
  const int lane = own.lane;
  const auto exists = [&](int b) { return ROWS * BATCH == 1 || own.index + b * ROWS < p.num_rows; };
  const auto existing = [&](int b) { return exists(b) ? own.index + b * ROWS : p.num_rows - 1; };
  const auto x_row = [&](int b) { return row_at<const T>(p.x, p.rows, 0, existing(b)); };
  const auto residual_row = [&](int b) { return row_at<const T>(p.residual, p.rows, 2, existing(b)); };
  if ((int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const T* x = x_row(b);
      const T* residual = HAS_RESIDUAL ? residual_row(b) : nullptr;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int k = (i * LANES + lane) * V;
        if (VECTOR != kExact && k >= p.hidden) break;
        prefetch_chunk(x + k, p.is_large);
        if (HAS_RESIDUAL) prefetch_chunk(residual + k, p.is_large);
      }
    }
  }
  // First if there are few rows, so that what follows can load its weights. The blocks of a large grid would only take
  // places from the rest of this one.
  if (p.num_rows <= 64) let_next_kernel_start();
  begin_kernel();
  const u64 policy = load_policy(p.is_large);

  Chunk<T> row[BATCH][ITEMS], other[BATCH][ITEMS];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const T* x = x_row(b);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      get_part<VECTOR, kWidth>(row[b][i], x, (i * LANES + lane) * V, p.x_step, p.hidden, policy);
  }
  if (HAS_RESIDUAL) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const T* residual = residual_row(b);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        get_part<VECTOR, kWidth>(other[b][i], residual, (i * LANES + lane) * V, p.residual_step, p.hidden, policy);
    }
  }
  Affine affine[PREFETCH ? ITEMS : 1];
  if (PREFETCH) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) affine[i].load(p, (i * LANES + lane) * V);
  }

  float total[BATCH], square[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    if (HAS_RESIDUAL) {
      T* sum = row_at<T>(p.sum, p.rows, 3, existing(b));
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int k = (i * LANES + lane) * V;
        add_residual(row[b][i], other[b][i]);
        if (exists(b)) put_part<VECTOR, kWidth>(sum, k, p.sum_step, p.hidden, row[b][i]);
      }
    }
    float own_mean = 0.0f;
    total[b] = square[b] = 0.0f;
    if (CENTER) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) total[b] = add_elements(row[b][i], total[b]);
      total[b] = warp_reduce<Sum, kWidth>(total[b]);
      own_mean = warp_mean(total[b], lane / 32, p.hidden);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      square[b] = squares(row[b][i], own_mean, part_count<VECTOR, kWidth, T>((i * LANES + lane) * V, p.hidden), square[b]);
    square[b] = warp_reduce<Sum, kWidth>(square[b]);
  }
  if (kWarps > 1) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) leave_sums(total[b], square[b], scratch[b][own.place], lane);
    __syncthreads();
  }
  Moments moments[BATCH];
  float scale[BATCH];
  T* out[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    moments[b] = join_warps(total[b], square[b], scratch[b][own.place], p.hidden);
    scale[b] = inverse_sqrt(moments[b].variance + p.eps);
    out[b] = row_at<T>(p.out, p.rows, 1, existing(b));
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int k = (i * LANES + lane) * V;
    if (!PREFETCH) affine[0].load(p, k);
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      normalise(row[b][i], p, affine[PREFETCH ? i : 0], moments[b], scale[b]);
      if (exists(b)) put_part<VECTOR, kWidth>(out[b], k, p.out_step, p.hidden, row[b][i]);
    }
  }
}

#endif

#if LANES >= 32

// A row of any length, read again for each pass; later passes find most of it in L2. Lanes of dense rows work together, so
// loops are counted by the first chunk of the warp.
extern "C" __global__ void __launch_bounds__(LANES) norm_long(const NormParams p) {
  __shared__ float scratch[2][kWarps];
  begin_kernel();
  const i64 index = blockIdx.x;
  const T* x = row_at<const T>(p.x, p.rows, 0, index);
  const T* residual = HAS_RESIDUAL ? row_at<const T>(p.residual, p.rows, 2, index) : nullptr;
  T* out = row_at<T>(p.out, p.rows, 1, index);
  T* sum = HAS_RESIDUAL ? row_at<T>(p.sum, p.rows, 3, index) : nullptr;
  const T* source = HAS_RESIDUAL ? sum : x;
  const i64 step = HAS_RESIDUAL ? p.sum_step : p.x_step;
  const u64 policy = load_policy(false);
  const int warp = threadIdx.x / 32 * 32 * V, lane = threadIdx.x % 32 * V;

  float total = 0.0f, square = 0.0f;
  for (int first = warp; first < p.hidden; first += LANES * V) {
    const int k = first + lane;
    Chunk<T> c;
    get_part<VECTOR, kWidth>(c, x, k, p.x_step, p.hidden, policy);
    if (HAS_RESIDUAL) {
      Chunk<T> other;
      get_part<VECTOR, kWidth>(other, residual, k, p.residual_step, p.hidden, policy);
      add_residual(c, other);
      // Read back below by this same warp only.
      put_part<VECTOR, kWidth>(sum, k, p.sum_step, p.hidden, c);
    }
    if (CENTER) total = add_elements(c, total);
    else square = squares(c, 0.0f, part_count<VECTOR, kWidth, T>(k, p.hidden), square);
  }
  if (VECTOR == kDense && HAS_RESIDUAL) __syncwarp();
  if (CENTER) {
    total = warp_reduce<Sum>(total);
    const float own_mean = warp_mean(total, threadIdx.x / 32, p.hidden);
    for (int first = warp; first < p.hidden; first += LANES * V) {
      const int k = first + lane;
      Chunk<T> c;
      get_part<VECTOR, kWidth>(c, source, k, step, p.hidden, policy);
      square = squares(c, own_mean, part_count<VECTOR, kWidth, T>(k, p.hidden), square);
    }
  }
  square = warp_reduce<Sum>(square);
  if (kWarps > 1) {
    leave_sums(total, square, scratch, threadIdx.x);
    __syncthreads();
  }
  const Moments moments = join_warps(total, square, scratch, p.hidden);
  const float scale = inverse_sqrt(moments.variance + p.eps);
  for (int first = warp; first < p.hidden; first += LANES * V) {
    const int k = first + lane;
    Chunk<T> c;
    Affine affine;
    get_part<VECTOR, kWidth>(c, source, k, step, p.hidden, policy);
    affine.load(p, k);
    normalise(c, p, affine, moments, scale);
    put_part<VECTOR, kWidth>(out, k, p.out_step, p.hidden, c);
  }
}

#endif
