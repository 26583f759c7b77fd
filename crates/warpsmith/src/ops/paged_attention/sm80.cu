// `paged_attention` on the tensor cores of sm_80 and later, through mma.sync.
//
// Rows are packed: the `group` query heads of a KV head and the queries of a request, tokens slower, fill tiles of
// 16 ROW_WARPS rows, so that a KV head is read once for all of them. A block works on one tile and one KV head at a
// time, over p.piece_keys keys: all of them, one span, or kRound, of which it leaves the states of the segments. Blocks
// take such pieces in turn until all are done, so the grid need not know the lengths.
//
// A block is KEY_WARPS groups of ROW_WARPS warps. A warp has 16 rows and goes through a segment in steps of kStep keys,
// holding the state of its rows in registers. Keys and values come through a ring of units, each of kUnitKeys keys or
// values, copied ahead by cp.async through the page table; groups wait for nobody but themselves until their segments end.
//
// ELEM: type of q and out, and of what is multiplied; KV: type of the cache. HEAD_DIM, ROW_WARPS, KEY_WARPS. RING: units
// of a ring. BLOCKS: blocks a multiprocessor should hold. SOFTCAP: whether scores are capped. WHOLE_PAGES: whether pages
// hold multiples of 16 keys.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/vec.cuh"

constexpr int kThreads = 32 * ROW_WARPS * KEY_WARPS, kGroupThreads = 32 * ROW_WARPS, kRows = 16 * ROW_WARPS;
// The longest heads leave no registers for the scores of more keys.
constexpr int kStep = HEAD_DIM > 192 ? 16 : 64, kUnitKeys = kRows < kStep ? kRows : kStep, kUnits = kStep / kUnitKeys;
constexpr int kRound = 4 * kSegment;
static_assert(KEY_WARPS == 1 || KEY_WARPS == 4, "a round is a segment for each of four groups, or four for one");
// Pieces of 16 bytes of a row. Rows of eight or a multiple are swizzled, others padded to an odd number: either way the
// eight rows that one ldmatrix reads lie in different banks.
constexpr int pitch_of(int pieces) { return pieces % 8 == 0 ? pieces : pieces | 1; }
template <int kPieces> WS_INLINE u32 place(int row, int piece) {
  return (u32)(row * pitch_of(kPieces) + (kPieces % 8 == 0 ? piece ^ (row & 7) : piece)) * 16;
}
constexpr int kPieces = HEAD_DIM * (int)sizeof(KV) / 16, kUnitBytes = kUnitKeys * pitch_of(kPieces) * 16;
constexpr int kDims = HEAD_DIM / 16, kTiles = HEAD_DIM / 8;

// 8-bit caches are multiplied as f16, which holds all their values. Their matrices are loaded as if pairs of elements
// were single ones; so the four neighbours 4 (lane % 4) of each 16 belong to a thread, where 16-bit types give it
// 2 (lane % 4) and the next of each 8.
constexpr bool kNarrow = sizeof(KV) == 1;
template <bool> struct Product {
  typedef ELEM type;
};
template <> struct Product<true> {
  typedef f16 type;
};
typedef Product<kNarrow>::type MUL;
// Two elements of a query as they are multiplied.
WS_INLINE u32 pack_pair(float lo, float hi, bf16) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
WS_INLINE u32 pack_pair(float lo, float hi, f16) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
WS_INLINE u32 multiplied(u32 pair, bf16) {
  return kNarrow ? pack_pair(bits_float(pair << 16), bits_float(pair & 0xffff0000u), f16()) : pair;
}
WS_INLINE u32 multiplied(u32 pair, f16) { return pair; }
// Two 8-bit elements in the lower half of a word.
WS_INLINE u32 widen(u32 codes, f8e5m2) { return __byte_perm(codes, 0, 0x1404); }
WS_INLINE u32 widen(u32 codes, f8e4m3) {
  u32 y;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)codes));
#else
  const u32 spread = __byte_perm(codes, 0, 0x1404), magnitude = (spread & 0x7f007f00u) >> 1;
  // The biases differ by 8; the largest code is NaN.
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(magnitude), "r"(0x5c005c00u));
  y |= (spread & 0x80008000u) | (((magnitude + 0x00800080u) >> 14 & 0x00010001u) * 0x7fffu);
