// out = softmax(scale q k^T + what hides keys) v on Hopper, with the whole row of scores never in memory.
//
// Persistent and warp-specialised. Warpgroup 0 is the producer: one thread of it copies tiles of q and blocks of BLOCK_N
// keys and values into rings in shared memory. Each of the CONSUMERS other warpgroups owns 64 queries of a tile: it
// multiplies them by a block of keys (q from shared memory), turns the scores into weights in its registers, and
// multiplies those, still in registers, by the values. While the weights of block n are computed, the tensor cores work
// on the values of block n - 1; and the warpgroups take turns in handing them work, so that one's exponentials run under the
// other's products.
//
// Warp w and lane l of a warpgroup hold rows 16 w + l / 4 + 8 h of scores, weights and sums (wgmma.cuh).
//
// A row walks over its keys in blocks that begin at multiples of BLOCK_N, upwards; blocks it sees nothing of change none of
// its bits. BLOCK_N depends on nothing but the head and the options: so a row's bits do not depend on the number of
// queries, their tile or the batch.
//
// Defines: T, bf16 or f16; HEAD_DIM; BLOCK_N; CONSUMERS, 2 or 3; STAGES of keys and values; Q_STAGES of queries; CAUSAL;
// WINDOW, whether old keys are hidden; SOFTCAP; HAS_SINKS; HAS_LSE; VARLEN, whether requests of different length are
// packed one after the other; OUT_WHOLE, whether there is shared memory for all results of a tile, which are then stored
// while the tensor cores work on the next one, or only for 64 columns at a time.

#include "warpsmith/math.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/vec.cuh"
#include "warpsmith/wgmma.cuh"

constexpr int kBlockM = 64 * CONSUMERS, kThreads = 128 * (1 + CONSUMERS);
// Heads are loaded in chunks of 128 bytes, the last one filled up with zeros.
constexpr int kChunks = (HEAD_DIM + 63) / 64;
constexpr u32 kQChunk = kBlockM * 128, kChunk = BLOCK_N * 128, kQBytes = kChunks * kQChunk, kBlockBytes = kChunks * kChunk;
// A warp's results leave through slices of 16 rows of 128 bytes.
constexpr u32 kSliceBytes = 16 * 128, kSlices = OUT_WHOLE ? kChunks : 1;

// Where things lie in shared memory.
constexpr u32 kQAt = 0, kKAt = kQAt + Q_STAGES * kQBytes, kVAt = kKAt + STAGES * kBlockBytes;
constexpr u32 kOutAt = kVAt + STAGES * kBlockBytes, kBarriersAt = kOutAt + CONSUMERS * 4 * kSlices * kSliceBytes;
constexpr u32 kKBarriers = kBarriersAt + Q_STAGES * 16, kVBarriers = kKBarriers + STAGES * 16;
constexpr u32 kWorkAt = kVBarriers + STAGES * 16 + 16, kWorkBytes = 32, kSharedBytes = kWorkAt + Q_STAGES * kWorkBytes;
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert(sizeof(T) == 2 && HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0, "steps of 16");

// Registers of a thread of the producer and of the consumers. A block of 384 threads has only 504 for each three of them.
constexpr int kProducerRegisters = CONSUMERS == 2 ? 40 : 32, kConsumerRegisters = CONSUMERS == 2 ? 232 : 160;

// Named barriers: a warpgroup's turn to use the tensor cores.
constexpr u32 kTurnBarrier = 1;

WS_INLINE void load_shared_words(u32 (&w)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
}

// A tile of queries of one head, and the keys it sees any of.
struct Work {
  int batch, head;
  int first;          // the tile's first query, in its request
  int block, end;     // blocks of keys
  int q_len, kv_len;  // of the request
  int q_at;           // where its queries begin

