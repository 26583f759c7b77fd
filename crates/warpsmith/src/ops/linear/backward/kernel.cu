// The pass of `linear_backward` over the gradient of the result: dz = dout scale f'(z), stored and summed over the rows.
//
// A block has 32 columns and goes down all rows with 32 x 32 threads: thread (x, y) has column x of rows y, y + 32 and so
// on, adds them in that order, and the 32 sums of a column are added as a tree. So the order depends on the number of
// rows alone.
//
// ELEM; FUNCTION: Identity or a struct of math.cuh; HAS_DZ, HAS_DBIAS: what is written.

#include "warpsmith/math.cuh"

struct Identity {
  template <class T> static WS_INLINE float derivative(float) { return 1.0f; }
};
template <class F> constexpr bool kHasSlope = true;
template <> constexpr bool kHasSlope<Identity> = false;

constexpr int kSide = 32;

extern "C" __global__ void __launch_bounds__(kSide * kSide) linear_backward_pass(const LinearPassParams p) {
  begin_kernel();
  __shared__ float sums[kSide][kSide + 1];
  const i64 column = (i64)blockIdx.x * kSide + threadIdx.x;
  const bool exists = column < p.n;
  const ELEM* dout = (const ELEM*)p.dout + column * p.dout_col;
  const ELEM* z = (const ELEM*)p.z + column * p.z_col;
  ELEM* dz = (ELEM*)p.dz + column;
  float sum = 0.0f;
  if (exists) {
#pragma unroll 4
    for (i64 row = threadIdx.y; row < p.lines; row += kSide) {
      float d = to_f32(dout[row * p.dout_row]) * p.scale;
      if (kHasSlope<FUNCTION>) d *= FUNCTION::template derivative<ELEM>(to_f32(z[row * p.z_row]));
      if (HAS_DZ) dz[row * p.n] = from_f32<ELEM>(d);
      sum += d;
    }
  }
  if (!HAS_DBIAS) return;
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Warp y has the sums of column y of the block.
  float total = sums[threadIdx.x][threadIdx.y];
#pragma unroll
  for (int distance = kSide / 2; distance > 0; distance /= 2) total += __shfl_down_sync(0xffffffffu, total, distance);
  const i64 owned = (i64)blockIdx.x * kSide + threadIdx.y;
  if (threadIdx.x == 0 && owned < p.n) ((ELEM*)p.dbias)[owned * p.dbias_step] = from_f32<ELEM>(total);
}