#endif
  return y;
}
WS_INLINE u32 widen(u32, bf16) { return 0; }
WS_INLINE u32 widen(u32, f16) { return 0; }

// A thread's elements of a row come in pairs: where pair i begins, and the place of its element e in the fragments.
WS_INLINE int pair_dim(int i) {
  const int lane = threadIdx.x % 4;
  return kNarrow ? i / 2 * 16 + lane * 4 + i % 2 * 2 : i * 8 + lane * 2;
}
constexpr int pair_place(int i, int half, int e) { return kNarrow ? (i / 2 * 2 + e) * 4 + 2 * half + i % 2 : i * 4 + 2 * half + e; }
constexpr bool kKeepQuery = HEAD_DIM <= 128;
constexpr int kQueryPieces = HEAD_DIM / 8, kQueryBytes = kKeepQuery ? 0 : kRows * pitch_of(kQueryPieces) * 16;
constexpr int kStateRow = HEAD_DIM + 4;

struct Shared {
  int starts[kThreads + 1];
  int pages[KEY_WARPS > 1 ? kRound + 1 : 1];
  float m[KEY_WARPS][kRows], l[KEY_WARPS][kRows];
};
// Queries that are not kept; the rings of the groups; and sums that wait for the next.
extern __shared__ __align__(128) u8 queries[];
#define ring (queries + kQueryBytes)
static_assert(KEY_WARPS == 1 || RING * kUnitBytes >= kRows * kStateRow * 4, "a group's states are exchanged through its ring");

WS_INLINE void group_sync(int group) {
  if (ROW_WARPS == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

// A piece of work: a tile of the rows of a request and KV head, and a range of keys.
struct Piece {
  Request request;
  int index, tile, range, head;
};
WS_INLINE int ranges_of(const PagedParams& p, const Request& request) {
  return p.ranges ? max((request.kv_len + p.piece_keys - 1) / p.piece_keys, 1) : 1;
}
WS_INLINE int pieces_of(const PagedParams& p, const Request& request) {
  if (request.count < p.min_queries || request.count > p.max_queries) return 0;
  return (request.count * p.group + kRows - 1) / kRows * ranges_of(p, request);
}
// Numbers the pieces of all requests. Threads count neighbouring requests; returns the number of all.
WS_INLINE int count_pieces(const PagedParams& p, int* starts) {
  const int each = (p.requests + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = 0;
  for (int i = 0; i < each; ++i) {
    const int r = threadIdx.x * each + i;
    if (r < p.requests) sum += pieces_of(p, request_at(p, r));
  }
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  starts[threadIdx.x + 1] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += starts[32 * w + 32];
  __syncthreads();
  starts[threadIdx.x + 1] = sum;
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  return starts[kThreads];
}
WS_INLINE Piece piece_at(const PagedParams& p, const int* starts, i64 index) {
  Piece piece;
  int left = (int)(index / p.num_kv_heads);
  piece.head = (int)(index - (i64)left * p.num_kv_heads);
  int lo = 0;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half /= 2)
    if (starts[lo + half] <= left) lo += half;
  left -= starts[lo];
  for (piece.index = lo * ((p.requests + kThreads - 1) / kThreads);; ++piece.index) {
    piece.request = request_at(p, piece.index);
    const int pieces = pieces_of(p, piece.request);
    if (left < pieces) break;
    left -= pieces;
  }
  const int ranges = ranges_of(p, piece.request);
  piece.tile = left / ranges;
  piece.range = left - piece.tile * ranges;
  return piece;
}

// Token and head of a row of a tile; there is none past the request's queries.
struct Row {
  bool exists;
  int i, token, head;
};
WS_INLINE Row row_of(const PagedParams& p, const Piece& piece, int row) {
  const int packed = piece.tile * kRows + row, i = packed / p.group;
  return {i < piece.request.count, i, piece.request.first + i, piece.head * p.group + packed - i * p.group};
}
// The two rows of a thread: lane / 4 of those of its warp, and 8 more.
WS_INLINE int thread_row(int half) { return threadIdx.x / 32 % ROW_WARPS * 16 + threadIdx.x % 32 / 4 + 8 * half; }

// The fragments of a warp's queries: in registers, or, where heads are long, read again and again from shared memory.
struct Query {
  u32 kept[kKeepQuery ? kDims : 1][4];
  u32 at;

  WS_INLINE void load(const PagedParams& p, const Piece& piece) {
    const u32 flip = p.scale < 0.0f ? 0x80008000u : 0;
    if (kKeepQuery) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row row = row_of(p, piece, thread_row(half));
        const ELEM* from = (const ELEM*)p.q + row.token * p.q_token + row.head * p.q_head;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          kept[kKeepQuery ? i / 2 : 0][i % 2 * 2 + half] =
              row.exists ? multiplied(*(const u32*)(from + pair_dim(i)) ^ flip, ELEM()) : 0;
      }
      return;
    }
    // Seen by all after the barrier that comes before the first step. Sixteen elements at a time, in the order of
    // pair_dim.
    for (int index = threadIdx.x; index < kRows * kDims; index += kThreads) {
      const int k = index % kDims;
      const Row row = row_of(p, piece, index / kDims);
      u32 words[2][4] = {};
      if (row.exists) {
        const ELEM* from = (const ELEM*)p.q + row.token * p.q_token + row.head * p.q_head + 16 * k;
        load_words(words[0], from), load_words(words[1], from + 8);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 to[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = kNarrow ? 2 * i + half : 4 * half + i;
          to[i] = multiplied(words[word / 4][word % 4] ^ flip, ELEM());
        }
        *(uint4*)(queries + place<kQueryPieces>(index / kDims, 2 * k + half)) = {to[0], to[1], to[2], to[3]};
      }
    }
    at = shared_address(queries) + place<kQueryPieces>(threadIdx.x / 32 % ROW_WARPS * 16, 0);
    static_assert(16 * pitch_of(kQueryPieces) % 8 == 0, "all warps' rows are swizzled alike");
  }
  WS_INLINE void fragment(u32 (&a)[4], int k) const {
    const int lane = threadIdx.x % 32;
    if (kKeepQuery) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = kept[kKeepQuery ? k : 0][e];
    } else {
      load_matrices<false>(a, at + place<kQueryPieces>(lane % 16, 2 * k + lane / 16));
    }
  }
};

