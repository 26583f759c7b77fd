#pragma once
// What the kernels of `attention_backward` on Hopper share: the layout of shared memory, the producer, and the products of a
// warpgroup.
//
// Threads to data: a block owns LEFT left lines, queries of a query head or keys of a KV head, and blocks of LINES right lines go
// past them. Warpgroup 0 is the producer: it has the copy engine bring the left lines once and the right ones into a ring. The
// two others are the consumers, and work on 64 left lines each. Both kinds of lines come as pairs of tensors: queries with
// gradients of results, keys with values. A consumer multiplies its left lines by the right ones, which gives scores and gradients of weights
// with a left line in a row and a right one in a column; what it makes of them, rounded, is a left operand in registers for the
// product with the same right lines. Warp w and lane l of a warpgroup hold rows 16 w + l / 4 + 8 h and columns
// 8 j + 2 (l % 4) + c (wgmma.cuh).
//
// Defines: T, bf16 or f16; HEAD_DIM; LEFT, 64 or 128; LINES, a multiple of 16; STAGES of right lines; VARLEN, whether requests are packed;
// SOFTCAP, and the others of attention.cuh as zero.

#include "warpsmith/attention_backward.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/vec.cuh"
#include "warpsmith/wgmma.cuh"

namespace warpsmith::attention {

constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers), kLeft = LEFT, kRight = LINES, kStages = STAGES;
// Heads are loaded in chunks of 128 bytes, the last one filled up with zeros.
constexpr int kChunks = (HEAD_DIM + 63) / 64;
constexpr u32 kLeftChunk = kLeft * 128, kRightChunk = kRight * 128, kLeftBytes = kChunks * kLeftChunk,
              kRightBytes = kChunks * kRightChunk;

// Where things lie in shared memory: the left lines of the first tensor and of the second; stages of right lines, of both
// tensors; what is kept of right lines that are queries, bases and then deltas; barriers.
constexpr u32 kStage = 2 * kRightBytes, kStatsBytes = 2 * kRight * 4;
constexpr u32 kStagesAt = 2 * kLeftBytes, kStatsAt = kStagesAt + kStages * kStage, kBarriersAt = kStatsAt + kStages * kStatsBytes;
constexpr u32 kLeftBarrier = kBarriersAt + kStages * 16, kRawBarrier = kLeftBarrier + 8, kTileAt = kRawBarrier + 8;
constexpr u32 kSharedBytes = kTileAt + 32;
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert(sizeof(T) == 2 && HEAD_DIM % 16 == 0 && kRight % 16 == 0, "steps of 16");

// Three threads of the three warpgroups have 504 registers together. Packed requests take some of the producer's.
constexpr int kProducerRegisters = LEFT == 128 && HEAD_DIM > 96 ? 24 : 40, kConsumerRegisters = (504 - kProducerRegisters) / 2;

// Named barriers: for turns at the tensor cores, and for the warps of each consumer.
constexpr u32 kTurnBarrier = 1, kGroupBarrier = kTurnBarrier + kConsumers;

// A place in the ring of right lines. At a full barrier those who fill the stage and the bytes arrive, at an empty barrier those
// who have read it.
//
// What orders accesses: the copy engine's writes complete a full barrier before anyone multiplies; a warp arrives at an empty one
// after `wgmma_wait<0>`, when its products have read all of the stage; and the copy engine writes again once all have arrived.
struct Ring {
  u32 barriers, stage = 0, parity = 0;

  WS_INLINE explicit Ring(u32 shared) : barriers(shared + kBarriersAt) {}
  WS_INLINE u32 full() const { return barriers + stage * 8; }
  WS_INLINE u32 empty() const { return full() + kStages * 8; }
  WS_INLINE void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};
// A warp is done with a stage of which only its products have read. Where lanes themselves read or write what a barrier guards, each
// of them must arrive (`mbarrier_arrive`): __syncwarp and one arrival order the same accesses, but racecheck, which only relates
// who arrives to who waits, reports every such pair.
WS_INLINE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Touches no memory that another kernel could write. `fills` and `reads`: arrivals of those who fill a stage and of its readers.
WS_INLINE void prepare(const AttentionBackwardSm90Params& p, u32 shared, u32 fills, u32 reads) {
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int i = 0; i < kStages; ++i, ring.next()) {
      mbarrier_init(ring.full(), fills);
      mbarrier_init(ring.empty(), reads);
    }
    mbarrier_init(shared + kLeftBarrier, 1);
    mbarrier_init(shared + kRawBarrier, 1);
    mbarrier_init_fence();
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
    tma_prefetch_map(&p.dout_map);
  }
}

