#pragma once
// `paged_attention` on tensor cores: how keys and values come to shared memory, through a ring of units that are copied
// ahead. Defines: those of the kernel.

#include "warpsmith/paged_fragments.cuh"

namespace warpsmith::paged {

constexpr int kSteps = kSegment / kStep;

// Where the keys of a segment are. With WHOLE_PAGES: for every 16 keys, the offsets of the first key and value. Otherwise
// those of each key and value, in vectors of 16 bytes: to find them from the page would take more instructions than to copy
// them.
constexpr i64 kNowhere = (i64)1 << 63;
struct Places {
#if WHOLE_PAGES
  i64 k[kSegment / 16], v[kSegment / 16];
#else
  static constexpr u32 kNone = 0xffffffff;
  u32 k[kSegment], v[kSegment];
#endif
};

// Dynamic shared memory: queries that are not kept in registers, the rings of the groups, and the sums of the block.
WS_INLINE u8* ring_of(int group) { return shared_bytes + kQueryBytes + group * RING * kUnitBytes; }

WS_INLINE void group_sync(int group) {
  if (ROW_WARPS == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

// As copy_async, for keys and values. With ONCE no other block reads them, so they are the first to be evicted from L2.
WS_INLINE void copy_keys(u32 to, const void* from, bool exists) {
#if ONCE && __CUDA_ARCH__ >= 900
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(exists ? 16 : 0), "l"(policy) : "memory");
#else
  copy_async(to, from, exists);
#endif
}

// The units of a group: for every KEY_WARPS-th segment from its first on, step by step, the keys and then the values. Steps
// are counted by t.
struct Units {
  const PagedParams& p;
  const i32* table;  // the request's pages
  Places* places;
  u32 base;  // of the ring
  const KV *k, *v;  // of the KV head and, if kTurns, of the thread's first row and piece
  Keys keys;  // to be read
  int segment, count;
  int into, from;  // slots of the ring: to be filled next, to be read next

  // Whether the compiler knows how far a thread goes between its turns at copying sixteen rows. Sums of sixteen rows of
  // long heads leave no registers for that, unless threads stay in their columns.
  static constexpr bool kTurns = WHOLE_PAGES && (kTransposedSums || HEAD_DIM <= 160 || kGroupThreads % kPieces == 0);

  // Begins with a piece.
  WS_INLINE void begin(const Piece& piece) {
    const int row = piece.request.row, thread = kTurns ? threadIdx.x % kGroupThreads : 0;
    const i64 first = thread / kPieces, element = thread % kPieces * kVec<KV>;
    table = (const i32*)p.page_table + row * p.table_row;
    k = (const KV*)p.k + piece.head * p.k_head + first * p.k_slot + element + (DENSE ? row * p.k_page : 0);
    v = (const KV*)p.v + piece.head * p.v_head + first * p.v_slot + element + (DENSE ? row * p.v_page : 0);
  }
  // t is never negative; as an unsigned number it is divided by a shift.
  WS_INLINE int segment_at(u32 t) const { return segment + (int)(t / kSteps) * KEY_WARPS; }
  WS_INLINE int key_at(u32 t) const { return segment_at(t) * kSegment + (int)(t % kSteps) * kStep; }
  // Whether the page of a lane is loaded one segment before it is needed: the load queues behind all keys in flight. Long
  // heads leave no register for it.
  static constexpr bool kLooksAhead = kTransposedSums || HEAD_DIM <= 128;
  // The page of this lane's sixteen keys of the segment that begins with step t, if there is one.
  WS_INLINE i32 page_at(u32 t) const {
#if WHOLE_PAGES && !DENSE
    const int i = threadIdx.x % 32, key = segment_at(t) * kSegment + 16 * i;
    if (i < kSegment / 16 && key < p.max_keys) return table[page_of(p, key) * p.table_col];
#endif
    return -1;
  }
  // Finds the pages of the segment that begins with step t; returns whether one of them does not exist. Only the last
  // comparisons need the request's length, so that its load and those of the pages overlap.
  WS_INLINE bool find(u32 t, i32 lane_page) {
    Places& to = places[t / kSteps % 2];
    const int start = segment_at(t) * kSegment;
    bool absent = false;
#if WHOLE_PAGES
    const int i = threadIdx.x % 32, key = start + 16 * i;
    if (i < kSegment / 16) {
      const int page = DENSE ? 0 : page_of(p, key), slot = key - page * p.page_size;
      const i32 id = DENSE ? 0 : kLooksAhead ? lane_page : key < p.max_keys ? table[page * p.table_col] : -1;
      const bool exists = DENSE || (id >= 0 && id < p.num_pages);
      to.k[i] = exists && key < keys.hi ? id * p.k_page + slot * p.k_slot : kNowhere;
      to.v[i] = exists && key < keys.hi ? id * p.v_page + slot * p.v_slot : kNowhere;
      absent = !exists && key < keys.hi;
    }
#else
    // Side by side, so that loads overlap, but for the longest heads, which leave no registers for that.
#pragma unroll (HEAD_DIM > 192 ? 1 : kSegment / 32)
    for (int at = threadIdx.x % 32; at < kSegment; at += 32) {
      const int key = start + at, page = page_of(p, key), slot = key - page * p.page_size;
      const i32 id = key < p.max_keys ? table[page * p.table_col] : -1;
      const bool exists = id >= 0 && id < p.num_pages, read = exists && key >= keys.lo && key < keys.hi;
      to.k[at] = read ? (u32)((u64)(id * p.k_page + slot * p.k_slot) / kVec<KV>) : Places::kNone;
      to.v[at] = read ? (u32)((u64)(id * p.v_page + slot * p.v_slot) / kVec<KV>) : Places::kNone;
      absent |= !exists && key < keys.hi;
    }
#endif
    return !DENSE && __any_sync(kAllLanes, absent);
  }
  // The offset of key or value `at` of step t.
  template <bool kValue> WS_INLINE i64 offset_of(u32 t, u32 at) const {
    const Places& from = places[t / kSteps % 2];
#if WHOLE_PAGES
    const u32 block = t % kSteps * (kStep / 16) + at / 16;
    const i64 first = kValue ? from.v[block] : from.k[block];
    return at % 16 == 0 || first == kNowhere ? first : first + at % 16 * (kValue ? p.v_slot : p.k_slot);
#else
    const u32 place = t % kSteps * kStep + at, vector = kValue ? from.v[place] : from.k[place];
    return vector == Places::kNone ? kNowhere : (i64)vector * kVec<KV>;
#endif
  }
  // Copies sixteen rows from key `at` of step t on, a multiple of 16. Rows that are not to be read become zeros; their
  // address may be invalid and is not used.
  template <bool kValue> WS_INLINE void copy_rows(u32 to, u32 t, u32 at) {
    const KV* cache = kValue ? v : k;
    const int thread = threadIdx.x % kGroupThreads, key = key_at(t) + (int)at;
    constexpr int kAll = 16 * kPieces, kCount = (kAll + kGroupThreads - 1) / kGroupThreads;
    if (kTurns) {
      // From turn to turn a thread goes some rows down and some pieces to the right, where it may reach the next row.
      const int row = thread / kPieces, piece = thread % kPieces;
      const i64 first = offset_of<kValue>(t, at), slot = kValue ? p.v_slot : p.k_slot;
      const int lo = keys.lo - key - row, hi = first == kNowhere ? lo : keys.hi - key - row;
      const KV* source = cache + first;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int down = i * kGroupThreads / kPieces, right = i * kGroupThreads % kPieces;
        const bool wraps = right && piece >= kPieces - right;
        const int rows = down + wraps, pieces = right - (wraps ? kPieces : 0);
        if (i > 0) source += (down - (i - 1) * kGroupThreads / kPieces) * slot;
        if (kAll % kGroupThreads && i + 1 == kCount && row + rows >= 16) break;
        const KV* from = source + right * kVec<KV>;
        if (wraps) from += slot - HEAD_DIM;
        copy_keys(to + place<kPieces>(row + rows, piece + pieces), from, rows >= lo && rows < hi);
      }
      return;
    }
#pragma unroll 4
    for (int i = 0; i < kCount; ++i) {
      const int index = thread + i * kGroupThreads, row = index / kPieces, piece = index % kPieces;
      if (kAll % kGroupThreads && index >= kAll) break;
      const i64 offset = offset_of<kValue>(t, at + row);
      const bool exists = offset != kNowhere && (!WHOLE_PAGES || (key + row >= keys.lo && key + row < keys.hi));
      copy_keys(to + place<kPieces>(row, piece), cache + offset + piece * kVec<KV>, exists);
    }
  }
  // Starts to copy the unit that is kUnit units after the first of step t.
  template <int kUnit> WS_INLINE void issue(int t) {
    constexpr bool kValue = kUnit % (2 * kUnits) >= kUnits;
    t += kUnit / (2 * kUnits);
    if (t < count) {
#pragma unroll
      for (int i = 0; i < kUnitKeys; i += 16)
        copy_rows<kValue>(base + into * kUnitBytes + place<kPieces>(i, 0), t, kUnit % kUnits * kUnitKeys + i);
    }
    commit_copies();
    into = into + 1 == RING ? 0 : into + 1;
  }
  template <int kUnit = 0> WS_INLINE void start() {
    if constexpr (kUnit < RING - 1) {
      if (kUnit == 0) into = from = 0;
      issue<kUnit>(0);
      start<kUnit + 1>();
    }
  }
  // Waits for unit kUnit of step t and returns its address. The unit before it may be overwritten from now on.
  template <int kUnit> WS_INLINE u32 next(int t, int group) {
    wait_copies<RING - 2>();
    group_sync(group);
    issue<kUnit + RING - 1>(t);
    const u32 at = base + from * kUnitBytes;
    from = from + 1 == RING ? 0 : from + 1;
    return at;
  }
};

}  // namespace warpsmith::paged