// m of the scores as they come from the product, l for this thread's columns alone.
struct State {
  float o[kTiles][4], m[2], l[2];
  WS_INLINE float at(int place) const { return o[place / 4][place % 4]; }
};
WS_INLINE void clear(State& state) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) state.o[i][e] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) state.m[half] = minus_infinity(), state.l[half] = 0.0f;
}

// The units of a group over the steps from `first` to below `last`: the keys of a step, then its values.
struct Units {
  const PagedParams& p;
  const KV *k, *v;
  const i32* table;  // the request's pages
  const int* pages;  // with several groups: those of the round, from first_page on; negative if they do not exist
  int first_page;
  bool absent;  // whether any page does not exist
  u32 base;     // of the ring
  Keys keys;    // to be read
  int first, last;
  int into, from;  // slots

  // Copies of threads that are kPassRows rows apart, where whole passes fill sixteen rows.
  static constexpr bool kPasses = kGroupThreads % kPieces == 0 && kGroupThreads / kPieces <= 16;
  static constexpr int kPassRows = kGroupThreads / kPieces;

  WS_INLINE int id_at(int page) const {
    if (KEY_WARPS > 1) return pages[page - first_page];
    const i32 id = table[page * p.table_col];
    return id < p.num_pages ? id : -1;
  }
  WS_INLINE const KV* row_at(const KV* cache, i64 page_stride, i64 slot_stride, int key) {
    const int page = page_of(p, key), slot = key - page * p.page_size;
    const int id = key < keys.hi ? id_at(page) : -1;
    return id < 0 ? nullptr : cache + id * page_stride + slot * slot_stride;
  }
  // Sixteen rows from `key` on, a multiple of 16. A row that is not to be read becomes zeros; its address, which may be
  // none, is not used then.
  WS_INLINE void copy_rows(u32 to, const KV* cache, i64 page_stride, i64 slot_stride, int key) {
    const int thread = threadIdx.x % kGroupThreads;
    if (WHOLE_PAGES && kPasses) {
      const int row = thread / kPieces, piece = thread % kPieces;
      const KV* page = row_at(cache, page_stride, slot_stride, key);
      const KV* source = page + row * slot_stride + piece * kVec<KV>;
      const int lo = keys.lo - key - row, hi = page ? keys.hi - key - row : 0;
#pragma unroll
      for (int i = 0; i < 16; i += kPassRows)
        copy_async(to + place<kPieces>(row + i, piece), source + i * slot_stride, i >= lo && i < hi);
      return;
    }
    constexpr int kAll = 16 * kPieces;
#pragma unroll 4
    for (int i = 0; i < (kAll + kGroupThreads - 1) / kGroupThreads; ++i) {
      const int index = thread + i * kGroupThreads, row = index / kPieces, piece = index % kPieces;
      if (kAll % kGroupThreads && index >= kAll) break;
      const KV* source = row_at(cache, page_stride, slot_stride, key + row);
      copy_async(to + place<kPieces>(row, piece), source + piece * kVec<KV>, source && key + row >= keys.lo && key + row < keys.hi);
    }
  }
  // The unit kUnit places after the first of `step`.
  template <int kUnit> WS_INLINE void issue(int step) {
    constexpr bool kValue = kUnit % (2 * kUnits) >= kUnits;
    step += kUnit / (2 * kUnits);
    if (step < last) {
#pragma unroll
      for (int i = 0; i < kUnitKeys; i += 16)
        copy_rows(base + into * kUnitBytes + place<kPieces>(i, 0), kValue ? v : k, kValue ? p.v_page : p.k_page,
                  kValue ? p.v_slot : p.k_slot, step * kStep + kUnit % kUnits * kUnitKeys + i);
    }
    commit_copies();
    into = into + 1 == RING ? 0 : into + 1;
  }
  template <int kUnit = 0> WS_INLINE void issue_first() {
    if constexpr (kUnit < RING - 1) {
      issue<kUnit>(first);
      issue_first<kUnit + 1>();
    }
  }
  WS_INLINE void start(Keys range) {
    keys = range;
    first = range.lo / kStep;
    last = range.lo < range.hi ? (range.hi + kStep - 1) / kStep : first;
    into = from = 0;
    issue_first();
  }
  // Waits for unit kUnit of `step` and returns where it is. The one before may be overwritten from now on.
  template <int kUnit> WS_INLINE u32 next(int step, int group) {
    wait_copies<RING - 2>();
    group_sync(group);
    issue<kUnit + RING - 1>(step);
    const u32 at = base + from * kUnitBytes;
    from = from + 1 == RING ? 0 : from + 1;
    return at;
  }
};

