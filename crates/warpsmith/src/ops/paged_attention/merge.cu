// The second half of `paged_attention` where the keys of a request were shared out over blocks or launches: the states of
// a row are folded in order, those of segments first to spans.
//
// A warp has one row, or, where states are those of segments, a block has, whose warps share its spans. A lane has the
// elements 4 lane to 4 lane + 3 and those 128 further on. States come through shared memory, up to kBatch at once; lane i
// works out how the i-th of them is taken up.
//
// ELEM: type of out, whose heads are dense. HEAD_DIM, DENSE.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"

constexpr int kWarps = 4, kPieces = HEAD_DIM / 4, kEach = (kPieces + 31) / 32;
// As many whole spans as the states of which every device has room for.
constexpr int kFits = 3072 / HEAD_DIM / kSegments * kSegments, kBatch = kFits < 32 ? kFits : 32;

extern __shared__ __align__(16) float4 values[];

WS_INLINE float4 folded(const Fold& f, const float4& sum, const float4& next) {
  return {folded(f, sum.x, next.x), folded(f, sum.y, next.y), folded(f, sum.z, next.z), folded(f, sum.w, next.w)};
}

// A sum of this lane's elements. States without weight are zeros, and their factors change nothing: no branch is worth the
// wait for it.
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

// How the state of this lane is taken up, whose largest score is m: after `before` and the lanes before it, or, of
// segments, after those of its span.
WS_INLINE Fold fold_of_lane(float before, float m, bool segments) {
  const int lane = threadIdx.x % 32, first = segments ? lane % kSegments : lane;
  float upto = m;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, upto, offset);
    if (first >= offset) upto = fmaxf(upto, other);
  }
  const float previous = __shfl_up_sync(0xffffffffu, upto, 1);
  return fold_of(first == 0 ? before : fmaxf(before, previous), m);
}

struct Merge {
  const PagedParams& p;
  int token, head, batch;
  // The keys up to here; and of the span that is not finished, those after them.
  Total total, open;

  // The piece i of a lane; lanes without one take the last.
  static WS_INLINE int piece(int i) { return min((int)threadIdx.x % 32 + 32 * i, kPieces - 1); }
  WS_INLINE const float4* sums(int slot) const { return (const float4*)partial_sums(p, partial_row(p, slot, token, head)); }
  WS_INLINE float2 weight(int slot) const { return *partial_weights(p, partial_row(p, slot, token, head)); }
  WS_INLINE void close() {
    total.take(fold_of(total.m, open.m), open.l, [&](int i) { return open.o[i]; });
    open.clear();
  }
  // Goes on with the span that is not finished.
  WS_INLINE void go_on(int slot) {
    const float2 next = weight(slot);
    const float4* from = sums(slot);
    open.take(fold_of(open.m, next.x), next.y, [&](int i) { return from[piece(i)]; });
  }
  // Goes through the states in the slots from `first` to below `last`, at most `batch`; there are none before `present`.
  // Gives each to `take`, with how it is taken up.
  template <class Take> WS_INLINE void go_through(int first, int present, int last, float before, bool segments, Take take) {
    const int lane = threadIdx.x % 32, count = last - first, own = first + lane;
    float4* staged = values + threadIdx.x / 32 * batch * kPieces;
    for (int i = lane; i < count * kPieces; i += 32) {
      const int slot = first + i / kPieces;
      copy_async(shared_address(staged + i), sums(slot) + i % kPieces, slot >= present);
    }
    commit_copies();
    const float2 next = own >= present && own < last ? weight(own) : float2{minus_infinity(), 0.0f};
    const Fold f = fold_of_lane(before, next.x, segments);
    wait_copies<0>();
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const Fold taken = {__shfl_sync(0xffffffffu, f.m, i), __shfl_sync(0xffffffffu, f.keep, i), __shfl_sync(0xffffffffu, f.add, i)};
      take(i, taken, __shfl_sync(0xffffffffu, next.y, i), [&](int j) { return staged[i * kPieces + piece(j)]; });
    }
    // Other states take the place of these.
    __syncwarp();
  }
  WS_INLINE void take_spans(int first, int last) {
    for (int base = first; base < last; base += batch)
      go_through(base, base, min(base + batch, last), total.m, false,
                 [&](int, const Fold& f, float l, auto next) { total.take(f, l, next); });
  }
  // Every warp folds some spans; all take up what all have folded.
  WS_INLINE void take_segments(Keys keys) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = max(batch / kSegments, 1);
    float4* spans = values + kWarps * batch * kPieces;
    float2* weights = (float2*)(spans + kWarps * each * kPieces);
    const int end = keys.lo < keys.hi ? (keys.hi + kSpan - 1) / kSpan : 0;
    for (int base = keys.lo / kSpan; base < end; base += kWarps * each) {
      const int first = base + warp * each, last = min((first + each) * kSegments, (keys.hi + kSegment - 1) / kSegment);
      if (first < end)
        go_through(first * kSegments, keys.lo / kSegment, last, minus_infinity(), true, [&](int i, const Fold& f, float l, auto next) {
          open.take(f, l, next);
          if (i % kSegments < kSegments - 1 && first * kSegments + i < last - 1) return;
          const int span = warp * each + i / kSegments;
#pragma unroll
          for (int j = 0; j < kEach; ++j)
            if (lane + 32 * j < kPieces) spans[span * kPieces + lane + 32 * j] = open.o[j];
          if (lane == 0) weights[span] = {open.m, open.l};
          open.clear();
        });
      __syncthreads();
      for (int i = 0; i < min(end - base, kWarps * each); ++i)
        total.take(fold_of(total.m, weights[i].x), weights[i].y, [&](int j) { return spans[i * kPieces + piece(j)]; });
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1) paged_attention_merge(const PagedParams p) {
  begin_kernel();
  const bool segments = p.range_keys == kSegment;
  const i64 index = segments ? (i64)blockIdx.x : (i64)blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= (i64)p.num_tokens * p.num_heads) return;
  const int token = (int)(index / p.num_heads), head = (int)(index % p.num_heads);
  int r;
  Request request;
  if (!find_request<32>(p, token, r, request)) return;
  Merge row = {p, token, head, min(p.ranges, kBatch)};
  row.total.clear(), row.open.clear();
  if (segments) {
    row.take_segments(keys_of(p, request, token - request.first));
    if (threadIdx.x >= 32) return;
  } else {
    // What each level has of the row, and then what is the request's own.
    int from = 0;
    for (int level = 0; level <= p.levels; ++level) {
      const Keys keys = level < p.levels ? Keys{from, shared_upto(p, level + 1, r)} : keys_of(p, request, token - request.first);
      if (keys.lo >= keys.hi) continue;
      from = keys.hi;
      int first = keys.lo / kSpan;
      // A window begins where it likes: only levels cut spans.
      if (level > 0 && keys.lo % kSpan) {
        const int last = min((keys.hi + kSegment - 1) / kSegment, ++first * kSegments);
        for (int segment = keys.lo / kSegment; segment < last; ++segment) row.go_on(slot_of_segment(level, segment));
        if (last == first * kSegments) row.close();
      }
      const int whole = level < p.levels ? keys.hi / kSpan : (keys.hi + kSpan - 1) / kSpan;
      row.take_spans(slot_of_span(level, first), slot_of_span(level, whole));
      if (first <= whole && whole * kSpan < keys.hi) row.go_on(slot_of_span(level, whole));
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
