// Gradients of rms_norm (CENTER 0) and layer_norm (CENTER 1). With y the normalised row, r its scale and
// g = dout * weight:  dx = r (g - y mean(g y) - mean(g)) + dsum,  dweight = sum dout y,  dbias = sum dout; the term
// mean(g) and dbias only if CENTER. Mean and scale are computed again from x: that is cheaper than reading them.
// Weight and dsum may be null.
//
// Threads to data: as in the forward kernel. A group of LANES threads takes every num_groups-th row, keeps its columns of
// dweight and dbias in registers, and writes one partial sum a group, which `column_sum` adds up. Nothing is added
// atomically: every run gives the same bits, and dx of a row does not depend on other rows.
//
// Between reading and writing a row, a group waits for sums over that row. To keep memory busy meanwhile, the next
// STAGES - 1 rows are being copied to shared memory. Each thread copies the chunks that it will read itself, so no
// barrier is needed.
//
// Defines: ELEM, LANES, ROWS, ITEMS, VECTOR, STAGES (0: rows are loaded when needed), CENTER, SUMS (whether the sums over
// rows are needed).

#include "warpsmith/async_copy.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;

struct RowPointers {
  const T *x, *dout, *dsum;
  T* dx;
  WS_INLINE RowPointers(const NormBackwardParams& p, i64 index) {
    x = row_at<const T>(p.x, p.rows, 0, index);
    dout = row_at<const T>(p.dout, p.rows, 1, index);
    dx = row_at<T>(p.dx, p.rows, 2, index);
    dsum = p.dsum ? row_at<const T>(p.dsum, p.rows, 3, index) : nullptr;
  }
};

// x minus its mean, and g, of one chunk; zero past the end of the row.
WS_INLINE void operands(float (&a)[V], float (&g)[V], const Chunk<T>& x, const Chunk<T>& dout, const float (&w)[V],
                        float mean, int count) {
  unpack(a, x);
  unpack(g, dout);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (CENTER) a[j] = VECTOR == kExact || j < count ? a[j] - mean : 0.0f;
    g[j] *= w[j];
  }
}

// The weight's elements, one if there is no weight, zero past the end of the row.
WS_INLINE void weights(float (&w)[V], const Chunk<T>& weight, bool given, int count) {
  unpack(w, weight);
#pragma unroll
  for (int j = 0; j < V; ++j) w[j] = VECTOR == kExact || j < count ? (given ? w[j] : 1.0f) : 0.0f;
}

// dx of one chunk.
WS_INLINE void gradient(Chunk<T>& out, const float (&a)[V], const float (&g)[V], const T* dsum, i64 at, i64 step, int count,
                        float scale, float mean_gy, float mean_g) {
  float d[V];
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] = scale * (fmaf(-a[j] * scale, mean_gy, g[j]) - (CENTER ? mean_g : 0.0f));
  if (dsum) {
    Chunk<T> c;
    float s[V];
    load_chunk<VECTOR>(c, dsum, at, step, count, from_f32<T>(0.0f));
    unpack(s, c);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] += s[j];
  }
  pack(out, d);
}

// Stores the V sums of one chunk to consecutive floats.
WS_INLINE void store_sums(float* to, const float (&sums)[V], int count) {
  if (VECTOR == kExact || (VECTOR == kAligned && count > 0)) {
#pragma unroll
    for (int j = 0; j < V; j += 4) {
      u32 w[4] = {float_bits(sums[j]), float_bits(sums[j + 1]), float_bits(sums[j + 2]), float_bits(sums[j + 3])};
      store_words(to + j, w);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < count) to[j] = sums[j];
  }
}

extern "C" __global__ void __launch_bounds__(LANES * ROWS) norm_backward_row(const NormBackwardParams p) {
  static_assert(STAGES == 0 || VECTOR != kAny, "staged rows are copied in whole chunks");
  __shared__ float scratch[2][4 * (LANES / 32)];
  extern __shared__ __align__(16) u8 memory[];
  // [stage][x or dout][item][thread]
  Chunk<T>* staged = (Chunk<T>*)memory + threadIdx.x;
  constexpr int kThreads = LANES * ROWS, kTensor = ITEMS * kThreads, kStage = 2 * kTensor;
  begin_kernel();
  const ThreadRow<LANES, ROWS> own;
  const int lane = own.lane;
  const i64 group = own.index;
  if (ROWS > 1 && group >= p.num_groups) return;
  const T zero = from_f32<T>(0.0f);
  const float inverse = 1.0f / (float)p.hidden;

  Chunk<T> weight[ITEMS];
  float dweight[ITEMS][V], dbias[ITEMS][V];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * LANES + lane) * V;
    if (p.weight) load_chunk_unfilled<VECTOR>(weight[i], (const T*)p.weight, k, p.weight_step, min(V, p.hidden - k));
