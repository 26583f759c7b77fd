// Adds the partial sums of a gradient over the groups of rows: out[c] = sum of partial[group][c], in a fixed order.
//
// Threads to data: a block of 32 x 16 threads adds 32 columns; thread (c, r) takes groups r, r + 16, ... of its
// column, then row 0 adds the sixteen. blockIdx.y picks one of two gradients; one that is not wanted is null.
// Define: ELEM.

#include "warpsmith/base.cuh"

extern "C" __global__ void __launch_bounds__(512) norm_backward_sum(const NormSumParams p) {
  __shared__ float scratch[16][33];
  const int c = threadIdx.x % 32, r = threadIdx.x / 32;
  begin_kernel();
  // Indexing the parameters with a variable would copy them all to the stack.
  ELEM* out = (ELEM*)(blockIdx.y == 0 ? p.out[0] : p.out[1]);
  if (!out) return;
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
    const i64 step = blockIdx.y == 0 ? p.step[0] : p.step[1];
    out[column * step] = from_f32<ELEM>(sum);
  }
}
