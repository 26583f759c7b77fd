// `attention` of f32 on the tensor cores of sm_80 and later, through mma.sync: dense heads.
//
// Threads to data: as in attention_mma.cuh.
//
// A number is split into a large and a small part of type TF32, which leaves less than 2^-22 of it. Three products of
// parts then have about the error of f32: large by large, and each large part by the small part of the other. Tensor
// cores truncate what they add, so the last two products are summed separately, and the sum over the values of a block
// starts from zero each time and is added with ordinary instructions.
//
// Fragments of scores become the left operand of the product with the values without moving between lanes, if the even
// ones of each 8 keys are taken as the first four. The values that a warp reads for it lie in different banks.
//
// Defines: those of attention_mma.cuh; KEYS is 16 or 32.

#include "warpsmith/attention_mma.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kSteps = HEAD_DIM / 8;
// Column blocks that are summed side by side, because a product waits for the previous one in the same sum. Fewer where
// registers are short.
constexpr int kAtOnce = kColumnBlocks % 4 || HEAD_DIM % 128 == 0 ? 2 : 4;
// Copies of a thread that are unrolled; registers are short.
constexpr int kAhead = 2;

extern __shared__ __align__(128) u8 shared[];

WS_INLINE u32 to_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// The two parts of a number. `large_if_finite` is the factor in products with the other number's small part.
struct Parts {
  u32 large, large_if_finite, small;
};
// kCareful is for numbers that may not be finite. Infinity has no small part, because infinity minus itself is NaN, and
// takes no part in products with small parts.
template <bool kCareful> WS_INLINE Parts split(float x) {
  const u32 large = to_tf32(x);
  const float rest = x - bits_float(large);
  const bool finite = !kCareful || rest == rest;
  return {large, finite ? large : 0u, finite ? to_tf32(rest) : 0u};
}

// Four elements of a left operand.
struct Left {
  u32 large[4], large_if_finite[4], small[4];
};
template <bool kCareful> WS_INLINE Left split_left(const float (&x)[4]) {
  Left left;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Parts parts = split<kCareful>(x[e]);
    left.large[e] = parts.large, left.large_if_finite[e] = parts.large_if_finite, left.small[e] = parts.small;
  }
  return left;
}

// Multiplies by two elements of the right operand, and adds the product of the large parts to `sum`, the others to `rest`.
WS_INLINE void multiply_parts(float (&sum)[4], float (&rest)[4], const Left& left, const Parts& b0, const Parts& b1) {
  multiply(rest, left.small, b0.large_if_finite, b1.large_if_finite, f32());
  multiply(sum, left.large, b0.large, b1.large, f32());
  multiply(rest, left.large_if_finite, b0.small, b1.small, f32());
}

WS_INLINE void load_floats(float (&x)[4], u32 at) {
  u32 r[4];
  load_matrices<false>(r, at);
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = bits_float(r[e]);
}
WS_INLINE float load_float(u32 at) {
  float x;
  load_shared(x, at);
  return x;
}

// The scores of a warp's rows.
template <bool kCareful> WS_INLINE void scores_of(float (&score)[kKeyBlocks][4], u32 queries, u32 keys) {
  float rest[kKeyBlocks][4];
  clear(score);
  clear(rest);
#pragma unroll kCareful ? 1 : 2
  for (int step = 0; step < kSteps; ++step) {
    float q[4];
    load_floats(q, queries + step * 32);
    const Left left = split_left<kCareful>(q);
#pragma unroll
    for (int j = 0; j < kKeyBlocks; j += 2) {
      float k[4];
      load_floats(k, keys + j * 8 * kLine + step * 32);
      Parts parts[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) parts[e] = split<kCareful>(k[e]);
      multiply_parts(score[j], rest[j], left, parts[0], parts[1]);
      multiply_parts(score[j + 1], rest[j + 1], left, parts[2], parts[3]);
    }
  }
#pragma unroll
  for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) score[j][e] += rest[j][e];
}

// out = kept out + weight values, for the two rows of a lane and a block of values.
template <bool kCareful>
WS_INLINE void weigh(float (&out)[kColumnBlocks][4], const float (&kept)[2], const float (&weight)[kKeyBlocks][4], u32 values) {
  // A weight that is not finite is NaN, which every product propagates.
  Left left[kKeyBlocks];
#pragma unroll
  for (int j = 0; j < kKeyBlocks; ++j) {
    const float(&w)[4] = weight[j];
    const float even_first[4] = {w[0], w[2], w[1], w[3]};
    left[j] = split_left<false>(even_first);
  }
#pragma unroll
  for (int first = 0; first < kColumnBlocks; first += kAtOnce) {
    float sum[kAtOnce][4], rest[kAtOnce][4];
    clear(sum);
    clear(rest);
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const u32 at = values + j * 8 * kLine + (first + c) * 32;
        const Parts b0 = split<kCareful>(load_float(at)), b1 = split<kCareful>(load_float(at + kLine));
        multiply_parts(sum[c], rest[c], left[j], b0, b1);
      }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[first + c][e] = fmaf(out[first + c][e], kept[e / 2], sum[c][e] + rest[c][e]);
  }
}

// Whether everything that this thread copied of kHeads heads is finite.
template <int kHeads> WS_INLINE bool are_finite(u32 heads) {
  float lost = 0.0f;
#pragma unroll kAhead
  for (int i = 0; i < kHeads * kPieces / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    float x[4];
    load_shared(x, heads + index / kPieces * kLine + index % kPieces * 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) lost = fmaf(x[e], 0.0f, lost);
  }
  return lost == lost;
}

// With a minimum of one block, the compiler does not spill to fit a third.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_sm80_f32(const AttentionParams p) {
  begin_kernel();
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
  const u32 value_at = values + lane % 4 * 2 * kLine + lane / 4 * 4;
  wait_copies<1>();
  const bool queries_finite = are_finite<kTileM>(queries);

#pragma unroll 1
  for (int block = span.begin; block < span.end; ++block) {
    const u32 stage = (block & 1) * kStage;
    // The stage that is filled here was last read before the second barrier of the previous iteration.
    load_block<kAhead>(keys, p.k, p.k_at, work, span, block + 1);
    wait_copies<2>();
    const bool plain = queries_finite && are_finite<kKeys>(keys + stage);
    float score[kKeyBlocks][4];
    if (__syncthreads_and(plain)) scores_of<false>(score, query_at, key_at + stage);
    else scores_of<true>(score, query_at, key_at + stage);

    float kept[2];
    weights_of(softmax, score, kept, p, work, span, block, lane);

    load_block<kAhead>(values, p.v, p.v_at, work, span, block + 1);
    wait_copies<2>();
    if (__syncthreads_and(are_finite<kKeys>(values + stage))) weigh<false>(out, kept, score, value_at + stage);
    else weigh<true>(out, kept, score, value_at + stage);
  }
  wait_copies<0>();
  finish_rows(out, softmax, p, work, warp, lane);
}
