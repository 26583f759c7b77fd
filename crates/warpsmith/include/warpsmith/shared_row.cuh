#pragma once
// Dense rows that begin and end at any element (kDense), by way of shared memory.
//
// Which thread owns which element depends on its position in the row alone, so results do not depend on addresses. Memory
// is accessed in aligned vectors of 16 bytes all the same: vector c of a row is the end of chunk c - 1 and the beginning
// of chunk c.
//
//   memory    |  .  . a0 a1 | a2 a3 b0 b1 | b2 b3 c0 c1 | c2 c3  .  . |     a, b, c: chunks 0, 1, 2
//   vector          0             1             2             3
//
// The owner of chunk c copies vector c to shared memory and, when its neighbours have done so too, reads vectors c and
// c + 1 from there. To store, it leaves its chunk in shared memory, reads the chunk before it, and writes vector c.
// Elements of vectors that are not all the row's, or not all of the neighbours', are written one by one by their owners.
//
// Nothing outside the row is written. Of what is before it, up to a multiple of 16 bytes, copies read and discard
// bytes: memory is allocated in such multiples. Nothing past its end is read.

#include "warpsmith/async_copy.cuh"
#include "warpsmith/unaligned.cuh"

namespace warpsmith {

// Elements between the last aligned address at or before a row and its start.
template <class T> WS_INLINE int row_shift(const T* row) { return (int)((u64)row % 16) / (int)sizeof(T); }

// Blocks of a multiprocessor that must find registers in kernels of staged rows, as the host counts on. For the oldest
// and for sm_100 the compiler needs more of them.
constexpr int staged_blocks(int threads, int items) {
#if __CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000
  const int at_once = items <= 2 ? 1024 : 640;
#else
  const int at_once = items <= 2 || threads >= 512 ? 1024 : 640;
#endif
  return threads <= at_once ? at_once / threads : 1;
}

// All threads of a row, which are kWarps warps of a block or part of one.
template <int kWarps> WS_INLINE void meet() {
  if constexpr (kWarps > 1) __syncthreads();
  else __syncwarp();
}

// Copies the first `bytes` of 16, none to all, and writes zeros for the others, which are not read. There is no L2
// policy: with one, ptxas of CUDA 13.0 emits for sm_90 a copy whose uniform registers were never set.
WS_INLINE void copy_async_part(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#endif
}

// kSlots neighbouring chunks of a row, or the vectors that hold them. Lives in shared memory.
template <class T, int kSlots> struct SharedRow {
  static constexpr int V = kVec<T>;
  // Slot i is number i + 1. The one before the first is read, and not used; the one past the last is for the vector in
  // which the last chunk ends.
  Chunk<T> chunks[kSlots + 2];

  // Starts to copy the vector of the chunk that is number `chunk` of a row and `slot` here. Past the row's end there are
  // zeros.
  WS_INLINE void copy(int slot, int chunk, const T* row, int length) {
    copy_vector(slot, chunk, row, length);
    if (slot == kSlots - 1) copy_vector(kSlots, chunk + 1, row, length);
  }

  // The chunk of a slot, when the copies to it and to the next have arrived.
  WS_INLINE void get(Chunk<T>& c, int slot, int shift) const {
    if (shift == 0) c = chunks[slot + 1];
    else join_from(c, chunks[slot + 1], chunks[slot + 2], shift);
  }

  // Leaves a chunk to be stored. Nobody may still want to read what was copied here.
  WS_INLINE void leave(int slot, const Chunk<T>& c) { chunks[slot + 1] = c; }

  // Stores what was left in a slot, when the slot before has been filled too.
  WS_INLINE void store(int slot, int chunk, T* row, int length) const {
    const int shift = row_shift(row), at = chunk * V;
    const bool whole = (slot > 0 || shift == 0) && at + V - shift <= length;
    const bool next_whole = slot + 1 < kSlots && at + 2 * V - shift <= length;
    const Chunk<T> own = chunks[slot + 1];
    if (whole) {
      Chunk<T> vector;
      join_last(vector, chunks[slot], own, shift);
      store_words(row + (at - shift), vector.words);
    }
    const int first = whole ? V - shift : 0, last = min(next_whole ? V - shift : V, length - at);
    if (first >= last) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= first && j < last) row[at + j] = own.items[j];
  }

 private:
  WS_INLINE void copy_vector(int slot, int vector, const T* row, int length) {
    const int shift = row_shift(row), at = vector * V - shift;
    const T* from = row + at;
    const int count = min(max(length - at, 0), V);
#if __CUDA_ARCH__ >= 800
    copy_async_part(chunks + slot + 1, from, count * (int)sizeof(T));
#else
    Chunk<T> c;
    if (count == V) {
      load_words(c.words, from);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) c.items[j] = j < count ? from[j] : T{};
    }
    chunks[slot + 1] = c;
#endif
  }
};

}  // namespace warpsmith
