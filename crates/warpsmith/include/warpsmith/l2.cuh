#pragma once
// How data passes through L2.

#include "warpsmith/vec.cuh"

namespace warpsmith {

// Prefetches the 128 bytes around `p` to L2; one thread of eight does. Meant for the time before `begin_kernel`, when
// memory is idle because the kernel before has little left to do. It is safe there: nothing is read, and if that kernel
// still writes this data, its writes reach the same L2 line, where the later loads find them. `streams`: the loads will
// have the policy of that name. For large tensors only the first blocks should prefetch; the host says how many.
WS_INLINE void prefetch_chunk(const void* p, bool streams = false) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x % 8 != 0) return;
  if (streams) asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(p) : "memory");
  else asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
#endif
}

// The L2 policy of loads: normal or, with `streams`, evict-last. The latter is for tensors so large that nobody finds
// them in L2 again: results are then written back early and steadily, which is faster than when they evict each other.
WS_INLINE u64 load_policy(bool streams) {
  u64 policy = 0;
#if __CUDA_ARCH__ >= 900
  u64 last;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  if (streams) policy = last;
#endif
  return policy;
}

WS_INLINE void load_words(u32 (&w)[4], const void* p, u64 policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p), "l"(policy) : "memory");
#else
  load_words(w, p);
#endif
}

// As load_chunk of vec.cuh.
template <int kVector, class T>
WS_INLINE void load_chunk(Chunk<T>& c, const T* row, i64 at, i64 step, int count, T fill, u64 policy) {
  if (kVector == kExact || (kVector && count > 0)) load_words(c.words, row + at, policy);
  else load_chunk<kVector>(c, row, at, step, count, fill);
}

}  // namespace warpsmith
