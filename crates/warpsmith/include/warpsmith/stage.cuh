#pragma once
// Rows on their way: a thread copies its own chunks to shared memory ahead of time and reads them back itself, so
// no barrier is needed and no register is held while they travel.

#include "warpsmith/base.cuh"

WS_INLINE void stage_chunk(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
#endif
}

// Ends a batch of copies; every thread ends the same number of batches, empty ones too.
WS_INLINE void stage_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's batches are still on their way.
template <int kPending> WS_INLINE void stage_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
