// `paged_attention` on the tensor cores of sm_80 and later, through mma.sync.
//
// Threads to data: rows are packed. The `group` query heads of a KV head and the queries of a request, heads fastest, fill
// tiles of ROWS * ROW_WARPS rows, so that a KV head is read once for all of them. A piece of work is one tile, one KV head
// and p.piece_keys keys: all of them, some spans, or kRound, for which the states of segments are left to the merge. The
// lengths may decide between some spans and all keys. Blocks take pieces in turn until all are done, so that the host
// need not know the lengths. With shared prefixes, groups of requests take the place of requests.
//
// A block is KEY_WARPS groups of ROW_WARPS warps; the groups take the segments of the piece in turn. A warp has ROWS rows
// and goes through a segment in steps of kStep keys, with the state of its rows in registers. Keys and values come through
// a ring of units, each of kUnitKeys keys or values, copied ahead by cp.async through the page table. Groups do not wait
// for each other until a segment ends: then they fold its state, in the order of segments, into the sums of the block.
//
// Defines: ELEM, type of q and out; KV, type of the cache; HEAD_DIM; ROW_WARPS; KEY_WARPS; ROWS, rows of a warp (16, or 8
// if no request has more); RING, units of a ring; STEP, keys of a step; BLOCKS, blocks per multiprocessor; SOFTCAP, whether scores are capped;
// WHOLE_PAGES, whether page sizes are multiples of 16 keys; DENSE, whether there are no pages (the strides of pages are
// then those of requests); ONCE, whether no two blocks read the same keys.

#include "warpsmith/paged_pieces.cuh"
#include "warpsmith/paged_units.cuh"

using namespace warpsmith;
using namespace warpsmith::paged;

static_assert(4 % KEY_WARPS == 0 || kAlone, "the groups take as many segments of a round");

struct Shared {
  i64 starts[kThreads + 1];
  // A barrier for each group: it is the group's turn to fold.
  u64 turns[KEY_WARPS];
  // For two segments of each warp.
  Places places[kThreads / 32][2];
};

// Whose turn it is to fold: every group waits for the one before. With mbarriers, because racecheck does not understand
// named barriers at which one warp waits and another only arrives.
struct Turns {
  u64* barriers;
  u32 taken;  // by this group: whether an odd number of times

  WS_INLINE u32 barrier_of(int group) const { return shared_address(barriers + group % KEY_WARPS); }
  WS_INLINE void begin() const {
    if (KEY_WARPS == 1) return;
    // One thread initialises all. With a thread for each barrier, the compiler emits predicated instructions, and the tools
    // of compute-sanitizer then report threads that initialise none.
    if (threadIdx.x == 0) {
#pragma unroll
      for (int group = 0; group < KEY_WARPS; ++group)
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier_of(group)), "r"(kGroupThreads) : "memory");
    }
    __syncthreads();
  }
  WS_INLINE void pass(int group) const {
    if (KEY_WARPS > 1)
      asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier_of(group + 1)) : "memory");
  }
  WS_INLINE void take(int group) {
    if (KEY_WARPS == 1) return;
    u32 done = 0;
    while (!done)
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done) : "r"(barrier_of(group)), "r"(taken) : "memory");
    taken ^= 1;
  }
};

template <int kUnit = 0> WS_INLINE void multiply_keys(Scores& s, const Query& q, Units& units, int t, int group) {
  if constexpr (kUnit < kUnits) {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    const u32 at = units.next<kUnit>(t, group);
    float(*sums)[4] = s + kUnit * kUnitKeys / 8;
#pragma unroll
    for (int i = 0; i < kUnitKeys / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][e] = 0.0f;
    // With 8-bit types, two times sixteen elements at once, if there are.
#pragma unroll
    for (int k = 0; k < kDims; k += 1 + kNarrow) {
      u32 query[2][4];
      q.fragment(query[0], k);
      if (kNarrow && k + 1 < kDims) q.fragment(query[1], k + 1);
#pragma unroll
      for (int i = 0; i < kUnitKeys / 16; ++i) {
        u32 keys[4];
        load_matrices<false>(keys, at + place<kPieces>(16 * i + row, kNarrow ? min(k + piece, kDims - 1) : 2 * k + piece));
        if (!kNarrow) {
          multiply(sums[2 * i], query[0], keys[0], keys[1], MUL());
          multiply(sums[2 * i + 1], query[0], keys[2], keys[3], MUL());
          continue;
        }
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          if (k + next >= kDims) break;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            u32 wide[2];
            widen(wide, keys[2 * half + next], KV());
            multiply(sums[2 * i + half], query[next], wide[0], wide[1], MUL());
          }
        }
      }
    }
    multiply_keys<kUnit + 1>(s, q, units, t, group);
  }
}