// Scores of 16 rows and kStep keys.
typedef float Scores[kStep / 8][4];

template <int kUnit = 0> WS_INLINE void multiply_keys(Scores& s, const Query& q, Units& units, int step, int group) {
  if constexpr (kUnit < kUnits) {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    const u32 at = units.next<kUnit>(step, group);
#pragma unroll
    for (int i = 0; i < kUnitKeys; i += 16) {
      float(&a)[4] = s[(kUnit * kUnitKeys + i) / 8], (&b)[4] = s[(kUnit * kUnitKeys + i) / 8 + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = b[e] = 0.0f;
#pragma unroll
      for (int k = 0; k < kDims; k += 1 + kNarrow) {
        u32 keys[4], query[4];
        q.fragment(query, k);
        if (!kNarrow) {
          load_matrices<false>(keys, at + place<kPieces>(i + row, 2 * k + piece));
          multiply(a, query, keys[0], keys[1], MUL());
          multiply(b, query, keys[2], keys[3], MUL());
          continue;
        }
        // Sixteen elements, and sixteen more if there are.
        load_matrices<false>(keys, at + place<kPieces>(i + row, min(k + piece, kDims - 1)));
        multiply(a, query, widen(keys[0], KV()), widen(keys[0] >> 16, KV()), MUL());
        multiply(b, query, widen(keys[2], KV()), widen(keys[2] >> 16, KV()), MUL());
        if (k + 1 < kDims) {
          q.fragment(query, k + 1);
          multiply(a, query, widen(keys[1], KV()), widen(keys[1] >> 16, KV()), MUL());
          multiply(b, query, widen(keys[3], KV()), widen(keys[3] >> 16, KV()), MUL());
        }
      }
    }
    multiply_keys<kUnit + 1>(s, q, units, step, group);
  }
}

template <int kUnit = 0> WS_INLINE void multiply_values(State& state, const Scores& s, Units& units, int step, int group) {
  if constexpr (kUnit < kUnits) {
    const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8, piece = lane / 16;
    const u32 at = units.next<kUnits + kUnit>(step, group);
#pragma unroll
    for (int i = 0; i < kUnitKeys; i += 16) {
      const float(&a)[4] = s[(kUnit * kUnitKeys + i) / 8], (&b)[4] = s[(kUnit * kUnitKeys + i) / 8 + 1];
      const u32 weights[4] = {pack_pair(a[0], a[1], MUL()), pack_pair(a[2], a[3], MUL()), pack_pair(b[0], b[1], MUL()),
                              pack_pair(b[2], b[3], MUL())};
#pragma unroll
      for (int d = 0; d < kDims; d += 1 + kNarrow) {
        u32 values[4];
        if (!kNarrow) {
          load_matrices<true>(values, at + place<kPieces>(i + row, 2 * d + piece));
          multiply(state.o[2 * d], weights, values[0], values[1], MUL());
          multiply(state.o[2 * d + 1], weights, values[2], values[3], MUL());
          continue;
        }
        load_matrices<true>(values, at + place<kPieces>(i + row, min(d + piece, kDims - 1)));
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          if (d + next >= kDims) break;
          // A word has two neighbours of one key, and of the next key: first those of even, then those of odd place.
          const u32 lower = __byte_perm(values[2 * next], 0, 0x3120), upper = __byte_perm(values[2 * next + 1], 0, 0x3120);
          multiply(state.o[2 * (d + next)], weights, widen(lower, KV()), widen(upper, KV()), MUL());
          multiply(state.o[2 * (d + next) + 1], weights, widen(lower >> 16, KV()), widen(upper >> 16, KV()), MUL());
        }
      }
    }
    multiply_values<kUnit + 1>(state, s, units, step, group);
  }
}

