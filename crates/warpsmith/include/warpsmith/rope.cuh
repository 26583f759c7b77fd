#pragma once
// Rotary position embedding, (a, b) -> (a cos - b sin, b cos + a sin) for every pair, for kernels that differ in where
// heads come from and where results go. `Rotary` is the C twin of the host's struct.
//
// Threads to data: a block takes kItems * tokens_at_once tokens; `head_tiles` blocks have the same tokens and share their
// heads. Its threads first compute the cosines and sines of all pairs of those tokens, into shared memory. Then
// 2^lane_bits threads work on a head, and 2^head_bits heads of a token are in work at once, for kItems tokens each. A
// column is a thread's share of a head: V pairs, in two pieces of V elements; or, past the rotated part, one piece to
// copy.
//
// The pieces of column c start at elements c V and num_pairs + c V in both layouts: with kInterleaved each of them holds
// V / 2 pairs of its own, and both layouts read whole 16-byte pieces side by side.
//
// The loads of x do not depend on the angles and are issued before them.

#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith {

constexpr int kRotaryThreads = 256;

// N floats, aligned so that shared memory is read in one access.
template <int N> struct alignas(N * 4 < 16 ? N * 4 : 16) Floats {
  float items[N];
};
template <int N> WS_INLINE void read(float (&out)[N], const float* shared) {
  Floats<N> f = *(const Floats<N>*)shared;
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = f.items[i];
}

WS_INLINE void rotate(float& a, float& b, float cos, float sin) {
  float first = fmaf(a, cos, -__fmul_rn(b, sin));
  b = fmaf(b, cos, __fmul_rn(a, sin));
  a = first;
}

// Cosine and sine of `angle` * 2^-64 turns: the nearest quarter turn, and polynomials for the rest (see angles.rs).
WS_INLINE void cos_sin(float& cos_out, float& sin_out, u64 angle) {
  u64 quarter = (angle + (1ull << 61)) >> 62;
  float x = (float)(i64)(angle - (quarter << 62)) * 0x1p-62f, z = x * x;
  float p = fmaf(fmaf(fmaf(-0.004602163f, z, 0.07968022f), z, -0.6459635f), z, -4.854626e-8f);
  float q = fmaf(fmaf(fmaf(0.0009067417f, z, -0.020861529f), z, 0.2536694f), z, -1.2337005f);
  float s = fmaf(x, 1.57079637f, x * p), c = fmaf(q, z, 1.0f);
  u32 turn = (u32)quarter;
  float c1 = turn & 1 ? s : c, s1 = turn & 1 ? c : s;
  cos_out = bits_float(float_bits(c1) ^ (((turn + 1) & 2) << 30));
  sin_out = bits_float(float_bits(s1) ^ ((turn & 2) << 30));
}

