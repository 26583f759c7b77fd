// dweight[v] = sum of dout[i] over all i with ids[i] = v, in f32 and in the order of i.
//
// Threads to data: a block owns kRows rows of dweight and, by its grid row, kTiles tiles of kThreads columns; a thread has
// one column of a tile. The block goes through all ids and lists the places of those that are its rows, in order, in
// shared memory. Then it adds tile by tile: sums are in shared memory, and each thread touches its own column alone. Where
// the list does not hold all places, ids are gone through again for each tile, a list at a time: the order of additions,
// and so the bits, are the same.
//
// Defines: IN, the element type.

#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 32, kTiles = 4, kList = 1024;

// A place and its row: the latter in the lowest bits.
constexpr int kRowBits = 5;
static_assert(kRows == 1 << kRowBits, "rows are counted in kRowBits");

struct Shared {
  u64 list[kList];
  float sums[kRows * kThreads];
  int counts[kWarps];
};

WS_INLINE i64 id_of(const EmbeddingBackwardParams& p, i64 place) {
  const i64 at = row_offset(p.rows, 0, place);
  return p.wide_ids ? ((const volatile i64*)p.ids)[at] : ((const volatile i32*)p.ids)[at];
}

// Lists the places of this block's rows from `from` on, as many rounds of kThreads ids as surely fit. Returns how many, and
// where it stopped.
WS_INLINE int list_places(Shared& shared, const EmbeddingBackwardParams& p, i64 first_row, i64& from) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int count = 0;
  for (; from < p.num_ids && count + kThreads <= kList; from += kThreads) {
    const i64 place = from + threadIdx.x;
    const u64 row = place < p.num_ids ? (u64)(id_of(p, place) - first_row) : kRows;
    const bool mine = row < (u64)kRows;
    const u32 votes = __ballot_sync(0xffffffffu, mine);
    __syncthreads();
    if (lane == 0) shared.counts[warp] = __popc(votes);
    __syncthreads();
    int before = count;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += shared.counts[w];
      count += shared.counts[w];
    }
    if (mine) shared.list[before + __popc(votes & ((1u << lane) - 1))] = (u64)place << kRowBits | row;
  }
  __syncthreads();
  return count;
}

// Adds the listed rows of dout to the sums of this thread's column.
WS_INLINE void add_places(Shared& shared, const EmbeddingBackwardParams& p, int count, i64 column) {
  for (int i = 0; i < count; ++i) {
    const u64 entry = shared.list[i];
    const i64 start = row_offset(p.rows, 1, (i64)(entry >> kRowBits));
    float* sum = &shared.sums[(entry & (kRows - 1)) * kThreads + threadIdx.x];
    *sum += to_f32(((const IN*)p.dout)[start + column * p.dout_step]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) embedding_backward(const EmbeddingBackwardParams p) {
  begin_kernel();
  __shared__ Shared shared;
  const i64 first_row = (i64)blockIdx.x * kRows;
  i64 next = 0;
  const int listed = list_places(shared, p, first_row, next);
  const bool complete = next >= p.num_ids;
  for (int tile = 0; tile < kTiles; ++tile) {
    const i64 column = ((i64)blockIdx.y * kTiles + tile) * kThreads + threadIdx.x;
    // The same for the whole block.
    if (column - threadIdx.x >= p.hidden) break;
    const bool works = column < p.hidden;
#pragma unroll 8
    for (int r = 0; r < kRows; ++r) shared.sums[r * kThreads + threadIdx.x] = 0.0f;
    if (complete) {
      if (works) add_places(shared, p, listed, column);
    } else {
      for (i64 from = 0; from < p.num_ids;) {
        __syncthreads();
        const int count = list_places(shared, p, first_row, from);
        if (works) add_places(shared, p, count, column);
      }
    }
    if (!works) continue;
    const int rows = (int)min(p.vocab - first_row, (i64)kRows);
    for (int r = 0; r < rows; ++r)
      ((IN*)p.dweight)[(first_row + r) * p.weight_pitch + column * p.weight_step] =
          from_f32<IN>(shared.sums[r * kThreads + threadIdx.x]);
  }
}
