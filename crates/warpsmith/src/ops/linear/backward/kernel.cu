// The pass of `linear_backward` over the gradient of the result, dz = dout scale f'(z), and the sums of dz over the rows.
//
// Threads to data: a block of 32 x 8 threads has 32 chunks of 16 bytes of columns and p.rows rows. Thread (x, y) has chunk
// x of rows y, y + 8, ... and adds them in that order; then the 8 sums of a column are added in order. With dbias, block
// (i, j) writes the sums of its rows to row j of `partial`, for linear_backward_add, or, if the grid has only one row of
// blocks, to dbias.
//
// Defines: ELEM; FUNCTION, Identity or a struct of math.cuh; HAS_DZ, HAS_DBIAS, what is written; VECTOR, kAligned or kAny.

#include "warpsmith/math.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

struct Identity {
  template <class T> static WS_INLINE float derivative(float) { return 1.0f; }
};
template <class F> constexpr bool kHasSlope = true;
template <> constexpr bool kHasSlope<Identity> = false;

constexpr int kLanes = 32, kLines = 8, kUnit = kVec<ELEM>;

// Adds the 8 sums of each column; the threads with y = 0 get the results.
template <int kCount> WS_INLINE void add_lines(float (&sum)[kCount]) {
  __shared__ float sums[kCount][kLines][kLanes];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i][threadIdx.y][threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.y > 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int line = 1; line < kLines; ++line) sum[i] += sums[i][line][threadIdx.x];
}

WS_INLINE void write_sum(const LinearPassParams& p, i64 column, float sum) {
  if (gridDim.y == 1) ((ELEM*)p.dbias)[column * p.dbias_step] = from_f32<ELEM>(sum);
  else ((float*)p.partial)[blockIdx.y * p.partial_row + column] = sum;
}

extern "C" __global__ void __launch_bounds__(kLanes * kLines) linear_backward_pass(const LinearPassParams p) {
  begin_kernel();
  const i64 first = ((i64)blockIdx.x * kLanes + threadIdx.x) * kUnit, row0 = (i64)blockIdx.y * p.rows + threadIdx.y;
  const int count = (int)max(min(p.n - first, (i64)kUnit), (i64)0);
  float sum[kUnit] = {};
#pragma unroll 4
  for (i64 i = 0; i < p.rows; i += kLines) {
    const i64 row = row0 + i;
    if (row >= p.lines || count == 0) break;
    Chunk<ELEM> chunk;
    float d[kUnit], z[kUnit];
    load_chunk<VECTOR>(chunk, (const ELEM*)p.dout + row * p.dout_row, first, p.dout_col, count, from_f32<ELEM>(0.0f));
    unpack(d, chunk);
    if (kHasSlope<FUNCTION>) {
      load_chunk<VECTOR>(chunk, (const ELEM*)p.z + row * p.z_row, first, p.z_col, count, from_f32<ELEM>(0.0f));
      unpack(z, chunk);
    }
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      d[j] *= p.scale;
      if (kHasSlope<FUNCTION>) d[j] *= FUNCTION::template derivative<ELEM>(z[j]);
      sum[j] += d[j];
    }
    if (HAS_DZ) {
      pack(chunk, d);
      store_chunk<VECTOR>((ELEM*)p.dz + row * p.n, first, 1, count, chunk);
    }
  }
  if (!HAS_DBIAS) return;
  add_lines(sum);
  if (threadIdx.y > 0) return;
  for (int j = 0; j < kUnit; ++j)
    if (j < count) write_sum(p, first + j, sum[j]);
}
