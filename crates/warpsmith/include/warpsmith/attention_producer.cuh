#pragma once
// The part of attention_sm90.cuh that brings queries, keys and values to shared memory: the layout of shared memory, the
// barriers between producer and consumers, and the producer itself. Defines as there.

#include "warpsmith/attention_tiles.cuh"

namespace warpsmith::attention {

// A warp writes its results through slices of 16 rows of 128 bytes.
constexpr u32 kSliceBytes = 16 * 128, kSlices = OUT_WHOLE ? kChunks : 1;
// Whether there is a slice for every chunk: then the copy engine stores them while the warp goes on.
constexpr bool kCopied = kSlices == kChunks;

// Where things lie in shared memory.
constexpr u32 kQAt = 0, kKAt = kQAt + Q_STAGES * kQBytes, kVAt = kKAt + STAGES * kBlockBytes;
constexpr u32 kOutAt = kVAt + STAGES * kBlockBytes, kBarriersAt = kOutAt + CONSUMERS * 4 * kSlices * kSliceBytes;
constexpr u32 kKBarriers = kBarriersAt + Q_STAGES * 16, kVBarriers = kKBarriers + STAGES * 16;
// Barriers for values that have arrived but are still to be cleared, and for tiles that have been announced.
constexpr u32 kRawBarrier = kVBarriers + STAGES * 16, kTileBarriers = kRawBarrier + 16;
constexpr u32 kTileAt = kTileBarriers + 16, kTileBytes = 32, kAbsentAt = kTileAt + Q_STAGES * kTileBytes;
constexpr u32 kRaisedAt = kAbsentAt + (PAGED ? STAGES * 4 : 0), kSharedBytes = kRaisedAt + kBlockM * 4;
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert(sizeof(T) == 2 && HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0, "steps of 16");

// Registers of a producer thread and of a consumer thread. With 384 threads, three threads of the three warpgroups have
// 504 together.
constexpr int kProducerRegisters = CONSUMERS == 3 ? 32 : VARLEN ? 56 : 40;
constexpr int kConsumerRegisters = CONSUMERS == 3 ? (512 - kProducerRegisters) / 3 : (504 - kProducerRegisters) / 2;

// The first of the named barriers by which warpgroups take turns at the tensor cores.
constexpr u32 kTurnBarrier = 1;

// A place in a ring of kStages stages. At a full barrier the producer and the bytes arrive; at an empty barrier, the warps
// that read the stage.
template <int kStages> struct Ring {
  u32 barriers, stage, parity;

  // The place after `count` others.
  WS_INLINE Ring(u32 barriers, u32 count = 0) : barriers(barriers), stage(count % kStages), parity(count / kStages % 2) {}
  WS_INLINE u32 full() const { return barriers + stage * 8; }
  WS_INLINE u32 empty() const { return full() + kStages * 8; }
  WS_INLINE void next() {
    if (kStages == 2)
      stage ^= 1, parity ^= stage ^ 1;
    else if (++stage == kStages)
      stage = 0, parity ^= 1;
  }
  WS_INLINE void init(u32 readers) {
    for (int i = 0; i < kStages; ++i, next()) {
      mbarrier_init(full(), 1);
      mbarrier_init(empty(), readers);
    }
  }
};
// Warps of the consumers; those that load keys and values read tiles, too.
constexpr u32 kConsumerWarps = 4 * CONSUMERS, kTileReaders = kConsumerWarps + 2;
WS_INLINE void init_barriers(u32 shared) {
  Ring<Q_STAGES>(shared + kBarriersAt).init(kTileReaders);
  Ring<STAGES>(shared + kKBarriers).init(kConsumerWarps);
  Ring<STAGES>(shared + kVBarriers).init(kConsumerWarps);
  mbarrier_init(shared + kRawBarrier, 1);
  for (int i = 0; i < Q_STAGES; ++i) mbarrier_init(shared + kTileBarriers + i * 8, 1);
  mbarrier_init_fence();
}
WS_INLINE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Clears the rows of values from `valid` on. They belong to another request and may be NaN, which a weight of zero would
// not hide.
WS_INLINE void clear_values(u32 values, int valid) {
  const u32 lane = threadIdx.x % 32;
  for (int row = valid + lane / 8; row < BLOCK_N; row += 4)
#pragma unroll
    for (int c = 0; c < kChunks; ++c) store_shared(values + c * kChunk + row * 128 + lane % 8 * 16, 0u, 0u, 0u, 0u);
  async_proxy_fence();
  __syncwarp();
}

WS_INLINE bool is_leader() { return threadIdx.x % 32 == 0; }
WS_INLINE void load_box(u32 to, u32 chunk_bytes, const void* map, u32 barrier, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) tma_load(to + c * chunk_bytes, map, barrier, c * 64, row, head, batch);
}