  WS_INLINE void put(u32 at) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(batch), "r"(head), "r"(first), "r"(block) : "memory");
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at + 16), "r"(end), "r"(q_len), "r"(kv_len), "r"(q_at) : "memory");
  }
  WS_INLINE void take(u32 at) {
    u32 a[4], b[4];
    load_shared_words(a, at);
    load_shared_words(b, at + 16);
    batch = a[0], head = a[1], first = a[2], block = a[3];
    end = b[0], q_len = b[1], kv_len = b[2], q_at = b[3];
  }
  // The position of query 0 among the keys.
  WS_INLINE int offset() const { return kv_len - q_len; }
  WS_INLINE void see(const AttentionSm90Params& p) {
    int hi = kv_len, lo = 0;
    if (CAUSAL) hi = min(hi, min(first + kBlockM, q_len) + offset());
    if (WINDOW) lo = max(lo, first + offset() - p.window + 1);
    block = lo / BLOCK_N;
    end = hi > lo ? (hi + BLOCK_N - 1) / BLOCK_N : block;
  }
};

// Whether the 64 queries of a warpgroup see nothing of the last block of a tile with more than one.
WS_INLINE bool misses_last(const Work& work, u32 warpgroup) {
  return CAUSAL && work.end > work.block + 1 &&
         work.first + (int)warpgroup * 64 + 64 + work.offset() <= (work.end - 1) * BLOCK_N;
}

// The tiles of a block, one after the other; the producer asks for them and tells the consumers. Heads are taken in groups whose keys and values stay in L2 together; in
// a group the tiles with most keys come first, dealt out forwards and backwards in turn, so that all blocks get about the same.
struct TileScheduler {
  u32 round = 0;

  WS_INLINE u32 index() const {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  WS_INLINE void advance() { ++round; }
  WS_INLINE bool done(const AttentionSm90Params& p) const { return round * gridDim.x >= p.tiles; }

  // False where there is no such tile.
  WS_INLINE bool get(const AttentionSm90Params& p, Work& work, int& kv_at) const {
    const u32 index = this->index();
    if (index >= p.tiles) return false;
#if VARLEN
    const u32 slot = index / p.num_heads;
    work.head = index - slot * p.num_heads;
    work.batch = 0;
    if (!find(p, slot, work, kv_at)) return false;
#else
    const u32 per_group = p.head_group * p.m_tiles, group = index / per_group, at = index - group * per_group;
    const u32 first_head = group * p.head_group, heads = min(p.head_group, p.num_heads * p.batch - first_head);
    const u32 m = at / heads, head = first_head + at - m * heads;
    work.batch = head / p.num_heads;
    work.head = head - work.batch * p.num_heads;
    work.first = (p.m_tiles - 1 - m) * kBlockM;
    work.q_len = p.q_len;
    work.kv_len = p.kv_len;
    work.q_at = kv_at = 0;
#endif
    work.see(p);
    return true;
  }

#if VARLEN
  // The request and tile of a slot: all tiles of request 0, the last first, then those of request 1, ... Executed by whole
  // warps.
  static WS_INLINE bool find(const AttentionSm90Params& p, u32 slot, Work& work, int& kv_at) {
    const int lane = threadIdx.x % 32;
    u32 before = 0;
    for (int base = 0; base < p.requests; base += 32) {
      const int request = base + lane;
      int start = 0, length = 0;
      if (request < p.requests) {
        start = max(p.q_starts[request], 0);
        length = max(min(p.q_starts[request + 1], p.q_len) - start, 0);
      }
      const u32 tiles = (length + kBlockM - 1) / kBlockM;
      u32 sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u32 lower = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += lower;
      }
      const u32 here = __ballot_sync(0xffffffffu, slot < before + sum);
      if (here) {
        const int owner = __ffs(here) - 1;
        const u32 first_slot = before + __shfl_sync(0xffffffffu, sum - tiles, owner);
        const u32 count = __shfl_sync(0xffffffffu, tiles, owner);
        work.q_at = __shfl_sync(0xffffffffu, start, owner);
        work.q_len = __shfl_sync(0xffffffffu, length, owner);
        kv_at = max(p.kv_starts[base + owner], 0);
        work.kv_len = max(min(p.kv_starts[base + owner + 1], p.kv_len) - kv_at, 0);
        work.first = (count - 1 - (slot - first_slot)) * kBlockM;
        return true;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return false;
  }
#endif
};

// A place in a ring of kStages stages: full barriers, at which the producer and the bytes arrive, and empty ones, at
// which the warps of the consumers do.
template <int kStages> struct Ring {
  u32 barriers, stage = 0, parity = 0;

  WS_INLINE Ring(u32 barriers) : barriers(barriers) {}
  WS_INLINE u32 full() const { return barriers + stage * 8; }
  WS_INLINE u32 empty() const { return full() + kStages * 8; }
  WS_INLINE void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  WS_INLINE void init() {
    for (int i = 0; i < kStages; ++i, next()) {
      mbarrier_init(full(), 1);
      mbarrier_init(empty(), 4 * CONSUMERS);
    }
  }
};
WS_INLINE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Zero rows of values from `valid` on, of a block that another request's follow: weights of zero would not hide NaN.
WS_INLINE void clear_values(u32 values, int valid) {
  const u32 lane = threadIdx.x % 32;
  for (int row = valid + lane / 8; row < BLOCK_N; row += 4)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + c * kChunk + row * 128 + lane % 8 * 16), "r"(0) : "memory");
  async_proxy_fence();
  __syncwarp();
}

