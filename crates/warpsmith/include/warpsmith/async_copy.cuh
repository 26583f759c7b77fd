#pragma once
// Asynchronous copies of 16 bytes from global to shared memory (sm_80 and later). A thread closes its copies in groups
// and waits for groups, in the order in which it closed them.
//
// What a thread copies, it may read after its own wait. What other threads copied takes a barrier too.

#include "warpsmith/shared.cuh"

namespace warpsmith {

// Code that has a path without these copies compiles for older devices too, where they do nothing.
WS_INLINE void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}
// Writes zeros if `exists` is false; `from` is not read then and may be any address.
WS_INLINE void copy_async(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// Closes a group, which may be empty. Threads count groups, so each must close as many as it waits for.
WS_INLINE void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's groups are incomplete.
template <int kPending> WS_INLINE void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace warpsmith
