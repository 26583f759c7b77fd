// out[i] = weight[ids[i]]; zeros where the id is no row of weight.
//
// Threads to data: a row is `units` accesses of WIDTH bytes. 2^lane_bits threads take ITEMS accesses each of a row, a
// lane's 2^lane_bits accesses apart; a block takes 256 >> lane_bits rows. All loads of a thread are issued before its
// first store.
//
// Defines: WIDTH, bytes of an access; ITEMS.

#include "warpsmith/access.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;
using Piece = access::Type<WIDTH>;

extern "C" __global__ void __launch_bounds__(kThreads) embedding(const EmbeddingParams p) {
  begin_kernel();
  const u32 row_block = blockIdx.x / p.tiles, tile = blockIdx.x - row_block * p.tiles;
  const i64 row = (i64)row_block * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
  if (row >= p.num_ids) return;
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const i64 first = ((i64)tile * ITEMS << p.lane_bits) + lane;
  i64 start[2];
  row_offsets<0>(start, p.rows, row);
  const i64 id = p.wide_ids ? ((const volatile i64*)p.ids)[start[0]] : ((const volatile i32*)p.ids)[start[0]];
  // As unsigned numbers negative ones are large.
  const bool exists = (u64)id < (u64)p.vocab;
  const char* from = (const char*)p.weight + (exists ? id : 0) * p.weight_pitch + first * p.weight_step;
  char* to = (char*)p.out + start[1] * p.size + first * p.out_step;
  const i64 left = (p.units - first + (1 << p.lane_bits) - 1) >> p.lane_bits;
  const int count = (int)min(left, (i64)ITEMS);
  Piece pieces[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    pieces[i] = Piece{};
    if (i < count && exists) access::load(pieces[i], from + ((i64)i << p.lane_bits) * p.weight_step);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) access::store(to + ((i64)i << p.lane_bits) * p.out_step, pieces[i]);
}
