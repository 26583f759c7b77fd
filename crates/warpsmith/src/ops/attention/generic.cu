// `attention` without tensor cores: any type and strides, on any GPU.
//
// Threads to data: a block of 256 threads, 16 x 16, computes TILE_M rows. Keys come in blocks of 64: thread (y, x) has the
// scores of rows y * kRows + i and keys x + 16 * j, summed over head_dim in ascending order, with 16 elements in shared
// memory at a time. The lanes of a half-warp share a row, so that its maximum and sum are shuffles. Then the same thread
// adds weighted values to columns x + 16 * c of its rows, key by key, with 16 values in shared memory at a time.
//
// Defines: T, the type; HEAD_DIM; TILE_M, 16 or 64 (a row has the same bits with either); DROPOUT, if there is any; those of
// attention.cuh.

#include "warpsmith/attention_dropout.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

constexpr int kThreads = 256, kKeys = 64, kDepth = 16, kRows = TILE_M / 16, kColumns = HEAD_DIM / 16;
// Lines are one element longer than they need to be, so that writing a column does not hit a single bank.
constexpr int kKeyLine = kKeys + 1, kRowLine = TILE_M + 1;

__shared__ float shared_q[kDepth * kRowLine];
__shared__ float shared_k[kDepth * kKeyLine];
__shared__ float shared_p[TILE_M * kKeyLine];
__shared__ float shared_v[kDepth * HEAD_DIM];

// Loads elements depth to depth + kDepth - 1 of `count` heads, the i-th at at(i), as [depth][head]; zeros past the end.
template <int kHeads, int kLine, class At> WS_INLINE void load_depth(float* to, int count, int depth, i64 dim, At at) {
#pragma unroll
  for (int i = 0; i < kHeads * kDepth / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, d = index % kDepth, head = index / kDepth;
    to[d * kLine + head] = head < count ? to_f32(at(head)[(depth + d) * dim]) : 0.0f;
  }
}

// The tanh of a softcap needs registers: with a minimum of one block, the compiler does not spill to fit a third.
extern "C" __global__ void __launch_bounds__(kThreads, SOFTCAP ? 1 : 0) attention_generic(const AttentionDropoutParams call) {
  begin_kernel();
  const AttentionParams& p = call.attention;
  const Work work = work_at(p, blockIdx.x, TILE_M);
  if (!work.exists) return;
  const Request& r = work.request;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  auto query_at = [&](int row) {
    const int index = work.first_row + row;
    return head_at<const T>(p.q, p.q_at, r.batch, r.first_query + index / p.group,
                            work.kv_head * p.group + index % p.group);
  };
  Row rows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i] = row_at(p, work, y * kRows + i);
  // Both ends of the keys that a row sees ascend with the row.
  const int first = keys_of(p, r, work.first_row / p.group).first;
  const int end = keys_of(p, r, (work.first_row + work.rows - 1) / p.group).end;

#if DROPOUT
  const int number = number_of(p, r);
#endif

  float most[kRows], sum[kRows], out[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    most[i] = minus_infinity(), sum[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[i][c] = 0.0f;
  }

  for (int block = first / kKeys * kKeys; block < end; block += kKeys) {
    const int count = min(kKeys, r.kv_len - block);
#if DROPOUT
    // Before anything else of the block takes registers.
    u32 kept = 0;
#pragma unroll 1
    for (int i = 0; i < 4 * kRows; ++i) {
      const int row = work.first_row + y * kRows + i / 4, head = work.kv_head * p.group + row % p.group;
      const HeadDropout dropout(call.dropout, number, head);
      kept |= (u32)dropout.keeps(row / p.group, block + x + i % 4 * 16) << i;
    }
#endif
    float score[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] = 0.0f;
    const T* keys = head_at<const T>(p.k, p.k_at, r.batch, (i64)r.first_key + block, work.kv_head);
#pragma unroll 1
    for (int depth = 0; depth < HEAD_DIM; depth += kDepth) {
      __syncthreads();
      load_depth<TILE_M, kRowLine>(shared_q, work.rows, depth, p.q_at.dim, query_at);
      load_depth<kKeys, kKeyLine>(shared_k, count, depth, p.k_at.dim, [&](int key) { return keys + key * p.k_at.token; });
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < kDepth; ++d) {
        float k[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) k[j] = shared_k[d * kKeyLine + x + 16 * j];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float q = shared_q[d * kRowLine + y * kRows + i];
#pragma unroll
          for (int j = 0; j < 4; ++j) score[i][j] = fmaf(q, k[j], score[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float high = most[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        score[i][j] = score_of(p, work, rows[i], block + x + 16 * j, score[i][j], false);
        high = fmaxf(high, score[i][j]);
      }
      high = warp_reduce<MaxIgnoringNan, 16>(high);
      const float base = base_of(high), scale = exp_neg<T>(most[i] - base);
      most[i] = high;
      sum[i] *= scale;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float e = exp_neg<T>(score[i][j] - base);
        sum[i] += e;
#if DROPOUT
        if (!(kept >> (4 * i + j) & 1)) e = 0.0f;
#endif
        shared_p[(y * kRows + i) * kKeyLine + x + 16 * j] = rounded<T>(e);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[i][c] *= scale;
    }
    const T* values = head_at<const T>(p.v, p.v_at, r.batch, (i64)r.first_key + block, work.kv_head);
#pragma unroll 1
    for (int part = 0; part < count; part += kDepth) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kDepth * HEAD_DIM / kThreads; ++i) {
        const int index = threadIdx.x + i * kThreads, key = index / HEAD_DIM, column = index % HEAD_DIM;
        const bool exists = part + key < count;
        shared_v[index] = exists ? to_f32(values[(part + key) * p.v_at.token + column * p.v_at.dim]) : 0.0f;
      }
      __syncthreads();
#pragma unroll 4
      for (int key = 0; key < kDepth; ++key) {
        float weight[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) weight[i] = shared_p[(y * kRows + i) * kKeyLine + part + key];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float v = shared_v[key * HEAD_DIM + x + 16 * c];
#pragma unroll
          for (int i = 0; i < kRows; ++i) out[i][c] = fmaf(weight[i], v, out[i][c]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sum[i] = warp_reduce<Sum, 16>(sum[i]);
    if (y * kRows + i >= work.rows) continue;
    float factor = finish_row<T>(p, work, rows[i], most[i], sum[i]);
#if DROPOUT
    factor *= call.dropout.factor;
#endif
    T* to = head_at<T>(p.out, p.out_at, r.batch, (i64)r.first_query + rows[i].query, rows[i].head);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) to[(x + 16 * c) * p.out_at.dim] = from_f32<T>(out[i][c] * factor);
  }
}
