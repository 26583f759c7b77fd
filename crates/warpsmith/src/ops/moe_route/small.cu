// `moe_route` of few tokens where the order of the logits decides alone: experts, weights and places by one cluster.
//
// Threads to data: a block has p.block_tokens tokens in a row, at most 32; its warps take one in turn. Blocks tell each other how many
// of their tokens each expert has: bytes that go straight to the memory of the others and are counted there, without a fence.
//
// Defines: ELEM, the type of logits; EXPERTS, of which there is room for; THREADS.

#include "warpsmith/mbarrier.cuh"
#include "warpsmith/moe_plain.cuh"

using namespace warpsmith;
using namespace warpsmith::moe;

constexpr int kWarps = THREADS / 32, kWords = EXPERTS / 4, kMostBlocks = 8;

// To the same place in block `rank` of the cluster, whose barrier counts it.
WS_INLINE void send(u32* to, u64* barrier, u32 word, u32 rank) {
  u32 remote, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(word), "r"(counted)
               : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_route_small(const __grid_constant__ MoeRouteParams p) {
  __shared__ BlockPlaces<THREADS, EXPERTS> places;
  __shared__ u32 counts[kMostBlocks][kWords];
  __shared__ u64 barrier;
  const int thread = threadIdx.x, warp = thread / 32, blocks = gridDim.x, block = blockIdx.x;
  if (thread == 0) {
    mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared_address(&barrier), blocks * EXPERTS);
  }
  for (int e = thread; e < EXPERTS; e += THREADS) places.masks[e] = 0;
  __syncthreads();
  // The others may count on the barrier from here on; they wait for that only once they have something to tell.
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  begin_kernel();
  const i64 first = block * p.block_tokens;
  const int tokens = (int)max(min(p.block_tokens, p.num_tokens - first), 0ll);
  for (int local = warp; local < tokens; local += kWarps) route_plain<ELEM, EXPERTS>(p, first + local, local, places.masks, places.ids);
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  for (int i = thread; i < blocks * kWords; i += THREADS) {
    const int word = i % kWords;
    send(&counts[block][word], &barrier, count_tokens(places.masks, word), i / kWords);
  }
  mbarrier_wait(shared_address(&barrier), 0);
  if (warp < places.kScanWarps) {
    i32 totals[4] = {0, 0, 0, 0}, earlier[4] = {0, 0, 0, 0};
    if (thread < kWords)
      for (int other = 0; other < blocks; ++other) {
        const u32 word = counts[other][thread];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 count = word >> (8 * i) & 0xff;
          totals[i] += count;
          earlier[i] += other < block ? count : 0;
        }
      }
    places.scan(p, totals, earlier, block == 0);
  }
  __syncthreads();
  places.put(p, first, tokens);
}