// The work of block `block`. kVector: pieces are dense, 16-byte aligned and whole.
//
// What differs between kernels is in `io`:
//   const T* source(i64 token)                         the token's first head; heads and elements are `x_head_stride` and
//                                                      `x_step` apart
//   i64 position(i64 token)
//   void expect(int item, i64 token)                   called first, to start loads that overlap with the angles
//   auto target(int item, i64 token, int head)         where the head goes; null if it is not stored
//   void put(target, i64 at, const float (&values)[V]) stores rotated elements from `at` on
//   void put(target, i64 at, const Chunk<T>& piece)    stores elements from `at` on as they are
template <class T, int kItems, bool kVector, bool kInterleaved, bool kTables, class Io>
WS_INLINE void rotate_tokens(const Rotary& p, Io& io, i64 block) {
  constexpr int V = kVector ? kVec<T> : 1;
  // Pairs in one piece with kInterleaved.
  constexpr int kOwnPairs = V / 2 > 0 ? V / 2 : 1;
  // [tokens][pairs] of cosines, then of sines.
  extern __shared__ __align__(16) float factors[];
  const int thread = threadIdx.x;
  const int lane = thread & ((1 << p.lane_bits) - 1);
  // Where one block takes all heads, as it does where there are many tokens, there is nothing to divide.
  const u32 token_block = p.head_tiles == 1 ? (u32)block : (u32)block / p.head_tiles;
  const int tile = (int)((u32)block - token_block * p.head_tiles);
  const int first_head = (tile << p.head_bits) + ((thread >> p.lane_bits) & ((1 << p.head_bits) - 1));
  const int slot = thread >> (p.lane_bits + p.head_bits);
  const int tokens_at_once = kRotaryThreads >> (p.lane_bits + p.head_bits);
  const i64 first_token = (i64)token_block * (kItems * tokens_at_once);
  const int sines = kItems * tokens_at_once * p.num_pairs;

  // Computed anew wherever needed: kept, they would occupy registers throughout the computation of the angles.
  auto token_of = [&](int i) { return first_token + i * tokens_at_once + slot; };
  auto start_of = [&](int column) {
    return column < p.rotate_columns ? (i64)column * p.first_stride + p.first_offset
                                     : p.rotary_dim + (i64)(column - p.rotate_columns) * V;
  };

  Chunk<T> a[kItems], b[kItems];
  auto load_piece = [&](Chunk<T>& piece, const T* head, i64 at) {
    if (kVector) load_words(piece.words, head + at);
    else piece.items[0] = head[at * p.x_step];
  };
  auto load = [&](int head, int column) {
    const i64 at = start_of(column);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (token_of(i) >= p.num_tokens) continue;
      const T* row = io.source(token_of(i)) + head * p.x_head_stride;
      load_piece(a[i], row, at);
      if (column < p.rotate_columns) load_piece(b[i], row, at + p.second);
    }
  };
  const bool works = first_head < p.num_heads && lane < p.columns;
  if (works) {
    load(first_head, lane);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (token_of(i) < p.num_tokens) io.expect(i, token_of(i));
  }

  const int pair_mask = (1 << p.pair_bits) - 1;
  for (int k = thread; k < (kItems * tokens_at_once) << p.pair_bits; k += kRotaryThreads) {
    const int pair = k & pair_mask, local = k >> p.pair_bits;
    const i64 token = first_token + local;
    if (pair >= p.num_pairs || token >= p.num_tokens) continue;
    i64 position = io.position(token);
    float cos, sin;
    if (kTables) {
      position = min(max(position, (i64)0), p.max_pos - 1);
      const i64 column = p.first_pair + pair;
      cos = ((const float*)p.cos)[position * p.cos_strides[0] + column * p.cos_strides[1]];
      sin = ((const float*)p.sin)[position * p.sin_strides[0] + column * p.sin_strides[1]];
    } else {
      cos_sin(cos, sin, p.frequencies[pair] * (u64)position);
    }
    factors[local * p.num_pairs + pair] = cos;
    factors[sines + local * p.num_pairs + pair] = p.backward ? -sin : sin;
  }
  __syncthreads();
  if (!works) return;

  for (int head = first_head;;) {
    for (int column = lane;;) {
      const i64 at = start_of(column);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (token_of(i) >= p.num_tokens) continue;
        auto target = io.target(i, token_of(i), head);
        if (!target) continue;
        if (column < p.rotate_columns) {
          const float* cosines = factors + (i * tokens_at_once + slot) * p.num_pairs;
          float u[V], v[V];
#pragma unroll
          for (int j = 0; j < V; ++j) {
            u[j] = to_f32(a[i].items[j]);
            v[j] = to_f32(b[i].items[j]);
          }
          if (kVector && kInterleaved) {
            float cos[kOwnPairs], sin[kOwnPairs];
            const int k = column * kOwnPairs;
            read(cos, cosines + k);
            read(sin, cosines + sines + k);
#pragma unroll
            for (int j = 0; j < kOwnPairs; ++j) rotate(u[2 * j], u[2 * j + 1], cos[j], sin[j]);
            read(cos, cosines + p.num_pairs / 2 + k);
            read(sin, cosines + sines + p.num_pairs / 2 + k);
#pragma unroll
            for (int j = 0; j < kOwnPairs; ++j) rotate(v[2 * j], v[2 * j + 1], cos[j], sin[j]);
          } else {
            float cos[V], sin[V];
            read(cos, cosines + column * V);
            read(sin, cosines + sines + column * V);
#pragma unroll
            for (int j = 0; j < V; ++j) rotate(u[j], v[j], cos[j], sin[j]);
          }
          io.put(target, at, u);
          io.put(target, at + p.second, v);
        } else {
          io.put(target, at, a[i]);
        }
      }
      column += 1 << p.lane_bits;
      if (column >= p.columns) break;
      load(head, column);
    }
    head += p.head_tiles << p.head_bits;
    if (head >= p.num_heads) break;
    load(head, lane);
  }
}

}  // namespace warpsmith