// Finds the tiles that see any keys, tells the other warps, and loads their queries.
WS_INLINE void announce_tiles(const Sm90Params& p, u32 shared) {
  Ring<Q_STAGES> q_ring(shared + kBarriersAt);
  TileScheduler tiles;
  bool found = true;
  while (found) {
    Tile tile{};
    for (found = false; !found && !tiles.done(p); tiles.advance()) found = tiles.get(p, tile) && tile.block < tile.end;
    if (!found) tile.end = 0;
    mbarrier_wait(q_ring.empty(), q_ring.parity ^ 1);
    if (is_leader()) {
      tile.put(shared + kTileAt + q_ring.stage * kTileBytes);
      mbarrier_arrive(shared + kTileBarriers + q_ring.stage * 8);
      if (found) {
        mbarrier_arrive_expect(q_ring.full(), kQBytes);
        load_box(shared + kQAt + q_ring.stage * kQBytes, kQChunk, &p.q_map, q_ring.full(),
                 tile.request.first_query + tile.first_query, tile.head, tile.request.batch);
      } else {
        mbarrier_arrive(q_ring.full());
      }
    }
    __syncwarp();
    q_ring.next();
  }
}

// Loads the keys of all tiles, or the values. One warp executes each, so that neither waits for room for the other.
template <bool kKeys> struct Loader {
  const Sm90Params& p;
  u32 shared;
  u32 tiles = 0, blocks = 0, cleared = 0;  // counts so far; rings follow from them, which saves registers

  WS_INLINE void run() {
    Tile tile;
    while (next(tile)) {
      const int kv_head = tile.head / p.attention.group;
#if PAGED
      Pages pages;
      pages.take(p, tile.request, tile.block, Pages::find(p, tile.request, tile.block));
#endif
#pragma unroll 1
      for (int n = tile.block; n < tile.end; ++n) {
        const int valid = tile.request.kv_len - n * BLOCK_N;
#if PAGED
        // Looked up before the wait, to overlap with it.
        const int found = Pages::find(p, tile.request, n + 1);
        load(valid, pages.absent, [&](u32 to, const void* map, u32 barrier) { pages.load(to, map, barrier, kv_head, n); });
        pages.take(p, tile.request, n + 1, found);
#else
        load(valid, 0, [&](u32 to, const void* map, u32 barrier) {
          const int row = tile.request.first_key + n * BLOCK_N;
          if (is_leader()) load_box(to, kChunk, map, barrier, row, kv_head, tile.request.batch);
        });
#endif
      }
    }
  }

  // The next tile that was announced; false when there is none. Its queries may still be on their way.
  WS_INLINE bool next(Tile& tile) {
    const Ring<Q_STAGES> q_ring(shared + kBarriersAt, tiles++);
    mbarrier_wait(shared + kTileBarriers + q_ring.stage * 8, q_ring.parity);
    tile.take(p.attention, shared + kTileAt + q_ring.stage * kTileBytes);
    release(q_ring.empty());
    return tile.end > 0;
  }

  // Loads a block, of which the first `valid` rows belong to the request.
  template <class LoadBlock> WS_INLINE void load(int valid, u32 absent, const LoadBlock& load_block) {
    const Ring<STAGES> ring(shared + (kKeys ? kKBarriers : kVBarriers), blocks++);
    const u32 to = shared + (kKeys ? kKAt : kVAt) + ring.stage * kBlockBytes;
    const bool clear = !kKeys && VARLEN && valid < BLOCK_N;
    const u32 barrier = clear ? shared + kRawBarrier : ring.full();
    mbarrier_wait(ring.empty(), ring.parity ^ 1);
    if (is_leader()) {
      if (kKeys && PAGED) store_shared(shared + kAbsentAt + ring.stage * 4, absent);
      mbarrier_arrive_expect(barrier, kBlockBytes);
    }
    load_block(to, kKeys ? &p.k_map : &p.v_map, barrier);
    if (clear) {
      mbarrier_wait(barrier, cleared++ % 2);
      clear_values(to, valid);
      if (is_leader()) mbarrier_arrive(ring.full());
    }
  }
};

// Prefetches what a block needs first to L2, while the kernel before this one finishes; long calls would gain nothing. The
// lengths of packed requests are not known that early. Executed by one warp.
WS_INLINE void prefetch_first_tile(const Sm90Params& p) {
#if !VARLEN
  Tile tile{};
  if (p.tiles > gridDim.x || !TileScheduler().get(p, tile) || !is_leader()) return;
  const int kv_head = tile.head / p.attention.group, batch = tile.request.batch;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) tma_prefetch_box((u64)&p.q_map, c * 64, tile.first_query, tile.head, batch);
#pragma unroll 1
  for (int n = tile.block; n < min(tile.end, tile.block + STAGES + 1); ++n)
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      tma_prefetch_box((u64)&p.k_map, c * 64, n * BLOCK_N, kv_head, batch);
      tma_prefetch_box((u64)&p.v_map, c * 64, n * BLOCK_N, kv_head, batch);
    }
#endif
}

// The whole of the producer.
WS_INLINE void produce(const Sm90Params& p, u32 shared) {
  const u32 warp = threadIdx.x / 32;
  if (warp == 0) announce_tiles(p, shared);
  if (warp == 1) Loader<true>{p, shared}.run();
  if (warp == 2) Loader<false>{p, shared}.run();
}

}  // namespace warpsmith::attention
