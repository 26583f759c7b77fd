// `attention` on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16 with dense heads.
//
// Threads to data: as in attention_mma.cuh. Two fragments of weights of 8 keys each, rounded, are the left operand of a
// product with the values. Keys are summed in ascending order, 16 an mma.
//
// Defines: those of attention_mma.cuh; KEYS is 32 or 64; DROPOUT, if there is any.

#include "warpsmith/attention_dropout.cuh"
#include "warpsmith/attention_mma.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kSteps = HEAD_DIM / 16;
// Larger heads leave no registers for the queries, which are then read from shared memory each time.
constexpr bool kKeepQueries = HEAD_DIM <= 128;
// All copies of a thread are unrolled.
constexpr int kAhead = kTileM * kPieces / kThreads;

extern __shared__ __align__(128) u8 shared[];

extern "C" __global__ void __launch_bounds__(kThreads) attention_sm80(const AttentionDropoutParams call) {
  begin_kernel();
  const AttentionParams& p = call.attention;
  const Work work = work_at(p, blockIdx.x, kTileM);
  if (!work.exists) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 queries = shared_address(shared), keys = queries + kTileM * kLine, values = keys + 2 * kStage;
  const Span span = span_of(p, work);
  Softmax softmax = softmax_of(p, work, warp, lane);
  float out[kColumnBlocks][4];
  clear(out);
  load_first<kAhead>(queries, keys, values, p, work, span);
  const u32 query_at = left_at(queries, warp, lane), key_at = right_at(keys, lane);
  const u32 value_at = values + lane % 16 * kLine + lane / 16 * 16;
  u32 query[kKeepQueries ? kSteps : 1][4];
  if (kKeepQueries) {
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices<false>(query[step], query_at + step * 32);
  }

#if DROPOUT
  const int number = number_of(p, work.request);
  const HeadDropout dropout[2] = {{call.dropout, number, softmax.rows[0].head}, {call.dropout, number, softmax.rows[1].head}};
#endif
#pragma unroll 1
  for (int block = span.begin; block < span.end; ++block) {
    const u32 stage = (block & 1) * kStage;
    // The stage that is filled here was last read before the second barrier of the previous iteration.
    load_block<kAhead>(keys, p.k, p.k_at, work, span, block + 1);
    wait_copies<2>();
    __syncthreads();
    float score[kKeyBlocks][4];
    clear(score);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32(&left)[4] = query[kKeepQueries ? step : 0];
      if (!kKeepQueries) load_matrices<false>(left, query_at + step * 32);
#pragma unroll
      for (int j = 0; j < kKeyBlocks; j += 2) {
        u32 right[4];
        load_matrices<false>(right, key_at + stage + j * 8 * kLine + step * 32);
        multiply(score[j], left, right[0], right[1], T());
        multiply(score[j + 1], left, right[2], right[3], T());
      }
    }

    float kept[2];
    weights_of(softmax, score, kept, p, work, span, block, lane);
#if DROPOUT
    // Two blocks of 8 keys have a cell's two keys.
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kKeyBlocks; j += 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = softmax.rows[half].query, key = block * kKeys + j * 8 + lane % 4 * 2 + e;
          const u64 bits = dropout[half].bits(cell_of(query), cell_of(key));
#pragma unroll
          for (int next = 0; next < 2; ++next)
            if (!dropout[half].keeps(bits, half_of(query), next)) score[j + next][2 * half + e] = 0.0f;
        }
#endif
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[c][e] *= kept[e / 2];

    load_block<kAhead>(values, p.v, p.v_at, work, span, block + 1);
    wait_copies<2>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kKeyBlocks; j += 2) {
      const u32 left[4] = {pack_pair(score[j][0], score[j][1], T()), pack_pair(score[j][2], score[j][3], T()),
                           pack_pair(score[j + 1][0], score[j + 1][1], T()), pack_pair(score[j + 1][2], score[j + 1][3], T())};
#pragma unroll
      for (int c = 0; c < kColumnBlocks; c += 2) {
        u32 right[4];
        load_matrices<true>(right, value_at + stage + j * 8 * kLine + c * 16);
        multiply(out[c], left, right[0], right[1], T());
        multiply(out[c + 1], left, right[2], right[3], T());
      }
    }
  }
  wait_copies<0>();
#if DROPOUT
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[c][e] *= call.dropout.factor;
#endif
  finish_rows(out, softmax, p, work, warp, lane);
}
