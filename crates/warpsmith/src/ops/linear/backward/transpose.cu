// Transposes f32 matrices: the tensor cores multiply f32 only if the dimension that is summed over is dense.
//
// Threads to data: block (i, z) transposes the i-th tile of 64 x 64 of matrix z, if there is one. It reads along the
// dense columns and writes along the rows, both in pieces of 16 bytes, 128 bytes of a line at a time. In shared memory a
// line is one element longer than the tile, so that neither direction has bank conflicts.

#include "warpsmith/base.cuh"

using namespace warpsmith;

constexpr int kTile = 64, kPitch = kTile + 1, kThreads = 256, kPiece = 4;
// A warp has 4 lines of 8 pieces at a time.
constexpr int kLanes = 8, kLines = 4, kSpan = kLanes * kPiece, kRounds = kTile * kTile / (kThreads * kPiece);

extern "C" __global__ void __launch_bounds__(kThreads) linear_backward_transpose(const __grid_constant__ TransposeParams p) {
  begin_kernel();
  __shared__ float tile[kTile * kPitch];
  const TransposedMatrix& m = p.matrices[blockIdx.y];
  const int across = (m.columns + kTile - 1) / kTile, down = (m.rows + kTile - 1) / kTile;
  if (blockIdx.x >= (u32)(across * down)) return;
  const int row0 = (int)blockIdx.x % down * kTile, column0 = (int)blockIdx.x / down * kTile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // This lane's line of the tile in a round, and the start of its piece of that line.
  auto line = [&](int round) { return (round / 2 * 8 + warp) * kLines + lane / kLanes; };
  auto piece = [&](int round) { return round % 2 * kSpan + lane % kLanes * kPiece; };
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int column = column0 + line(round), row = row0 + piece(round);
    float4 values = {0.0f, 0.0f, 0.0f, 0.0f};
    // Rows are whole pieces.
    if (column < m.columns && row < m.rows) values = *(const float4*)((const float*)m.from + column * m.pitch + row);
    float* to = tile + line(round) * kPitch + piece(round);
    to[0] = values.x, to[1] = values.y, to[2] = values.z, to[3] = values.w;
  }
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = row0 + line(round), column = column0 + piece(round);
    // The last piece of a row of the copy may reach into its padding.
    if (row >= m.rows || column >= m.columns) continue;
    const float* from = tile + piece(round) * kPitch + line(round);
    *(float4*)((float*)m.to + row * m.to_pitch + column) = {from[0], from[kPitch], from[2 * kPitch], from[3 * kPitch]};
  }
}
