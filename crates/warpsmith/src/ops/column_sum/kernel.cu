// Adds the partial sums of a gradient over the groups of rows: out[c] = sum of partial[group][c], in a fixed order.
//
// Threads to data: a block of 32 x 16 threads adds 32 columns; thread (c, r) takes groups r, r + 16, ... of its
// column, then row 0 adds the sixteen. blockIdx.y picks the gradient. Define: ELEM.

#include "warpsmith/base.cuh"

extern "C" __global__ void __launch_bounds__(512) column_sum(const ColumnSumParams p) {
  __shared__ float scratch[16][33];
  const int c = threadIdx.x % 32, r = threadIdx.x / 32;
  const i64 column = (i64)blockIdx.x * 32 + c;
  const float* partial = (const float*)p.partial + (i64)blockIdx.y * p.num_groups * p.hidden;
  float sum = 0.0f;
  if (column < p.hidden) {
    for (i64 group = r; group < p.num_groups; group += 16) sum += partial[group * p.hidden + column];
  }
  scratch[r][c] = sum;
  __syncthreads();
  if (r == 0 && column < p.hidden) {
    for (int i = 1; i < 16; ++i) sum += scratch[i][c];
    ELEM* out = (ELEM*)p.out[blockIdx.y];
    out[column * p.step[blockIdx.y]] = from_f32<ELEM>(sum);
  }
}