// Executed by one warp.
WS_INLINE void produce(const AttentionSm90Params& p, u32 shared) {
  const bool leader = threadIdx.x % 32 == 0;
  Ring<Q_STAGES> q_ring(shared + kBarriersAt);
  Ring<STAGES> k_ring(shared + kKBarriers), v_ring(shared + kVBarriers);
  const u32 raw_barrier = shared + kVBarriers + STAGES * 16;
  u32 raw_parity = 0;
  for (TileScheduler tiles; !tiles.done(p); tiles.advance()) {
    Work work;
    int kv_at;
    if (!tiles.get(p, work, kv_at) || work.block >= work.end) continue;
    const int kv_head = work.head / p.group;
    auto load = [&](u32 to, u32 chunk_bytes, const void* map, u32 barrier, int row, int head) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) tma_load(to + c * chunk_bytes, map, barrier, c * 64, row, head, work.batch);
    };
    mbarrier_wait(q_ring.empty(), q_ring.parity ^ 1);
    if (leader) {
      work.put(shared + kWorkAt + q_ring.stage * kWorkBytes);
      mbarrier_arrive_expect(q_ring.full(), kQBytes);
      load(shared + kQAt + q_ring.stage * kQBytes, kQChunk, &p.q_map, q_ring.full(), work.q_at + work.first, work.head);
    }
    q_ring.next();
#pragma unroll 1
    for (int n = work.block; n < work.end; ++n) {
      const int row = kv_at + n * BLOCK_N;
      mbarrier_wait(k_ring.empty(), k_ring.parity ^ 1);
      if (leader) {
        mbarrier_arrive_expect(k_ring.full(), kBlockBytes);
        load(shared + kKAt + k_ring.stage * kBlockBytes, kChunk, &p.k_map, k_ring.full(), row, kv_head);
      }
      k_ring.next();
      mbarrier_wait(v_ring.empty(), v_ring.parity ^ 1);
      const u32 values = shared + kVAt + v_ring.stage * kBlockBytes;
      const bool clear = VARLEN && (n + 1) * BLOCK_N > work.kv_len;
      if (leader) {
        const u32 barrier = clear ? raw_barrier : v_ring.full();
        mbarrier_arrive_expect(barrier, kBlockBytes);
        load(values, kChunk, &p.v_map, barrier, row, kv_head);
      }
      if (clear) {
        mbarrier_wait(raw_barrier, raw_parity);
        raw_parity ^= 1;
        clear_values(values, work.kv_len - n * BLOCK_N);
        if (leader) mbarrier_arrive(v_ring.full());
      }
      v_ring.next();
    }
  }
  // The end of all tiles.
  mbarrier_wait(q_ring.empty(), q_ring.parity ^ 1);
  if (leader) {
    Work{}.put(shared + kWorkAt + q_ring.stage * kWorkBytes);
    mbarrier_arrive(q_ring.full());
  }
}

WS_INLINE float* lse_at(const AttentionSm90Params& p, const Work& work, int row) {
  return p.lse + (work.batch * p.lse_batch + work.head * p.lse_head + (work.q_at + row) * p.lse_row);
}
WS_INLINE T* out_at(const AttentionSm90Params& p, const Work& work, int row) {
  return (T*)p.out + (work.batch * p.out_batch + work.head * p.out_head + (work.q_at + row) * p.out_row);
}

