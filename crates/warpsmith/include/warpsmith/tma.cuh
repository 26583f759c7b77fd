#pragma once
// The bulk tensor copy engine (sm_90). Maps are encoded by the host and lie in kernel parameters that are
// `const __grid_constant__`, aligned to 64 bytes. Coordinates are in elements, the innermost first; what lies outside
// the tensor is read as zero and never written.

#include "warpsmith/mbarrier.cuh"

namespace warpsmith {

// Prefetches a map.
WS_INLINE void tma_prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}

// Loads a box into shared memory; its bytes count towards `barrier`.
WS_INLINE void tma_load(u32 shared, const void* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// The same into every block of the cluster whose bit is set in `blocks`, at the same address and barrier in each.
WS_INLINE void tma_load_multicast(u32 shared, const void* map, u32 barrier, u16 blocks, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Prefetches a box to L2. Nothing is read: this is safe even while an earlier kernel still writes the box.
WS_INLINE void tma_prefetch_box(u64 map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];"
               ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Stores a box. Threads that wrote it must have executed `async_proxy_fence` before the barrier that precedes this.
WS_INLINE void tma_store(const void* map, u32 shared, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"((u64)map), "r"(shared), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// The same for a converged warp, one lane of which stores if `wanted`, which must be the same in all. With a predicate
// instead of a branch: around a branch the compiler gives up uniform registers, even those of distant loops.
WS_INLINE void tma_store_if(bool wanted, const void* map, u32 shared, int c0, int c1, int c2, int c3) {
  asm volatile(
      "{\n.reg .pred one, p;\nelect.sync _|one, 0xffffffff;\nsetp.ne.and.b32 p, %6, 0, one;\n"
      "@p cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n}"
      ::"l"((u64)map), "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"((int)wanted) : "memory");
}
// Ends a group of the calling thread's stores.
WS_INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of the calling thread's groups still read shared memory.
template <int kPending> WS_INLINE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later accesses of the copy engine and tensor cores.
WS_INLINE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The swizzle of a box with rows of kRowBytes bytes: where the copy engine puts, or expects, the byte at `offset` of the
// unswizzled box. The box must be aligned to 1024 bytes.
template <int kRowBytes> WS_INLINE u32 swizzled(u32 offset) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "spans of the copy engine");
  return offset ^ (((offset >> 7) & (kRowBytes / 16 - 1)) << 4);
}

}  // namespace warpsmith
