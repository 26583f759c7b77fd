// Adds the partial sums of a gradient over the groups of rows: out[c] = sum of partial[group][c], in a fixed order.
//
// Threads to data: a block of 32 x ROWS threads adds 32 columns; thread (c, r) takes groups r, r + ROWS, ... of its
// column, then row 0 adds those of all rows. blockIdx.y selects one of two gradients; a gradient that is not needed is null.
// Defines: ELEM, ROWS.

#include "warpsmith/base.cuh"

using namespace warpsmith;

constexpr int kRows = ROWS;

extern "C" __global__ void __launch_bounds__(32 * kRows) column_sum(const ColumnSumParams p) {
  __shared__ float scratch[kRows][33];
  const int c = threadIdx.x % 32, r = threadIdx.x / 32;
  begin_kernel();
  // Indexing the parameters with a variable would copy them all to the stack.
  ELEM* out = (ELEM*)(blockIdx.y == 0 ? p.out[0] : p.out[1]);
  if (!out) return;
  const i64 column = (i64)blockIdx.x * 32 + c;
  const float* partial = (const float*)p.partial + (i64)blockIdx.y * p.num_groups * p.hidden;
  float sum = 0.0f;
  if (column < p.hidden) {
    // There is little to add and much latency to hide: loads of several groups are issued together.
#pragma unroll 8
    for (i64 group = r; group < p.num_groups; group += kRows) sum += partial[group * p.hidden + column];
  }
  scratch[r][c] = sum;
  __syncthreads();
  if (r == 0 && column < p.hidden) {
#pragma unroll
    for (int i = 1; i < kRows; ++i) sum += scratch[i][c];
    const i64 step = blockIdx.y == 0 ? p.step[0] : p.step[1];
    out[column * step] = from_f32<ELEM>(sum);
  }
}
