// Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for every pair of every head. Threads to data: as in
// rope.cuh.
//
// Defines: ELEM, POSITION (i64 or i32), INTERLEAVED, VECTOR (pieces are dense, 16-byte aligned and whole), HAS_TABLES,
// ITEMS.

#include "warpsmith/rope.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = VECTOR ? kVec<T> : 1;

struct Io {
  const RopeParams& p;

  WS_INLINE const T* source(i64 token) const {
    i64 start[1];
    row_offsets<0>(start, p.tokens, token);
    return (const T*)p.x + start[0];
  }
  WS_INLINE i64 position(i64 token) const {
    i64 start[1];
    row_offsets<2>(start, p.tokens, token);
    return ((const POSITION*)p.positions)[start[0]];
  }
  WS_INLINE void expect(int, i64) const {}
  WS_INLINE T* target(int, i64 token, int head) const {
    i64 start[1];
    row_offsets<1>(start, p.tokens, token);
    return (T*)p.out + start[0] + head * p.out_head_stride;
  }
  WS_INLINE void put(T* head, i64 at, const Chunk<T>& piece) const {
    if (VECTOR) store_words(head + at, piece.words);
    else head[at * p.out_step] = piece.items[0];
  }
  template <int kCount> WS_INLINE void put(T* head, i64 at, const float (&values)[kCount]) const {
    Chunk<T> piece;
    if constexpr (kCount > 1) pack(piece, values);
    else piece.items[0] = from_f32<T>(values[0]);
    put(head, at, piece);
  }
};

// Blocks per multiprocessor. Addresses of tables need more registers than angles, and so does the compiler for sm_120;
// with four blocks either would spill.
constexpr int kResident = HAS_TABLES || __CUDA_ARCH__ >= 1200 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(kRotaryThreads, kResident) rope(const RopeParams p) {
  begin_kernel();
  Io io{p};
  rotate_tokens<T, ITEMS, VECTOR, INTERLEAVED, HAS_TABLES>(p.rotary, io, blockIdx.x);
}