// The results of tiles that see no keys at all. Executed by one warp.
WS_INLINE void store_empty(const AttentionSm90Params& p) {
  const int lane = threadIdx.x % 32;
  for (TileScheduler tiles; !tiles.done(p); tiles.advance()) {
    Work work;
    int kv_at;
    if (!tiles.get(p, work, kv_at) || work.block < work.end) continue;
    const int rows = min(work.q_len - work.first, kBlockM);
    for (int row = 0; row < rows; ++row) {
      const u32 zero[4] = {0, 0, 0, 0};
      if (lane < HEAD_DIM / 8) store_words(out_at(p, work, work.first + row) + lane * 8, zero);
      if (HAS_LSE && lane == 0) *lse_at(p, work, work.first + row) = HAS_SINKS ? p.sinks[work.head] : -INFINITY;
    }
  }
}

// The state of the rows of a thread: the largest score so far in units of log2, and the sum of the weights relative to it,
// of this thread's columns only.
struct Rows {
  float top[2], sum[2];

  // The weights of a block of scores, in place, and by what earlier sums are to be multiplied.
  template <bool kFirst> WS_INLINE void weigh(float (&s)[BLOCK_N / 2], float (&factor)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Four chains, for the sake of latency.
      float most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
      for (int j = 4; j < BLOCK_N / 8; ++j) most[j % 4] = fmaxf(most[j % 4], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      float top_here = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
      top_here = fmaxf(top_here, __shfl_xor_sync(0xffffffffu, top_here, 1));
      top_here = fmaxf(top_here, __shfl_xor_sync(0xffffffffu, top_here, 2));
      const float before = top[h];
      top[h] = kFirst && !HAS_SINKS ? top_here * scale : fmaxf(before, top_here * scale);
      // Where nothing was seen yet, the scores stay -inf and the weights become zero.
      const float shift = (CAUSAL || WINDOW) && top[h] == -INFINITY ? 0.0f : top[h];
      factor[h] = exp2_flushed(before - shift);
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * j + 2 * h + c];
          x = exp2_flushed(fmaf(x, scale, -shift));
          part[c] += x;
        }
      sum[h] = kFirst && !HAS_SINKS ? part[0] + part[1] : fmaf(sum[h], factor[h], part[0] + part[1]);
    }
  }
};

struct Consumer {
  const AttentionSm90Params& p;
  u32 shared, index, warp, lane;
  Ring<Q_STAGES> q_ring;
  Ring<STAGES> k_ring, v_ring;

  float scores[BLOCK_N / 2], out[HEAD_DIM / 2];
  u32 weights[BLOCK_N / 4];