// Adds weighted values of sixteen keys to the sums of sixteen elements. `lower` has the values of the first eight keys,
// `upper` those of the others, each for two times eight elements.
template <int kWords>
WS_INLINE void add_values(State& state, int d, const u32 (&weights)[kWords], const u32 (&lower)[2], const u32 (&upper)[2]) {
  if constexpr (kWords == 2) {
    const u32 values[4] = {lower[0], lower[1], upper[0], upper[1]};
    multiply(state.o[d], values, weights[0], weights[1], MUL());
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply(state.o[2 * d + i], weights, lower[i], upper[i], MUL());
  }
}

template <int kUnit = 0> WS_INLINE void multiply_values(State& state, const Scores& s, Units& units, int t, int group) {
  if constexpr (kUnit < kUnits) {
    const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8, piece = lane / 16;
    const u32 at = units.next<kUnits + kUnit>(t, group);
#pragma unroll
    for (int i = 0; i < kUnitKeys; i += 16) {
      const float(&a)[4] = s[(kUnit * kUnitKeys + i) / 8], (&b)[4] = s[(kUnit * kUnitKeys + i) / 8 + 1];
      u32 weights[2 * kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        weights[half] = pack_pair(a[2 * half], a[2 * half + 1], MUL());
        weights[kHalves + half] = pack_pair(b[2 * half], b[2 * half + 1], MUL());
      }
#pragma unroll
      for (int d = 0; d < kDims; d += 1 + kNarrow) {
        u32 values[4];
        if (!kNarrow) {
          load_matrices<true>(values, at + place<kPieces>(i + row, 2 * d + piece));
          add_values(state, d, weights, {values[0], values[2]}, {values[1], values[3]});
          continue;
        }
        load_matrices<true>(values, at + place<kPieces>(i + row, min(d + piece, kDims - 1)));
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          if (d + next >= kDims) break;
          // A word has two neighbours of one key and the same two of the next key. Reordered: first both even elements, then
          // both odd ones.
          u32 lower[2], upper[2];
          widen(lower, __byte_perm(values[2 * next], 0, 0x3120), KV());
          widen(upper, __byte_perm(values[2 * next + 1], 0, 0x3120), KV());
          add_values(state, d + next, weights, lower, upper);
        }
      }
    }
    multiply_values<kUnit + 1>(state, s, units, t, group);
  }
}

// Hides the keys that rows do not see.
WS_INLINE void hide(Scores& s, const PagedParams& p, const Keys (&seen)[kHalves], const Units& units, int t, bool absent) {
  const int key0 = units.key_at(t);
#pragma unroll
  for (int i = 0; i < kStep / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = 8 * i + threadIdx.x % 4 * 2 + e, key = key0 + at;
      bool exists = true;
      if (absent) exists = units.offset_of<false>(t, at) != kNowhere;
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        if (!exists || key < seen[half].lo || key >= seen[half].hi) s[i][2 * half + e] = minus_infinity();
    }
  }
}

// Updates the state by the next step; `all` are the keys that every row sees.
WS_INLINE void run_step(State& state, const PagedParams& p, const Keys (&seen)[kHalves], const Query& q, const Scale& scale,
                        Units& units, Keys all, int t, bool absent, int group) {
  Scores s;
  multiply_keys(s, q, units, t, group);
  if (SOFTCAP) {
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2 * kHalves; ++e) {
        const float x = exp2_approx(s[i][e] * scale.inner);
        s[i][e] = scale.cap * (1.0f - 2.0f * reciprocal(1.0f + x));
      }
  }
  const int key = units.key_at(t);
  if (key < all.lo || key + kStep > all.hi || absent) hide(s, p, seen, units, t, absent);
  weigh(state, s, scale);
  multiply_values(state, s, units, t, group);
}

// Writes the states of a thread's rows over a range of keys, for the merge.
WS_INLINE void leave(const PagedParams& p, const Piece& piece, int range, const State& state) {
  const Pairs pairs(state);
#pragma unroll
  for (int run = 0; run < Pairs::kRuns; ++run) {
    const Row row = row_of(p, piece, Pairs::row(run));
    const float m = Pairs::of_row(state.m, run), l = Pairs::of_row(state.l, run);
    if (!row.exists) continue;
    const i64 slot = partial_row(p, range, row.token, row.head);
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) *(float2*)(partial_sums(p, slot) + Pairs::dim(i)) = pairs.of[run][i];
    if (Pairs::writes_row()) *partial_weights(p, slot) = {m, l};
  }
}

