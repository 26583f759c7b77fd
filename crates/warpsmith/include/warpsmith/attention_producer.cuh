#pragma once
// What of attention_sm90.cuh brings queries, keys and values to shared memory: where they lie there, the barriers by which it and
// the consumers tell each other, and the producer itself. Defines as there.

#include "warpsmith/attention_tiles.cuh"

// A warp's results leave through slices of 16 rows of 128 bytes.
constexpr u32 kSliceBytes = 16 * 128, kSlices = OUT_WHOLE ? kChunks : 1;
// Whether there is one for every chunk, for the copy engine to take while the warp goes on.
constexpr bool kCopied = kSlices == kChunks;

// Where things lie in shared memory.
constexpr u32 kQAt = 0, kKAt = kQAt + Q_STAGES * kQBytes, kVAt = kKAt + STAGES * kBlockBytes;
constexpr u32 kOutAt = kVAt + STAGES * kBlockBytes, kBarriersAt = kOutAt + CONSUMERS * 4 * kSlices * kSliceBytes;
constexpr u32 kKBarriers = kBarriersAt + Q_STAGES * 16, kVBarriers = kKBarriers + STAGES * 16;
constexpr u32 kTileAt = kVBarriers + STAGES * 16 + 16, kTileBytes = 32, kAbsentAt = kTileAt + Q_STAGES * kTileBytes;
constexpr u32 kSharedBytes = kAbsentAt + (PAGED ? STAGES * 4 : 0);
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert(sizeof(T) == 2 && HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0, "steps of 16");

// Registers of a thread of the producer and of the consumers. A block of 384 threads has only 504 for each three of them.
constexpr int kProducerRegisters = CONSUMERS == 3 ? 32 : VARLEN ? 56 : 40;
constexpr int kConsumerRegisters = CONSUMERS == 3 ? (512 - kProducerRegisters) / 3 : (504 - kProducerRegisters) / 2;

// Named barriers: a warpgroup's turn to use the tensor cores, and the warps of the producer.
constexpr u32 kTurnBarrier = 1, kProducerBarrier = kTurnBarrier + CONSUMERS;

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
// Executed by all warps of the producer; afterwards any of them may announce the block.
WS_INLINE void clear_values(u32 values, int valid) {
  const u32 lane = threadIdx.x % 32;
  for (int row = valid + threadIdx.x % (32 * kProducers) / 8; row < BLOCK_N; row += 4 * kProducers)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + c * kChunk + row * 128 + lane % 8 * 16), "r"(0) : "memory");
  async_proxy_fence();
  if (kProducers > 1) named_barrier_sync(kProducerBarrier, 32 * kProducers);
  __syncwarp();
}

