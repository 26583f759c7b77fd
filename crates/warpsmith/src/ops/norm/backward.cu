// Gradients of rms_norm (CENTER 0) and layer_norm (CENTER 1). With y the normalised row, r its scale and
// g = dout * weight:  dx = r (g - y mean(g y) - mean(g)) + dsum,  dweight = sum dout y,  dbias = sum dout; the term
// mean(g) only if CENTER. Mean and scale are computed again from x: that is cheaper than reading them.
//
// Threads to data: as in the forward kernel. A group of LANES threads takes every num_groups-th row, keeps the
// columns it owns of dweight and dbias in registers, and leaves one partial sum a group for `column_sum`.
// The number of groups depends on the number of rows and the device alone, and nothing is added atomically: two
// runs give the same bits, and dx of a row does not depend on the other rows.
//
// Defines: ELEM, LANES, ROWS, ITEMS, VECTOR, CENTER, HAS_WEIGHT, HAS_DSUM, HAS_DWEIGHT (dweight is wanted),
// HAS_DBIAS (dbias is wanted).

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using T = ELEM;
constexpr int V = kVec<T>;

struct RowPointers {
  const T *x, *dout, *dsum;
  T* dx;
  WS_INLINE RowPointers(const NormBackwardParams& p, i64 index) {
    x = (const T*)p.x + row_offset(p.rows, 0, index);
    dout = (const T*)p.dout + row_offset(p.rows, 1, index);
    dx = (T*)p.dx + row_offset(p.rows, 2, index);
    dsum = (const T*)p.dsum + (HAS_DSUM ? row_offset(p.rows, 3, index) : 0);
  }
};

// x minus its mean, and g, of one chunk; zero past the end of the row.
WS_INLINE void operands(float (&a)[V], float (&g)[V], const Chunk<T>& x, const Chunk<T>& dout, const Chunk<T>& weight,
                        float mean, int count) {
  unpack(a, x);
  unpack(g, dout);
  if (CENTER) {
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = j < count ? a[j] - mean : 0.0f;
  }
  if (HAS_WEIGHT) {
    float w[V];
    unpack(w, weight);
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = j < count ? g[j] * w[j] : 0.0f;
  }
}

// dx of one chunk in place of its g.
WS_INLINE void gradient(Chunk<T>& out, const float (&a)[V], const float (&g)[V], const Chunk<T>& dsum, float scale,
                        float mean_gy, float mean_g) {
  float d[V];
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] = scale * (fmaf(-a[j] * scale, mean_gy, g[j]) - (CENTER ? mean_g : 0.0f));
  if (HAS_DSUM) {
    float s[V];
    unpack(s, dsum);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] += s[j];
  }
  pack(out, d);
}

extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_backward_row(const NormBackwardParams p) {
  static_assert(ROWS == 1 || LANES == 32, "several rows a block only with a warp a row");
  __shared__ float scratch[2][3 * (LANES / 32)];
  const int lane = threadIdx.x % LANES;
  const i64 group = (i64)blockIdx.x * ROWS + threadIdx.x / LANES;
  if (ROWS > 1 && group >= p.num_groups) return;
  const T zero = from_f32<T>(0.0f);
  const float inverse = 1.0f / (float)p.hidden;

  Chunk<T> weight[ITEMS];
  float dweight[ITEMS][V], dbias[ITEMS][V];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    if (HAS_WEIGHT) load_cached_chunk<VECTOR>(weight[i], (const T*)p.weight, k, p.weight_step, min(V, p.hidden - k));
#pragma unroll
    for (int j = 0; j < V; ++j) dweight[i][j] = dbias[i][j] = 0.0f;
  }

  for (i64 index = group; index < p.num_rows; index += p.num_groups) {
    const RowPointers at(p, index);
    Chunk<T> x[ITEMS], dout[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
      load_chunk<VECTOR>(x[i], at.x, k, p.x_step, count, zero);
      load_chunk<VECTOR>(dout[i], at.dout, k, p.dout_step, count, zero);
    }
    float mean = 0.0f;
    if (CENTER) {
      float total[1] = {0.0f};
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        float a[V];
        unpack(a, x[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) total[0] += a[j];
      }
      block_reduce<Sum, LANES>(total, scratch[0]);
      mean = total[0] * inverse;
    }
    // One pass gives the sums of a a, a g and g; y = a * scale is applied afterwards.
    float sums[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float a[V], g[V];
      operands(a, g, x[i], dout[i], weight[i], mean, p.hidden - (i * LANES + lane) * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[0] = fmaf(a[j], a[j], sums[0]);
        sums[1] = fmaf(a[j], g[j], sums[1]);
        sums[2] += g[j];
      }
    }
    block_reduce<Sum, LANES>(sums, scratch[1]);
    const float scale = 1.0f / sqrtf(sums[0] * inverse + p.eps);
    const float mean_gy = sums[1] * scale * inverse, mean_g = sums[2] * inverse;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
      float a[V], g[V];
      operands(a, g, x[i], dout[i], weight[i], mean, count);
      if (HAS_DWEIGHT || HAS_DBIAS) {
        float d[V];
        unpack(d, dout[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (HAS_DWEIGHT) dweight[i][j] = fmaf(d[j], a[j] * scale, dweight[i][j]);
          if (HAS_DBIAS) dbias[i][j] += d[j];
        }
      }
      Chunk<T> dsum;
      if (HAS_DSUM) load_chunk<VECTOR>(dsum, at.dsum, k, p.dsum_step, count, zero);
      gradient(dout[i], a, g, dsum, scale, mean_gy, mean_g);
      store_chunk<VECTOR>(at.dx, k, p.dx_step, count, dout[i]);
    }
    // The next row's reductions write the scratch this row's have just read; without CENTER there is only one
    // reduction a row, so its two uses need a barrier between them.
    if (LANES > 32) __syncthreads();
  }

  float* partial = (float*)p.partial + group * p.hidden;
  const i64 bias_at = (i64)p.num_groups * p.hidden;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (k + j >= p.hidden) continue;
      if (HAS_DWEIGHT) partial[k + j] = dweight[i][j];
      if (HAS_DBIAS) partial[(HAS_DWEIGHT ? bias_at : 0) + k + j] = dbias[i][j];
    }
  }
}

