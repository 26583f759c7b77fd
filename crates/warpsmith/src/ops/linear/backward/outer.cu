// dw = dz^T x for up to LINES rows of dz and x: an element is a sum of so few products that the time is that of writing it.
//
// Threads to data: a row of dw may start anywhere, but every kVec-th row starts at the same distance from a multiple of 16
// bytes. A block has up to kRows rows that far apart, and 128 aligned pieces of 16 bytes of each. A thread writes one piece
// of all these rows, and has the columns of x that go with it in registers. In the first and the last piece of a row it
// writes the elements that are the row's. The products of an element are added in the order of the rows of x.
// Blocks (i, 0) also write the sums of their columns of dz, with HAS_DBIAS.
//
// Defines: ELEM; LINES, a power of two; HAS_DBIAS.

#include "warpsmith/vec.cuh"

using namespace warpsmith;

constexpr int kThreads = 128, kRows = 32, kUnit = kVec<ELEM>;

extern "C" __global__ void __launch_bounds__(kThreads) linear_backward_outer(const OuterParams p) {
  begin_kernel();
  __shared__ __align__(16) float dz[kRows][LINES];
  const int first = blockIdx.x / kUnit * (kUnit * kRows) + blockIdx.x % kUnit;
  for (int i = threadIdx.x; i < kRows * LINES; i += kThreads) {
    const int line = i / kRows, row = first + i % kRows * kUnit;
    const bool exists = line < p.lines && row < p.n;
    dz[i % kRows][line] = exists ? to_f32(((const ELEM*)p.dz)[line * p.dz_row + row * p.dz_col]) : 0.0f;
  }
  ELEM* const out = (ELEM*)p.dw + first * p.dw_row;
  const int before = (int)((u64)out % 16) / (int)sizeof(ELEM);
  const int column = (int)(blockIdx.y * kThreads + threadIdx.x) * kUnit - before;
  float x[LINES][kUnit];
#pragma unroll
  for (int line = 0; line < LINES; ++line)
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const bool exists = line < p.lines && column + j >= 0 && column + j < p.k;
      x[line][j] = exists ? to_f32(((const ELEM*)p.x)[line * p.x_row + (column + j) * p.x_col]) : 0.0f;
    }
  __syncthreads();
  const int rows = (p.n - first + kUnit - 1) / kUnit;
  if (HAS_DBIAS && blockIdx.y == 0 && (int)threadIdx.x < min(rows, kRows)) {
    float sum = dz[threadIdx.x][0];
#pragma unroll
    for (int line = 1; line < LINES; ++line) sum += dz[threadIdx.x][line];
    ((ELEM*)p.dbias)[(first + (int)threadIdx.x * kUnit) * p.dbias_step] = from_f32<ELEM>(sum);
  }
  if (column >= p.k) return;
  const bool whole = column >= 0 && column + kUnit <= p.k;
#pragma unroll 4
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) break;
    float sum[kUnit];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      sum[j] = dz[i][0] * x[0][j];
#pragma unroll
      for (int line = 1; line < LINES; ++line) sum[j] = fmaf(dz[i][line], x[line][j], sum[j]);
    }
    Chunk<ELEM> chunk;
    pack(chunk, sum);
    ELEM* const to = out + i * (kUnit * p.dw_row) + column;
    if (whole) {
      store_words(to, chunk.words);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        if (column + j >= 0 && column + j < p.k) to[j] = chunk.items[j];
    }
  }
}