#pragma unroll
    for (int j = 0; j < V; ++j) dweight[i][j] = dbias[i][j] = 0.0f;
  }

  auto fetch = [&](i64 index, int stage) {
    if (index < p.num_rows) {
      const RowPointers at(p, index);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        int k = (i * LANES + lane) * V;
        if (VECTOR == kExact || k < p.hidden) {
          copy_async(staged + stage * kStage + i * kThreads, at.x + k);
          copy_async(staged + stage * kStage + kTensor + i * kThreads, at.dout + k);
        }
      }
    }
    commit_copies();
  };
  int stage = 0, parity = 0;
  if (STAGES > 0) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(group + s * p.num_groups, s);
  }

  for (i64 index = group; index < p.num_rows; index += p.num_groups) {
    const RowPointers at(p, index);
    Chunk<T> x[ITEMS], dout[ITEMS];
    if (STAGES > 0) {
      fetch(index + (STAGES - 1) * p.num_groups, stage == 0 ? STAGES - 1 : stage - 1);
      wait_copies<(STAGES > 0 ? STAGES - 1 : 0)>();
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
      if (STAGES > 0 && (VECTOR == kExact || count > 0)) {
        x[i] = staged[stage * kStage + i * kThreads];
        dout[i] = staged[stage * kStage + kTensor + i * kThreads];
      } else {
        load_chunk<VECTOR>(x[i], at.x, k, p.x_step, count, zero);
        load_chunk<VECTOR>(dout[i], at.dout, k, p.dout_step, count, zero);
      }
    }
    stage = stage + 1 >= STAGES ? 0 : stage + 1;

    // Scratch is reused two rows later at the earliest, with barriers in between.
    float* sums_scratch = scratch[parity];
    parity ^= 1;
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
      block_reduce<Sum, LANES>(total, sums_scratch + 3 * (LANES / 32));
      mean = total[0] * inverse;
    }
    // One pass gives the sums of a a, a g and g; y = a * scale is applied afterwards.
    float sums[CENTER ? 3 : 2] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int count = p.hidden - (i * LANES + lane) * V;
      float a[V], g[V], w[V];
      weights(w, weight[i], p.weight, count);
      operands(a, g, x[i], dout[i], w, mean, count);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[0] = fmaf(a[j], a[j], sums[0]);
        sums[1] = fmaf(a[j], g[j], sums[1]);
        if (CENTER) sums[CENTER ? 2 : 0] += g[j];
      }
    }
    block_reduce<Sum, LANES>(sums, sums_scratch);
    const float scale = 1.0f / sqrtf(sums[0] * inverse + p.eps);
    const float mean_gy = sums[1] * scale * inverse, mean_g = CENTER ? sums[CENTER ? 2 : 0] * inverse : 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V, count = min(V, p.hidden - k);
      float a[V], g[V], w[V];
      weights(w, weight[i], p.weight, count);
      operands(a, g, x[i], dout[i], w, mean, count);
      if (SUMS) {
        float d[V];
        unpack(d, dout[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dweight[i][j] = fmaf(d[j], a[j] * scale, dweight[i][j]);
          if (CENTER) dbias[i][j] += d[j];
        }
      }
      gradient(dout[i], a, g, at.dsum, k, p.dsum_step, count, scale, mean_gy, mean_g);
      store_chunk<VECTOR>(at.dx, k, p.dx_step, count, dout[i]);
    }
  }

  if (SUMS) {
    float* partial = (float*)p.partial + group * p.hidden;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * LANES + lane) * V, count = p.hidden - k;
      store_sums(partial + k, dweight[i], count);
      if (CENTER) store_sums(partial + p.num_groups * p.hidden + k, dbias[i], count);
    }
  }
}

// Rows of any length: each pass reads the row again. Partial sums are kept in memory; every column has one owner.
extern "C" __global__ void __launch_bounds__(LANES) norm_backward_long(const NormBackwardParams p) {
  __shared__ float scratch[2][3 * (LANES / 32)];
  begin_kernel();
  const T zero = from_f32<T>(0.0f);
  const float inverse = 1.0f / (float)p.hidden;
  float* dweight = (float*)p.partial + blockIdx.x * (i64)p.hidden;
  float* dbias = dweight + p.num_groups * p.hidden;
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
        Chunk<T> x, dout, weight;
        float a[V], g[V], d[V], w[V];
        load_chunk<VECTOR>(x, at.x, k, p.x_step, count, zero);
        load_chunk<VECTOR>(dout, at.dout, k, p.dout_step, count, zero);
        if (p.weight) load_chunk_unfilled<VECTOR>(weight, (const T*)p.weight, k, p.weight_step, count);
        weights(w, weight, p.weight, count);
        operands(a, g, x, dout, w, mean, count);
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
        if (SUMS) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            if (j >= count) continue;
            dweight[k + j] = fmaf(d[j], a[j] * scale, first ? 0.0f : dweight[k + j]);
            if (CENTER) dbias[k + j] = d[j] + (first ? 0.0f : dbias[k + j]);
          }
        }
        gradient(dout, a, g, at.dsum, k, p.dsum_step, count, scale, mean_gy, mean_g);
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