// The number of this block's tile in the order of query_tile and key_tile. Blocks go through the tiles of some heads before they
// begin with others, so that the right lines of those stay in L2.
WS_INLINE int tile_number(const AttentionBackwardSm90Params& p, int heads) {
  const AttentionParams& a = p.backward.attention;
  if (VARLEN) return blockIdx.x;
  const int all = a.requests * heads, first = blockIdx.x / (p.head_group * a.tiles) * p.head_group;
  const int group = min(p.head_group, all - first), index = blockIdx.x - first * a.tiles;
  return index / group * all + first + index % group;
}

// The block's tile, which one warp finds. Others read it where they need it, and keep no registers for it.
WS_INLINE void put_tile(u32 shared, const Tile& tile) {
  const Request& r = tile.request;
  if (threadIdx.x % 32 != 0) return;
  store_shared(shared + kTileAt, (u32)tile.head, (u32)tile.first, tile.exists ? (u32)tile.count : 0u, (u32)r.batch);
  store_shared(shared + kTileAt + 16, (u32)r.first_query, (u32)r.q_len, (u32)r.first_key, (u32)r.kv_len);
}
WS_INLINE bool has_tile(u32 shared) {
  u32 count;
  load_shared(count, shared + kTileAt + 8);
  return count != 0;
}
WS_INLINE Request take_request(const AttentionParams& p, u32 shared) {
  u32 batch = 0, of[4];
  if (!VARLEN) {
    load_shared(batch, shared + kTileAt + 12);
    return {(int)batch, 0, p.q_len, 0, p.kv_len};
  }
  load_shared(of, shared + kTileAt + 16);
  return {0, (int)of[0], (int)of[1], (int)of[2], (int)of[3]};
}
WS_INLINE Tile take_tile(const AttentionParams& p, u32 shared) {
  u32 of[4];
  load_shared(of, shared + kTileAt);
  return {take_request(p, shared), (int)of[0], (int)of[1], (int)of[2], of[2] != 0};
}

// Loads lines of a head; the copy engine gives zeros for what lies outside the tensor.
WS_INLINE void load_box(u32 to, u32 chunk_bytes, const void* map, u32 barrier, int line, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) tma_load(to + c * chunk_bytes, map, barrier, c * 64, line, head, batch);
}

// Clears the lines of a stage from `valid` on. They belong to another request and may be NaN, which a weight of zero would not
// hide. The tensor cores read these ordinary writes: each lane fences its own before the arrival that lets them.
WS_INLINE void clear_lines(u32 stage, int valid) {
  const int lane = threadIdx.x % 32;
  for (int line = valid + lane / 8; line < kRight; line += 4)
#pragma unroll
    for (int c = 0; c < 2 * kChunks; ++c) store_shared(stage + c * kRightChunk + line * 128 + lane % 8 * 16, 0u, 0u, 0u, 0u);
  async_proxy_fence();
  __syncwarp();
}

// The right lines of the producer's first warp: loads a block of both tensors, of which the first `valid` lines belong to the
// request.
struct Loader {
  u32 shared;
  Ring ring;
  u32 cleared = 0;

  WS_INLINE explicit Loader(u32 shared) : shared(shared), ring(shared) {}
  WS_INLINE void load(const void* first_map, const void* second_map, int line, int head, int batch, int valid) {
    const u32 to = shared + kStagesAt + ring.stage * kStage;
    const bool clear = VARLEN && valid < kRight;
    const u32 barrier = clear ? shared + kRawBarrier : ring.full();
    mbarrier_wait(ring.empty(), ring.parity ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect(barrier, kStage);
      load_box(to, kRightChunk, first_map, barrier, line, head, batch);
      load_box(to + kRightBytes, kRightChunk, second_map, barrier, line, head, batch);
    }
    if (clear) {
      mbarrier_wait(barrier, cleared++ % 2);
      clear_lines(to, valid);
      if (elect_one()) mbarrier_arrive(ring.full());
    }
    __syncwarp();
    ring.next();
  }
};
// The left lines.
WS_INLINE void load_left(u32 shared, const void* first_map, const void* second_map, int line, int head, int batch) {
  const u32 barrier = shared + kLeftBarrier;
  if (!elect_one()) return;
  mbarrier_arrive_expect(barrier, 2 * kLeftBytes);
  load_box(shared, kLeftChunk, first_map, barrier, line, head, batch);
  load_box(shared + kLeftBytes, kLeftChunk, second_map, barrier, line, head, batch);
}

