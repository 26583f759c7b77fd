// out = x, element by element, whatever the strides.
//
// Threads to data, PLANES 0: a line is `units` accesses of WIDTH bytes. 2^lane_bits threads take ITEMS accesses each of a
// line, a lane's 2^lane_bits accesses apart; a block takes 256 >> lane_bits lines. All loads of a thread are issued
// before its first store. Neighbouring accesses are x_step and out_step bytes apart: WIDTH where lines are dense.
//
// Threads to data, PLANES 1: a block takes one tile of kTile x kTile elements of a plane. It is read along the plane's
// columns, where x is dense, and written along its lines, where out is. Lines of the tile in shared memory are an odd
// number of words long, so that neither way meets a bank twice.
//
// Defines: WIDTH, bytes of an access; PLANES; ITEMS.

#include "warpsmith/access.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;
using Piece = access::Type<WIDTH>;

#if PLANES

constexpr int kTile = WIDTH >= 4 ? 32 : 128 / WIDTH;
constexpr int kPitch = kTile + (WIDTH >= 4 ? 1 : 4 / WIDTH);
constexpr int kRounds = kTile * kTile / kThreads;

extern "C" __global__ void __launch_bounds__(kThreads) copy(const CopyParams p) {
  begin_kernel();
  __shared__ Piece tile[kTile * kPitch];
  const u32 per_plane = p.tiles_down * p.tiles_across;
  const u32 plane = blockIdx.x / per_plane, place = blockIdx.x - plane * per_plane;
  const u32 down = place / p.tiles_across, across = place - down * p.tiles_across;
  i64 start[2];
  row_offsets<0>(start, p.starts, plane);
  const char* x = (const char*)p.x + start[0] * WIDTH;
  char* out = (char*)p.out + start[1] * WIDTH;
  const i64 line0 = (i64)down * kTile, column0 = (i64)across * kTile;
#pragma unroll 4
  for (int round = 0; round < kRounds; ++round) {
    const int i = round * kThreads + threadIdx.x, line = i % kTile, column = i / kTile;
    if (line0 + line < p.lines && column0 + column < p.units)
      access::load(tile[column * kPitch + line], x + (line0 + line) * p.x_pitch + (column0 + column) * p.x_step);
  }
  __syncthreads();
#pragma unroll 4
  for (int round = 0; round < kRounds; ++round) {
    const int i = round * kThreads + threadIdx.x, column = i % kTile, line = i / kTile;
    if (line0 + line < p.lines && column0 + column < p.units)
      access::store(out + (line0 + line) * p.out_pitch + (column0 + column) * p.out_step, tile[column * kPitch + line]);
  }
}

#else

extern "C" __global__ void __launch_bounds__(kThreads) copy(const CopyParams p) {
  begin_kernel();
  const u32 line_block = blockIdx.x / p.tiles_across, part = blockIdx.x - line_block * p.tiles_across;
  const i64 line = (i64)line_block * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
  if (line >= p.num_starts) return;
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const i64 first = ((i64)part * ITEMS << p.lane_bits) + lane;
  i64 start[2];
  row_offsets<0>(start, p.starts, line);
  const char* x = (const char*)p.x + start[0] * p.size + first * p.x_step;
  char* out = (char*)p.out + start[1] * p.size + first * p.out_step;
  const i64 left = (p.units - first + (1 << p.lane_bits) - 1) >> p.lane_bits;
  const int count = (int)min(left, (i64)ITEMS);
  Piece pieces[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) access::load(pieces[i], x + ((i64)i << p.lane_bits) * p.x_step);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) access::store(out + ((i64)i << p.lane_bits) * p.out_step, pieces[i]);
}

#endif
