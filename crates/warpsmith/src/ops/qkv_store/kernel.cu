// Norms and rotates the heads of queries and keys of a packed projection. Queries stay where they are; keys and values go to
// their slots of a paged cache.
//
// Threads to data: a warp has a head; p.head_blocks blocks share the heads of a token, eight at a time each. The cosines
// and sines of the token are computed once in a block, into shared memory.
//
// With PER_LANE, a lane holds that many neighbouring elements of its head, loaded at once; the other element of a rotated
// pair is with the lane 16 further, or with INTERLEAVED its neighbour. With PER_LANE 0 heads of any length and strides go
// through shared memory. Both sum squares in the same order: each lane those of its elements, then the lanes.
//
// Defines: ELEM, CACHE (element types), PER_LANE, ROPE (0: none, 1: angles, 2: tables), INTERLEAVED, NORM.

#include "warpsmith/group.cuh"
#include "warpsmith/kv_cache.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rope.cuh"

using namespace warpsmith;

using T = ELEM;
using U = CACHE;
// Types of the same size are the same type.
constexpr bool kCasts = sizeof(T) != sizeof(U);
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr bool kComputes = ROPE != 0 || NORM;

// Cosines of all pairs of a token, then their sines.
WS_INLINE void compute_factors(const QkvStoreParams& p, u32 token, float* factors) {
  const Rotary& r = p.rotary;
  i64 position = load_integer(p.positions, p.wide_positions, token * p.position_stride);
  if (ROPE == 2) position = min(max(position, (i64)0), r.max_pos - 1);
  for (int pair = threadIdx.x; pair < r.num_pairs; pair += kThreads) {
    float cos, sin;
    if (ROPE == 2) {
      cos = ((const float*)r.cos)[position * r.cos_strides[0] + pair * r.cos_strides[1]];
      sin = ((const float*)r.sin)[position * r.sin_strides[0] + pair * r.sin_strides[1]];
    } else {
      cos_sin(cos, sin, r.frequencies[pair] * (u64)position);
    }
    factors[pair] = cos;
    factors[r.num_pairs + pair] = sin;
  }
}

// What a warp's head is, and where it comes from and goes to: `from` is in place for queries, `to` is in a cache.
struct Place {
  bool is_query, is_value;
  T* from;
  U* to;
  i64 to_step;
  u32 side, kv_head;
  u64 weight;
  i64 weight_step;

  WS_INLINE Place(const QkvStoreParams& p, u32 token, i64 slot, u32 head) {
    is_query = head < p.num_heads;
    is_value = head >= p.num_heads + p.num_kv_heads;
    from = (T*)p.qkv + token * p.token_stride + head * p.head_stride;
    side = is_value ? 1 : 0;
    kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    const QkvCache& cache = p.caches[side];
    const i64 at = is_query ? -1 : place_at(p.slots, slot, cache.page_stride, cache.place_stride);
    to = at < 0 ? nullptr : (U*)cache.at + at + kv_head * cache.head_stride;
    to_step = cache.step;
    weight = is_query ? p.q_weight : p.k_weight;
    weight_step = is_query ? p.q_weight_step : p.k_weight_step;
  }
  // Queries that nothing changes are where they belong; the others may have no slot.
  WS_INLINE bool is_needed() const { return is_query ? kComputes : to != nullptr; }
  WS_INLINE float weight_at(u32 i) const { return to_f32(((const T*)weight)[i * weight_step]); }
  WS_INLINE ScaleDivisor divisor(const QkvStoreParams& p) const {
    return divisor_at(p.caches[side].scale, p.caches[side].scale_stride, kv_head);
  }
};

WS_INLINE float inverse_root(float squares, const QkvStoreParams& p) {
  return 1.0f / sqrtf(squares / (float)p.head_dim + p.eps);
}

#if PER_LANE
constexpr int E = PER_LANE;

// Stores neighbouring elements at once. A template, so that the branch which does not fit the type is not compiled.
template <class Cache, int kCount> WS_INLINE void store_rounded(Cache* to, const float (&x)[kCount]) {
  if constexpr (kCount * (int)sizeof(Cache) >= 4) {
    Group<Cache, kCount> group;
    group.pack(x);
    group.store(to);
  } else {
    // Half of a word of 8-bit elements.
    const float word[4] = {x[0], x[1]};
    *(u16*)to = (u16)pack_word(word, Cache());
  }
}

// Stores a lane's elements of a head of keys or values, rounded to the type of the cache.
WS_INLINE void put(const QkvStoreParams& p, const Place& place, const float (&x)[E]) {
  const ScaleDivisor divided = kCasts ? place.divisor(p) : ScaleDivisor(1.0f);
  float scaled[E];
#pragma unroll
  for (int j = 0; j < E; ++j) scaled[j] = kCasts ? divided(x[j]) : x[j];
  store_rounded(place.to + threadIdx.x % 32 * E, scaled);
}

