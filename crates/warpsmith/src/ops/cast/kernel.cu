// out = round(x), round(x * scale) or round(x / scale), element by element.
//
// Threads to data: a row is cut into groups of K elements, the smallest K for which both types move at least 8 bytes at
// once and the wider one 16. 2^lane_bits threads work on a row, each on ITEMS groups; a block has 256 >> lane_bits rows.
// A dense tensor is one row.
//
// Defines: IN, OUT (element types), SCALE (0: none, 1: multiply, 2: divide), VECTOR (rows are dense, and groups aligned to
// their size), ITEMS.

#include "warpsmith/group.cuh"
#include "warpsmith/l2.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;
constexpr int kWide = sizeof(IN) > sizeof(OUT) ? sizeof(IN) : sizeof(OUT);
constexpr int kNarrow = sizeof(IN) < sizeof(OUT) ? sizeof(IN) : sizeof(OUT);
constexpr int K = 16 / kWide > 8 / kNarrow ? 16 / kWide : 8 / kNarrow;

WS_INLINE float scaled(float x, float scale) {
  if (SCALE == 1) return __fmul_rn(x, scale);
  if (SCALE == 2) return __fdiv_rn(x, scale);
  return x;
}

// Elements loaded before the first is stored where they are converted one by one. Where only the last group of a row is,
// one: that leaves the registers to the others.
constexpr int kAtOnce = VECTOR ? 1 : 4;

// Blocks per multiprocessor; the slow path of the division needs registers.
constexpr int kResident = SCALE == 2 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(kThreads, kResident) cast(const CastParams p) {
  const Lines<kThreads> lines{p.lane_bits};
  const int lane = lines.lane();
  const BlockPlace tile(p.col_tiles);
  const i64 row = (i64)tile.row * lines.count() + lines.line();
  if (row >= p.num_rows) return;
  i64 start[SCALE ? 3 : 2];
  row_offsets<0>(start, p.rows, row);
  const IN* x = (const IN*)p.x + start[0];
  OUT* out = (OUT*)p.out + start[1];
  const i64 first = (((i64)tile.column * ITEMS << p.lane_bits) + lane) * K;
  const i64 stride = (i64)K << p.lane_bits;
  if (VECTOR && (int)blockIdx.x < p.blocks_ahead) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * stride + K <= p.num_cols) prefetch_chunk(x + first + i * stride);
  }
  begin_kernel();
  const float scale = SCALE ? ((const float*)p.scale)[start[SCALE ? 2 : 0]] : 1.0f;

  // All whole groups are loaded before the first is stored. The end of a row is converted element by element.
  Group<IN, K> groups[ITEMS];
  if (VECTOR) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * stride + K <= p.num_cols) groups[i].load(x + first + i * stride);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = first + i * stride;
    if (VECTOR && at + K <= p.num_cols) {
      float values[K];
      groups[i].unpack(values);
#pragma unroll
      for (int j = 0; j < K; ++j) values[j] = scaled(values[j], scale);
      Group<OUT, K> result;
      result.pack(values);
      result.store(out + at);
    } else {
      const int count = (int)min(p.num_cols - at, (i64)K);
#pragma unroll 1
      for (int j = 0; j < count; j += kAtOnce) {
        IN items[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (j + i < count) items[i] = x[(at + j + i) * p.x_step];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (j + i < count) out[(at + j + i) * p.out_step] = from_f32<OUT>(scaled(to_f32(items[i]), scale));
      }
    }
  }
}