  WS_INLINE Consumer(const AttentionSm90Params& p, u32 shared, u32 index)
      : p(p), shared(shared), index(index), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32),
        q_ring(shared + kBarriersAt), k_ring(shared + kKBarriers), v_ring(shared + kVBarriers) {}

  WS_INLINE void await_turn() const { named_barrier_sync(kTurnBarrier + index, 256); }
  WS_INLINE void end_turn() const { named_barrier_arrive(kTurnBarrier + (index + 1 == CONSUMERS ? 0 : index + 1), 256); }

  // Begins scores = q k^T for the block at the head of the ring.
  WS_INLINE void multiply_keys() {
    const u64 q = wgmma_descriptor<false>(shared + kQAt + q_ring.stage * kQBytes + index * (64 * 128));
    const u64 k = wgmma_descriptor<false>(shared + kKAt + k_ring.stage * kBlockBytes);
    hold(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
      Wgmma<T, T, BLOCK_N>::template mma<false, false>(scores, q + (step / 4 * (kQChunk >> 4) + step % 4 * kKMajorStep),
                                                       k + (step / 4 * (kChunk >> 4) + step % 4 * kKMajorStep), step > 0);
    wgmma_commit();
  }
  // Begins out += weights v.
  WS_INLINE void multiply_values(bool accumulate) {
    const u64 v = wgmma_descriptor<true, BLOCK_N>(shared + kVAt + v_ring.stage * kBlockBytes);
    hold(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
      WgmmaA<T, HEAD_DIM>::template mma<true>(out, weights + 4 * step, v + step * kMNMajorStep, accumulate || step > 0);
    wgmma_commit();
  }

  // Hides the keys that rows do not see.
  WS_INLINE void mask(const Work& work, int n) {
    const int row = work.first + index * 64 + warp * 16 + lane / 4 + work.offset(), column = n * BLOCK_N + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int end = (CAUSAL ? min(row + 8 * h + 1, work.kv_len) : work.kv_len) - column;
      const int begin = row + 8 * h - p.window + 1 - column;
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c >= end || (WINDOW && 8 * j + c < begin)) scores[4 * j + 2 * h + c] = -INFINITY;
    }
  }
  // Whether some row of this warpgroup does not see all of block n.
  WS_INLINE bool needs_mask(const Work& work, int n) const {
    const int row = work.first + index * 64 + work.offset();
    if ((n + 1) * BLOCK_N > (CAUSAL ? min(row + 1, work.kv_len) : work.kv_len)) return true;
    return WINDOW && n * BLOCK_N < row + 63 - p.window + 1;
  }

  // cap tanh(x / cap), with the scale of the scores in softcap_in.
  WS_INLINE void cap() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      // tanh(y) = 1 - 2 / (1 + e^2y)
      const float e = exp2_flushed(scores[i] * p.softcap_in);
      scores[i] = fmaf(-2.0f, reciprocal(1.0f + e), 1.0f);
    }
  }

  WS_INLINE void pack_weights() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) {
      const float pair[2] = {scores[2 * i], scores[2 * i + 1]};
      weights[i] = pack_pair(pair, T{});
    }
  }

  template <bool kFirst> WS_INLINE void weigh(Rows& rows, float (&factor)[2], const Work& work, int n) {
    hold(scores);
    if (SOFTCAP) cap();
    if (needs_mask(work, n)) mask(work, n);
    rows.weigh<kFirst>(scores, factor, p.scale);
  }

  // The next tile that the producer has chosen; false when there is none.
  WS_INLINE bool next(Work& work) {
    mbarrier_wait(q_ring.full(), q_ring.parity);
    work.take(shared + kWorkAt + q_ring.stage * kWorkBytes);
    return work.end > 0;
  }

  WS_INLINE void start(Rows& rows, const Work& work) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.top[h] = HAS_SINKS ? p.sinks[work.head] * kLog2E : -INFINITY;
      rows.sum[h] = HAS_SINKS && lane % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  // One product of keys runs ahead of the values, over the end of a tile too: the tensor cores have work while the next
  // tile's first weights are computed. Results go to shared memory at the end of their tile and from there to their
  // place at the end of the next, where the tensor cores are busy meanwhile.
  WS_INLINE void run() {
    Work work;
    if (!next(work)) return;
    bool pending = false;
    Rows rows;
    Results results;
    float factor[2];
    start(rows, work);
    mbarrier_wait(k_ring.full(), k_ring.parity);
    await_turn();
    multiply_keys();
    end_turn();
    wgmma_wait<0>();
    release_keys();
    weigh<true>(rows, factor, work, work.block);
    pack_weights();
    while (true) {
      const bool misses = misses_last(work, index);
      const int end = misses ? work.end - 1 : work.end;
      // The keys of block n, and the values of the block before it.
#pragma unroll 1
      for (int n = work.block + 1; n < end; ++n) {
        mbarrier_wait(k_ring.full(), k_ring.parity);
        await_turn();
        multiply_keys();
        mbarrier_wait(v_ring.full(), v_ring.parity);
        multiply_values(n > work.block + 1);
        end_turn();
        wgmma_wait<1>();
        release_keys();
        weigh<false>(rows, factor, work, n);
        finish_values();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= factor[i / 2 % 2];
        pack_weights();
      }
      if (misses) {
        mbarrier_wait(k_ring.full(), k_ring.parity);
        await_turn();
        end_turn();
        release_keys();
      }
      const bool accumulate = end - work.block > 1;
      release(q_ring.empty());
      q_ring.next();
      Results done = destination(work);
      const Rows ended = rows;
      if (!next(work)) {
        if (OUT_WHOLE && pending) store(results);
        mbarrier_wait(v_ring.full(), v_ring.parity);
        multiply_values(accumulate);
        finish_values();
        finish(done, ended);
        if (OUT_WHOLE) store(done);
        return;
      }
      start(rows, work);
      mbarrier_wait(k_ring.full(), k_ring.parity);
      await_turn();
      multiply_keys();
      mbarrier_wait(v_ring.full(), v_ring.parity);
      multiply_values(accumulate);
      end_turn();
      if (OUT_WHOLE && pending) store(results);
      wgmma_wait<1>();
      release_keys();
      weigh<true>(rows, factor, work, work.block);
      finish_values();
      if (misses) {
        mbarrier_wait(v_ring.full(), v_ring.parity);
        release_values();
      }
      pack_weights();
      finish(done, ended);
      results = done;
      pending = true;
    }
  }

  WS_INLINE void release_keys() {
    release(k_ring.empty());
    k_ring.next();
  }
  WS_INLINE void release_values() {
    release(v_ring.empty());
    v_ring.next();
  }
  WS_INLINE void finish_values() {
    wgmma_wait<0>();
    hold(out);
    release_values();
  }

  // The results of a warp that lie in shared memory, on their way out.
  struct Results {
    T* out;           // of the warp's first row
    float* lse;
    int rows;         // to be stored
  };

  WS_INLINE Results destination(const Work& work) const {
    const int first = work.first + index * 64 + warp * 16;
    return {out_at(p, work, first), HAS_LSE ? lse_at(p, work, first) : nullptr, work.q_len - first};
  }

  // Brings the results of a tile to shared memory.
  WS_INLINE void finish(Results& results, const Rows& rows) {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      inverse[h] = sum == 0.0f ? 0.0f : reciprocal(sum);
      const int row = lane / 4 + 8 * h;
      if (HAS_LSE && lane % 4 == 0 && row < results.rows)
        results.lse[row * p.lse_row] = sum == 0.0f ? -INFINITY : (rows.top[h] + log2f(sum)) * 0.6931471805599453f;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      stage(chunk, inverse);
      if (!OUT_WHOLE) copy(chunk, results);
    }
  }
  WS_INLINE u32 slice(int chunk) const {
    return shared + kOutAt + (index * 4 + warp) * (kSlices * kSliceBytes) + (OUT_WHOLE ? chunk * kSliceBytes : 0);
  }
  WS_INLINE void stage(int chunk, const float (&inverse)[2]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (chunk * 64 + j * 8 >= HEAD_DIM) break;
      u32 m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (chunk * 8 + j + i / 2) + 2 * (i % 2);
        const float pair[2] = {out[at] * inverse[i % 2], out[at + 1] * inverse[i % 2]};
        m[i] = pack_pair(pair, T{});
      }
      store_matrices(slice(chunk) + swizzled<128>(lane % 16 * 128 + (j + lane / 16) * 16), m[0], m[1], m[2], m[3]);
    }
    __syncwarp();
  }
  WS_INLINE void copy(int chunk, const Results& results) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, column = lane % 8, at = chunk * 64 + column * 8;
      u32 words[4];
      load_shared_words(words, slice(chunk) + swizzled<128>(row * 128 + column * 16));
      if (row < results.rows && at < HEAD_DIM) store_words(results.out + (row * p.out_row + at), words);
    }
    __syncwarp();
  }

  WS_INLINE void store(const Results& results) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) copy(chunk, results);
  }
};