// threadIdx.x, read again: for rare paths, so that the compiler does not compute what depends on it early and keep it in
// registers.
WS_INLINE u32 thread_now() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

template <int kCount> WS_INLINE void clear(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
}
// A descriptor of what lies `units` of 16 bytes further on. Only the lower half of a descriptor changes.
WS_INLINE u64 later(u64 descriptor, u32 units) { return (descriptor >> 32 << 32) | (u32)((u32)descriptor + units); }

// Begins products = left right^T.
WS_INLINE void multiply_lines(float (&products)[kRight / 2], u64 left, u64 right) {
  pin(products);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    Wgmma<T, T, kRight>::template mma<false, false>(products, left + (step / 4 * (kLeftChunk >> 4) + step % 4 * kKMajorStep),
                                                    right + (step / 4 * (kRightChunk >> 4) + step % 4 * kKMajorStep), step > 0);
  wgmma_commit();
}
// Begins sum += weights right.
WS_INLINE void accumulate(float (&sum)[HEAD_DIM / 2], const u32 (&weights)[kRight / 4], u64 right) {
  pin(sum);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kRight / 16; ++step)
    WgmmaA<T, HEAD_DIM>::template mma<true>(sum, weights + 4 * step, right + step * kMNMajorStep, 1);
  wgmma_commit();
}
WS_INLINE void pack(u32 (&packed)[kRight / 4], const float (&x)[kRight / 2]) {
#pragma unroll
  for (int i = 0; i < kRight / 4; ++i) packed[i] = pack_pair(x[2 * i], x[2 * i + 1], T());
}

// A score before the softcap, and the weight that it gives.
struct Score {
  float value, slope = 1.0f;
  WS_INLINE Score(const AttentionBackwardSm90Params& p, float dot) : value(dot * p.backward.attention.scale) {
    if (SOFTCAP) {
      // tanh(y) = 1 - 2 / (1 + e^2y)
      const float t = fmaf(-2.0f, reciprocal(1.0f + exp2_flushed(dot * p.softcap_in)), 1.0f);
      value = p.backward.attention.softcap * t;
      slope = fmaf(-t, t, 1.0f);
    }
  }
  WS_INLINE float weight(float base) const { return exp2_flushed((value - base) * kLog2E); }
};

// Columns of a row: from `first` to below `end`.
struct Columns {
  int first, end;
};
// Makes zero of what is outside of the columns of the thread's two rows, counted from the thread's first.
WS_INLINE void hide(float (&x)[kRight / 2], const Columns (&seen)[2]) {
#pragma unroll
  for (int j = 0; j < kRight / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * j + c < seen[h].first || 8 * j + c >= seen[h].end) x[4 * j + 2 * h + c] = 0.0f;
}

// Writes the sums of a warpgroup times `factor` to 64 lines of a head, of which `count` exist, through left lines in shared
// memory that nobody needs any more: the copy engine's writes of them were awaited, and so were the products of all warps that
// read them, before the barrier of the warpgroup that precedes this. A warp reads only what it has written itself.
WS_INLINE void store_lines(T* to, i64 step, int count, u32 lines, const float (&sum)[HEAD_DIM / 2], float factor) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 slice = lines + warp * (16 * 128);
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; j += 2) {
    u32 m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (j + i / 2) + 2 * (i % 2);
      m[i] = pack_pair(sum[at] * factor, sum[at + 1] * factor, T());
    }
    const u32 column = (j % 8 + lane / 16) * 16;
    store_matrices<false>(slice + j / 8 * kLeftChunk + swizzled<128>(lane % 16 * 128 + column), m[0], m[1], m[2], m[3]);
  }
  __syncwarp();
  to += warp * 16 * step;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = i * 4 + lane / 8, column = c * 64 + lane % 8 * 8;
      u32 words[4];
      load_shared(words, slice + c * kLeftChunk + swizzled<128>(line * 128 + lane % 8 * 16));
      if (warp * 16 + line < count && column < HEAD_DIM) store_words(to + line * step + column, words);
    }
}

}  // namespace warpsmith::attention