// Computes and stores a head of which each lane has loaded its elements.
WS_INLINE void finish(const QkvStoreParams& p, const Place& place, Group<T, E>& mine, const float* factors) {
  const int lane = threadIdx.x % 32;
  const bool computes = kComputes && !place.is_value;
  if (!kCasts && !computes) {
    mine.store((T*)place.to + lane * E);
    return;
  }
  float x[E];
  mine.unpack(x);
  if (!computes) {
    put(p, place, x);
    return;
  }
  if constexpr (NORM) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < E; ++j) squares = fmaf(x[j], x[j], squares);
    const float scale = inverse_root(warp_reduce<Sum>(squares), p);
#pragma unroll
    for (int j = 0; j < E; ++j) x[j] = __fmul_rn(__fmul_rn(x[j], scale), place.weight_at(lane * E + j));
  }
  if constexpr (ROPE != 0) {
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
  }
  if (place.is_query) {
    mine.pack(x);
    mine.store(place.from + lane * E);
  } else {
    put(p, place, x);
  }
}
#else
// An element of a head of keys or values that is not computed: its own bits, if the types are the same.
template <class Cache, class From> WS_INLINE Cache cast_value(From x, const ScaleDivisor& divided) {
  if constexpr (sizeof(Cache) != sizeof(From)) return from_f32<Cache>(divided(to_f32(x)));
  else return x;
}

// Loads, computes and stores a head, in shared memory of the warp.
WS_INLINE void finish_any(const QkvStoreParams& p, const Place& place, const float* factors, float* x) {
  const u32 lane = threadIdx.x % 32;
  const ScaleDivisor divided = kCasts && !place.is_query ? place.divisor(p) : ScaleDivisor(1.0f);
  if (!kComputes || place.is_value) {
    for (u32 i = lane; i < p.head_dim; i += 32)
      place.to[i * place.to_step] = cast_value<U>(place.from[i * p.step], divided);
    return;
  }
  for (u32 i = lane; i < p.head_dim; i += 32) x[i] = to_f32(place.from[i * p.step]);
  __syncwarp();
  if constexpr (NORM) {
    const u32 each = (p.head_dim + 31) / 32;
    float squares = 0.0f;
    for (u32 i = lane * each; i < min((lane + 1) * each, p.head_dim); ++i) squares = fmaf(x[i], x[i], squares);
    const float scale = inverse_root(warp_reduce<Sum>(squares), p);
    __syncwarp();
    for (u32 i = lane; i < p.head_dim; i += 32) x[i] = __fmul_rn(__fmul_rn(x[i], scale), place.weight_at(i));
    __syncwarp();
  }
  if constexpr (ROPE != 0) {
    const u32 pairs = p.rotary.num_pairs;
    for (u32 pair = lane; pair < pairs; pair += 32) {
      const u32 first = INTERLEAVED ? 2 * pair : pair, second = INTERLEAVED ? 2 * pair + 1 : pair + pairs;
      rotate(x[first], x[second], factors[pair], factors[pairs + pair]);
    }
    __syncwarp();
  }
  for (u32 i = lane; i < p.head_dim; i += 32) {
    if (place.is_query) place.from[i * p.step] = from_f32<T>(x[i]);
    else place.to[i * place.to_step] = from_f32<U>(kCasts ? divided(x[i]) : x[i]);
  }
  __syncwarp();
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads) qkv_store(const QkvStoreParams p) {
  extern __shared__ __align__(16) float shared[];
  const u32 token = blockIdx.x / p.head_blocks, part = blockIdx.x - token * p.head_blocks;
  const u32 warp = threadIdx.x / 32;
  const u32 first = part * kWarps + warp;
  // First, so that what follows can load its weights.
  let_next_kernel_start();
  await_kernel_before();
  const i64 slot = slot_at(p.slots, token);
#if PER_LANE
  // The first head is loaded while the angles are computed.
  Group<T, E> mine;
  auto load = [&](u32 head) {
    mine.load((const T*)p.qkv + token * p.token_stride + head * p.head_stride + threadIdx.x % 32 * E);
  };
  if (first < p.heads) load(first);
#endif
  if constexpr (ROPE != 0) {
    compute_factors(p, token, shared);
    __syncthreads();
  }
  for (u32 head = first; head < p.heads; head += p.head_blocks * kWarps) {
    const Place place(p, token, slot, head);
#if PER_LANE
    if (head != first) load(head);
    if (place.is_needed()) finish(p, place, mine, shared);
#else
    if (place.is_needed()) finish_any(p, place, shared, shared + 2 * p.rotary.num_pairs + warp * p.head_dim);
#endif
  }
}
