#pragma once
// Which queries and keys a block of attention_sm90.cuh works on: its tiles, their order, and the pages of their keys.
// Defines as there.

#include "warpsmith/attention.cuh"
#include "warpsmith/tma.cuh"

namespace warpsmith::attention {

constexpr int kBlockM = 64 * CONSUMERS, kThreads = 128 * (1 + CONSUMERS);
// Heads are loaded in chunks of 128 bytes, the last one filled up with zeros.
constexpr int kChunks = (HEAD_DIM + 63) / 64;
constexpr u32 kQChunk = kBlockM * 128, kChunk = BLOCK_N * 128, kQBytes = kChunks * kQChunk, kBlockBytes = kChunks * kChunk;

#if PAGED
// Blocks and pages are both made of runs of kPageRows keys, of which a block has kPages.
constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int kPageRows = common_divisor(PAGE_SIZE, BLOCK_N), kPages = BLOCK_N / kPageRows;
#else
constexpr int kPages = 1;
#endif

// What the producer wrote, in all lanes of a warp. Only the lane that later arrives at the barrier for its warp reads it:
// then the read precedes the arrival without another barrier, and racecheck sees that too.
WS_INLINE u32 take_word(u32 at) {
  u32 word = 0;
  if (threadIdx.x % 32 == 0) load_shared(word, at);
  return __shfl_sync(0xffffffffu, word, 0);
}
WS_INLINE void take_words(u32 (&w)[4], u32 at) {
  if (threadIdx.x % 32 == 0) load_shared(w, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = __shfl_sync(0xffffffffu, w[i], 0);
}

// A tile of queries of one head, and the blocks of keys it sees any of.
struct Tile {
  Request request;
  int head, first_query;  // of the tile, in its request
  int block, end;         // `end` is zero if there are no more tiles

  // Writes the tile for the other warps. Packed requests have batch 0; others begin with key 0.
  WS_INLINE void put(u32 at) const {
    store_shared(at, (u32)head, (u32)first_query, (u32)block, (u32)end);
    store_shared(at + 16, (u32)(VARLEN ? request.first_key : request.batch), (u32)request.first_query, (u32)request.q_len,
                 (u32)request.kv_len);
  }
  WS_INLINE void take(const AttentionParams& p, u32 at) {
    u32 a[4] = {}, b[4] = {};
    take_words(a, at);
    head = a[0], first_query = a[1], block = a[2], end = a[3];
    if (VARLEN) {
      take_words(b, at + 16);
      request = {0, (int)b[1], (int)b[2], (int)b[0], (int)b[3]};
    } else {
      request = {(int)take_word(at + 16), 0, p.q_len, 0, p.kv_len};
    }
  }

  // The position of query 0 among the keys.
  WS_INLINE int offset() const { return request.kv_len - request.q_len; }
  WS_INLINE void see(const AttentionParams& p) {
    int until = request.kv_len, from = 0;
    if (CAUSAL) until = min(until, min(first_query + kBlockM, request.q_len) + offset());
    if (WINDOW) from = max(from, first_query + offset() - p.window);
    block = from / BLOCK_N;
    end = until > from ? (until + BLOCK_N - 1) / BLOCK_N : block;
  }
};

// Where the keys of a tile are in memory.
struct KeysInMemory {
  const Sm90Params& p;
  const Request& request;
  const T* first;

  WS_INLINE KeysInMemory(const Sm90Params& p, const Tile& tile) : p(p), request(tile.request) {
    const int batch = PAGED ? 0 : request.batch, token = PAGED ? 0 : request.first_key;
    first = head_at<T>(p.attention.k, p.attention.k_at, batch, token, (u32)tile.head / (u32)p.attention.group);
  }
  // Null if the key is past the last one or in a page that does not exist.
  WS_INLINE const T* at(int key) const {
    if (key >= request.kv_len) return nullptr;
    const HeadStrides& s = p.attention.k_at;
#if PAGED
    const PagedKeys& keys = p.paged;
    const int page = ((const i32*)keys.page_table)[(i64)request.first_key * keys.table_row + key / PAGE_SIZE * keys.table_col];
    return (u32)page < (u32)keys.num_pages ? first + (page * s.batch + key % PAGE_SIZE * s.token) : nullptr;
#else
    return first + key * s.token;
#endif
  }
};

// Whether the 64 queries of a warpgroup see nothing of the last block of a tile with more than one.
WS_INLINE bool misses_last(const Tile& tile, u32 warpgroup) {
  return CAUSAL && tile.end > tile.block + 1 &&
         tile.first_query + (int)warpgroup * 64 + 64 + tile.offset() <= (tile.end - 1) * BLOCK_N;
}

// Requests with fewer queries are left to another kernel.
WS_INLINE int least_queries(const Sm90Params& p) {
#if PAGED
  return p.paged.min_queries;
#else
  return 1;
#endif
}

// The tiles of a block, one after the other; one warp asks for them and tells the others. Heads come in groups whose keys
// and values fit in L2 together. In a group, tiles with the most keys come first, and are assigned to blocks in
// alternating order, so that all blocks get about the same work.
struct TileScheduler {
  u32 round = 0;

  WS_INLINE u32 index() const {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  WS_INLINE void advance() { ++round; }
  WS_INLINE bool done(const Sm90Params& p) const { return round * gridDim.x >= p.tiles; }

  // False where there is no such tile.
  WS_INLINE bool get(const Sm90Params& p, Tile& tile) const {
    const AttentionParams& a = p.attention;
    const u32 index = this->index();
    if (index >= p.tiles) return false;
    const u32 num_heads = a.num_kv_heads * a.group;
    // If all requests have the same number of queries, the host has chosen groups of heads.
    const bool even = PAGED ? !a.q_starts : !VARLEN;
    int number, m;
    if (even) {
      const u32 per_group = p.head_group * p.m_tiles, group = index / per_group, at = index - group * per_group;
      const u32 first_head = group * p.head_group, heads = min(p.head_group, num_heads * a.requests - first_head);
      const u32 row = at / heads, head = first_head + at - row * heads;
      number = head / num_heads;
      m = p.m_tiles - 1 - row;
      tile.head = head - number * num_heads;
      tile.request = {number, 0, a.q_len, 0, a.kv_len};
    } else {
      const u32 slot = index / num_heads;
      tile.head = index - slot * num_heads;
      number = find_packed(a, slot, kBlockM, 1, least_queries(p), tile.request, m);
      if (number < 0) return false;
    }
#if PAGED
    const PagedKeys& keys = p.paged;
    if (even) {
      tile.request.batch = 0;
      tile.request.first_query = number * keys.queries;
      tile.request.q_len = keys.queries;
    }
    // With pages, first_key is the request's row of the page table.
    tile.request.first_key = number;
    tile.request.kv_len = min(max(((const i32*)keys.kv_lens)[number * keys.kv_lens_step], 0), keys.max_keys);
#elif VARLEN
    find_packed_keys(a, number, tile.request);
#endif
    tile.first_query = m * kBlockM;
    tile.see(a);
    return true;
  }
};

#if PAGED
// The pages of a block of keys: lane l holds the page of the l-th run. A page that does not exist, or is past the last key,
// is replaced by a page number past the end, which the copy engine reads as zeros.
struct Pages {
  static_assert(kPageRows % 8 == 0, "rows that are swizzled together belong to one run");
  static_assert(kPages <= 32, "a run a lane");

  int page;
  u32 absent;  // bits of pages that should be there

  // The first key of this lane's run of block n.
  static WS_INLINE int first_key(int n) { return n * BLOCK_N + (int)(threadIdx.x % 32) * kPageRows; }
  // This lane's page of block n, as the table has it; the number of pages if there are no more keys.
  static WS_INLINE int find(const Sm90Params& p, const Request& request, int n) {
    const int key = first_key(n);
    if (threadIdx.x % 32 >= kPages || key >= request.kv_len) return p.paged.num_pages;
    return ((const i32*)p.paged.page_table)[(i64)request.first_key * p.paged.table_row + key / PAGE_SIZE * p.paged.table_col];
  }
  // Goes to block n, for which `find` has returned `found`.
  WS_INLINE void take(const Sm90Params& p, const Request& request, int n, int found) {
    const bool exists = (u32)found < (u32)p.paged.num_pages;
    const bool wanted = threadIdx.x % 32 < kPages && first_key(n) < request.kv_len;
    absent = __ballot_sync(0xffffffffu, wanted && !exists);
    page = exists ? found : p.paged.num_pages;
  }

  // Loads all runs of block n, by one lane: if each lane issued its own copy, they would take turns of some 50 cycles.
  WS_INLINE void load(u32 to, const void* map, u32 barrier, int kv_head, int n) const {
    // As many at a time as there are registers for.
    constexpr int kBatch = 3;
#pragma unroll
    for (int first = 0; first < kPages; first += kBatch) {
      int pages[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) pages[i] = __shfl_sync(0xffffffffu, page, first + i);
      if (!elect_one()) continue;
#pragma unroll
      for (int i = first; i < first + kBatch && i < kPages; ++i)
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          tma_load(to + c * kChunk + i * (kPageRows * 128), map, barrier, c * 64, (n * BLOCK_N + i * kPageRows) % PAGE_SIZE, kv_head, pages[i - first]);
    }
    __syncwarp();
  }
};
#endif

}  // namespace warpsmith::attention
