// Stores keys and values in their slots of a paged cache. Keys may be rotated on the way, both may be cast.
//
// Threads to data: of v_per_k + 1 neighbouring blocks, the first stores keys and the others values, so that angles are
// computed while other blocks wait for memory. Rotated keys are mapped as in rope.cuh. Otherwise a head is cut into
// columns of V elements (with VECTOR, 16 bytes); 2^lane_bits threads work on the columns of all heads of a token, and a
// thread has the same columns of ITEMS tokens, 256 >> lane_bits apart. Loads do not wait for slots: those of all ITEMS
// tokens are issued together with the loads of their slots, before the first store.
//
// Defines: ELEM, CACHE (element types), VECTOR (columns are dense on both sides and aligned to their size), ROPE (0: none,
// 1: angles, 2: tables), INTERLEAVED, ITEMS.

#include "warpsmith/group.cuh"
#include "warpsmith/kv_cache.cuh"
#include "warpsmith/l2.cuh"
#include "warpsmith/rope.cuh"

using namespace warpsmith;

using T = ELEM;
using U = CACHE;
constexpr int V = VECTOR ? kVec<T> : 1;
constexpr int kThreads = kRotaryThreads;
// Types of the same size are the same type.
constexpr bool kCasts = sizeof(T) != sizeof(U);

// The slot of a token. It is loaded long before it is used, also for tokens past the end.
WS_INLINE i64 slot_of(const KvStoreParams& p, u32 token) { return slot_at(p.slots, min(token, (u32)p.num_tokens - 1)); }

// Elements from the start of a cache to the first head of a slot, or -1 if there is no such slot.
WS_INLINE i64 place_of(const KvStoreParams& p, const KvSide& side, i64 slot) {
  return place_at(p.slots, slot, side.page_stride, side.place_stride);
}

// What a head of the cache is divided by; one if there are no scales.
WS_INLINE ScaleDivisor divisor_of(const KvSide& side, int head) {
  return kCasts ? divisor_at(side.scale, side.scale_stride, head) : ScaleDivisor(1.0f);
}

WS_INLINE void put_values(const KvSide& side, U* head, i64 at, const float (&values)[V], const ScaleDivisor& divided) {
  float scaled[V];
#pragma unroll
  for (int j = 0; j < V; ++j) scaled[j] = kCasts ? divided(values[j]) : values[j];
  store_values<VECTOR>(head, at, side.cache_step, scaled);
}

// A template, so that the branch which does not fit the types is not compiled.
template <class Cache, class From>
WS_INLINE void put_piece(const KvSide& side, Cache* head, i64 at, const Chunk<From>& piece, const ScaleDivisor& divided) {
  if constexpr (sizeof(From) != sizeof(Cache)) {
    float values[V];
    if constexpr (VECTOR) unpack_words(values, piece);
    else values[0] = to_f32(piece.items[0]);
    put_values(side, head, at, values, divided);
  } else if (VECTOR) {
    store_words(head + at, piece.words);
  } else {
    head[at * side.cache_step] = piece.items[0];
  }
}

WS_INLINE void store_tokens(const KvStoreParams& p, const KvSide& side, u32 block) {
  const Lines<kThreads> lines{side.lane_bits};
  const u32 lane = lines.lane(), at_once = lines.count(), num_tokens = (u32)p.num_tokens;
  const u32 first = block * (ITEMS * at_once) + lines.line();
  const u32 units = side.heads * side.columns;
  if (lane >= units) return;
  if (VECTOR && side.heads == 1) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const u32 token = first + i * at_once;
      if (token < num_tokens) prefetch_chunk((const T*)side.x + token * side.token_stride + lane * V);
    }
  }
  begin_kernel();
  i64 places[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) places[i] = slot_of(p, first + i * at_once);
  for (u32 unit = lane; unit < units; unit += 1u << side.lane_bits) {
    const u32 head = side.heads == 1 ? 0 : unit / side.columns;
    const i64 at = (i64)(unit - head * side.columns) * V;
    Chunk<T> pieces[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const u32 token = first + i * at_once;
      if (token >= num_tokens) continue;
      const T* x = (const T*)side.x + token * side.token_stride + head * side.head_stride;
      if (VECTOR) load_words(pieces[i].words, x + at);
      else pieces[i].items[0] = x[at * side.step];
    }
    const ScaleDivisor divided = divisor_of(side, head);
    if (unit == lane) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
        places[i] = first + i * at_once < num_tokens ? place_of(p, side, places[i]) : -1;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (places[i] >= 0) put_piece(side, (U*)side.cache + places[i] + head * side.cache_head_stride, at, pieces[i], divided);
  }
}

// Where a head goes in the cache.
struct Target {
  U* head;
  ScaleDivisor divided;
  WS_INLINE explicit operator bool() const { return head != nullptr; }
};

struct Io {
  const KvStoreParams& p;
  const KvSide& side;
  i64 slots[ITEMS];

  WS_INLINE const T* source(i64 token) const { return (const T*)side.x + token * side.token_stride; }
  WS_INLINE i64 position(i64 token) const { return load_integer(p.positions, p.wide_positions, token * p.position_stride); }
  WS_INLINE void expect(int item, i64 token) { slots[item] = slot_of(p, (u32)token); }
  WS_INLINE Target target(int item, i64, int head) const {
    const i64 place = place_of(p, side, slots[item]);
    if (place < 0) return {nullptr, ScaleDivisor(1.0f)};
    return {(U*)side.cache + place + head * side.cache_head_stride, divisor_of(side, head)};
  }
  WS_INLINE void put(Target target, i64 at, const float (&values)[V]) const {
    put_values(side, target.head, at, values, target.divided);
  }
  WS_INLINE void put(Target target, i64 at, const Chunk<T>& piece) const {
    put_piece(side, target.head, at, piece, target.divided);
  }
};

// Blocks per multiprocessor; with rotations, more would leave too few registers.
constexpr int kResident = ROPE ? 3 : 5;

extern "C" __global__ void __launch_bounds__(kThreads, kResident) kv_store(const KvStoreParams p) {
  const u32 sides = p.v_per_k + 1, group = sides == 2 ? blockIdx.x / 2 : blockIdx.x / sides;
  const u32 member = blockIdx.x - group * sides;
  const bool keys = member == 0;
  // The last blocks may have no work.
  const u32 block = keys ? group : group * p.v_per_k + member - 1;
  if constexpr (ROPE != 0) {
    if (keys) {
      begin_kernel();
      Io io{p, p.sides[0]};
      rotate_tokens<T, ITEMS, VECTOR, INTERLEAVED, ROPE == 2>(p.rotary, io, block);
      return;
    }
  }
  if (keys) store_tokens(p, p.sides[0], block);
  else store_tokens(p, p.sides[1], block);
}