// What turns products into scores, in units of log2 e after the last factor.
struct Scale {
  float inner, cap, factor;
};
WS_INLINE Scale scale_of(const PagedParams& p, int kv_head) {
  const float scale = fabsf(p.scale) * scale_of(p.k_scale, p.k_scale_step, kv_head);
  if (!SOFTCAP) return {0.0f, 0.0f, scale * kLog2E};
  return {2.0f * kLog2E * scale / p.softcap, p.softcap, kLog2E};
}

// Hides what the rows do not see.
WS_INLINE void hide(Scores& s, const PagedParams& p, const Keys (&seen)[2], const Units& units, int key0) {
#pragma unroll
  for (int i = 0; i < kStep / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = key0 + 8 * i + threadIdx.x % 4 * 2 + e;
      bool exists = true;
      if (units.absent) exists = key < units.keys.hi && units.id_at(page_of(p, key)) >= 0;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (!exists || key < seen[half].lo || key >= seen[half].hi) s[i][2 * half + e] = minus_infinity();
    }
  }
}

// Takes the scores of the next step into the state, but for the values: leaves their weights in s.
WS_INLINE void weigh(State& state, Scores& s, const Scale& scale) {
  float keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i) most = fmaxf(most, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    most = fmaxf(most, state.m[half]);
    const float base = most == minus_infinity() ? 0.0f : most * scale.factor;
    keep[half] = exp2_approx(fmaf(state.m[half], scale.factor, -base));
    state.m[half] = most;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[i][2 * half + e];
        x = exp2_approx(fmaf(x, scale.factor, -base));
        sum += x;
      }
    state.l[half] = fmaf(state.l[half], keep[half], sum);
  }
  // Most steps leave the largest score as it is; a factor of 1 changes no bit.
  if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[i][e] *= keep[e / 2];
  }
}

