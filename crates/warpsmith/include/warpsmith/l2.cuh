#pragma once
// How data passes through L2.

#include "warpsmith/vec.cuh"

// Asks for the chunk at `p`, with its neighbours of 128 bytes, to be brought to L2: before `begin_kernel`, when the memory
// is idle because the kernel before has little left to do. One thread of eight asks. Nothing is read: if that kernel still
// writes this data, its writes and what was brought meet in L2, and the loads that follow find both. `streams`: the loads
// will have the policy of that name. Of large tensors only the first blocks should ask: the host says how many.
WS_INLINE void fetch_ahead(const void* p, bool streams = false) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x % 8 != 0) return;
  if (streams) asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(p) : "memory");
  else asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
#endif
}

// How loads treat what they bring to L2: as usual or, with `streams`, as the last to be evicted. That is meant for tensors
// too large to be found in L2 by anyone: results then leave for memory soon and steadily, which the memory likes better
// than when they give way to each other.
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
