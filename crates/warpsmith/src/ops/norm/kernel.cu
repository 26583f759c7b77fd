// s = x + residual; out = (s - mean(s)) / sqrt(var + eps) * weight + bias, where the mean is taken as zero unless
// CENTER: then this is layer_norm, else rms_norm. Weight and bias may be null.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... The mapping depends on the row length alone, never on alignment or the number of rows, so a
// row's bits are the same in any batch.
//
// With CENTER each warp finds the mean of its own elements and the squares around that, without waiting for the other
// warps; the block then joins the warps' moments, with a single barrier for both.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (groups of so many threads a block), TOGETHER (rows a group has
// at once), ITEMS (chunks of a row a thread has), VECTOR (kAny, kAligned or kExact), CENTER, HAS_RESIDUAL, PREFETCH (weight
// and bias are loaded with the row).

#include "warpsmith/group.cuh"
#include "warpsmith/l2.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using T = ELEM;
constexpr int V = kVec<T>;
constexpr int kWarps = LANES / 32;

// s for one chunk, rounded as it is stored, so that fusing the addition changes nothing.
WS_INLINE void add_residual(Chunk<T>& c, const Chunk<T>& residual) {
  float a[V], b[V];
  unpack_words(a, c);
  unpack_words(b, residual);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] += b[j];
  pack(c, a);
}

// The squares of a chunk's elements around `mean`, added up; those past the end of the row count for nothing.
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
// Tells the other warps what this one knows of a row: the sum of its elements (unless CENTER, zero) and of the squares
// around its own mean. A barrier must follow.
WS_INLINE void tell_warps(float (&scratch)[2][kWarps], float total, float square) {
  if (kWarps == 1 || threadIdx.x % 32 != 0) return;
  if (CENTER) scratch[0][threadIdx.x / 32] = total;
  scratch[1][threadIdx.x / 32] = square;
}
// Joins what the warps were told, or what the only one knows.
WS_INLINE Moments join_warps(const float (&scratch)[2][kWarps], float total, float square, int hidden) {
  const float n = (float)hidden;
  if (kWarps == 1) return {CENTER ? total / n : 0.0f, square / n};
  const int warp = threadIdx.x % kWarps;
  if (!CENTER) return {0.0f, warp_reduce<Sum, kWarps>(scratch[1][warp]) / n};
  total = scratch[0][warp];
  const float mean = warp_reduce<Sum, kWarps>(total) / n;
  const float elements = warp_elements(warp, hidden), off = total / elements - mean;
  return {mean, warp_reduce<Sum, kWarps>(fmaf(elements * off, off, scratch[1][warp])) / n};
}

// 1 / sqrt(x) to an ulp: an estimate and one step of Newton, which must not touch the zero that is right for infinity.
WS_INLINE float inverse_sqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  float better = fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y);
  return y > 0.0f ? better : y;
}

struct Affine {
  Chunk<T> weight, bias;
  WS_INLINE void load(const NormParams& p, int at, int count) {
    if (p.weight) load_cached_chunk<VECTOR>(weight, (const T*)p.weight, at, p.weight_step, count);
    if (CENTER && p.bias) load_cached_chunk<VECTOR>(bias, (const T*)p.bias, at, p.bias_step, count);
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

// Rows in registers: memory is read once. A group of LANES threads has TOGETHER rows, which share what it loads of weight
// and bias, and the barrier; where the last group has a row too few, it does one twice.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_row(const NormParams p) {
  static_assert(ROWS == 1 || LANES == 32, "several rows a block only with a warp a row");
  static_assert(TOGETHER == 1 || (ROWS == 1 && !HAS_RESIDUAL), "rows together");
  __shared__ float scratch[TOGETHER][2][kWarps];
  const int lane = threadIdx.x % LANES;
  const i64 first = ((i64)blockIdx.x * ROWS + threadIdx.x / LANES) * TOGETHER;
  const bool exists = ROWS == 1 || first < p.num_rows;
  auto index = [&](int r) { return TOGETHER == 1 ? first : min(first + r, p.num_rows - 1); };
  const T* x[TOGETHER];
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) x[r] = (const T*)p.x + row_offset(p.rows, 0, index(r));
  const T* residual = HAS_RESIDUAL ? (const T*)p.residual + row_offset(p.rows, 2, first) : nullptr;
  if (exists && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * LANES + lane) * V;
      if (VECTOR != kExact && k >= p.hidden) break;
#pragma unroll
      for (int r = 0; r < TOGETHER; ++r) fetch_ahead(x[r] + k, p.is_large);
      if (HAS_RESIDUAL) fetch_ahead(residual + k, p.is_large);
    }
  }
  begin_kernel();
  if (!exists) return;
  const T zero = from_f32<T>(0.0f);
  const u64 policy = load_policy(p.is_large);

  Chunk<T> row[TOGETHER][ITEMS];
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      load_chunk<VECTOR>(row[r][i], x[r], k, p.x_step, min(V, p.hidden - k), zero, policy);
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
    T* sum = (T*)p.sum + row_offset(p.rows, 3, first);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      add_residual(row[0][i], other[i]);
      store_chunk<VECTOR>(sum, k, p.sum_step, min(V, p.hidden - k), row[0][i]);
    }
  }

  float total[TOGETHER], square[TOGETHER];
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) {
    total[r] = 0.0f;
    if (CENTER) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        float a[V];
        unpack_words(a, row[r][i]);
#pragma unroll
        for (int j = 0; j < V; ++j) total[r] += a[j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r)
    if (CENTER) total[r] = warp_reduce<Sum>(total[r]);
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) {
    const float own_mean = CENTER ? warp_mean(total[r], lane / 32, p.hidden) : 0.0f;
    square[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      square[r] = squares(row[r][i], own_mean, p.hidden - (i * LANES + lane) * V, square[r]);
  }
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) {
    square[r] = warp_reduce<Sum>(square[r]);
    tell_warps(scratch[r], total[r], square[r]);
  }
  if (kWarps > 1) __syncthreads();
  Moments moments[TOGETHER];
  float scale[TOGETHER];
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) {
    moments[r] = join_warps(scratch[r], total[r], square[r], p.hidden);
    scale[r] = inverse_sqrt(moments[r].variance + p.eps);
  }

  T* out[TOGETHER];
#pragma unroll
  for (int r = 0; r < TOGETHER; ++r) out[r] = (T*)p.out + row_offset(p.rows, 1, index(r));
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
    if (!PREFETCH) affine[0].load(p, k, count);
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) {
      normalise(row[r][i], p, affine[PREFETCH ? i : 0], moments[r], scale[r]);
      store_chunk<VECTOR>(out[r], k, p.out_step, count, row[r][i]);
    }
  }
}

// A row of any length, read again for each pass; later passes find most of it in L2.
extern "C" __global__ void __launch_bounds__(LANES) norm_long(const NormParams p) {
  __shared__ float scratch[2][kWarps];
  begin_kernel();
  const i64 index = blockIdx.x;
  const T* x = (const T*)p.x + row_offset(p.rows, 0, index);
  const T* residual = (const T*)p.residual + (HAS_RESIDUAL ? row_offset(p.rows, 2, index) : 0);
  T* out = (T*)p.out + row_offset(p.rows, 1, index);
  T* sum = (T*)p.sum + (HAS_RESIDUAL ? row_offset(p.rows, 3, index) : 0);
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
  square = warp_reduce<Sum>(square);
  tell_warps(scratch, total, square);
  if (kWarps > 1) __syncthreads();
  const Moments moments = join_warps(scratch, total, square, p.hidden);
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
