// The gradient of queries on Hopper: f16 and bf16 with dense heads.
//
// Threads to data: as in attention_backward_sm90.cuh. The left lines are queries and gradients of results of a head, the right
// ones keys and values, in ascending order. Consumers take turns in issuing products, so that one computes weights while the
// tensor cores work for the other.
//
// Defines: those of attention_backward_sm90.cuh.

#include "warpsmith/attention_backward_sm90.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

// The blocks of keys that some of a tile's queries see. Both ends of the keys that a query sees ascend with the query.
struct Blocks {
  int first, end;

  WS_INLINE Blocks(const AttentionParams& p, const Tile& tile) {
    first = keys_of(p, tile.request, tile.first).first / kRight;
    end = max((keys_of(p, tile.request, tile.first + tile.count - 1).end + kRight - 1) / kRight, first);
  }
};

WS_INLINE void produce(const AttentionBackwardSm90Params& p, u32 shared) {
  const AttentionParams& a = p.backward.attention;
  const Tile tile = take_tile(a, shared);
  const Request& r = tile.request;
  const Blocks blocks(a, tile);
  if (blocks.first == blocks.end || threadIdx.x / 32 > 0) return;
  load_left(shared, &p.q_map, &p.dout_map, r.first_query + tile.first, tile.head, r.batch);
  __syncwarp();
  const int kv_head = tile.head / a.group;
  Loader loader(shared);
#pragma unroll 1
  for (int block = blocks.first; block < blocks.end; ++block)
    loader.load(&p.k_map, &p.v_map, r.first_key + block * kRight, kv_head, r.batch, r.kv_len - block * kRight);
}

struct Consumer {
  const AttentionBackwardSm90Params& p;
  u32 shared, index;

  WS_INLINE void await_turn() const { named_barrier_sync(kTurnBarrier + index, 256); }
  WS_INLINE void end_turn() const { named_barrier_arrive(kTurnBarrier + (index ^ 1), 256); }

  // The thread's first row of the tile; the other is 8 further on.
  static WS_INLINE int row_now() {
    const int thread = thread_now();
    return thread / 32 * 16 - 64 + thread % 32 / 4;
  }
  // Makes zero of what belongs to keys of a block that the thread's queries do not see.
  WS_INLINE void hide_unseen(float (&x)[kRight / 2], int block) const {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const int column = block * kRight + (int)thread_now() % 4 * 2, query = tile.first + row_now();
    Columns seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Keys keys = keys_of(a, tile.request, query + 8 * h);
      seen[h] = {keys.first - column, keys.end - column};
    }
    hide(x, seen);
  }

  WS_INLINE void run() {
    const AttentionParams& a = p.backward.attention;
    float dq[HEAD_DIM / 2];
    clear(dq);
    // The first turn is the first consumer's. Somebody waits for each arrival: none is pending when the block ends.
    if (index == 1) end_turn();
    sum_up(dq);
    if (index == 0) await_turn();
    const Tile tile = take_tile(a, shared);
    const Request& r = tile.request;
    const int first = index * 64;
    // All warps are done with the left lines.
    named_barrier_sync(kGroupBarrier + index, 128);
    store_lines(head_at<T>(p.backward.dq, p.backward.dq_at, r.batch, (i64)r.first_query + tile.first + first, tile.head),
                p.backward.dq_at.token, tile.count - first, shared + first * 128, dq, a.scale);
  }

  WS_INLINE void sum_up(float (&dq)[HEAD_DIM / 2]) {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const Request& r = tile.request;
    const Blocks blocks(a, tile);
    if (blocks.first == blocks.end) return;
    // The blocks of which some of these 64 queries see a key, and the keys that all of them see.
    const int first = tile.first + index * 64, last = min(first + 63, r.q_len - 1);
    const Keys low = keys_of(a, r, first), high = keys_of(a, r, last);
    int begin = min(low.first / kRight, blocks.end), end = min((high.end + kRight - 1) / kRight, blocks.end);
    if (first > last || begin >= end) begin = end = blocks.first;
    RowStats row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = tile.first + row_now() + 8 * h;
      row[h] = query < r.q_len ? stats_at(p.backward, r, tile.head)[query] : RowStats{0.0f, 0.0f};
    }

    const u32 lines = shared + index * (64 * 128);
    const u64 queries_left = wgmma_descriptor<false>(lines), douts_left = wgmma_descriptor<false>(lines + kLeftBytes);
    const u64 as_columns = wgmma_descriptor<false>(shared + kStagesAt), as_rows = wgmma_descriptor<true, kRight>(shared + kStagesAt);
    Ring ring(shared);
    const auto skip = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(ring.full(), ring.parity);
        await_turn();
        end_turn();
        release(ring.empty());
        ring.next();
      }
    };
    mbarrier_wait(shared + kLeftBarrier, 0);
    skip(begin - blocks.first);
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      const u32 at = ring.stage * (kStage >> 4);
      float s[kRight / 2], ds[kRight / 2];
      u32 gradients[kRight / 4];
      mbarrier_wait(ring.full(), ring.parity);
      await_turn();
      multiply_lines(s, queries_left, later(as_columns, at));
      multiply_lines(ds, douts_left, later(as_columns, at + (kRightBytes >> 4)));
      end_turn();
      wgmma_wait<1>();
      pin(s);
      if (SOFTCAP) {
        wgmma_wait<0>();
        pin(ds);
      }
#pragma unroll
      for (int i = 0; i < kRight / 2; ++i) {
        const Score score(p, s[i]);
        s[i] = score.weight(row[i / 2 % 2].base);
        if (SOFTCAP) s[i] *= score.slope;
      }
      wgmma_wait<0>();
      pin(ds);
#pragma unroll
      for (int i = 0; i < kRight / 2; ++i) ds[i] = s[i] * (ds[i] - row[i / 2 % 2].delta);
      if (block * kRight < high.first || (block + 1) * kRight > low.end) hide_unseen(ds, block);
      pack(gradients, ds);
      accumulate(dq, gradients, later(as_rows, at));
      wgmma_wait<0>();
      pin(dq);
      release(ring.empty());
      ring.next();
    }
    skip(blocks.end - end);
  }
};

extern __shared__ __align__(1024) u8 shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_backward_sm90_queries(const __grid_constant__ AttentionBackwardSm90Params p) {
  const u32 shared = shared_address(shared_memory);
  prepare(p, shared, 1, 4 * kConsumers);
  // Only the pass over keys may still run: it began when all before it was complete, and writes nothing that is read here, nor
  // reads what is written. So this one fills up the multiprocessors that it leaves.
  let_next_kernel_start();
  if (threadIdx.x / 32 == 0) {
    const AttentionParams& a = p.backward.attention;
    put_tile(shared, query_tile(a, tile_number(p, a.num_kv_heads * a.group), kLeft));
  }
  __syncthreads();
  if (!has_tile(shared)) return await_kernel_before();
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    produce(p, shared);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, shared, warpgroup - 1}.run();
    // The kernel after this one relies on the pass over keys, too.
    await_kernel_before();
  }
}
