// The second half of `paged_attention` if the keys of a request were distributed over blocks or launches: folds the states
// of a row in order, segments first into spans.
//
// Threads to data: with ONE_ROW, a block has one row, and thread d element d; otherwise a warp has one row, and a lane four
// elements of every 128.
//
// Defines: ELEM, type of out; HEAD_DIM; DENSE; ONE_ROW (1: for few rows and many states; 0: heads must be dense).

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/reduce.cuh"

using namespace warpsmith;
using namespace warpsmith::paged;

// Whether the kernel before left requests whole, so that there is nothing to merge.
WS_INLINE bool has_no_states(const PagedParams& p) { return p.slots && *(const volatile int*)p.is_whole; }

#if ONE_ROW
// Each of 256 threads computes the factors of one state; then thread d folds element d of all states. There are no shared
// prefixes.

constexpr int kThreads = 256, kWarps = kThreads / 32, kPieces = HEAD_DIM / 4;
static_assert(HEAD_DIM <= kThreads && kThreads / kSegments == 32, "an element a thread, and a span a lane");

// The factors with which a state is folded, and its sum of weights.
struct __align__(16) Step {
  float keep, add, l, unused;
};

extern __shared__ __align__(16) u8 shared_bytes[];

// How many states fit into shared memory, in whole spans. The factors of spans take kSpanBytes.
constexpr int kSpanBytes = 32 * (sizeof(Step) + sizeof(float));
WS_INLINE int states_that_fit() {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return min((int)(bytes - kSpanBytes) / (HEAD_DIM * 4 + (int)sizeof(Step)) / kSegments * kSegments, kThreads);
}

// A sum of weights, and of this thread's element. States without weight are loaded as zeros, so they change nothing.
struct RowSum {
  float l, o;
  WS_INLINE void take(const Step& step, float next_l, float next_o) {
    const Fold f = {0.0f, step.keep, step.add};
    l = folded(f, l, next_l), o = folded(f, o, next_o);
  }
};

// In each kLanes neighbouring lanes, the maximum over the lanes up to this one, and over those before it.
template <int kLanes> WS_INLINE float2 largest_upto(float m) {
  const int place = threadIdx.x % kLanes;
  m = warp_scan<MaxIgnoringNan, kLanes>(m, place);
  const float before = __shfl_up_sync(kAllLanes, m, 1);
  return {m, place == 0 ? minus_infinity() : before};
}

struct Merge {
  const PagedParams& p;
  int token, head, most;
  // The states are in slots from `first` to below `last`; those before `present` are missing.
  int first, present, last;
  float m;  // the largest score so far
  RowSum total;

  WS_INLINE float* sums() const { return (float*)shared_bytes; }
  WS_INLINE Step* steps() const { return (Step*)(sums() + most * HEAD_DIM); }
  // For every span of segments.
  WS_INLINE Step* span_steps() const { return steps() + most; }
  // The maximum of every span of segments, or of every 32 states.
  WS_INLINE float* largest() const { return (float*)(span_steps() + kThreads / kSegments); }

