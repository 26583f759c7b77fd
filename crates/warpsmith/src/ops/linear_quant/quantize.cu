// Activations in eight bits: scale = most / 127, quant = round(x * (127 / most)) for each 32 neighbours of a row.
//
// Threads to data: warp w of the grid has 32 neighbours, the groups of all rows one after the other; a lane has one.
//
// Defines: ELEM (element type).

#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) linear_quant_quantize(const LinearQuantParams p) {
  begin_kernel();
  const u32 groups = (u32)(p.k / 32);
  const u32 index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const u32 row = index / groups, group = index - row * groups;
  if (row >= p.num_rows) return;
  const int lane = threadIdx.x % 32;
  const T* from = row_at<const T>(p.x, p.rows, 0, row);
  const float x = to_f32(from[((i64)group * 32 + lane) * p.x_step]);
  const float most = warp_reduce<MaxIgnoringNan>(fabsf(x));
  // Infinity less itself is NaN, and so is NaN.
  const bool finite = __all_sync(kAllLanes, __fsub_rn(x, x) == 0.0f);
  // 2^-100: the inverse of what is smaller would overflow.
  const bool counts = finite && most >= 7.88860905221011805e-31f;
  const int quant = counts ? (int)rintf(__fmul_rn(x, __fdiv_rn(127.0f, most))) : 0;
  ((signed char*)p.quants)[(i64)index * 32 + lane] = (signed char)quant;
  const int sum = warp_reduce<Sum, 16>(quant);
  if (lane % 16 == 0) ((i32*)p.sums)[(i64)index * 2 + lane / 16] = sum;
  if (lane == 0) ((float*)p.scales)[index] = counts ? __fdiv_rn(most, 127.0f) : finite ? 0.0f : bits_float(0x7fc00000u);
}
