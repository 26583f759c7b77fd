// The second half of `paged_attention` where the keys of a request were shared out over blocks: the states of a row are
// folded in order, those of segments (p.range_keys is kSegment) first to spans. A block has one row, and a thread
// elements d, d + kThreads and so on. States come through shared memory, up to kBatch at once.
//
// ELEM: type of out.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"

constexpr int kThreads = 128, kEach = (HEAD_DIM + kThreads - 1) / kThreads, kBatch = 64;
constexpr int kSegments = kSpan / kSegment;
static_assert(32 % kSegments == 0, "a warp works out the factors of whole spans");

extern __shared__ __align__(16) float values[];

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

extern "C" __global__ void __launch_bounds__(kThreads) paged_attention_merge(const PagedParams p) {
  __shared__ float2 weights[kBatch];
  begin_kernel();
  const int token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, lane = threadIdx.x % 32;
  int index;
  Request request;
  if (!find_request<kThreads>(p, token, index, request)) return;
  const Keys keys = keys_of(p, request, token - request.first);
  const bool segments = p.range_keys == kSegment;
  const int first = keys.lo / kSpan * (segments ? kSegments : 1), last = (keys.hi + p.range_keys - 1) / p.range_keys;
  const int nothing = keys.lo / p.range_keys;  // ranges before this one were not worked on

  Total span, total;
  span.clear(), total.clear();
  for (int base = first; base < last; base += kBatch) {
    const int count = min(last - base, kBatch);
    for (int index = threadIdx.x; index < count * (HEAD_DIM / 4); index += kThreads) {
      const int range = base + index / (HEAD_DIM / 4), piece = index % (HEAD_DIM / 4);
      const float* from = partial_sums(p, partial_row(p, range, token, head)) + 4 * piece;
      copy_async(shared_address(values + 4 * index), from, range >= nothing);
    }
    commit_copies();
    if (threadIdx.x < kBatch) {
      const int range = base + threadIdx.x;
      const bool some = range >= nothing && range < last;
      weights[threadIdx.x] = some ? *partial_weights(p, partial_row(p, range, token, head)) : float2{minus_infinity(), 0.0f};
    }
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += 32) {
      // Lane i has the factors of the i-th state: those of segments begin anew with each span.
      const float2 own = weights[chunk + lane];
      float most = own.x;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, most, offset);
        if (lane >= offset && (!segments || lane % kSegments >= offset)) most = fmaxf(most, other);
      }
      if (!segments) most = fmaxf(most, total.m);
      float before = __shfl_up_sync(0xffffffffu, most, 1);
      if (lane == 0 || (segments && lane % kSegments == 0)) before = segments ? minus_infinity() : total.m;
      const Fold own_fold = fold_of(before, own.x);
      const int states = min(count - chunk, 32);
#pragma unroll 8
      for (int i = 0; i < states; ++i) {
        const Fold f = {__shfl_sync(0xffffffffu, own_fold.m, i), __shfl_sync(0xffffffffu, own_fold.keep, i),
                        __shfl_sync(0xffffffffu, own_fold.add, i)};
        const float l = __shfl_sync(0xffffffffu, own.y, i);
        // Threads without an element take the last one.
        auto next = [&](int j) {
          return values[(chunk + i) * HEAD_DIM + min((int)threadIdx.x + j * kThreads, HEAD_DIM - 1)];
        };
        if (!segments) {
          total.take(f, l, next);
          continue;
        }
        span.take(f, l, next);
        if (i % kSegments == kSegments - 1 || i == states - 1) {
          total.take(fold_of(total.m, span.m), span.l, [&](int j) { return span.o[j]; });
          span.clear();
        }
      }
    }
    __syncthreads();
  }
  const Finish finish = finish_of(p, head, total.m, total.l);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = threadIdx.x + i * kThreads;
    if (d < HEAD_DIM) ((ELEM*)p.out)[token * p.out_token + head * p.out_head + d * p.out_dim] = from_f32<ELEM>(total.o[i] * finish.factor);
  }
  if (threadIdx.x == 0) write_lse(p, token, head, finish.lse);
}
