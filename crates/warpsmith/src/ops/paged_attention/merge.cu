// The second half of `paged_attention` where the keys of a request were shared out over blocks: the states of a row are
// folded in order, those of segments (p.range_keys is kSegment) first to spans. A block has one row, and a thread
// elements d, d + kThreads and so on. States come through shared memory, up to kBatch at once.
//
// ELEM: type of out.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/reduce.cuh"

constexpr int kThreads = 128, kEach = (HEAD_DIM + kThreads - 1) / kThreads, kBatch = 64;
constexpr int kSegments = kSpan / kSegment;
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

extern "C" __global__ void __launch_bounds__(kThreads) paged_attention_merge(const PagedParams p) {
  __shared__ float2 weights[kBatch];
  __shared__ Step steps[kBatch];
  begin_kernel();
  const int token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  int index;
  Request request;
  if (!find_request<kThreads>(p, token, index, request)) return;
  const bool segments = p.range_keys == kSegment;
  Total span, total;
  total.clear();
  // What each level has of the row, and then what is the request's own.
  for (int level = 0; level <= p.levels; ++level) {
    Keys keys;
    if (level < p.levels)
      keys = {shared_upto(p, level, index), shared_upto(p, level + 1, index)};
    else
      keys = keys_of(p, request, token - request.first);
    const int first = keys.lo / kSpan * (segments ? kSegments : 1) + level;
    const int last = keys.lo < keys.hi ? (keys.hi + p.range_keys - 1) / p.range_keys + level : first;
    const int nothing = keys.lo / p.range_keys + level;  // ranges before this one were not worked on
    for (int base = first; base < last; base += kBatch) {
      const int count = min(last - base, kBatch);
      for (int i = threadIdx.x; i < count * (HEAD_DIM / 4); i += kThreads) {
        const int range = base + i / (HEAD_DIM / 4), piece = i % (HEAD_DIM / 4);
        const float* from = partial_sums(p, partial_row(p, range, token, head)) + 4 * piece;
        copy_async(shared_address(values + 4 * i), from, range >= nothing);
      }
      commit_copies();
      if (threadIdx.x < kBatch) {
        const int range = base + threadIdx.x;
        const bool some = range >= nothing && range < last;
        weights[threadIdx.x] = some ? *partial_weights(p, partial_row(p, range, token, head)) : float2{minus_infinity(), 0.0f};
      }
      __syncthreads();
      if (threadIdx.x < kBatch) steps[threadIdx.x] = step_of(weights, total.m, segments);
      wait_copies<0>();
      __syncthreads();
      for (int start = 0; start < count; start += kSegments) {
        if (segments) span.clear();
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          if (start + i >= count) break;
          const Step step = steps[start + i];
          const Fold f = {step.m, step.keep, step.add};
          // Threads without an element take the last one.
          auto next = [&](int j) {
            return values[(start + i) * HEAD_DIM + min((int)threadIdx.x + j * kThreads, HEAD_DIM - 1)];
          };
          if (segments)
            span.take(f, step.l, next);
          else
            total.take(f, step.l, next);
        }
        if (segments) total.take(fold_of(total.m, span.m), span.l, [&](int j) { return span.o[j]; });
      }
      __syncthreads();
    }
  }
  const Finish finish = finish_of(p, head, total.m, total.l);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = threadIdx.x + i * kThreads;
    if (d < HEAD_DIM) ((ELEM*)p.out)[token * p.out_token + head * p.out_head + d * p.out_dim] = from_f32<ELEM>(total.o[i] * finish.factor);
  }
  if (threadIdx.x == 0) write_lse(p, token, head, finish.lse);
}
