// Merges attention outputs over parts of a context by their lses.
//
// Threads to data: a row is one token's head. 2^lane_bits threads work on a row, each on V elements at a time, 16 bytes
// of the parts with VECTOR, and a block on 256 >> lane_bits rows. Every thread works out the weights of its row by
// itself. The outputs of up to BATCH parts are loaded before the first is used, those of the first before the lses.
//
// Defines: ELEM, OUT (element types), VECTOR (pieces are dense and their addresses multiples of their size).

#include "warpsmith/group.cuh"
#include "warpsmith/rows.cuh"

using T = ELEM;
constexpr int V = VECTOR ? kVec<T> : 1;
constexpr int kThreads = 256;
constexpr int BATCH = 4;

extern "C" __global__ void __launch_bounds__(kThreads) merge_states(const MergeStatesParams p) {
  begin_kernel();
  const float kEmpty = bits_float(0xff800000u);
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const i64 row = (i64)blockIdx.x * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
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

  Chunk<T> pieces[BATCH];
  auto load = [&](int first, i64 at) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (first + i >= count) continue;
      const T* part = outs + (first + i) * p.outs_part_stride;
      if (VECTOR) load_words(pieces[i].words, part + at);
      else pieces[i].items[0] = part[at * p.outs_step];
    }
  };
  i64 at = (i64)lane * V;
  if (at < p.head_dim) load(0, at);

  float largest = kEmpty;
  for (int i = 0; i < count; ++i) {
    const float lse = lses[i * p.lses_part_stride];
    largest = largest != largest || largest > lse ? largest : lse;
  }
  const bool any = largest != kEmpty;

  // At least once: also threads without elements know the lse.
  do {
    float total[V], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] = 0.0f;
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i >= count) break;
        const float lse = lses[(first + i) * p.lses_part_stride];
        // What an empty part has is not even multiplied by zero.
        if (lse == kEmpty) continue;
        const float weight = expf(lse - largest);
        sum += weight;
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] = fmaf(weight, to_f32(pieces[i].items[j]), total[j]);
      }
      first += BATCH;
      if (first >= count) break;
      load(first, at);
    }
    if (p.lse && at == 0) ((float*)p.lse)[start[3]] = any ? largest + logf(sum) : kEmpty;
    if (at >= p.head_dim) return;
    const float inverse = any ? __frcp_rn(sum) : 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] = __fmul_rn(total[j], inverse);
    store_values<VECTOR>(out, at, p.out_step, total);
    at += (i64)V << p.lane_bits;
    if (at < p.head_dim) load(0, at);
  } while (at < p.head_dim);
}
