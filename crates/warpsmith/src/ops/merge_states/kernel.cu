// Merges attention outputs over parts of a context by their lses.
//
// Threads to data: a row is one head of one token. 2^lane_bits threads work on a row, each on CHUNKS pieces of V elements
// at a time (with VECTOR, V elements are 16 bytes); a block has 256 >> lane_bits rows. Every thread computes the weights
// of its row by itself. Outputs and lses of up to BATCH parts are loaded before the first is used.
//
// Defines: ELEM, OUT (element types), VECTOR (pieces are dense and their addresses multiples of their size), CHUNKS, BATCH.

#include "warpsmith/group.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = VECTOR ? kVec<T> : 1;
constexpr int kThreads = 256;
constexpr int kBatch = BATCH;

extern "C" __global__ void __launch_bounds__(kThreads) merge_states(const MergeStatesParams p) {
  begin_kernel();
  // The lse of a part without keys.
  const float kEmpty = minus_infinity();
  const Lines<kThreads> lines{p.lane_bits};
  const int lane = lines.lane();
  const i64 row = (i64)blockIdx.x * lines.count() + lines.line();
  if (row >= p.num_rows) return;
  i64 start[4];
  row_offsets<0>(start, p.rows, row);
  const T* outs = (const T*)p.outs + start[0];
  const float* lses = (const float*)p.lses + start[1];
  OUT* out = (OUT*)p.out + start[2];
  int count = p.num_parts;
  if (p.counts) {
    const int given = ((const i32*)p.counts)[(i64)((u32)row / (u32)p.num_heads) * p.count_stride];
    count = min(max(given, 0), count);
  }

  // A thread's pieces are adjacent. Parts past `count` are treated as empty.
  Chunk<T> pieces[kBatch][CHUNKS];
  float lse[kBatch];
  auto load = [&](int first, i64 at) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      lse[i] = kEmpty;
      if (first + i >= count) continue;
      lse[i] = lses[(first + i) * p.lses_part_stride];
      const T* part = outs + (first + i) * p.outs_part_stride;
      if (at >= p.head_dim) continue;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        if (VECTOR) load_words(pieces[i][c].words, part + at + c * V);
        else pieces[i][c].items[0] = part[at * p.outs_step];
      }
    }
  };
  i64 at = (i64)lane * (CHUNKS * V);
  load(0, at);
  float largest = kEmpty;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) largest = Max::join(largest, lse[i]);
  for (int i = kBatch; i < count; ++i) largest = Max::join(largest, lses[i * p.lses_part_stride]);
  const bool any = largest != kEmpty;

  // At least once: the thread that writes the lse may have no elements.
  do {
    float total[CHUNKS][V], sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int j = 0; j < V; ++j) total[c][j] = 0.0f;
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Not multiplied by zero: what an empty part holds may be NaN.
        if (lse[i] == kEmpty) continue;
        const float weight = expf(lse[i] - largest);
        sum += weight;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
          for (int j = 0; j < V; ++j) total[c][j] = fmaf(weight, to_f32(pieces[i][c].items[j]), total[c][j]);
      }
      first += kBatch;
      if (first >= count) break;
      load(first, at);
    }
    if (p.lse && at == 0) ((float*)p.lse)[start[3]] = any ? largest + logf(sum) : kEmpty;
    if (at >= p.head_dim) return;
    const float inverse = any ? __frcp_rn(sum) : 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < V; ++j) total[c][j] = __fmul_rn(total[c][j], inverse);
      store_values<VECTOR>(out, at + c * V, p.out_step, total[c]);
    }
    at += (i64)(CHUNKS * V) << p.lane_bits;
    if (at < p.head_dim) load(0, at);
  } while (at < p.head_dim);
}
