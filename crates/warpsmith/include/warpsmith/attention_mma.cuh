#pragma once
// What the kernels of `attention` on mma.sync share: tiles of heads in shared memory, and the softmax of a warp's scores.
//
// Threads to data: a block of 4 warps computes 64 rows, 16 a warp. Keys come in blocks of KEYS, whose keys and values are
// copied ahead by cp.async into two stages each. A warp's scores are fragments of m16n8: lane l has rows l / 4 and
// l / 4 + 8, and columns 2 (l % 4) and the next of each 8 keys. A line of shared memory is 16 bytes longer than a head,
// which makes it an odd number of 16-byte pieces, so that the eight that one ldmatrix reads lie in different banks.
//
// Defines: T, the type; HEAD_DIM; KEYS, keys of a block; those of attention.cuh.

#include "warpsmith/attention.cuh"
#include "warpsmith/mma.cuh"

namespace warpsmith::attention {

constexpr int kThreads = 128, kTileM = 64, kKeys = KEYS;
constexpr int kPieceElements = 16 / (int)sizeof(T), kPieces = HEAD_DIM / kPieceElements, kLine = (kPieces + 1) * 16;
constexpr int kKeyBlocks = kKeys / 8, kColumnBlocks = HEAD_DIM / 8;
constexpr u32 kStage = kKeys * kLine;

template <int kCount> WS_INLINE void clear(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = 0.0f;
}

// Copies `count` heads, the i-th at at(i), into kHeads lines; lines past the end become zeros. kAhead: how many of a
// thread's copies are unrolled, which keeps their addresses in registers.
template <int kHeads, int kAhead, class At> WS_INLINE void load_heads(u32 to, int count, At at) {
  constexpr int kCopies = kHeads * kPieces;
#pragma unroll kAhead
  for (int i = 0; i < (kCopies + kThreads - 1) / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, line = index / kPieces, piece = index % kPieces;
    // 32 heads of 80 elements are no whole number of copies for each thread.
    if (kCopies % kThreads != 0 && index >= kCopies) break;
    const bool exists = line < count;
    copy_async(to + line * kLine + piece * 16, at(exists ? line : 0) + piece * kPieceElements, exists);
  }
}
template <int kAhead> WS_INLINE void load_queries(u32 to, const AttentionParams& p, const Work& work) {
  load_heads<kTileM, kAhead>(to, work.rows, [&](int row) {
    const int index = work.first_row + row;
    return head_at<const T>(p.q, p.q_at, work.request.batch, (i64)work.request.first_query + index / p.group,
                            work.kv_head * p.group + index % p.group);
  });
}

// The blocks of keys that a block's rows see any of, from `begin` to below `end`. Every row sees every key from
// `first_seen_by_all` to below `end_seen_by_all`, apart from masks.
struct Span {
  int begin, end, first_seen_by_all, end_seen_by_all;
};
WS_INLINE Span span_of(const AttentionParams& p, const Work& work) {
  // Both ends of the keys that a row sees ascend with the row.
  const Keys low = keys_of(p, work.request, work.first_row / p.group);
  const Keys high = keys_of(p, work.request, (work.first_row + work.rows - 1) / p.group);
  return {low.first / kKeys, (high.end + kKeys - 1) / kKeys, high.first, low.end};
}

// Copies a block of keys or values into its stage, if the span has that block. Closes a group of copies either way.
template <int kAhead>
WS_INLINE void load_block(u32 stages, u64 base, const HeadStrides& strides, const Work& work, const Span& span, int block) {
  if (block < span.end) {
    const Request& r = work.request;
    const T* first = head_at<const T>(base, strides, r.batch, (i64)r.first_key + block * kKeys, work.kv_head);
    load_heads<kKeys, kAhead>(stages + (block & 1) * kStage, r.kv_len - block * kKeys,
                              [&](int key) { return first + key * strides.token; });
  }
  commit_copies();
}

// The addresses that a lane gives to ldmatrix: of the warp's rows of queries, as a left operand; and of keys, as a right
// operand.
WS_INLINE u32 left_at(u32 queries, int warp, int lane) { return queries + (warp * 16 + lane % 16) * kLine + lane / 16 * 16; }
WS_INLINE u32 right_at(u32 keys, int lane) { return keys + (lane % 8 + lane / 16 * 8) * kLine + lane / 8 % 2 * 16; }

// The two rows of a lane: the largest score so far, and the sum of exponentials relative to it, of this lane's keys alone.
struct Softmax {
  Row rows[2];
  float most[2], sum[2];
};
WS_INLINE Softmax softmax_of(const AttentionParams& p, const Work& work, int warp, int lane) {
  return {{row_at(p, work, warp * 16 + lane / 4), row_at(p, work, warp * 16 + lane / 4 + 8)},
          {minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
}

// Turns the products with a block of keys into the weights of its values. `kept`: for each row, the factor of everything
// summed before.
WS_INLINE void weights_of(Softmax& softmax, float (&score)[kKeyBlocks][4], float (&kept)[2], const AttentionParams& p,
                          const Work& work, const Span& span, int block, int lane) {
  const bool is_seen =
      block * kKeys >= span.first_seen_by_all && (block + 1) * kKeys <= span.end_seen_by_all && work.rows == kTileM;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = softmax.most[half];
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[j][2 * half + e];
        s = score_of(p, work, softmax.rows[half], block * kKeys + j * 8 + lane % 4 * 2 + e, s, is_seen);
        highest = fmaxf(highest, s);
      }
    // NaN does not count here; it shows in the sum.
    highest = quad_reduce<MaxIgnoringNan>(highest);
    const float base = base_of(highest);
    kept[half] = exp_neg<T>(softmax.most[half] - base);
    softmax.most[half] = highest;
    softmax.sum[half] *= kept[half];
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[j][2 * half + e];
        s = exp_neg<T>(s - base);
        softmax.sum[half] += s;
      }
  }
}

template <class E> WS_INLINE void store_pair(E* to, float low, float high) { *(u32*)to = pack_pair(low, high, E()); }
WS_INLINE void store_pair(float* to, float low, float high) { *(float2*)to = {low, high}; }

// Starts the copies of queries and first keys, one group, and of first values, another.
template <int kAhead>
WS_INLINE void load_first(u32 queries, u32 keys, u32 values, const AttentionParams& p, const Work& work, const Span& span) {
  load_queries<kAhead>(queries, p, work);
  load_block<kAhead>(keys, p.k, p.k_at, work, span, span.begin);
  load_block<kAhead>(values, p.v, p.v_at, work, span, span.begin);
}

// Writes the results of a lane's rows, and their lse.
WS_INLINE void finish_rows(const float (&out)[kColumnBlocks][4], const Softmax& softmax, const AttentionParams& p, const Work& work,
                           int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_reduce<Sum>(softmax.sum[half]);
    if (warp * 16 + half * 8 + lane / 4 >= work.rows) continue;
    const Row& row = softmax.rows[half];
    const float factor = finish_row<T>(p, work, row, softmax.most[half], sum);
    T* to = head_at<T>(p.out, p.out_at, work.request.batch, (i64)work.request.first_query + row.query, row.head);
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
      store_pair(to + c * 8 + lane % 4 * 2, out[c][2 * half] * factor, out[c][2 * half + 1] * factor);
  }
}

}  // namespace warpsmith::attention