  // Loads `count` states from slot `base` on, and computes their factors.
  template <bool kSpans> WS_INLINE void load(int base, int count) {
    const int own = threadIdx.x, lane = own % 32, warp = own / 32;
    const i64 row = partial_row(p, base, token, head), step = (i64)p.num_tokens * p.num_heads;
    float2 weight = {minus_infinity(), 0.0f};
    if (own < count && base + own >= present && base + own < last) weight = *partial_weights(p, row + own * step);
    const float* from = partial_sums(p, row);
#pragma unroll 4
    for (int i = own; i < count * kPieces; i += kThreads) {
      const int state = i / kPieces;
      const bool exists = base + state >= present && base + state < last;
      copy_async(shared_address(sums() + 4 * i), from + (exists ? state * step * HEAD_DIM + i % kPieces * 4 : 0), exists);
    }
    commit_copies();
    const float2 upto = largest_upto<kSpans ? kSegments : 32>(weight.x);
    if (kSpans ? own % kSegments == kSegments - 1 : lane == 31) largest()[kSpans ? own / kSegments : warp] = upto.x;
    __syncthreads();
    float before = kSpans ? minus_infinity() : m;
    if (!kSpans)
      for (int w = 0; w < warp; ++w) before = fmaxf(before, largest()[w]);
    const Fold f = fold_of(fmaxf(before, upto.y), weight.x);
    if (own < count) steps()[own] = {f.keep, f.add, weight.y, 0.0f};
    if (kSpans && warp == 0) {
      const float span = largest()[lane];
      const Fold f = fold_of(fmaxf(m, largest_upto<32>(span).y), span);
      span_steps()[lane] = {f.keep, f.add, 0.0f, 0.0f};
    }
    const int parts = kSpans ? count / kSegments : kWarps;
    for (int i = 0; i < parts; ++i) m = fmaxf(m, largest()[i]);
    wait_copies<0>();
    __syncthreads();
  }
  template <bool kSpans> WS_INLINE void take() {
    const float* o = sums() + min((int)threadIdx.x, HEAD_DIM - 1);
#pragma unroll 1
    for (int base = first; base < last; base += most) {
      // Whole spans; states that do not exist have no weight.
      const int count = min((last - base + kSegments - 1) / kSegments * kSegments, most);
      load<kSpans>(base, count);
#pragma unroll 2
      for (int i = 0; i < count; i += kSegments) {
        RowSum sum = total;
        if (kSpans) sum = {};
#pragma unroll
        for (int j = i; j < i + kSegments; ++j) sum.take(steps()[j], steps()[j].l, o[j * HEAD_DIM]);
        if (kSpans) total.take(span_steps()[i / kSegments], sum.l, sum.o);
        else total = sum;
      }
      // The next states overwrite these.
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 3) paged_attention_merge(const PagedParams p) {
  const int token = blockIdx.x / p.num_heads, head = blockIdx.x - token * p.num_heads;
  int r;
  Request request;
  // The kernel before this one has waited for all earlier kernels: what it does not write itself can be read already.
  if (!find_request<32>(p, token, r, request)) return begin_kernel();
  const Keys keys = keys_of(p, request, token - request.first);
  const bool segments = p.range_keys == kSegment;
  const int first = segments ? keys.lo / kSpan * kSegments : keys.lo / kSpan;
  const int last = keys.lo < keys.hi ? (keys.hi - 1) / p.range_keys + 1 : first;
  Merge row = {p, token, head, states_that_fit(), first, keys.lo / p.range_keys, last, minus_infinity(), {}};
  begin_kernel();
  if (has_no_states(p)) return;
  if (segments) row.take<true>();
  else row.take<false>();
  const Finish finish = finish_of(p, head, row.m, row.total.l);
  ELEM* out = (ELEM*)p.out + token_at(p, token, p.out_batch, p.out_token) + head * p.out_head;
  if (threadIdx.x < HEAD_DIM) out[threadIdx.x * p.out_dim] = from_f32<ELEM>(row.total.o * finish.factor);
  if (threadIdx.x == 0) write_lse(p, token, head, finish.lse);
}
#else
// A warp has one row, and a lane elements 4 lane to 4 lane + 3 of every 128. States come through shared memory, up to
// kBatch at once; lane i computes the factors of the i-th of them.
constexpr int kWarps = 4, kPieces = HEAD_DIM / 4, kEach = (kPieces + 31) / 32;
// As many states, in whole spans, as fit into shared memory on every device.
constexpr int kFits = 3072 / HEAD_DIM / kSegments * kSegments, kBatch = kFits < 32 ? kFits : 32;

extern __shared__ __align__(16) float4 values[];

WS_INLINE float4 folded(const Fold& f, const float4& sum, const float4& next) {
  return {folded(f, sum.x, next.x), folded(f, sum.y, next.y), folded(f, sum.z, next.z), folded(f, sum.w, next.w)};
}

// A sum of this lane's elements. States without weight are loaded as zeros, so they change nothing; a branch to skip them
// would cost more.
struct Total {
  float m, l;
  float4 o[kEach];
  WS_INLINE void clear() {
    m = minus_infinity(), l = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = {};
  }
  template <class Next> WS_INLINE void take(const Fold& f, float next_l, Next next) {
    m = f.m, l = folded(f, l, next_l);
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = folded(f, o[i], next(i));
  }
};

// The factors of this lane's state, whose maximum is m: it is folded after `before` and the lanes before it or, with
// segments, after those of its span.
WS_INLINE Fold fold_of_lane(float before, float m, bool segments) {
  const int lane = threadIdx.x % 32, first = segments ? lane % kSegments : lane;
  const float upto = warp_scan<MaxIgnoringNan>(m, first);
  const float previous = __shfl_up_sync(kAllLanes, upto, 1);
  return fold_of(first == 0 ? before : fmaxf(before, previous), m);
}

struct Merge {
  const PagedParams& p;
  int token, head, batch;
  float4* staged;  // this warp's
  // The sum over all complete spans, and over the span that is not complete yet.
  Total total, open;

  // The piece i of a lane; lanes without one take the last.
  static WS_INLINE int piece(int i) { return min((int)threadIdx.x % 32 + 32 * i, kPieces - 1); }
  WS_INLINE const float4* sums(int slot) const { return (const float4*)partial_sums(p, partial_row(p, slot, token, head)); }
  WS_INLINE float2 weight(int slot) const { return *partial_weights(p, partial_row(p, slot, token, head)); }
  WS_INLINE void close() {
    total.take(fold_of(total.m, open.m), open.l, [&](int i) { return open.o[i]; });
    open.clear();
  }
  // Folds a state into the span that is not complete yet.
  WS_INLINE void take_one(int slot) {
    const float2 next = weight(slot);
    const float4* from = sums(slot);
    open.take(fold_of(open.m, next.x), next.y, [&](int i) { return from[piece(i)]; });
  }
  // Folds the states in slots from `first` to below `last`: spans, or segments from the first of a span on. Those before
  // `present` are missing.
  WS_INLINE void take_slots(int first, int present, int last, bool segments) {
    const int lane = threadIdx.x % 32;
    for (int base = first; base < last; base += batch) {
      const int count = min(last - base, batch), own = base + lane;
      for (int i = lane; i < count * kPieces; i += 32) {
        const int slot = base + i / kPieces;
        copy_async(shared_address(staged + i), sums(slot) + i % kPieces, slot >= present);
      }
      commit_copies();
      const float2 next = own >= present && own < last ? weight(own) : float2{minus_infinity(), 0.0f};
      const Fold f = fold_of_lane(segments ? minus_infinity() : total.m, next.x, segments);
      wait_copies<0>();
      __syncwarp();
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const Fold taken = {__shfl_sync(kAllLanes, f.m, i), __shfl_sync(kAllLanes, f.keep, i), __shfl_sync(kAllLanes, f.add, i)};
        const float l = __shfl_sync(kAllLanes, next.y, i);
        (segments ? open : total).take(taken, l, [&](int j) { return staged[i * kPieces + piece(j)]; });
        if (segments && (i % kSegments == kSegments - 1 || i == count - 1)) close();
      }
      // The next states overwrite these.
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1) paged_attention_merge(const PagedParams p) {
  begin_kernel();
  if (has_no_states(p)) return;
  const int warp = threadIdx.x / 32;
  const i64 index = (i64)blockIdx.x * kWarps + warp;
  if (index >= (i64)p.num_tokens * p.num_heads) return;
  const int token = (int)(index / p.num_heads), head = (int)(index % p.num_heads);
  int r;
  Request request;
  if (!find_request<32>(p, token, r, request)) return;
  const int batch = min(p.ranges, kBatch);
  Merge row = {p, token, head, batch, values + warp * batch * kPieces};
  row.total.clear(), row.open.clear();
  if (p.range_keys == kSegment) {
    const Keys keys = keys_of(p, request, token - request.first);
    const int first = keys.lo / kSpan * kSegments, present = keys.lo / kSegment;
    row.take_slots(first, present, keys.lo < keys.hi ? (keys.hi + kSegment - 1) / kSegment : first, true);
  } else {
    // The keys of each level, and then those of the request alone.
    int from = 0;
    for (int level = 0; level <= p.levels; ++level) {
      const Keys keys = level < p.levels ? Keys{from, shared_upto(p, level + 1, r)} : keys_of(p, request, token - request.first);
      if (keys.lo >= keys.hi) continue;
      from = keys.hi;
      int first = keys.lo / kSpan;
      // A window may begin inside a span too, but only levels leave segments.
      if (level > 0 && keys.lo % kSpan) {
        const int last = min((keys.hi + kSegment - 1) / kSegment, ++first * kSegments);
        for (int segment = keys.lo / kSegment; segment < last; ++segment) row.take_one(slot_of_segment(level, segment));
        if (last == first * kSegments) row.close();
      }
      const int whole = level < p.levels ? keys.hi / kSpan : (keys.hi + kSpan - 1) / kSpan;
      row.take_slots(slot_of_span(level, first), 0, slot_of_span(level, whole), false);
      if (first <= whole && whole * kSpan < keys.hi) row.take_one(slot_of_span(level, whole));
    }
    row.close();
  }
  const Finish finish = finish_of(p, head, row.total.m, row.total.l);
  ELEM* out = (ELEM*)p.out + token_at(p, token, p.out_batch, p.out_token) + head * p.out_head;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int piece = threadIdx.x % 32 + 32 * i;
    const float4& o = row.total.o[i];
    struct alignas(4 * sizeof(ELEM)) Four {
      ELEM x, y, z, w;
    };
    if (piece < kPieces)
      ((Four*)out)[piece] = {from_f32<ELEM>(o.x * finish.factor), from_f32<ELEM>(o.y * finish.factor),
                             from_f32<ELEM>(o.z * finish.factor), from_f32<ELEM>(o.w * finish.factor)};
  }
  if (threadIdx.x % 32 == 0) write_lse(p, token, head, finish.lse);
}
#endif
