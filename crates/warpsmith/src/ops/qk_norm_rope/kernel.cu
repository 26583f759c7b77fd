// Norms and rotates the heads of queries and keys.
//
// Threads to data: a warp has a head; p.head_blocks blocks share the heads of a token, queries first and then keys, eight at a
// time each. The cosines and sines of the token are computed once in a block, into shared memory.
//
// With PER_LANE, a lane holds that many neighbouring elements of its head, loaded at once; the other element of a rotated
// pair is with the lane 16 further, or with INTERLEAVED its neighbour. With PER_LANE 0 heads of any length and strides go
// through shared memory. Both sum squares in the same order: each lane those of its elements, then the lanes.
//
// Defines: ELEM, WEIGHT (element types), PER_LANE, HAS_TABLES, INTERLEAVED.

#include "warpsmith/group.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rope.cuh"

using namespace warpsmith;

using T = ELEM;
using W = WEIGHT;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Cosines of all pairs of a token, then their sines.
WS_INLINE void compute_factors(const QkNormRopeParams& p, u32 token, float* factors) {
  const Rotary& r = p.rotary;
  i64 position = load_integer(p.positions, p.wide_positions, row_offset(p.places, 0, token));
  if (HAS_TABLES) position = min(max(position, (i64)0), r.max_pos - 1);
  for (int pair = threadIdx.x; pair < r.num_pairs; pair += kThreads) {
    float cos, sin;
    if (HAS_TABLES) {
      cos = ((const float*)r.cos)[position * r.cos_strides[0] + pair * r.cos_strides[1]];
      sin = ((const float*)r.sin)[position * r.sin_strides[0] + pair * r.sin_strides[1]];
    } else {
      cos_sin(cos, sin, r.frequencies[pair] * (u64)position);
    }
    factors[pair] = cos;
    factors[r.num_pairs + pair] = sin;
  }
}

WS_INLINE float inverse_root(float squares, const QkNormRopeParams& p) {
  return 1.0f / sqrtf(squares / (float)p.head_dim + p.eps);
}

// Where the heads of a kind come from and go to: those of a token, `head` among them.
struct Place {
  const HeadsOfKind& kind;
  const T* from;
  T* to;

  WS_INLINE Place(const QkNormRopeParams& p, u32 token, u32 of_all)
      : kind(p.kinds[of_all < p.num_heads ? 0 : 1]) {
    const int side = of_all < p.num_heads ? 0 : 1;
    const u32 head = side ? of_all - p.num_heads : of_all;
    from = row_at<const T>(kind.from, p.tokens, side, token) + head * kind.from_head_stride;
    to = row_at<T>(kind.to, p.tokens, side + 2, token) + head * kind.to_head_stride;
  }
  WS_INLINE float weight_at(u32 i) const { return to_f32(((const W*)kind.weight)[i * kind.weight_step]); }
};

#if PER_LANE
constexpr int E = PER_LANE;

// Computes and stores a head of which each lane has its elements.
WS_INLINE void finish(const QkNormRopeParams& p, const Place& place, Group<T, E>& mine, const float* factors) {
  const int lane = threadIdx.x % 32;
  float x[E];
  mine.unpack(x);
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < E; ++j) squares = fmaf(x[j], x[j], squares);
  const float scale = inverse_root(warp_reduce<Sum>(squares), p);
#pragma unroll
  for (int j = 0; j < E; ++j) x[j] = __fmul_rn(__fmul_rn(x[j], scale), place.weight_at(lane * E + j));
  if constexpr (INTERLEAVED) {
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      const int pair = (lane * E + j) / 2;
      rotate(x[j], x[j + 1], factors[pair], factors[16 * E + pair]);
    }
  } else {
    const bool second = lane >= 16;
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int pair = lane % 16 * E + j;
      const float other = __shfl_xor_sync(kAllLanes, x[j], 16);
      float a = second ? other : x[j], b = second ? x[j] : other;
      rotate(a, b, factors[pair], factors[16 * E + pair]);
      x[j] = second ? b : a;
    }
  }
  mine.pack(x);
  mine.store(place.to + lane * E);
}
#else
// Loads, computes and stores a head, in shared memory of the warp.
WS_INLINE void finish_any(const QkNormRopeParams& p, const Place& place, const float* factors, float* x) {
  const u32 lane = threadIdx.x % 32;
  for (u32 i = lane; i < p.head_dim; i += 32) x[i] = to_f32(place.from[i * place.kind.from_step]);
  __syncwarp();
  const u32 each = (p.head_dim + 31) / 32;
  float squares = 0.0f;
  for (u32 i = lane * each; i < min((lane + 1) * each, p.head_dim); ++i) squares = fmaf(x[i], x[i], squares);
  const float scale = inverse_root(warp_reduce<Sum>(squares), p);
  __syncwarp();
  for (u32 i = lane; i < p.head_dim; i += 32) x[i] = __fmul_rn(__fmul_rn(x[i], scale), place.weight_at(i));
  __syncwarp();
  const u32 pairs = p.rotary.num_pairs;
  for (u32 pair = lane; pair < pairs; pair += 32) {
    const u32 first = INTERLEAVED ? 2 * pair : pair, second = INTERLEAVED ? 2 * pair + 1 : pair + pairs;
    rotate(x[first], x[second], factors[pair], factors[pairs + pair]);
  }
  __syncwarp();
  for (u32 i = lane; i < p.head_dim; i += 32) place.to[i * place.kind.to_step] = from_f32<T>(x[i]);
  __syncwarp();
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads) qk_norm_rope(const QkNormRopeParams p) {
  extern __shared__ __align__(16) float shared[];
  const u32 token = blockIdx.x / p.head_blocks, part = blockIdx.x - token * p.head_blocks;
  const u32 warp = threadIdx.x / 32;
  const u32 first = part * kWarps + warp;
  // First, so that what follows can load its weights.
  let_next_kernel_start();
  await_kernel_before();
#if PER_LANE
  // The first head is loaded while the angles are computed.
  Group<T, E> mine;
  if (first < p.heads) mine.load(Place(p, token, first).from + threadIdx.x % 32 * E);
#endif
  compute_factors(p, token, shared);
  __syncthreads();
  for (u32 head = first; head < p.heads; head += p.head_blocks * kWarps) {
    const Place place(p, token, head);
#if PER_LANE
    if (head != first) mine.load(place.from + threadIdx.x % 32 * E);
    finish(p, place, mine, shared);
#else
    finish_any(p, place, shared, shared + 2 * p.rotary.num_pairs + warp * p.head_dim);
#endif
  }
}
