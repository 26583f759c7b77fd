// s = x + residual; out = (s - mean(s)) / sqrt(var + eps) * weight + bias, where the mean is taken as zero unless
// CENTER: then this is layer_norm, else rms_norm. Weight and bias may be null.
//
// Threads to data: a row is cut into 16-byte chunks; lane l of the row's LANES threads owns chunks l, l + LANES,
// l + 2 LANES, ... The mapping depends on the row length alone, never on alignment or the number of rows, so a
// row's bits are the same in any batch.
//
// Defines: ELEM (element type), LANES (threads a row), ROWS (rows a block), ITEMS (chunks a thread), VECTOR (kAny,
// kAligned or kExact), CENTER, HAS_RESIDUAL.

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using T = ELEM;
constexpr int V = kVec<T>;
// Measured on an H200: evict-first accesses gain 2% when rows are read and written once, and lose 3% with a residual.
constexpr bool kStreaming = !HAS_RESIDUAL;

struct RowPointers {
  const T *x, *residual;
  T *out, *sum;
  WS_INLINE RowPointers(const NormParams& p, i64 index) {
    x = (const T*)p.x + row_offset(p.rows, 0, index);
    out = (T*)p.out + row_offset(p.rows, 1, index);
    residual = (const T*)p.residual + (HAS_RESIDUAL ? row_offset(p.rows, 2, index) : 0);
    sum = (T*)p.sum + (HAS_RESIDUAL ? row_offset(p.rows, 3, index) : 0);
  }
};

// s for one chunk, rounded as it is stored, so that fusing the addition changes nothing.
WS_INLINE void add_residual(Chunk<T>& c, const Chunk<T>& residual) {
  float a[V], b[V];
  unpack(a, c);
  unpack(b, residual);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] += b[j];
  pack(c, a);
}

// The elements of a chunk minus `mean`; those past the end of the row count as zero.
WS_INLINE void centered(float (&a)[V], const Chunk<T>& c, float mean, int count) {
  unpack(a, c);
  if (CENTER) {
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = VECTOR == kExact || j < count ? a[j] - mean : 0.0f;
  }
}

WS_INLINE void normalised(Chunk<T>& c, const NormParams& p, int at, int count, float mean, float scale) {
  float a[V];
  unpack(a, c);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = (CENTER ? a[j] - mean : a[j]) * scale;
  if (p.weight) {
    Chunk<T> weight;
    float w[V];
    load_cached_chunk<VECTOR>(weight, (const T*)p.weight, at, p.weight_step, count);
    unpack(w, weight);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] *= w[j];
  }
  if (CENTER && p.bias) {
    Chunk<T> bias;
    float b[V];
    load_cached_chunk<VECTOR>(bias, (const T*)p.bias, at, p.bias_step, count);
    unpack(b, bias);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] += b[j];
  }
  pack(c, a);
}

// A row in registers: memory is read once.
extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_row(const NormParams p) {
  static_assert(ROWS == 1 || LANES == 32, "several rows a block only with a warp a row");
  __shared__ float scratch[2][LANES / 32];
  begin_kernel();
  const int lane = threadIdx.x % LANES;
  const i64 index = (i64)blockIdx.x * ROWS + threadIdx.x / LANES;
  if (ROWS > 1 && index >= p.num_rows) return;
  const RowPointers at(p, index);
  const T zero = from_f32<T>(0.0f);

  Chunk<T> row[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    load_chunk<VECTOR, kStreaming>(row[i], at.x, k, p.x_step, min(V, p.hidden - k), zero);
  }
  if (HAS_RESIDUAL) {
    Chunk<T> other[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      load_chunk<VECTOR>(other[i], at.residual, k, p.residual_step, min(V, p.hidden - k), zero);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V;
      add_residual(row[i], other[i]);
      store_chunk<VECTOR>(at.sum, k, p.sum_step, min(V, p.hidden - k), row[i]);
    }
  }

  float mean = 0.0f;
  if (CENTER) {
    float total[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float a[V];
      unpack(a, row[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) total[0] += a[j];
    }
    block_reduce<Sum, LANES>(total, scratch[0]);
    mean = total[0] / (float)p.hidden;
  }
  float squares[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    float a[V];
    centered(a, row[i], mean, p.hidden - (i * LANES + lane) * V);
#pragma unroll
    for (int j = 0; j < V; ++j) squares[0] = fmaf(a[j], a[j], squares[0]);
  }
  block_reduce<Sum, LANES>(squares, scratch[1]);
  const float scale = 1.0f / sqrtf(squares[0] / (float)p.hidden + p.eps);

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
    if (VECTOR == kExact || count > 0) normalised(row[i], p, k, count, mean, scale);
    store_chunk<VECTOR, kStreaming>(at.out, k, p.out_step, count, row[i]);
  }
}

// A row of any length, read again for each pass; later passes find most of it in L2.
extern "C" __global__ void __launch_bounds__(LANES) norm_long(const NormParams p) {
  __shared__ float scratch[2][LANES / 32];
  begin_kernel();
  const RowPointers at(p, blockIdx.x);
  const T zero = from_f32<T>(0.0f);
  const T* source = HAS_RESIDUAL ? at.sum : at.x;
  const i64 step = HAS_RESIDUAL ? p.sum_step : p.x_step;

  float total[1] = {0.0f};
  for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
    int count = min(V, p.hidden - k);
    Chunk<T> c;
    float a[V];
    load_chunk<VECTOR>(c, at.x, k, p.x_step, count, zero);
    if (HAS_RESIDUAL) {
      Chunk<T> other;
      load_chunk<VECTOR>(other, at.residual, k, p.residual_step, count, zero);
      add_residual(c, other);
      // Read back below by this same thread only.
      store_chunk<VECTOR>(at.sum, k, p.sum_step, count, c);
    }
    unpack(a, c);
#pragma unroll
    for (int j = 0; j < V; ++j) total[0] = CENTER ? total[0] + a[j] : fmaf(a[j], a[j], total[0]);
  }
  block_reduce<Sum, LANES>(total, scratch[0]);
  const float mean = CENTER ? total[0] / (float)p.hidden : 0.0f;
  float squares[1] = {total[0]};
  if (CENTER) {
    squares[0] = 0.0f;
    for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
      int count = min(V, p.hidden - k);
      Chunk<T> c;
      float a[V];
      load_chunk<VECTOR>(c, source, k, step, count, zero);
      centered(a, c, mean, count);
#pragma unroll
      for (int j = 0; j < V; ++j) squares[0] = fmaf(a[j], a[j], squares[0]);
    }
    block_reduce<Sum, LANES>(squares, scratch[1]);
  }
  const float scale = 1.0f / sqrtf(squares[0] / (float)p.hidden + p.eps);
  for (int k = threadIdx.x * V; k < p.hidden; k += LANES * V) {
    int count = min(V, p.hidden - k);
    Chunk<T> c;
    load_chunk<VECTOR>(c, source, k, step, count, zero);
    normalised(c, p, k, count, mean, scale);
    store_chunk<VECTOR>(at.out, k, p.out_step, count, c);
  }
}
