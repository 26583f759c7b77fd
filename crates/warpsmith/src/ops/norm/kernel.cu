// s = x + residual; out = (s - mean(s)) / sqrt(var + eps) * weight + bias. With CENTER this is layer_norm; without, the
// mean counts as zero, and this is rms_norm. Weight and bias may be null.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... The mapping depends only on the row length, never on alignment or the number of rows, so a row has the
// same bits in any batch.
//
// With CENTER each warp computes the mean of its own elements and the squares around that mean, without waiting for the
// other warps; the block then joins the warps' moments, with a single barrier for both.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (rows a block), ITEMS (chunks a thread), VECTOR (kAny,
// kAligned or kExact), CENTER, HAS_RESIDUAL, PREFETCH (weight and bias are loaded with the row).

#include "warpsmith/group.cuh"
#include "warpsmith/l2.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr int kWarps = LANES / 32;

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
  if (VECTOR == kExact) return 32.0f * V * ITEMS;
  int n = 0;
  for (int first = warp * 32 * V; first < hidden; first += LANES * V) n += min(32 * V, hidden - first);
  return (float)max(n, 1);
}

// The mean of a warp's own elements, whose sum over the warp is `total`.
WS_INLINE float warp_mean(float total, int warp, int hidden) { return total / warp_elements(warp, hidden); }

struct Moments {
  float mean, variance;
};
// Joins the warps' sums: of their elements (zero unless CENTER), and of the squares around their own means.
WS_INLINE Moments join_warps(float total, float square, float (&scratch)[2][kWarps], int hidden) {
  const float n = (float)hidden;
  if (kWarps == 1) return {CENTER ? total / n : 0.0f, square / n};
  if (!CENTER) {
    float sum[1] = {square};
    block_reduce<Sum, LANES, 1>(sum, scratch[0]);
    return {0.0f, sum[0] / n};
  }
  if (threadIdx.x % 32 == 0) {
    scratch[0][threadIdx.x / 32] = total;
    scratch[1][threadIdx.x / 32] = square;
  }
  __syncthreads();
  const int warp = threadIdx.x % kWarps;
  total = scratch[0][warp];
  const float mean = warp_reduce<Sum, kWarps>(total) / n;
  const float elements = warp_elements(warp, hidden), off = total / elements - mean;
  return {mean, warp_reduce<Sum, kWarps>(fmaf(elements * off, off, scratch[1][warp])) / n};
}

// 1 / sqrt(x) to an ulp: an estimate and one Newton step, which is skipped for infinity, where the estimate is zero.
WS_INLINE float inverse_sqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  float better = fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y);
  return y > 0.0f ? better : y;
}