// Takes the next step into the state; `all` is what every row sees.
WS_INLINE void run_step(State& state, const PagedParams& p, const Keys (&seen)[2], const Query& q, const Scale& scale,
                        Units& units, Keys all, int step, int group) {
  Scores s;
  multiply_keys(s, q, units, step, group);
  if (SOFTCAP) {
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = exp2_approx(s[i][e] * scale.inner);
        s[i][e] = scale.cap * (1.0f - 2.0f * reciprocal(1.0f + x));
      }
  }
  if (step * kStep < all.lo || (step + 1) * kStep > all.hi || units.absent) hide(s, p, seen, units, step * kStep);
  weigh(state, s, scale);
  multiply_values(state, s, units, step, group);
}
// Ends a segment: from here on the state can be folded.
WS_INLINE void close(State& state, const Scale& scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.l[half] += __shfl_xor_sync(0xffffffffu, state.l[half], 1);
    state.l[half] += __shfl_xor_sync(0xffffffffu, state.l[half], 2);
    if (state.m[half] != minus_infinity()) state.m[half] *= scale.factor;
  }
}

// Hands a warp's state to the other groups.
WS_INLINE void publish(Shared& shared, float* states, const State& state, int first, int group) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane / 4 + 8 * half;
    if (lane % 4 == 0) shared.m[group][row] = state.m[half], shared.l[group][row] = state.l[half];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      *(float2*)(states + row * kStateRow + pair_dim(i)) = {state.at(pair_place(i, half, 0)), state.at(pair_place(i, half, 1))};
  }
}

// Four neighbours of a row and what belongs to the row.
struct Sums {
  float m, l, o[4];
  WS_INLINE void clear() {
    m = minus_infinity(), l = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = 0.0f;
  }
  WS_INLINE void take(float next_m, float next_l, const float* next) {
    if (next_l == 0.0f) return;
    const Fold f = fold_of(m, next_m);
    m = f.m, l = folded(f, l, next_l);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = folded(f, o[e], next[e]);
  }
};

// Leaves the state of a row over a range of keys for the merge; `sum` gives the element of a place in the fragments.
template <class Sum>
WS_INLINE void leave(const PagedParams& p, const Piece& piece, int range, int half, float m, float l, Sum sum) {
  const Row row = row_of(p, piece, thread_row(half));
  if (!row.exists) return;
  const i64 slot = partial_row(p, range, row.token, row.head);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    *(float2*)(partial_sums(p, slot) + pair_dim(i)) = {sum(pair_place(i, half, 0)), sum(pair_place(i, half, 1))};
  if (threadIdx.x % 4 == 0) *partial_weights(p, slot) = {m, l};
}
WS_INLINE void leave(const PagedParams& p, const Piece& piece, int range, const State& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    leave(p, piece, range, half, state.m[half], state.l[half], [&](int place) { return state.at(place); });
}

// Four groups of one warp: each takes a segment of a round, and all together fold their states. Four neighbours of a
// row are folded by one thread; its sums so far wait in shared memory.
struct Parallel {
  static constexpr int kQuads = HEAD_DIM / 4, kEach = (kRows * kQuads + kThreads - 1) / kThreads;