// A state in shared memory, in the layout of a group's registers: thread i of every group has the same rows.
struct SharedState {
  u32 at;
  static constexpr int kSumBytes = kSums * kGroupThreads * 16, kBytes = kSumBytes + kGroupThreads * 8 * kHalves;

  static WS_INLINE SharedState of(int index) {
    return {shared_address(ring_of(KEY_WARPS)) + index * kBytes + threadIdx.x % kGroupThreads * 16};
  }
  WS_INLINE u32 weights_at(int half) const {
    return at + kSumBytes + 8 * half - (kTransposedSums ? threadIdx.x % kGroupThreads * 8 : 0);
  }
  WS_INLINE void get(float (&x)[4], int i) const { load_shared(x, at + i * kGroupThreads * 16); }
  WS_INLINE void put(const State& state) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) store_shared(at + i * kGroupThreads * 16, state.o[i]);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) store_shared(weights_at(half), state.m[half], state.l[half]);
  }
  // Folds `state` onto this one, whose keys come first; leaves the result in `state`.
  WS_INLINE void fold_into(State& state) const {
    float m[kHalves], l[kHalves], keep[kHalves], add[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) load_shared(m[half], l[half], weights_at(half));
    // Sums without weight become zeros.
    const ForSums own(state.l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own.of[half] == 0.0f) {
#pragma unroll
        for (int i = 0; i < kSums; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) state.o[i][kTransposedSums ? 2 * e + half : 2 * half + e] = 0.0f;
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const Fold f = fold_of(m[half], state.m[half]);
      keep[half] = f.keep, add[half] = f.add;
      state.m[half] = f.m, state.l[half] = folded(f, l[half], state.l[half]);
    }
    const ForSums keeps(keep), adds(add);
    // A few at a time: registers hold one state and little else.
    constexpr int kBatch = 4;
#pragma unroll
    for (int first = 0; first < kSums; first += kBatch) {
      float before[kBatch][4];
#pragma unroll
      for (int i = first; i < first + kBatch && i < kSums; ++i) get(before[i - first], i);
#pragma unroll
      for (int i = first; i < first + kBatch && i < kSums; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          state.o[i][e] = folded({0.0f, keeps[e], adds[e]}, before[i - first][e], state.o[i][e]);
    }
  }
};

// Writes the results of a thread's rows, from the state of all keys.
WS_INLINE void write(const PagedParams& p, const Piece& piece, const State& state) {
  const Pairs pairs(state);
#pragma unroll
  for (int run = 0; run < Pairs::kRuns; ++run) {
    const Row row = row_of(p, piece, Pairs::row(run));
    const float m = Pairs::of_row(state.m, run), l = Pairs::of_row(state.l, run);
    if (!row.exists) continue;
    const Finish finish = finish_of(p, row.head, m, l);
    ELEM* to = (ELEM*)p.out + token_at(p, row.token, p.out_batch, p.out_token) + row.head * p.out_head;
    // Adding zero turns -0 into +0, as in the merge.
    const auto result = [&](float x) { return fmaf(x, finish.factor, 0.0f); };
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const float2 pair = pairs.of[run][i];
      *(u32*)(to + Pairs::dim(i)) = pack_pair(result(pair.x), result(pair.y), ELEM());
    }
    if (Pairs::writes_row()) write_lse(p, row.token, row.head, finish.lse);
  }
}

