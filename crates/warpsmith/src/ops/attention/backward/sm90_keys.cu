// The gradients of keys and values on Hopper: f16 and bf16 with dense heads.
//
// Threads to data: as in attention_backward_sm90.cuh. The left lines are keys and values of a KV head, the right ones queries and
// gradients of results, of one query head after the other, in ascending order. The second warp of the producer brings what is
// kept of the queries.
//
// Defines: those of attention_backward_sm90.cuh.

#include "warpsmith/attention_backward_sm90.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

// With a softcap, the slope of a score is at hand only together with its weight: its gradient must be, too.
constexpr bool kEarly = SOFTCAP;

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
      release(ring.full());
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

struct Consumer {
  const AttentionBackwardSm90Params& p;
  u32 shared, index;

  // Makes zero of what belongs to queries of a block that do not see the thread's keys.
  WS_INLINE void hide_unseen(float (&x)[kRight / 2], int block) const {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const int thread = thread_now(), column = block * kRight + thread % 4 * 2;
    Columns seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = tile.first + thread / 32 * 16 - 64 + thread % 32 / 4 + 8 * h;
      const Queries queries = queries_of(a, tile.request, key, key + 1);
      seen[h] = {queries.first - column, queries.end - column};
    }
    hide(x, seen);
  }

  WS_INLINE void run() {
    const AttentionParams& a = p.backward.attention;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
    clear(dk);
    clear(dv);
    sum_up(dk, dv);
    const Tile tile = take_tile(a, shared);
    const Request& r = tile.request;
    const int first = index * 64;
    const i64 token = (i64)r.first_key + tile.first + first;
    const u32 lines = shared + first * 128;
    // All warps are done with the left lines.
    named_barrier_sync(kGroupBarrier + index, 128);
    store_lines(head_at<T>(p.backward.dk, p.backward.dk_at, r.batch, token, tile.head), p.backward.dk_at.token, tile.count - first,
                lines, dk, a.scale);
    store_lines(head_at<T>(p.backward.dv, p.backward.dv_at, r.batch, token, tile.head), p.backward.dv_at.token, tile.count - first,
                lines + kLeftBytes, dv, 1.0f);
  }

  WS_INLINE void sum_up(float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM / 2]) {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const Request& r = tile.request;
    const Blocks blocks(a, tile);
    if (blocks.first == blocks.end) return;
    // The blocks that see some of these 64 keys, and the queries from which and until which all are seen.
    const int first = tile.first + index * 64, last = min(first + 63, r.kv_len - 1);
    const Queries some = queries_of(a, r, first, last + 1);
    int begin = min(some.first / kRight, blocks.end), end = min((some.end + kRight - 1) / kRight, blocks.end);
    if (first > last || begin >= end) begin = end = blocks.first;
    const Queries whole = {queries_of(a, r, last, last + 1).first, queries_of(a, r, first, first + 1).end};

    const u32 lines = shared + index * (64 * 128);
    const u64 keys_left = wgmma_descriptor<false>(lines), values_left = wgmma_descriptor<false>(lines + kLeftBytes);
    const u64 as_columns = wgmma_descriptor<false>(shared + kStagesAt), as_rows = wgmma_descriptor<true, kRight>(shared + kStagesAt);
    Ring ring(shared);
    const auto skip = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(ring.full(), ring.parity);
        release(ring.empty());
        ring.next();
      }
    };
    mbarrier_wait(shared + kLeftBarrier, 0);
#pragma unroll 1
    for (int head = 0; head < a.group; ++head) {
      skip(begin - blocks.first);
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const u32 at = ring.stage * (kStage >> 4);
        float s[kRight / 2], ds[kRight / 2];
        u32 weights[kRight / 4], gradients[kRight / 4];
        mbarrier_wait(ring.full(), ring.parity);
        multiply_lines(s, keys_left, later(as_columns, at));
        multiply_lines(ds, values_left, later(as_columns, at + (kRightBytes >> 4)));
        wgmma_wait<1>();
        pin(s);

        const bool is_seen = block * kRight >= whole.first && (block + 1) * kRight <= whole.end;
        const u32 bases = shared + kStatsAt + ring.stage * kStatsBytes + threadIdx.x % 4 * 8, deltas = bases + kStatsBytes / 2;
        if (kEarly) {
          wgmma_wait<0>();
          pin(ds);
        }
#pragma unroll
        for (int j = 0; j < kRight / 8; ++j) {
          float base[2], delta[2];
          load_shared(base[0], base[1], bases + j * 32);
          if (kEarly) load_shared(delta[0], delta[1], deltas + j * 32);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Score score(p, s[4 * j + i]);
            s[4 * j + i] = score.weight(base[i % 2]);
            if (kEarly) ds[4 * j + i] = s[4 * j + i] * (ds[4 * j + i] - delta[i % 2]) * score.slope;
          }
        }
        if (!is_seen) hide_unseen(s, block);
        pack(weights, s);
        accumulate(dv, weights, later(as_rows, at + (kRightBytes >> 4)));
        if (!kEarly) {
          wgmma_wait<1>();
          pin(ds);
#pragma unroll
          for (int j = 0; j < kRight / 8; ++j) {
            float delta[2];
            load_shared(delta[0], delta[1], deltas + j * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) ds[4 * j + i] = s[4 * j + i] * (ds[4 * j + i] - delta[i % 2]);
          }
        }
        if (!is_seen) hide_unseen(ds, block);
        pack(gradients, ds);
        accumulate(dk, gradients, later(as_rows, at));
        wgmma_wait<0>();
        pin(dk);
        pin(dv);
        release(ring.empty());
        ring.next();
      }
      skip(blocks.end - end);
    }
  }
};

extern __shared__ __align__(1024) u8 shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_backward_sm90_keys(const __grid_constant__ AttentionBackwardSm90Params p) {
  const u32 shared = shared_address(shared_memory);
  prepare(p, shared, 2);
  begin_kernel();
  if (threadIdx.x / 32 == 0) {
    const AttentionParams& a = p.backward.attention;
    put_tile(shared, key_tile(a, tile_number(p, a.num_kv_heads), kLeft));
  }
  __syncthreads();
  u32 exists;
  load_shared(exists, shared + kTileAt + 8);
  if (!exists) return;
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    produce(p, shared);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, shared, warpgroup - 1}.run();
  }
}
