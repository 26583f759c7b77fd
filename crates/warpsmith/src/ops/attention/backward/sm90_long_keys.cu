// The gradients of keys and values on Hopper: f16 and bf16 with dense heads of more than 128 elements.
//
// Threads to data: as in attention_backward_sm90_keys.cuh. Both consumers have the same 64 keys, because the sums of two gradients
// do not fit the registers of one: the first multiplies by keys, which gives weights, and sums up the gradients of values; the
// second multiplies by values, takes the weights from the first, and sums up the gradients of keys. Thread for thread they hold
// the same rows and columns.
//
// Defines: those of attention_backward_sm90.cuh.

#include "warpsmith/attention_backward_sm90_keys.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

static_assert(kLeft == 64, "keys of both consumers");

// The weights of two blocks on their way, in pieces of 16 bytes of 128 threads, and barriers: two that say that the weights of a
// block are there, two that they have been read. Every thread arrives for itself.
constexpr u32 kPieces = kRight / 8, kWeightsBytes = kPieces * 128 * 16;
constexpr u32 kWeightsAt = kSharedBytes, kWeightsBarriers = kWeightsAt + 2 * kWeightsBytes;
static_assert(kWeightsBarriers + 32 <= 232448, "shared memory");

// A place among the weights on their way.
struct Passage {
  u32 shared, count = 0;

  WS_INLINE u32 full() const { return shared + kWeightsBarriers + count % 2 * 8; }
  WS_INLINE u32 empty() const { return full() + 16; }
  WS_INLINE u32 piece(int i) const { return shared + kWeightsAt + count % 2 * kWeightsBytes + (i * 128 + threadIdx.x % 128) * 16; }

  WS_INLINE void init() const {
    for (int i = 0; i < 4; ++i) mbarrier_init(shared + kWeightsBarriers + i * 8, 128);
  }
  WS_INLINE void put(const float (&weights)[kRight / 2]) {
    mbarrier_wait(empty(), count / 2 % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float four[4] = {weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]};
      store_shared(piece(i), four);
    }
    mbarrier_arrive(full());
    ++count;
  }
  WS_INLINE void await() const { mbarrier_wait(full(), count / 2 % 2); }
  WS_INLINE void done() {
    mbarrier_arrive(empty());
    ++count;
  }
};

struct Consumer {
  const AttentionBackwardSm90Params& p;
  u32 shared;

  // Calls `visit(ring, block, is_seen)` for each block of queries, in order, once it has arrived. `is_seen`: all of them see all
  // keys.
  template <class Visit> WS_INLINE void each(const Visit& visit) const {
    const AttentionParams& a = p.backward.attention;
    const Tile tile = take_tile(a, shared);
    const Blocks blocks(a, tile);
    if (blocks.first == blocks.end) return;
    const Queries all = queries_of_all(a, tile.request, tile.first, tile.first + tile.count - 1);
    Ring ring(shared);
    mbarrier_wait(shared + kLeftBarrier, 0);
#pragma unroll 1
    for (int head = 0; head < a.group; ++head)
#pragma unroll 1
      for (int block = blocks.first; block < blocks.end; ++block) {
        mbarrier_wait(ring.full(), ring.parity);
        visit(ring, block, block * kRight >= all.first && (block + 1) * kRight <= all.end);
        mbarrier_arrive(ring.empty());
        ring.next();
      }
  }
  // The products of the left lines of a tensor with the right lines of one.
  WS_INLINE void multiply(float (&x)[kRight / 2], const Ring& ring, u32 tensor) const {
    const u64 right = wgmma_descriptor<false>(shared + kStagesAt + tensor * kRightBytes);
    multiply_lines(x, wgmma_descriptor<false>(shared + tensor * kLeftBytes), later(right, ring.stage * (kStage >> 4)));
    wgmma_wait<0>();
    pin(x);
  }
  WS_INLINE void sum_up(float (&sum)[HEAD_DIM / 2], const float (&x)[kRight / 2], const Ring& ring, u32 tensor) const {
    const u64 right = wgmma_descriptor<true, kRight>(shared + kStagesAt + tensor * kRightBytes);
    u32 packed[kRight / 4];
    pack(packed, x);
    accumulate(sum, packed, later(right, ring.stage * (kStage >> 4)));
    wgmma_wait<0>();
    pin(sum);
  }

  WS_INLINE void of_values() const {
    const AttentionBackwardParams& b = p.backward;
    float dv[HEAD_DIM / 2];
    clear(dv);
    Passage passage{shared};
    each([&](const Ring& ring, int block, bool is_seen) {
      const Stats stats(shared, ring);
      float s[kRight / 2], weighted_slopes[kRight / 2];
      multiply(s, ring, 0);
#pragma unroll
      for (int j = 0; j < kRight / 8; ++j) {
        float base[2];
        stats.bases(base, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Score score(p, s[4 * j + i]);
          s[4 * j + i] = score.weight(base[i % 2]);
          if (SOFTCAP) weighted_slopes[4 * j + i] = s[4 * j + i] * score.slope;
        }
      }
      if (SOFTCAP) passage.put(weighted_slopes);
      else passage.put(s);
      if (!is_seen) hide_unseen(p, shared, s, block);
      sum_up(dv, s, ring, 1);
    });
    named_barrier_sync(kGroupBarrier, 128);
    store_keys(p, shared, b.dv, b.dv_at, 0, shared, dv, 1.0f);
  }

  WS_INLINE void of_keys() const {
    const AttentionBackwardParams& b = p.backward;
    float dk[HEAD_DIM / 2];
    clear(dk);
    Passage passage{shared};
    each([&](const Ring& ring, int block, bool is_seen) {
      const Stats stats(shared, ring);
      float ds[kRight / 2];
      multiply(ds, ring, 1);
      passage.await();
#pragma unroll
      for (int j = 0; j < kRight / 8; ++j) {
        float delta[2], weights[4];
        stats.deltas(delta, j);
        load_shared(weights, passage.piece(j));
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[4 * j + i] = weights[i] * (ds[4 * j + i] - delta[i % 2]);
      }
      passage.done();
      if (!is_seen) hide_unseen(p, shared, ds, block);
      sum_up(dk, ds, ring, 0);
    });
    named_barrier_sync(kGroupBarrier + 1, 128);
    store_keys(p, shared, b.dk, b.dk_at, 0, shared + kLeftBytes, dk, b.attention.scale);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_backward_sm90_long_keys(const __grid_constant__ AttentionBackwardSm90Params p) {
  if (threadIdx.x == 0) Passage{shared_address(shared_memory)}.init();
  run(p, [&](u32 shared, u32 index) {
    const Consumer consumer{p, shared};
    if (index == 0) consumer.of_values();
    else consumer.of_keys();
  });
}
