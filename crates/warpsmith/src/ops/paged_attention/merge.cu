// The second half of `paged_attention` where the keys of a request were shared out over blocks or launches: the states of
// a row are folded in order, those of segments first to spans. A block has one row, and a thread elements d, d + kThreads
// and so on. States come through shared memory, up to kBatch at once.
//
// ELEM: type of out. HEAD_DIM, DENSE.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/reduce.cuh"

constexpr int kThreads = 128, kEach = (HEAD_DIM + kThreads - 1) / kThreads, kBatch = 64;
static_assert(32 % kSegments == 0, "a warp works out the factors of whole spans");

extern __shared__ __align__(16) float values[];

// How a state is taken up, and its sum of weights.
struct alignas(16) Step {
  float keep, add, l, m;
};

// A sum of this thread's elements. States without weight are zeros, and their factors change nothing: no branch is worth
// the wait for it.
struct Total {
  float m, l, o[kEach];
  WS_INLINE void clear() {
    m = minus_infinity(), l = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = 0.0f;
  }
  template <class Next> WS_INLINE void take(const Fold& f, float next_l, Next next) {
    m = f.m, l = folded(f, l, next_l);
#pragma unroll
    for (int i = 0; i < kEach; ++i) o[i] = folded(f, o[i], next(i));
  }
};

// The states of the ranges from `base` on, as their threads have them: thread i that of the i-th. Works out how each is
// taken up: after those before it of its span, if they are `segments`, else after `m` and all before it.
WS_INLINE Step step_of(const float2* weights, float m, bool segments) {
  const int lane = threadIdx.x % 32;
  const float2 own = weights[threadIdx.x];
  float upto = own.x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset && (!segments || lane % kSegments >= offset)) upto = fmaxf(upto, other);
  }
  // The second warp's states come after those of the first.
  float before = segments ? minus_infinity() : m;
  if (!segments && threadIdx.x >= 32) before = fmaxf(before, warp_reduce<Max>(weights[lane].x));
  const float previous = __shfl_up_sync(0xffffffffu, upto, 1);
  const bool begins = lane == 0 || (segments && lane % kSegments == 0);
  const Fold f = fold_of(begins ? before : fmaxf(before, previous), own.x);
  return {f.keep, f.add, own.y, f.m};
}

// What a thread has of a row whose states are taken up one after the other.
struct Merge {
  const PagedParams& p;
  int token, head;
  // The keys up to here; and of the span that a level has not finished, those after them.
  Total total, open;

  // The element j of a state's sums; threads without one take the last.
  static WS_INLINE int element(int j) { return min((int)threadIdx.x + j * kThreads, HEAD_DIM - 1); }
  WS_INLINE void close() {
    total.take(fold_of(total.m, open.m), open.l, [&](int j) { return open.o[j]; });
    open.clear();
  }
  // Goes on with the span that is not finished.
  WS_INLINE void go_on(int slot) {
    const i64 row = partial_row(p, slot, token, head);
    const float2 weight = *partial_weights(p, row);
    const float* sums = partial_sums(p, row);
    open.take(fold_of(open.m, weight.x), weight.y, [&](int j) { return sums[element(j)]; });
  }
  // The states in the slots from `first` to below `last`: spans, or segments from the first of a span on. There are none
  // before `present`.
  WS_INLINE void take_slots(int first, int present, int last, bool segments, float2* weights, Step* steps) {
    for (int base = first; base < last; base += kBatch) {
      const int count = min(last - base, kBatch);
      for (int i = threadIdx.x; i < count * (HEAD_DIM / 4); i += kThreads) {
        const int slot = base + i / (HEAD_DIM / 4), piece = i % (HEAD_DIM / 4);
        const float* from = partial_sums(p, partial_row(p, slot, token, head)) + 4 * piece;
        copy_async(shared_address(values + 4 * i), from, slot >= present);
      }
      commit_copies();
      if (threadIdx.x < kBatch) {
        const int slot = base + threadIdx.x;
        const bool some = slot >= present && slot < last;
        weights[threadIdx.x] = some ? *partial_weights(p, partial_row(p, slot, token, head)) : float2{minus_infinity(), 0.0f};
      }
      __syncthreads();
      if (threadIdx.x < kBatch) steps[threadIdx.x] = step_of(weights, total.m, segments);
      wait_copies<0>();
      __syncthreads();
      for (int start = 0; start < count; start += kSegments) {
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          if (start + i >= count) break;
          const Step step = steps[start + i];
          const Fold f = {step.m, step.keep, step.add};
          auto next = [&](int j) { return values[(start + i) * HEAD_DIM + element(j)]; };
          if (segments)
            open.take(f, step.l, next);
          else
            total.take(f, step.l, next);
        }
        if (segments) close();
      }
      // The next states take the place of these.
      __syncthreads();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads) paged_attention_merge(const PagedParams p) {
  __shared__ float2 weights[kBatch];
  __shared__ Step steps[kBatch];
  begin_kernel();
  const int token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  int index;
  Request request;
  if (!find_request<kThreads>(p, token, index, request)) return;
  Merge row = {p, token, head};
  row.total.clear(), row.open.clear();
  if (p.range_keys == kSegment) {
    const Keys keys = keys_of(p, request, token - request.first);
    const int first = keys.lo / kSpan * kSegments, present = keys.lo / kSegment;
    const int last = keys.lo < keys.hi ? (keys.hi + kSegment - 1) / kSegment : first;
    row.take_slots(first, present, last, true, weights, steps);
  } else {
    // What each level has of the row, and then what is the request's own.
    int from = 0;
    for (int level = 0; level <= p.levels; ++level) {
      const Keys keys = level < p.levels ? Keys{from, shared_upto(p, level + 1, index)} : keys_of(p, request, token - request.first);
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
      row.take_slots(slot_of_span(level, first), 0, slot_of_span(level, whole), false, weights, steps);
      if (first <= whole && whole * kSpan < keys.hi) row.go_on(slot_of_span(level, whole));
    }
    row.close();
  }
  const Finish finish = finish_of(p, head, row.total.m, row.total.l);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = threadIdx.x + i * kThreads;
    if (d < HEAD_DIM)
      ((ELEM*)p.out)[token_at(p, token, p.out_batch, p.out_token) + head * p.out_head + d * p.out_dim] =
          from_f32<ELEM>(row.total.o[i] * finish.factor);
  }
  if (threadIdx.x == 0) write_lse(p, token, head, finish.lse);
}
