// `attention` of f32 on the tensor cores of sm_80 and later, through mma.sync: dense heads.
//
// A number is the sum of two of TF32 and of less than 2^-22 of it, so three products of TF32 make one that errs about as
// f32 does: the large parts, and each with the other's small one. Tensor cores cut off what they add, so the last two have
// sums of their own, and what the values of a block add to is begun anew each time and added by ordinary means.
//
// Fragments of scores are the left operand of the product with the values as they are, if of these 8 keys the even ones
// count as the first four. The values that a warp reads for it lie in different banks.
//
// The defines are those of attention_mma.cuh; KEYS is 16 or 32.

#include "warpsmith/attention_mma.cuh"

constexpr int kSteps = HEAD_DIM / 8;
// Columns of values whose sums are made side by side: a product waits for the one before it in the same sum. Fewer where
// registers would not do.
constexpr int kAtOnce = kColumnBlocks % 4 || HEAD_DIM % 128 == 0 ? 2 : 4;
// Copies of a thread whose addresses are made at once: registers are few.
constexpr int kAhead = 2;

extern __shared__ __align__(128) u8 shared[];

WS_INLINE u32 to_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// The two parts of a number, and the large one for the product with the other's small part.
struct Parts {
  u32 large, beside, small;
};
// With care, where something may not be finite: it has no small part, because infinity less itself is NaN, and takes no part
// in products with one.
template <bool kCareful> WS_INLINE Parts split(float x) {
  const u32 large = to_tf32(x);
  const float rest = x - bits_float(large);
  const bool finite = !kCareful || rest == rest;
  return {large, finite ? large : 0u, finite ? to_tf32(rest) : 0u};
}

// Four elements of a left operand.
struct Left {
  u32 large[4], beside[4], small[4];
};
template <bool kCareful> WS_INLINE Left split_left(const float (&x)[4]) {
  Left left;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Parts parts = split<kCareful>(x[e]);
    left.large[e] = parts.large, left.beside[e] = parts.beside, left.small[e] = parts.small;
  }
  return left;
}

// The product with two elements of the right operand: of the large parts to `sum`, of the others to `rest`.
WS_INLINE void multiply_parts(float (&sum)[4], float (&rest)[4], const Left& left, const Parts& b0, const Parts& b1) {
  multiply(rest, left.small, b0.beside, b1.beside, f32());
  multiply(sum, left.large, b0.large, b1.large, f32());
  multiply(rest, left.beside, b0.small, b1.small, f32());
}

WS_INLINE void load_floats(float (&x)[4], u32 at) {
  u32 r[4];
  load_matrices<false>(r, at);
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = bits_float(r[e]);
}
WS_INLINE float load_float(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
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

// Adds the weights of a block times its values to what is `kept` of the sums of two rows.
template <bool kCareful>
WS_INLINE void weigh(float (&out)[kColumnBlocks][4], const float (&kept)[2], const float (&weight)[kKeyBlocks][4], u32 values) {
  // A weight that is not finite is NaN, which needs no care.
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

// Whether what this thread has copied of so many heads is finite.
template <int kHeads> WS_INLINE bool are_finite(u32 heads) {
  float lost = 0.0f;
#pragma unroll kAhead
  for (int i = 0; i < kHeads * kPieces / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    float x[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(heads + index / kPieces * kLine + index % kPieces * 16) : "memory");
#pragma unroll
    for (int e = 0; e < 4; ++e) lost = fmaf(x[e], 0.0f, lost);
  }
  return lost == lost;
}

// With a minimum of one block, the compiler does not spill registers for a third.
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

  load_queries<kAhead>(queries, p, work);
  load_block<kAhead>(keys, p.k, p.k_at, work, span, span.begin);
  load_block<kAhead>(values, p.v, p.v_at, work, span, span.begin);
  const u32 query_at = left_at(queries, warp, lane), key_at = right_at(keys, lane);
  const u32 value_at = values + lane % 4 * 2 * kLine + lane / 4 * 4;
  wait_copies<1>();
  const bool queries_finite = are_finite<kTileM>(queries);

#pragma unroll 1
  for (int block = span.begin; block < span.end; ++block) {
    const u32 stage = (block & 1) * kStage;
    // The stage that is filled here was last read before the barrier in the middle of the block before.
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