  static WS_INLINE void run(const PagedParams& p, const Piece& piece, const Keys (&seen)[2], const Query& q, const Scale& scale,
                            Units& units, Shared& shared, float* states, Keys early, Keys late, Keys keys) {
    const int group = threadIdx.x / 32, count = min(piece.request.count * p.group - piece.tile * kRows, kRows) * kQuads;
    Sums *span = (Sums*)(ring + KEY_WARPS * RING * kUnitBytes) + threadIdx.x, *total = span + kEach * kThreads;
    if (p.piece_keys != kRound) {
      for (int i = 0; i < kEach; ++i) {
        span[i * kThreads].clear();
        if (!p.ranges) total[i * kThreads].clear();
      }
    }
#pragma unroll 1
    for (int start = keys.lo / kRound * kRound; start < keys.hi; start += kRound) {
      units.first_page = page_of(p, start);
      const int end = min(start + kRound, keys.hi), num_pages = page_of(p, end - 1) - units.first_page + 1;
      bool absent = false;
      for (int i = threadIdx.x; i < num_pages; i += kThreads) {
        const i32 id = units.table[(units.first_page + i) * p.table_col];
        const bool exists = id >= 0 && id < p.num_pages;
        shared.pages[i] = exists ? id : -1;
        absent |= !exists;
      }
      units.absent = __syncthreads_or(absent);
      const int segment = start + group * kSegment;
      units.start({max(keys.lo, segment), min(keys.hi, segment + kSegment)});
      State state;
      clear(state);
#pragma unroll 1
      for (int step = units.first; step < units.last; ++step)
        run_step(state, p, seen, q, scale, units, {late.lo, early.hi}, step, group);
      close(state, scale);
      if (p.piece_keys == kRound) {
        if (segment < keys.hi) leave(p, piece, segment / kSegment, state);
        continue;
      }
      group_sync(group);
      publish(shared, states, state, 0, group);
      __syncthreads();
      const bool span_ends = end == keys.hi || end % kSpan == 0;
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int at = threadIdx.x + i * kThreads, row = at / kQuads, d = at % kQuads * 4;
        if (at >= count) break;
        Sums sums = span[i * kThreads];
#pragma unroll
        for (int g = 0; g < KEY_WARPS; ++g) {
          const float* o = (const float*)(ring + g * RING * kUnitBytes) + row * kStateRow + d;
          sums.take(shared.m[g][row], shared.l[g][row], o);
        }
        if (span_ends && p.ranges) {
          const Row of = row_of(p, piece, row);
          const i64 slot = partial_row(p, piece.range, of.token, of.head);
          *(float4*)(partial_sums(p, slot) + d) = {sums.o[0], sums.o[1], sums.o[2], sums.o[3]};
          if (d == 0) *partial_weights(p, slot) = {sums.m, sums.l};
        } else if (span_ends) {
          total[i * kThreads].take(sums.m, sums.l, sums.o);
          sums.clear();
        }
        span[i * kThreads] = sums;
      }
      __syncthreads();
    }
    if (p.piece_keys == kRound) __syncthreads();
    if (!p.ranges) write(p, piece, total, count);
  }
  static WS_INLINE void write(const PagedParams& p, const Piece& piece, const Sums* totals, int count) {
#pragma unroll 1
    for (int i = 0; i < kEach; ++i) {
      const int at = threadIdx.x + i * kThreads, row = at / kQuads, d = at % kQuads * 4;
      if (at >= count) break;
      const Row of = row_of(p, piece, row);
      const Sums total = totals[i * kThreads];
      const Finish finish = finish_of(p, of.head, total.m, total.l);
      const float factor = finish.factor;
      u32* to = (u32*)((ELEM*)p.out + of.token * p.out_token + of.head * p.out_head + d);
      to[0] = pack_pair(total.o[0] * factor, total.o[1] * factor, ELEM());
      to[1] = pack_pair(total.o[2] * factor, total.o[3] * factor, ELEM());
      if (d == 0) write_lse(p, of.token, of.head, finish.lse);
    }
  }
};

// One group of several warps: it goes through all segments, and each thread folds what it has of its rows' states. The
// sums so far wait in shared memory, each where its thread put it.
struct Sequential {
  static constexpr int kEach = 4 * kTiles;

  struct Level {
    float* sums;
    float m[2], l[2];
    WS_INLINE void clear() {
#pragma unroll
      for (int half = 0; half < 2; ++half) m[half] = minus_infinity(), l[half] = 0.0f;
    }
    WS_INLINE float at(int place) const { return l[place % 4 / 2] == 0.0f ? 0.0f : sums[place * kThreads]; }
    // `next` gives the element of a place in the fragments.
    template <class Next> WS_INLINE void take(const float (&next_m)[2], const float (&next_l)[2], Next next) {
      bool some[2], fresh[2];
      Fold f[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f[half] = fold_of(m[half], next_m[half]);
        some[half] = next_l[half] != 0.0f;
        fresh[half] = l[half] == 0.0f;
        if (some[half]) m[half] = f[half].m, l[half] = folded(f[half], l[half], next_l[half]);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int half = i % 4 / 2;
        if (some[half]) sums[i * kThreads] = folded(f[half], fresh[half] ? 0.0f : sums[i * kThreads], next(i));
      }
    }
  };

