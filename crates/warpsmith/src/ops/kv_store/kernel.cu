// Stores keys and values in their slots of a paged cache; keys may be rotated on the way, both may be cast.
//
// Threads to data: one block of v_per_k + 1 stores keys, the others values, so that the angles of one are worked out while
// the others wait for memory. Rotated keys go as rope.cuh says. Otherwise a
// head is cut into columns of V elements, 16 bytes with VECTOR; 2^lane_bits threads work on the columns of all heads of
// a token, and a thread does the same columns of ITEMS tokens, 256 >> lane_bits apart. Loads do not wait for slots:
// those of all ITEMS tokens are issued together with them, before the first store.
//
// Defines: ELEM, CACHE (element types), VECTOR (columns are dense on both sides, and their addresses multiples of their
// size), ROPE (0: none, 1: angles, 2: tables), INTERLEAVED, ITEMS.

#include "warpsmith/group.cuh"
#include "warpsmith/rope.cuh"

using T = ELEM;
using U = CACHE;
constexpr int V = VECTOR ? kVec<T> : 1;
constexpr int kThreads = kRotaryThreads;
// Two types of the same size are the same.
constexpr bool kCasts = sizeof(T) != sizeof(U);

WS_INLINE i64 index_at(u64 base, bool wide, i64 offset) {
  return wide ? ((const i64*)base)[offset] : ((const i32*)base)[offset];
}

// Elements from the start of a cache to a token's first head, or -1 if it goes nowhere. As unsigned numbers negative ones
// are large.
WS_INLINE i64 place_of(const KvStoreParams& p, const KvSide& side, i64 token) {
  const u64 slot = (u64)index_at(p.slots, p.wide_slots, token * p.slot_stride);
  if (slot >= p.num_slots) return -1;
  const u32 page = (u32)slot / p.page_size;
  return page * side.page_stride + ((u32)slot - page * p.page_size) * side.place_stride;
}

// Divides many numbers by one, rounded as __fdiv_rn does it wherever that shows in 8 bits, without the cases it tells
// apart for each element.
struct Divisor {
  float scale, inverse, factor;

  WS_INLINE explicit Divisor(float given) {
    // A power of two on both sides keeps inverse and corrections in range. What it makes overflow saturates anyway, what
    // it makes underflow is zero in 8 bits.
    factor = fabsf(given) < 1e-15f ? 0x1p100f : fabsf(given) > 1e15f ? 0x1p-100f : 1.0f;
    scale = given * factor;
    inverse = __frcp_rn(scale);
  }
  WS_INLINE float operator()(float x) const {
    x *= factor;
    const float first = x * inverse;
    float q = fmaf(fmaf(-scale, first, x), inverse, first);
    q = fmaf(fmaf(-scale, q, x), inverse, q);
    // Of zero and infinity the corrections would make NaN.
    return fabsf(first) < 1e30f && first != 0.0f ? q : first;
  }
};

// What a head of the cache is divided by; one without scales.
WS_INLINE float scale_of(const KvSide& side, int head) {
  return kCasts && side.scale ? ((const float*)side.scale)[head * side.scale_stride] : 1.0f;
}

WS_INLINE void put_values(const KvSide& side, U* head, i64 at, const float (&values)[V], float scale) {
  float scaled[V];
  const Divisor divided(scale);
#pragma unroll
  for (int j = 0; j < V; ++j) scaled[j] = kCasts ? divided(values[j]) : values[j];
  store_values<VECTOR>(head, at, side.cache_step, scaled);
}

// A template so that what is not for these types is not compiled.
template <class Cache>
WS_INLINE void put_piece(const KvSide& side, Cache* head, i64 at, const Chunk<T>& piece, float scale) {
  if constexpr (sizeof(T) != sizeof(Cache)) {
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = to_f32(piece.items[j]);
    put_values(side, head, at, values, scale);
  } else if (VECTOR) {
    store_words(head + at, piece.words);
  } else {
    head[at * side.cache_step] = piece.items[0];
  }
}

WS_INLINE void store_tokens(const KvStoreParams& p, const KvSide& side, i64 block) {
  const u32 lane = threadIdx.x & ((1u << side.lane_bits) - 1);
  const int at_once = kThreads >> side.lane_bits;
  const i64 first = block * (ITEMS * at_once) + (threadIdx.x >> side.lane_bits);
  i64 places[ITEMS];
  const u32 units = side.heads * side.columns;
  for (u32 unit = lane; unit < units; unit += 1u << side.lane_bits) {
    const u32 head = side.heads == 1 ? 0 : unit / side.columns;
    const i64 at = (i64)(unit - head * side.columns) * V;
    Chunk<T> pieces[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const i64 token = first + i * at_once;
      if (token >= p.num_tokens) continue;
      const T* x = (const T*)side.x + token * side.token_stride + head * side.head_stride;
      if (VECTOR) load_words(pieces[i].words, x + at);
      else pieces[i].items[0] = x[at * side.step];
    }
    const float scale = scale_of(side, head);
    if (unit == lane) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const i64 token = first + i * at_once;
        places[i] = token < p.num_tokens ? place_of(p, side, token) : -1;
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (places[i] >= 0) put_piece(side, (U*)side.cache + places[i] + head * side.cache_head_stride, at, pieces[i], scale);
  }
}

// A head's place in the cache.
struct Target {
  U* head;
  float scale;
  WS_INLINE explicit operator bool() const { return head != nullptr; }
};

struct Io {
  const KvStoreParams& p;
  const KvSide& side;
  i64 places[ITEMS];

  WS_INLINE const T* source(i64 token) const { return (const T*)side.x + token * side.token_stride; }
  WS_INLINE i64 position(i64 token) const { return index_at(p.positions, p.wide_positions, token * p.position_stride); }
  WS_INLINE void expect(int item, i64 token) { places[item] = place_of(p, side, token); }
  WS_INLINE Target target(int item, i64, int head) const {
    if (places[item] < 0) return {nullptr, 1.0f};
    return {(U*)side.cache + places[item] + head * side.cache_head_stride, scale_of(side, head)};
  }
  WS_INLINE void put(Target target, i64 at, const float (&values)[V]) const {
    put_values(side, target.head, at, values, target.scale);
  }
  WS_INLINE void put(Target target, i64 at, const Chunk<T>& piece) const {
    put_piece(side, target.head, at, piece, target.scale);
  }
};

// Blocks a multiprocessor must hold: more than that, with rotations, would leave too few registers.
constexpr int kResident = ROPE ? 3 : 5;

extern "C" __global__ void __launch_bounds__(kThreads, kResident) kv_store(const KvStoreParams p) {
  begin_kernel();
  const u32 group = blockIdx.x / (p.v_per_k + 1), member = blockIdx.x - group * (p.v_per_k + 1);
  const bool keys = member == 0;
  // Past the last value there may be blocks without work.
  const i64 block = keys ? group : (i64)group * p.v_per_k + member - 1;
  if constexpr (ROPE != 0) {
    if (keys) {
      Io io{p, p.sides[0]};
      rotate_tokens<T, ITEMS, VECTOR, INTERLEAVED, ROPE == 2>(p.rotary, io, block);
      return;
    }
  }
  if (keys) store_tokens(p, p.sides[0], block);
  else store_tokens(p, p.sides[1], block);
}
