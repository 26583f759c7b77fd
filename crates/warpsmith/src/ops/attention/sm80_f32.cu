// `attention` of f32 on the tensor cores of sm_80 and later, through mma.sync: dense heads.
//
// A number is the sum of two of TF32 and of less than 2^-22 of it, so three products of TF32 make one that errs about as
// f32 does: the large parts, and each with the other's small one. Tensor cores cut off what they add, so the last two have
// sums of their own, and what the values of a block add to is begun anew each time and added by ordinary means.
//
// A block of 4 warps makes 64 rows, 16 a warp. Keys come in blocks of KEYS, whose keys and values are copied ahead by cp.async
// into two stages each. A warp's scores are fragments of m16n8: lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and
// the next of each 8 keys. Those are the left operand of the product with the values as they are, if of these 8 keys the even
// ones count as the first four. Lines of shared memory are 16 bytes longer than a head, an odd number of pieces: so
// eight lines' pieces, read by one ldmatrix, lie in different banks, and so do the values that a warp reads.
//
// HEAD_DIM. KEYS: keys of a block, 16 or 32. And those of attention.cuh.

#include "warpsmith/attention.cuh"
#include "warpsmith/mma.cuh"

constexpr int kThreads = 128, kTileM = 64, kKeys = KEYS;
constexpr int kSteps = HEAD_DIM / 8, kPieces = HEAD_DIM / 4, kLine = (kPieces + 1) * 16;
constexpr int kKeyBlocks = kKeys / 8, kColumnBlocks = HEAD_DIM / 8;
// Columns of values whose sums are made side by side: a product waits for the one before it in the same sum. Fewer where
// registers would not do.
constexpr int kAtOnce = kColumnBlocks % 4 || HEAD_DIM % 128 == 0 ? 2 : 4;
constexpr u32 kStage = kKeys * kLine;

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

template <int kCount> WS_INLINE void clear(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = 0.0f;
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

// `count` heads, the first of them at at(0), into kHeads lines; zeros past the end. Not all at once: the compiler would keep all
// their addresses in registers.
template <int kHeads, class At> WS_INLINE void load_heads(u32 to, int count, At at) {
#pragma unroll 2
  for (int i = 0; i < kHeads * kPieces / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, line = index / kPieces, piece = index % kPieces;
    const bool exists = line < count;
    copy_async(to + line * kLine + piece * 16, at(exists ? line : 0) + piece * 4, exists);
  }
}
// Whether what this thread has copied so is finite.
template <int kHeads> WS_INLINE bool are_finite(u32 heads) {
  float lost = 0.0f;
#pragma unroll 2
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
  const Request& r = work.request;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 queries = shared_address(shared), keys = queries + kTileM * kLine, values = keys + 2 * kStage;
  // Both ends of what is seen ascend with the row. From `inside` on and below `whole`, every row sees every key.
  const Keys low = keys_of(p, r, work.first_row / p.group);
  const Keys high = keys_of(p, r, (work.first_row + work.rows - 1) / p.group);
  const int begin = low.first / kKeys, end = (high.end + kKeys - 1) / kKeys;
  const int inside = high.first, whole = low.end;

  auto load_block = [&](u32 to, u64 base, const HeadStrides& strides, int block) {
    if (block < end) {
      const float* first = head_at<const float>(base, strides, r.batch, (i64)r.first_key + block * kKeys, work.kv_head);
      load_heads<kKeys>(to + (block & 1) * kStage, r.kv_len - block * kKeys, [&](int key) { return first + key * strides.token; });
    }
    commit_copies();
  };

  const Row rows[2] = {row_at(p, work, warp * 16 + lane / 4), row_at(p, work, warp * 16 + lane / 4 + 8)};
  float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f}, out[kColumnBlocks][4];
  clear(out);

  load_heads<kTileM>(queries, work.rows, [&](int row) {
    const int index = work.first_row + row;
    return head_at<const float>(p.q, p.q_at, r.batch, (i64)r.first_query + index / p.group,
                                work.kv_head * p.group + index % p.group);
  });
  load_block(keys, p.k, p.k_at, begin);
  load_block(values, p.v, p.v_at, begin);
  // Rows of the queries, and their halves of 16 bytes, as ldmatrix wants them for a left operand; and the keys for a right one.
  const u32 query_at = queries + (warp * 16 + lane % 16) * kLine + lane / 16 * 16;
  const u32 key_at = keys + (lane % 8 + lane / 16 * 8) * kLine + lane / 8 % 2 * 16;
  const u32 value_at = values + lane % 4 * 2 * kLine + lane / 4 * 4;
  wait_copies<1>();
  const bool queries_finite = are_finite<kTileM>(queries);

#pragma unroll 1
  for (int block = begin; block < end; ++block) {
    const u32 stage = (block & 1) * kStage;
    // The stage that is filled here was last read before the barrier in the middle of the block before.
    load_block(keys, p.k, p.k_at, block + 1);
    wait_copies<2>();
    const bool plain = queries_finite && are_finite<kKeys>(keys + stage);
    float score[kKeyBlocks][4];
    if (__syncthreads_and(plain)) scores_of<false>(score, query_at, key_at + stage);
    else scores_of<true>(score, query_at, key_at + stage);

    const bool checked = block * kKeys >= inside && (block + 1) * kKeys <= whole && work.rows == kTileM;
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = most[half];
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = score[j][2 * half + e];
          s = score_of(p, work, rows[half], block * kKeys + j * 8 + lane % 4 * 2 + e, s, checked);
          highest = larger(highest, s);
        }
      highest = larger(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = larger(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float base = base_of(highest);
      scale[half] = exp_neg<f32>(most[half] - base);
      most[half] = highest;
      sum[half] *= scale[half];
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = score[j][2 * half + e];
          s = exp_neg<f32>(s - base);
          sum[half] += s;
        }
    }

    load_block(values, p.v, p.v_at, block + 1);
    wait_copies<2>();
    if (__syncthreads_and(are_finite<kKeys>(values + stage))) weigh<false>(out, scale, score, value_at + stage);
    else weigh<true>(out, scale, score, value_at + stage);
  }
  wait_copies<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    if (warp * 16 + half * 8 + lane / 4 >= work.rows) continue;
    const float factor = finish_row<f32>(p, work, rows[half], most[half], sum[half]);
    float* to = head_at<float>(p.out, p.out_at, r.batch, (i64)r.first_query + rows[half].query, rows[half].head);
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
      *(float2*)(to + c * 8 + lane % 4 * 2) = {out[c][2 * half] * factor, out[c][2 * half + 1] * factor};
  }
}