  static WS_INLINE void run(const PagedParams& p, const Piece& piece, const Keys (&seen)[2], const Query& q, const Scale& scale,
                            Units& units, Keys early, Keys late, Keys keys) {
    bool absent = false;
    if (keys.lo < keys.hi)
      for (int page = page_of(p, keys.lo) + threadIdx.x; page <= page_of(p, keys.hi - 1); page += kThreads)
        absent |= units.id_at(page) < 0;
    units.absent = __syncthreads_or(absent);
    Level span, total;
    span.sums = (float*)(ring + RING * kUnitBytes) + threadIdx.x;
    total.sums = span.sums + kEach * kThreads;
    span.clear(), total.clear();
    units.start(keys);
    State state;
    clear(state);
#pragma unroll 1
    for (int step = units.first; step < units.last; ++step) {
      run_step(state, p, seen, q, scale, units, {late.lo, early.hi}, step, 0);
      const bool last = step + 1 == units.last;
      if (!last && (step + 1) % (kSegment / kStep)) continue;
      close(state, scale);
      if (p.piece_keys == kRound)
        leave(p, piece, step * kStep / kSegment, state);
      else
        span.take(state.m, state.l, [&](int place) { return state.at(place); });
      clear(state);
      if (p.ranges || (!last && (step + 1) % (kSpan / kStep))) continue;
      total.take(span.m, span.l, [&](int place) { return span.sums[place * kThreads]; });
      span.clear();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (p.piece_keys == kSpan)
        leave(p, piece, piece.range, half, span.m[half], span.l[half], [&](int place) { return span.at(place); });
      const Row row = row_of(p, piece, thread_row(half));
      if (p.ranges || !row.exists) continue;
      const Finish finish = finish_of(p, row.head, total.m[half], total.l[half]);
      ELEM* to = (ELEM*)p.out + row.token * p.out_token + row.head * p.out_head;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        *(u32*)(to + pair_dim(i)) = pack_pair(total.at(pair_place(i, half, 0)) * finish.factor,
                                              total.at(pair_place(i, half, 1)) * finish.factor, ELEM());
      if (threadIdx.x % 4 == 0) write_lse(p, row.token, row.head, finish.lse);
    }
    // The ring is filled anew for the next piece.
    __syncthreads();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) paged_attention_sm80(const PagedParams p) {
  __shared__ Shared shared;
  begin_kernel();
  const int group = threadIdx.x / kGroupThreads;
  float* states = (float*)(ring + group * RING * kUnitBytes);
  Units units = {p};
  units.pages = shared.pages;
  units.base = shared_address(states);
  const i64 pieces = (i64)count_pieces(p, shared.starts) * p.num_kv_heads;
#pragma unroll 1
  for (i64 index = blockIdx.x; index < pieces; index += gridDim.x) {
    const Piece piece = piece_at(p, shared.starts, index);
    Keys seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_of(p, piece, thread_row(half));
      seen[half] = row.exists ? keys_of(p, piece.request, row.i) : Keys{0, 0};
    }
    // What the first and the last query of the tile see.
    const int i0 = piece.tile * kRows / p.group, i1 = min(((piece.tile + 1) * kRows - 1) / p.group, piece.request.count - 1);
    const Keys early = keys_of(p, piece.request, i0), late = keys_of(p, piece.request, i1);
    units.table = (const i32*)p.page_table + piece.index * p.table_row;
    units.k = (const KV*)p.k + piece.head * p.k_head;
    units.v = (const KV*)p.v + piece.head * p.v_head;
    Query q;
    q.load(p, piece);
    const Scale scale = scale_of(p, piece.head);
    Keys keys = {early.lo, late.hi};
    if (p.ranges) keys = {max(keys.lo, piece.range * p.piece_keys), min(keys.hi, (piece.range + 1) * p.piece_keys)};
    // The merge does not ask for what no row sees.
    if (p.ranges && keys.lo >= keys.hi) continue;
    if constexpr (KEY_WARPS > 1)
      Parallel::run(p, piece, seen, q, scale, units, shared, states, early, late, keys);
    else
      Sequential::run(p, piece, seen, q, scale, units, early, late, keys);
  }
}