// Folds the state of a segment into that of its span, and a complete span into that of all keys; writes what is complete.
WS_INLINE void fold(const PagedParams& p, const Piece& piece, Whole whole, State& state, int segment, Keys keys, Turns& turns,
                    int group) {
  const SharedState span = SharedState::of(0), total = SharedState::of(1);
  const bool first = segment == keys.lo / kSegment, last = (segment + 1) * kSegment >= keys.hi;
  if (!first) turns.take(group);
  if (!first && segment % kSegments != 0) span.fold_into(state);
  if (!last && (segment + 1) % kSegments != 0) {
    span.put(state);
  } else if (!whole) {
    leave(p, piece, slot_of_span(p.level, segment / kSegments), state);
  } else {
    if (segment / kSegments > keys.lo / kSpan) total.fold_into(state);
    if (last) write(p, piece, state);
    else total.put(state);
  }
  if (!last) turns.pass(group);
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) paged_attention_sm80(const PagedParams p) {
  __shared__ Shared shared;
  prefetch_first_keys(p);
  // Everything about dense requests is in the parameters, so much can be done before the wait.
  if (!DENSE) await_kernel_before();
  const int group = threadIdx.x / kGroupThreads;
  Units units = {p};
  units.places = shared.places[threadIdx.x / 32];
  units.base = shared_address(ring_of(group));
  const Whole whole = {p, stay_whole(p)};
  if (lengths_decide(p) && blockIdx.x == 0 && threadIdx.x == 0) *(int*)p.is_whole = whole;
  const i64 pieces = num_pieces(p, whole, shared.starts);
  Turns turns = {shared.turns, 0};
  turns.begin();
#pragma unroll 1
  for (i64 index = blockIdx.x; index < pieces; index += gridDim.x) {
    const Piece piece = piece_at(p, whole, shared.starts, index);
    Keys seen[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const Row row = row_of(p, piece, thread_row(half));
      seen[half] = row.exists ? keys_of(p, piece.request, row.i) : Keys{0, 0};
    }
    // What the first and the last query of the tile see.
    const int i0 = piece.tile * kRows / p.group, i1 = min(((piece.tile + 1) * kRows - 1) / p.group, piece.request.count - 1);
    const Keys early = keys_of(p, piece.request, i0), late = keys_of(p, piece.request, i1);
    Keys keys = {early.lo, late.hi};
    if (!whole) keys = {max(keys.lo, piece.range * p.piece_keys), min(keys.hi, (piece.range + 1) * p.piece_keys)};
    units.keys = keys;
    units.begin(piece);
    // Without a window the first key does not depend on the length: the table and the length are loaded at the same time.
    const int lo = max(piece.request.from, whole ? 0 : piece.range * p.piece_keys);
    units.segment = (p.window > 0 ? keys.lo : lo) / kSegment + group;
    const i32 first_page = Units::kLooksAhead ? units.page_at(0) : -1;
    i32 next_page = Units::kLooksAhead ? units.page_at(kSteps) : -1;
    bool absent_next = units.find(0, first_page);
    if (DENSE) await_kernel_before();
    if (keys.lo >= keys.hi) {
      // The merge does not read the state of a range of which no row sees anything.
      if (whole && group == 0) {
        State none;
        clear(none);
        write(p, piece, none);
      }
      continue;
    }
    const int last = (keys.hi - 1) / kSegment, segments = (last - units.segment) / KEY_WARPS + 1;
    units.count = units.segment > last ? 0 : segments * kSteps;
    // The last segment may have fewer steps.
    if (units.count && units.segment_at(units.count - 1) == last)
      units.count -= kSteps - (keys.hi - last * kSegment + kStep - 1) / kStep;
    __syncwarp();
    units.start();
    Query q;
    q.load(p, piece);
    if (!kKeepQuery) __syncthreads();
    const Scale scale = scale_of(p, piece.head);
    // With shared prefixes, a piece is a span.
    const bool cut = !whole && is_cut(piece.request, piece.range);
#pragma unroll 1
    for (int t = 0; t < units.count;) {
      const int segment = units.segment_at(t), end = min(units.count, t + kSteps);
      const bool absent = absent_next;
      // Not earlier: the blocks of the next kernel would compete with the first loads.
      const bool ends = end == units.count && index + gridDim.x >= pieces;
      if (ends && !kAlone) let_next_kernel_start();
      if (end < units.count) {
        absent_next = units.find(end, next_page);
        if (Units::kLooksAhead) next_page = units.page_at(end + kSteps);
      }
      State state;
      clear(state);
#pragma unroll 1
      for (; t < end; ++t) {
        if (ends && kAlone && t + 1 == end) let_next_kernel_start();
        run_step(state, p, seen, q, scale, units, {late.lo, early.hi}, t, absent, group);
      }
      close(state, scale);
      if (p.piece_keys == kRound || cut)
        leave(p, piece, cut ? slot_of_segment(p.level, segment) : segment, state);
      else
        fold(p, piece, whole, state, segment, keys, turns, group);
    }
    // The next piece overwrites queries, sums, and the ring of a group of several warps.
    if (!kKeepQuery || KEY_WARPS == 1 || p.piece_keys != kRound) __syncthreads();
  }
  if (DENSE) await_kernel_before();  // also without pieces: the next kernel relies on it
}
