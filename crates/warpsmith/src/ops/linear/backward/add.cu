// Adds the parts of sums, which are in f32, and rounds the results: those of products that were split, and those of the
// columns of dz.
//
// Threads to data: a block of 256 threads has units of 4 neighbouring columns of one sum. With few parts a thread has a unit
// of its own and adds all its parts in order. With many, `shared`, the 8 warps have the same 32 units: each adds every
// eighth part, and then the 8 sums are added in order. So the order depends on the number of parts alone.
//
// Defines: ELEM, the type of the results.

#include "warpsmith/division.cuh"

using namespace warpsmith;

constexpr int kLanes = 32, kLines = 8, kThreads = kLanes * kLines, kUnit = 4;

struct alignas(kUnit * sizeof(ELEM)) Results {
  ELEM items[kUnit];
};

// The sum that a block is for. They are few, and their blocks follow each other.
WS_INLINE const AddedSum& sum_of(const AddParams& p, u32 block) {
  int at = 0;
#pragma unroll
  for (int i = 1; i < (int)(sizeof(p.sums) / sizeof(p.sums[0])); ++i)
    if (block >= p.sums[i].first_block) at = i;
  return p.sums[at];
}

WS_INLINE void add(float (&sum)[kUnit], const float* part, int count) {
  float values[kUnit] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (count == kUnit) {
    const float4 all = *(const float4*)part;
    values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
  } else {
    // Nothing was written past the end of a row.
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      if (i < count) values[i] = part[i];
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] += values[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_backward_add(const __grid_constant__ AddParams p) {
  begin_kernel();
  __shared__ float sums[kLines][kUnit][kLanes];
  const AddedSum& s = sum_of(p, blockIdx.x);
  const u32 block = blockIdx.x - s.first_block, lane = threadIdx.x % kLanes, line = threadIdx.x / kLanes;
  const u32 unit = s.shared ? block * kLanes + lane : block * kThreads + threadIdx.x;
  const u32 row = divide(unit, s.per_row), column = (unit - row * s.per_row.value) * kUnit;
  const int count = unit < s.units ? min(s.columns - (int)column, kUnit) : 0;
  float sum[kUnit] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (count > 0) {
    const float* from = (const float*)s.parts + (row * s.pitch + column);
    const int step = s.shared ? kLines : 1;
#pragma unroll 4
    for (int part = s.shared ? line : 0; part < s.count; part += step) add(sum, from + part * s.between, count);
  }
  if (s.shared) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sums[line][i][lane] = sum[i];
    __syncthreads();
    if (line > 0) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
#pragma unroll
      for (int other = 1; other < kLines; ++other) sum[i] += sums[other][i][lane];
  }
  ELEM* to = (ELEM*)s.out + row * s.out_row + column * s.out_col;
  if (s.vector && count == kUnit) {
    Results results;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) results.items[i] = from_f32<ELEM>(sum[i]);
    *(Results*)to = results;
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      if (i < count) to[i * s.out_col] = from_f32<ELEM>(sum[i]);
  }
}
