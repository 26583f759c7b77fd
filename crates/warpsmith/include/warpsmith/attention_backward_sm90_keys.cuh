#pragma once
// What the kernels of `attention_backward` on Hopper share whose left lines are keys and values of a KV head: the right ones are
// queries and gradients of results, of one query head after the other, in ascending order. The second warp of the producer
// brings what is kept of the queries.
//
// Threads to data, and defines: as in attention_backward_sm90.cuh.

#include "warpsmith/attention_backward_sm90.cuh"

namespace warpsmith::attention {

// Arrivals at a stage: the copy engine's and those of a warp that stores what is kept of queries, and of all consumers, whose
// lanes read that.
constexpr u32 kFills = 1 + 32, kReads = 128 * kConsumers;

// The blocks of queries that see some of the keys of a tile.
struct Blocks {
  int first, end;

  WS_INLINE Blocks(const AttentionParams& p, const Tile& tile) {
    const Queries seen = queries_of(p, tile.request, tile.first, tile.first + tile.count);
    first = seen.first / kRight;
    end = max((seen.end + kRight - 1) / kRight, first);
  }
};

// Copies what is kept of the queries of each block to shared memory.
WS_INLINE void load_stats(const AttentionBackwardParams& p, const Tile& tile, const Blocks& blocks, u32 shared) {
  constexpr int kLines = (kRight + 31) / 32;
  const AttentionParams& a = p.attention;
  const int lane = threadIdx.x % 32;
  Ring ring(shared);
#pragma unroll 1
  for (int head = tile.head * a.group; head < (tile.head + 1) * a.group; ++head)
#pragma unroll 1
    for (int block = blocks.first; block < blocks.end; ++block) {
      RowStats stats[kLines];
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int query = block * kRight + i * 32 + lane;
        stats[i] = query < tile.request.q_len ? stats_at(p, tile.request, head)[query] : RowStats{0.0f, 0.0f};
      }
      mbarrier_wait(ring.empty(), ring.parity ^ 1);
      const u32 to = shared + kStatsAt + ring.stage * kStatsBytes;
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int line = i * 32 + lane;
        if (kRight % 32 != 0 && line >= kRight) break;
        store_shared(to + line * 4, stats[i].base);
        store_shared(to + kStatsBytes / 2 + line * 4, stats[i].delta);
      }
      mbarrier_arrive(ring.full());
      ring.next();
    }
}

WS_INLINE void produce(const AttentionBackwardSm90Params& p, u32 shared) {
  const AttentionParams& a = p.backward.attention;
  const Tile tile = take_tile(a, shared);
  const Request& r = tile.request;
  const Blocks blocks(a, tile);
  const int warp = threadIdx.x / 32;
  if (blocks.first == blocks.end || warp > 1) return;
  if (warp == 1) return load_stats(p.backward, tile, blocks, shared);
  load_left(shared, &p.k_map, &p.v_map, r.first_key + tile.first, tile.head, r.batch);
  __syncwarp();
  Loader loader(shared);
#pragma unroll 1
  for (int head = tile.head * a.group; head < (tile.head + 1) * a.group; ++head)
#pragma unroll 1
    for (int block = blocks.first; block < blocks.end; ++block)
      loader.load(&p.q_map, &p.dout_map, r.first_query + block * kRight, head, r.batch, r.q_len - block * kRight);
}

// Makes zero of what belongs to queries of a block that do not see the thread's keys.
WS_INLINE void hide_unseen(const AttentionBackwardSm90Params& p, u32 shared, float (&x)[kRight / 2], int block) {
  const AttentionParams& a = p.backward.attention;
  const Tile tile = take_tile(a, shared);
  const int thread = thread_now(), column = block * kRight + thread % 4 * 2;
  Columns seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = tile.first + (thread / 32 * 16 - 64) % kLeft + thread % 32 / 4 + 8 * h;
    const Queries queries = queries_of(a, tile.request, key, key + 1);
    seen[h] = {queries.first - column, queries.end - column};
  }
  hide(x, seen);
}

// The queries that see all keys from `first` to `last`.
WS_INLINE Queries queries_of_all(const AttentionParams& p, const Request& r, int first, int last) {
  return {queries_of(p, r, last, last + 1).first, queries_of(p, r, first, first + 1).end};
}

// The base or delta of the thread's columns of a stage, of which j is the block of eight.
struct Stats {
  u32 at;
  WS_INLINE Stats(u32 shared, const Ring& ring) : at(shared + kStatsAt + ring.stage * kStatsBytes + threadIdx.x % 4 * 8) {}
  WS_INLINE void bases(float (&base)[2], int j) const { load_shared(base[0], base[1], at + j * 32); }
  WS_INLINE void deltas(float (&delta)[2], int j) const { load_shared(delta[0], delta[1], at + kStatsBytes / 2 + j * 32); }
};

// Writes 64 keys' gradients, from the key `first` of the tile on, through the left lines of a consumer, which only its own warps
// have read.
WS_INLINE void store_keys(const AttentionBackwardSm90Params& p, u32 shared, u64 base, const HeadStrides& at, int first,
                          u32 lines, const float (&sum)[HEAD_DIM / 2], float factor) {
  const Tile tile = take_tile(p.backward.attention, shared);
  const Request& r = tile.request;
  store_lines(head_at<T>(base, at, r.batch, (i64)r.first_key + tile.first + first, tile.head), at.token, tile.count - first, lines,
              sum, factor);
}

extern __shared__ __align__(1024) u8 shared_memory[];

// The whole of a kernel: `consume(shared, index)` is what consumer `index` does.
template <class Consume> WS_INLINE void run(const AttentionBackwardSm90Params& p, const Consume& consume) {
  const u32 shared = shared_address(shared_memory);
  prepare(p, shared, kFills, kReads);
  begin_kernel();
  if (threadIdx.x / 32 == 0) {
    const AttentionParams& a = p.backward.attention;
    put_tile(shared, key_tile(a, tile_number(p, a.num_kv_heads), kLeft));
  }
  __syncthreads();
  if (!has_tile(shared)) return;
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    produce(p, shared);
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, warpgroup - 1);
  }
}

}  // namespace warpsmith::attention