WS_INLINE void consume(const AttentionSm90Params& p, u32 shared, u32 index) {
  Consumer consumer(p, shared, index);
  // The first turn is the first warpgroup's.
  if (index == CONSUMERS - 1) consumer.end_turn();
  consumer.run();
  // Each arrival is waited for: none is left when the block ends.
  if (index == 0) consumer.await_turn();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_sm90(const __grid_constant__ AttentionSm90Params p) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  const u32 shared = shared_address(shared_memory);
  // The same in all lanes of a warp, and known to be.
  const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    Ring<Q_STAGES>(shared + kBarriersAt).init();
    Ring<STAGES>(shared + kKBarriers).init();
    Ring<STAGES>(shared + kVBarriers).init();
    mbarrier_init(shared + kVBarriers + STAGES * 16, 1);
    mbarrier_init_fence();
    tma_prefetch(&p.q_map);
    tma_prefetch(&p.k_map);
    tma_prefetch(&p.v_map);
  }
  __syncthreads();
  // Nothing above touches memory that another kernel writes.
  begin_kernel();
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x / 32 == 0) produce(p, shared);
    if (threadIdx.x / 32 == 1) store_empty(p);
  } else {
    take_registers<kConsumerRegisters>();
    consume(p, shared, warpgroup - 1);
  }
}
