#pragma once
// Values that the warps of a row exchange: within a block, or between the blocks of a cluster that share a row (sm_90).

#include "warpsmith/mbarrier.cuh"
#include "warpsmith/reduce.cuh"

namespace warpsmith {

// kValues floats of each of kWarps warps, of each of kBlocks blocks. Lives in shared memory.
//
// Blocks write to each other's memory, and each write counts towards the barrier of the block that it goes to. That takes
// no fence: one at the scope of a cluster would wait for stores to global memory. Rounds alternate between two
// sets: whoever begins round n + 2 has seen round n + 1 of all warps, which have read round n by then.
template <int kBlocks, int kWarps, int kValues> struct Exchange {
  static_assert(kValues == 1 || kValues == 2 || kValues == 4, "a vector");
  static constexpr int kAllWarps = kBlocks * kWarps;

  struct alignas(4 * kValues) Values {
    float at[kValues];
  };
  Values values[2][kAllWarps];
  u64 barriers[2];

  // Once, by all threads of the cluster.
  WS_INLINE void begin() {
    if constexpr (kBlocks > 1) {
      if (threadIdx.x == 0) {
        mbarrier_init(barrier(0), 1);
        mbarrier_init(barrier(1), 1);
        mbarrier_init_fence();
        expect(0);
        expect(1);
      }
      cluster_sync();
    }
  }

  // Round `round`, counted from zero: what this warp has, of which every lane has a copy, for what all warps have.
  WS_INLINE const Values* swap(const float (&own)[kValues], u32 round) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = round & 1;
    if constexpr (kBlocks == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[half][warp].at[i] = own[i];
      }
      __syncthreads();
    } else {
      if (lane < kBlocks) send(shared_address(&values[half][cluster_rank() * kWarps + warp]), barrier(half), own, lane);
      mbarrier_wait(barrier(half), round >> 1 & 1);
      if (threadIdx.x == 0) expect(half);
    }
    return values[half];
  }

 private:
  WS_INLINE u32 barrier(int half) { return shared_address(&barriers[half]); }
  WS_INLINE void expect(int half) { mbarrier_arrive_expect(barrier(half), sizeof(values[0])); }

  // To the same address in block `rank` of the cluster.
  WS_INLINE static void send(u32 to, u32 barrier, const float (&own)[kValues], u32 rank) {
    u32 remote, counted;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(to), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(barrier), "r"(rank));
    if constexpr (kValues == 1)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
                   "f"(own[0]), "r"(counted) : "memory");
    else if constexpr (kValues == 2)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
                   "f"(own[0]), "f"(own[1]), "r"(counted) : "memory");
    else
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                   "f"(own[0]), "f"(own[1]), "f"(own[2]), "f"(own[3]), "r"(counted) : "memory");
  }
};

// Of kWarps warps each lane looks at kShare, 32 apart; lanes kWidth apart look at the same.
template <int kWarps> struct WarpShare {
  static_assert((kWarps & (kWarps - 1)) == 0, "a power of two");
  static constexpr int kWidth = kWarps < 32 ? kWarps : 32;
  static constexpr int kShare = kWarps / kWidth;

  WS_INLINE static int warp(int i) { return threadIdx.x % kWidth + 32 * i; }
};

}  // namespace warpsmith
