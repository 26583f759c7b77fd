// The gradients of keys and values on Hopper: f16 and bf16 with dense heads of up to 128 elements.
//
// Threads to data: as in attention_backward_sm90_keys.cuh. Each consumer has 64 of 128 keys, and the sums of both gradients.
//
// Defines: those of attention_backward_sm90.cuh.

#include "warpsmith/attention_backward_sm90_keys.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

static_assert(kLeft == 64 * kConsumers, "keys of a consumer");

// With a softcap, the slope of a score is at hand only together with its weight: its gradient must be, too.
constexpr bool kEarly = SOFTCAP;

struct Consumer {
  const AttentionBackwardSm90Params& p;
  u32 shared, index;

  WS_INLINE void run() {
    const AttentionBackwardParams& b = p.backward;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
    clear(dk);
    clear(dv);
    sum_up(dk, dv);
    const int first = index * 64;
    const u32 lines = shared + first * 128;
    // All warps are done with the left lines.
    named_barrier_sync(kGroupBarrier + index, 128);
    store_keys(p, shared, b.dk, b.dk_at, first, lines, dk, b.attention.scale);
    store_keys(p, shared, b.dv, b.dv_at, first, lines + kLeftBytes, dv, 1.0f);
  }

  WS_INLINE void sum_up(float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM / 2]) {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const Request& r = tile.request;
    const Blocks blocks(a, tile);
    if (blocks.first == blocks.end) return;
    // The blocks that see some of these 64 keys.
    const int first = tile.first + index * 64, last = min(first + 63, r.kv_len - 1);
    const Queries some = queries_of(a, r, first, last + 1), all = queries_of_all(a, r, first, last);
    int begin = min(some.first / kRight, blocks.end), end = min((some.end + kRight - 1) / kRight, blocks.end);
    if (first > last || begin >= end) begin = end = blocks.first;

    const u32 lines = shared + index * (64 * 128);
    const u64 keys = wgmma_descriptor<false>(lines), values = wgmma_descriptor<false>(lines + kLeftBytes);
    const u64 as_columns = wgmma_descriptor<false>(shared + kStagesAt), as_rows = wgmma_descriptor<true, kRight>(shared + kStagesAt);
    Ring ring(shared);
    const auto skip = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(ring.full(), ring.parity);
        mbarrier_arrive(ring.empty());
        ring.next();
      }
    };
    mbarrier_wait(shared + kLeftBarrier, 0);
#pragma unroll 1
    for (int head = 0; head < a.group; ++head) {
      skip(begin - blocks.first);
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const bool is_seen = block * kRight >= all.first && (block + 1) * kRight <= all.end;
        const u32 at = ring.stage * (kStage >> 4);
        const Stats stats(shared, ring);
        float s[kRight / 2], ds[kRight / 2];
        u32 weights[kRight / 4], gradients[kRight / 4];
        mbarrier_wait(ring.full(), ring.parity);
        multiply_lines(s, keys, later(as_columns, at));
        multiply_lines(ds, values, later(as_columns, at + (kRightBytes >> 4)));
        wgmma_wait<1>();
        pin(s);
        if (kEarly) {
          wgmma_wait<0>();
          pin(ds);
        }
#pragma unroll
        for (int j = 0; j < kRight / 8; ++j) {
          float base[2], delta[2];
          stats.bases(base, j);
          if (kEarly) stats.deltas(delta, j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Score score(p, s[4 * j + i]);
            s[4 * j + i] = score.weight(base[i % 2]);
            if (kEarly) ds[4 * j + i] = s[4 * j + i] * (ds[4 * j + i] - delta[i % 2]) * score.slope;
          }
        }
        if (!is_seen) hide_unseen(p, shared, s, block);
        pack(weights, s);
        accumulate(dv, weights, later(as_rows, at + (kRightBytes >> 4)));
        if (!kEarly) {
          wgmma_wait<1>();
          pin(ds);
#pragma unroll
          for (int j = 0; j < kRight / 8; ++j) {
            float delta[2];
            stats.deltas(delta, j);
#pragma unroll
            for (int i = 0; i < 4; ++i) ds[4 * j + i] = s[4 * j + i] * (ds[4 * j + i] - delta[i % 2]);
          }
        }
        if (!is_seen) hide_unseen(p, shared, ds, block);
        pack(gradients, ds);
        accumulate(dk, gradients, later(as_rows, at));
        wgmma_wait<0>();
        pin(dk);
        pin(dv);
        mbarrier_arrive(ring.empty());
        ring.next();
      }
      skip(blocks.end - end);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_backward_sm90_keys(const __grid_constant__ AttentionBackwardSm90Params p) {
  run(p, [&](u32 shared, u32 index) { Consumer{p, shared, index}.run(); });
}