struct Affine {
  Chunk<T> weight, bias;
  WS_INLINE void load(const NormParams& p, int at, int count) {
    if (p.weight) load_chunk_unfilled<VECTOR>(weight, (const T*)p.weight, at, p.weight_step, count);
    if (CENTER && p.bias) load_chunk_unfilled<VECTOR>(bias, (const T*)p.bias, at, p.bias_step, count);
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

// A row in registers: memory is read once.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_row(const NormParams p) {
  __shared__ float scratch[2][kWarps];
  const ThreadRow<LANES, ROWS> own;
  const int lane = own.lane;
  const i64 index = own.index;
  const bool exists = ROWS == 1 || index < p.num_rows;
  const T* x = row_at<const T>(p.x, p.rows, 0, index);
  const T* residual = HAS_RESIDUAL ? row_at<const T>(p.residual, p.rows, 2, index) : nullptr;
  if (exists && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * LANES + lane) * V;
      if (VECTOR != kExact && k >= p.hidden) break;
      prefetch_chunk(x + k, p.is_large);
      if (HAS_RESIDUAL) prefetch_chunk(residual + k, p.is_large);
    }
  }
  // First, so that what follows can load its weights.
  let_next_kernel_start();
  await_kernel_before();
  if (!exists) return;
  const T zero = from_f32<T>(0.0f);
  const u64 policy = load_policy(p.is_large);

  Chunk<T> row[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    load_chunk<VECTOR>(row[i], x, k, p.x_step, min(V, p.hidden - k), zero, policy);
  }
  Chunk<T> other[HAS_RESIDUAL ? ITEMS : 1];
  if (HAS_RESIDUAL) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      load_chunk<VECTOR>(other[i], residual, k, p.residual_step, min(V, p.hidden - k), zero, policy);
    }
  }
  Affine affine[PREFETCH ? ITEMS : 1];
  if (PREFETCH) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      affine[i].load(p, k, min(V, p.hidden - k));
    }
  }
  if (HAS_RESIDUAL) {
    T* sum = row_at<T>(p.sum, p.rows, 3, index);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      add_residual(row[i], other[i]);
      store_chunk<VECTOR>(sum, k, p.sum_step, min(V, p.hidden - k), row[i]);
    }
  }

  float total = 0.0f, square = 0.0f, own_mean = 0.0f;
  if (CENTER) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float a[V];
      unpack_words(a, row[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) total += a[j];
    }
    total = warp_reduce<Sum>(total);
    own_mean = warp_mean(total, lane / 32, p.hidden);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) square = squares(row[i], own_mean, p.hidden - (i * LANES + lane) * V, square);
  if (CENTER || kWarps == 1) square = warp_reduce<Sum>(square);
  const Moments moments = join_warps(total, square, scratch, p.hidden);
  const float scale = inverse_sqrt(moments.variance + p.eps);

  T* out = row_at<T>(p.out, p.rows, 1, index);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
    if (!PREFETCH) affine[0].load(p, k, count);
    normalise(row[i], p, affine[PREFETCH ? i : 0], moments, scale);
    store_chunk<VECTOR>(out, k, p.out_step, count, row[i]);
  }
}

// A row of any length, read again for each pass; later passes find most of it in L2.
extern "C" __global__ void __launch_bounds__(LANES) norm_long(const NormParams p) {
  __shared__ float scratch[2][kWarps];
  // First, so that what follows can load its weights.
  let_next_kernel_start();
  await_kernel_before();
  const i64 index = blockIdx.x;
  const T* x = row_at<const T>(p.x, p.rows, 0, index);
  const T* residual = HAS_RESIDUAL ? row_at<const T>(p.residual, p.rows, 2, index) : nullptr;
  T* out = row_at<T>(p.out, p.rows, 1, index);
  T* sum = HAS_RESIDUAL ? row_at<T>(p.sum, p.rows, 3, index) : nullptr;
  const T zero = from_f32<T>(0.0f);
  const T* source = HAS_RESIDUAL ? sum : x;
  const i64 step = HAS_RESIDUAL ? p.sum_step : p.x_step;

  float total = 0.0f, square = 0.0f;
  for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
    int count = min(V, p.hidden - k);
    Chunk<T> c;
    load_chunk<VECTOR>(c, x, k, p.x_step, count, zero);
    if (HAS_RESIDUAL) {
      Chunk<T> other;
      load_chunk<VECTOR>(other, residual, k, p.residual_step, count, zero);
      add_residual(c, other);
      // Read back below by this same thread only.
      store_chunk<VECTOR>(sum, k, p.sum_step, count, c);
    }
    if (CENTER) {
      float a[V];
      unpack_words(a, c);
#pragma unroll
      for (int j = 0; j < V; ++j) total += a[j];
    } else {
      square = squares(c, 0.0f, count, square);
    }
  }
  if (CENTER) {
    total = warp_reduce<Sum>(total);
    const float own_mean = warp_mean(total, threadIdx.x / 32, p.hidden);
    for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
      int count = min(V, p.hidden - k);
      Chunk<T> c;
      load_chunk<VECTOR>(c, source, k, step, count, zero);
      square = squares(c, own_mean, count, square);
    }
  }
  if (CENTER || kWarps == 1) square = warp_reduce<Sum>(square);
  const Moments moments = join_warps(total, square, scratch, p.hidden);
  const float scale = inverse_sqrt(moments.variance + p.eps);
  for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
    int count = min(V, p.hidden - k);
    Chunk<T> c;
    Affine affine;
    load_chunk<VECTOR>(c, source, k, step, count, zero);
    affine.load(p, k, count);
    normalise(c, p, affine, moments, scale);
    store_chunk<VECTOR>(out, k, p.out_step, count, c);
  }
}