// Loads queries and keys, or values, or all of them. Executed by kProducers warps: they all find the same tiles and wait for the
// same empty stages, and each loads its boxes; every block has some of every warp, so none falls a whole ring behind. One
// thread speaks for them.
template <bool kKeys, bool kValues> struct Producer {
  const Sm90Params& p;
  u32 shared;
  Ring<Q_STAGES> q_ring;
  Ring<STAGES> k_ring, v_ring;
  u32 raw_parity = 0;
  TileScheduler tiles;

  // The keys of a tile whose queries are on their way; none at the end of all tiles.
  struct Walk {
    Request request;
    int kv_head, block, end;
  };

  WS_INLINE Producer(const Sm90Params& p, u32 shared)
      : p(p), shared(shared), q_ring(shared + kBarriersAt), k_ring(shared + kKBarriers), v_ring(shared + kVBarriers) {}

  static WS_INLINE bool leader() { return threadIdx.x % (32 * kProducers) == 0; }

  // Goes to the next tile that sees any keys: loads its queries and tells the consumers.
  WS_INLINE Walk next() {
    Tile tile{};
    bool found = false;
    for (; !found && !tiles.done(p); tiles.advance()) found = tiles.get(p, tile) && tile.block < tile.end;
    if (kKeys && leader()) {
      mbarrier_wait(q_ring.empty(), q_ring.parity ^ 1);
      if (!found) tile.end = 0;
      tile.put(shared + kTileAt + q_ring.stage * kTileBytes);
      if (found) {
        mbarrier_arrive_expect(q_ring.full(), kQBytes);
        load(shared + kQAt + q_ring.stage * kQBytes, kQChunk, &p.q_map, q_ring.full(),
             tile.request.first_query + tile.first_query, tile.head, tile.request.batch);
      } else {
        mbarrier_arrive(q_ring.full());
      }
    }
    __syncwarp();
    q_ring.next();
    return {tile.request, tile.head / p.attention.group, tile.block, found ? tile.end : tile.block};
  }
  WS_INLINE void load(u32 to, u32 chunk_bytes, const void* map, u32 barrier, int row, int head, int batch) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) tma_load(to + c * chunk_bytes, map, barrier, c * 64, row, head, batch);
  }

  WS_INLINE void run() {
    // No tile, as if it were at its end; `ahead` is the one behind it, looked for after `look` blocks or at the end.
    Walk walk{}, ahead{};
    int look = 0;
#if PAGED
    Pages pages;
    int first = 0;  // what the table says of the first block of `ahead`
#endif
    while (true) {
      if (walk.block < walk.end) {
        const int n = walk.block++;
#if PAGED
        // Looked up before the wait, to be there after it.
        const int found = Pages::find(p, walk.request, n + 1);
        auto load_block = [&](u32 to, const void* map, u32 barrier) { pages.load(to, map, barrier, walk.kv_head); };
        const u32 absent = pages.absent;
#else
        auto load_block = [&](u32 to, const void* map, u32 barrier) {
          if (leader()) load(to, kChunk, map, barrier, walk.request.first_key + n * BLOCK_N, walk.kv_head, walk.request.batch);
        };
        const u32 absent = 0;
#endif
        if (kKeys) load_keys(load_block, absent);
        if (kValues) load_values(load_block, walk.request.kv_len - n * BLOCK_N);
        --look;
#if PAGED
        pages.take(p, walk.request, n + 1, found);
#endif
      }
      if (look == 0 || (look > 0 && walk.block == walk.end)) {
        ahead = next();
        look = -1;
#if PAGED
        first = Pages::find(p, ahead.request, ahead.block);
#endif
      }
      if (walk.block == walk.end) {
        if (ahead.block == ahead.end) return;
        walk = ahead;
        // Queries that are asked for at the end of the tile before theirs are waited for. But their place is free only after
        // the first block of that tile has been used, as is the stage that the block goes to that fills the ring again.
        look = Q_STAGES > 1 ? STAGES : 0x7fffffff;
#if PAGED
        pages.take(p, walk.request, walk.block, first);
#endif
      }
    }
  }

  template <class Load> WS_INLINE void load_keys(const Load& load_block, u32 absent) {
    mbarrier_wait(k_ring.empty(), k_ring.parity ^ 1);
    if (leader()) {
      if (PAGED) store_shared_word(shared + kAbsentAt + k_ring.stage * 4, absent);
      mbarrier_arrive_expect(k_ring.full(), kBlockBytes);
    }
    load_block(shared + kKAt + k_ring.stage * kBlockBytes, &p.k_map, k_ring.full());
    k_ring.next();
  }

  // Of which `valid` rows are the request's.
  template <class Load> WS_INLINE void load_values(const Load& load_block, int valid) {
    const u32 raw_barrier = shared + kVBarriers + STAGES * 16;
    mbarrier_wait(v_ring.empty(), v_ring.parity ^ 1);
    const u32 values = shared + kVAt + v_ring.stage * kBlockBytes;
    const bool clear = VARLEN && valid < BLOCK_N;
    const u32 barrier = clear ? raw_barrier : v_ring.full();
    if (leader()) mbarrier_arrive_expect(barrier, kBlockBytes);
    load_block(values, &p.v_map, barrier);
    if (clear) {
      mbarrier_wait(raw_barrier, raw_parity);
      raw_parity ^= 1;
      clear_values(values, valid);
      if (leader()) mbarrier_arrive(v_ring.full());
    }
    v_ring.next();
  }
};

// The whole of the producer. In pages, three warps share the boxes of keys and values. Elsewhere each is a single box or a few, and
// one warp loads the keys and another the values: neither waits until there is room for the other's.
WS_INLINE void produce(const Sm90Params& p, u32 shared) {
  const u32 warp = threadIdx.x / 32;
  if (PAGED) {
    if (warp < kProducers) Producer<true, true>(p, shared).run();
  } else {
    if (warp == 0) Producer<true, false>(p, shared).run();
    if (warp == 1) Producer<false, true>(p, shared).run();
  }
}
