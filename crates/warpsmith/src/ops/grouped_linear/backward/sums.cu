// Sums of columns over the rows of each group, in f32 and in the order of the rows: gradients of biases.
//
// Threads to data: a thread has a column of a group.
//
// Defines: ELEM, the type of the results; ROW_T, that of the rows.

#include "warpsmith/grouped_tiles.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_sums(const __grid_constant__ GroupedSumsParams p) {
  begin_kernel();
  const u32 blocks = ((u32)p.n + kThreads - 1) / kThreads, number = blockIdx.x / blocks;
  const int column = (int)(blockIdx.x - number * blocks) * kThreads + threadIdx.x;
  GroupWalk<1, 4, GroupedSumsParams> walk(p);
  const Group group = walk.group((int)number);
  if (column >= p.n) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int row = group.row; row < group.end; ++row) {
    const i64 from = p.order ? ((const i32*)p.order)[row] : row;
    const float y = to_f32(((const ROW_T*)p.from)[from * p.row + column * p.col]);
    sum = p.weights ? fmaf(((const float*)p.weights)[row], y, sum) : sum + y;
  }
  ((ELEM*)p.out)[number * p.out_group + column * p.out_step] = from_f32<ELEM>(sum);
}
