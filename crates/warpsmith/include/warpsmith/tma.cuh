#pragma once
// The bulk tensor copy engine (sm_90). Maps are encoded by the host and lie in kernel parameters that are
// `const __grid_constant__`, aligned to 64 bytes. Coordinates are in elements, the innermost first; what lies outside
// the tensor is read as zero and never written.

#include "warpsmith/mbarrier.cuh"

WS_INLINE void tma_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}

// Loads a box into shared memory; its bytes count towards `barrier`.
WS_INLINE void tma_load(u32 shared, const void* map, u32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
WS_INLINE void tma_load(u32 shared, const void* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// The same into every block of the cluster whose bit is set in `blocks`, at the same address and barrier in each.
WS_INLINE void tma_load_multicast(u32 shared, const void* map, u32 barrier, u16 blocks, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
WS_INLINE void tma_load_multicast(u32 shared, const void* map, u32 barrier, u16 blocks, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
      ::"r"(shared), "l"((u64)map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Stores a box. Threads that wrote it must have executed `async_proxy_fence` before the barrier that precedes this.
WS_INLINE void tma_store(const void* map, u32 shared, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"((u64)map), "r"(shared), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// The same for a converged warp, one lane of which stores if `wanted`, which is the same in all. Predicates in place of a
// branch: around a branch the compiler gives up uniform registers, also those of loops far away.
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

// Swizzle of a box whose rows have kRowBytes (32, 64 or 128) bytes: where the copy engine puts, or expects, the byte
// at `offset` of the unswizzled box. The box is aligned to 1024 bytes.
template <int kRowBytes> WS_INLINE u32 swizzled(u32 offset) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "spans of the copy engine");
  return offset ^ (((offset >> 7) & (kRowBytes / 16 - 1)) << 4);
}

// Four 8x8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
WS_INLINE void store_matrices(u32 row, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(row), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}