// Rows of any length: each pass reads again, and the partial sums live in memory, owned column by column.
extern "C" __global__ void __launch_bounds__(LANES) norm_backward_long(const NormBackwardParams p) {
  __shared__ float scratch[2][3 * (LANES / 32)];
  const T zero = from_f32<T>(0.0f);
  const float inverse = 1.0f / (float)p.hidden;
  float* dweight = (float*)p.partial + blockIdx.x * (i64)p.hidden;
  float* dbias = dweight + (HAS_DWEIGHT ? (i64)p.num_groups * p.hidden : 0);
  bool first = true;
  for (i64 index = blockIdx.x; index < p.num_rows; index += p.num_groups) {
    const RowPointers at(p, index);
    float mean = 0.0f;
    if (CENTER) {
      float total[1] = {0.0f};
      for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
        Chunk<T> x;
        float a[V];
        load_chunk<VECTOR>(x, at.x, k, p.x_step, min(V, p.hidden - k), zero);
        unpack(a, x);
#pragma unroll
        for (int j = 0; j < V; ++j) total[0] += a[j];
      }
      block_reduce<Sum, LANES>(total, scratch[0]);
      mean = total[0] * inverse;
    }
    float sums[3] = {0.0f, 0.0f, 0.0f}, scale = 0.0f, mean_gy = 0.0f, mean_g = 0.0f;
    for (int pass = 0; pass < 2; ++pass) {
      for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
        int count = min(V, p.hidden - k);
        Chunk<T> x, dout, weight, dsum;
        float a[V], g[V], d[V];
        load_chunk<VECTOR>(x, at.x, k, p.x_step, count, zero);
        load_chunk<VECTOR>(dout, at.dout, k, p.dout_step, count, zero);
        if (HAS_WEIGHT) load_cached_chunk<VECTOR>(weight, (const T*)p.weight, k, p.weight_step, count);
        operands(a, g, x, dout, weight, mean, count);
        unpack(d, dout);
        if (pass == 0) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sums[0] = fmaf(a[j], a[j], sums[0]);
            sums[1] = fmaf(a[j], g[j], sums[1]);
            sums[2] += g[j];
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (j >= count) continue;
          if (HAS_DWEIGHT) dweight[k + j] = fmaf(d[j], a[j] * scale, first ? 0.0f : dweight[k + j]);
          if (HAS_DBIAS) dbias[k + j] = d[j] + (first ? 0.0f : dbias[k + j]);
        }
        if (HAS_DSUM) load_chunk<VECTOR>(dsum, at.dsum, k, p.dsum_step, count, zero);
        gradient(dout, a, g, dsum, scale, mean_gy, mean_g);
        store_chunk<VECTOR>(at.dx, k, p.dx_step, count, dout);
      }
      if (pass == 0) {
        block_reduce<Sum, LANES>(sums, scratch[1]);
        scale = 1.0f / sqrtf(sums[0] * inverse + p.eps);
        mean_gy = sums[1] * scale * inverse;
        mean_g = sums[2] * inverse;
      }
    }
    first = false;
    __syncthreads();
  }
}
