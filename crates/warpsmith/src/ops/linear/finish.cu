// Adds the parts of the sums of a long product, which are in f32, and finishes the results: what the kernels of `linear` do
// after their sums, with the same arithmetic.
//
// Threads to data: a thread has four neighbours of a row of the result, or with a gate one, and adds the parts of each in
// order. So the order depends on the number of parts alone.
//
// Defines: those of linear.cuh. The sums of a row lie in the order of the rows of w.

#include "warpsmith/division.cuh"
#include "warpsmith/linear.cuh"

using namespace warpsmith;
using namespace warpsmith::linear;

constexpr int kThreads = 256, kUnit = GATE ? 1 : 4;

struct alignas(kUnit * sizeof(OUT_T)) Unit {
  OUT_T items[kUnit];
};

// One sum over all parts.
WS_INLINE float add_parts(const FinishParams& p, const float* from) {
  float sum = 0.0f;
#pragma unroll 4
  for (int part = 0; part < p.count; ++part) sum += from[part * p.between];
  return sum;
}
// Those of neighbours. Nothing was written past the end of a row.
WS_INLINE void add_parts(float (&sums)[kUnit], const FinishParams& p, const float* from, int count) {
  if constexpr (kUnit == 4) {
    if (count == kUnit) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sums[i] = 0.0f;
#pragma unroll 4
      for (int part = 0; part < p.count; ++part) {
        const float4 all = *(const float4*)(from + part * p.between);
        sums[0] += all.x, sums[1] += all.y, sums[2] += all.z, sums[3] += all.w;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sums[i] = i < count ? add_parts(p, from + i) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_finish(const __grid_constant__ FinishParams p) {
  begin_kernel();
  const u32 unit = blockIdx.x * kThreads + threadIdx.x;
  if (unit >= p.units) return;
  const LinearParams& l = p.linear;
  const u32 batch = divide(unit, p.per_matrix), inside = unit - batch * p.per_matrix.value, row = divide(inside, p.per_row);
  const int column = (int)(inside - row * p.per_row.value) * kUnit, count = min(l.n - column, kUnit);

  const float* from = (const float*)p.parts + (batch * (i64)l.m + row) * p.pitch;
  float sums[kUnit], up = 0.0f;
  add_parts(sums, p, from + gate_row(l, column), count);
  if (GATE) up = add_parts(p, from + up_row(l, column));

  OUT_T* out = (OUT_T*)l.out + batch * l.out_batch + row * l.out_row + column * l.out_col;
  const bool vector = p.vector && count == kUnit;
  Unit unit_of_residual = {}, results;
  if (HAS_RESIDUAL && vector)
    unit_of_residual = *(const Unit*)((const OUT_T*)l.residual + batch * l.residual_batch + row * l.residual_row + column);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (i >= count) break;
    const float residual = vector ? to_f32(unit_of_residual.items[i]) : residual_at(l, batch, row, column + i);
    const ColumnTerms terms = column_terms(l, batch, column + i);
    results.items[i] = from_f32<OUT_T>(finish(l, sums[i], up, row_term(l, batch, row), terms, residual));
  }
  if (vector) {
    *(Unit*)out = results;
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      if (i < count) out[i * l.out_col] = results.items[i];
  }
}
