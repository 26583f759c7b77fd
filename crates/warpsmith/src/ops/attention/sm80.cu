// `attention` on the tensor cores of sm_80 and later, through mma.sync: f16 and bf16 with dense heads.
//
// A block of 4 warps makes 64 rows, 16 a warp. Keys come in blocks of kKeys, whose keys and values are copied ahead by
// cp.async into two stages each. A warp's scores are fragments of m16n8: lane l has rows l / 4 and l / 4 + 8, columns
// 2 (l % 4) and the next of each 8 keys; rounded, two such fragments are the left operand of the product with the
// values. Keys are summed in ascending order, 16 an mma. Lines of shared memory are 16 bytes longer than a head, an odd
// number of pieces, so that eight lines' pieces, read by one ldmatrix, lie in different banks.
//
// T: the type. HEAD_DIM. KEYS: keys of a block, 32 or 64. And those of attention.cuh.

#include "warpsmith/attention.cuh"
#include "warpsmith/mma.cuh"

constexpr int kThreads = 128, kTileM = 64, kKeys = KEYS;
constexpr int kSteps = HEAD_DIM / 16, kPieces = HEAD_DIM / 8, kLine = (kPieces + 1) * 16;
constexpr int kKeyBlocks = kKeys / 8, kColumnBlocks = HEAD_DIM / 8;
// Larger heads leave no registers for the queries: they are read from shared memory each time.
constexpr bool kKeepQueries = HEAD_DIM <= 128;
constexpr u32 kStage = kKeys * kLine;

extern __shared__ __align__(128) u8 shared[];

WS_INLINE u32 pair(float low, float high, bf16) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
WS_INLINE u32 pair(float low, float high, f16) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// `count` heads, the first of them at at(0), into kHeads lines; zeros past the end.
template <int kHeads, class At> WS_INLINE void load_heads(u32 to, int count, At at) {
#pragma unroll
  for (int i = 0; i < kHeads * kPieces / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, line = index / kPieces, piece = index % kPieces;
    const bool exists = line < count;
    copy_async(to + line * kLine + piece * 16, at(exists ? line : 0) + piece * 8, exists);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) attention_sm80(const AttentionParams p) {
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

  auto load_queries = [&] {
    load_heads<kTileM>(queries, work.rows, [&](int row) {
      const int index = work.first_row + row;
      return head_at<const T>(p.q, p.q_at, r.batch, (i64)r.first_query + index / p.group,
                              work.kv_head * p.group + index % p.group);
    });
  };
  auto load_block = [&](u32 to, u64 base, const HeadStrides& strides, int block) {
    if (block < end) {
      const T* first = head_at<const T>(base, strides, r.batch, (i64)r.first_key + block * kKeys, work.kv_head);
      load_heads<kKeys>(to + (block & 1) * kStage, r.kv_len - block * kKeys, [&](int key) { return first + key * strides.token; });
    }
    commit_copies();
  };

  const Row rows[2] = {row_at(p, work, warp * 16 + lane / 4), row_at(p, work, warp * 16 + lane / 4 + 8)};
  float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f}, out[kColumnBlocks][4];
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[c][e] = 0.0f;

  load_queries();
  load_block(keys, p.k, p.k_at, begin);
  load_block(values, p.v, p.v_at, begin);
  // Rows of the queries, and their halves of 16 bytes, as ldmatrix wants them for a left operand; and the keys and values
  // for right ones.
  const u32 query_at = queries + (warp * 16 + lane % 16) * kLine + lane / 16 * 16;
  const u32 key_at = (lane % 8 + lane / 16 * 8) * kLine + lane / 8 % 2 * 16;
  const u32 value_at = lane % 16 * kLine + lane / 16 * 16;
  u32 query[kKeepQueries ? kSteps : 1][4];
  if (kKeepQueries) {
    wait_copies<1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices<false>(query[step], query_at + step * 32);
  }

#pragma unroll 1
  for (int block = begin; block < end; ++block) {
    const u32 stage = (block & 1) * kStage;
    // The stage that is filled here was last read before the barrier in the middle of the block before.
    load_block(keys, p.k, p.k_at, block + 1);
    wait_copies<2>();
    __syncthreads();
    float score[kKeyBlocks][4];
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32(&left)[4] = query[kKeepQueries ? step : 0];
      if (!kKeepQueries) load_matrices<false>(left, query_at + step * 32);
#pragma unroll
      for (int j = 0; j < kKeyBlocks; j += 2) {
        u32 right[4];
        load_matrices<false>(right, keys + stage + key_at + j * 8 * kLine + step * 32);
        multiply(score[j], left, right[0], right[1], T());
        multiply(score[j + 1], left, right[2], right[3], T());
      }
    }

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
      scale[half] = exp_neg<T>(most[half] - base);
      most[half] = highest;
      sum[half] *= scale[half];
#pragma unroll
      for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = score[j][2 * half + e];
          s = exp_neg<T>(s - base);
          sum[half] += s;
        }
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[c][e] *= scale[e / 2];

    load_block(values, p.v, p.v_at, block + 1);
    wait_copies<2>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kKeyBlocks; j += 2) {
      const u32 left[4] = {pair(score[j][0], score[j][1], T()), pair(score[j][2], score[j][3], T()),
                           pair(score[j + 1][0], score[j + 1][1], T()), pair(score[j + 1][2], score[j + 1][3], T())};
#pragma unroll
      for (int c = 0; c < kColumnBlocks; c += 2) {
        u32 right[4];
        load_matrices<true>(right, values + stage + value_at + j * 8 * kLine + c * 16);
        multiply(out[c], left, right[0], right[1], T());
        multiply(out[c + 1], left, right[2], right[3], T());
      }
    }
  }
  wait_copies<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    if (warp * 16 + half * 8 + lane / 4 >= work.rows) continue;
    const float factor = finish_row<T>(p, work, rows[half], most[half], sum[half]);
    T* to = head_at<T>(p.out, p.out_at, r.batch, (i64)r.first_query + rows[half].query, rows[half].head);
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
      *(u32*)(to + c * 8 + lane % 4 * 2) = pair(out[c][2 * half] * factor, out[c][2 * half + 1] * factor, T());
  }
}
