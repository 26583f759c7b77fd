#pragma once
// What all CUDA kernels of `paged_attention` share: which keys a query sees, how partial results are joined, and how the
// final result is computed. The prelude declares PagedParams.
//
// A row is one query head of one token. Its result over a range of keys is a state: m, the largest score, multiplied by
// log2 e; l, the sum of 2^(score - m); and o, the sum of 2^(score - m) v. Keys are processed in segments of kSegment,
// counted from key 0, and kSegments segments are a span. The states of the segments of a span are folded from left to
// right, and then those of the spans. However keys are distributed over warps, blocks and launches, this order stays the
// same, and with it every bit of a row.
//
// Define DENSE: there are no pages, but a batch of p.requests requests of equal length, whose keys are contiguous.

#include "warpsmith/division.cuh"
#include "warpsmith/math.cuh"

#ifndef DENSE
#define DENSE 0
#endif

namespace warpsmith::paged {

constexpr int kSegment = 128, kSpan = 1024, kSegments = kSpan / kSegment;
constexpr float kLn2 = 0.6931471805599453f;

// Shared prefixes: at each of p.levels levels, groups of neighbouring requests begin with the same keys. A launch works on
// the groups of one level (p.level), over the keys that no earlier level covers; the last launch works on the keys of
// requests that no level covers. Without levels, that is the only launch.
WS_INLINE int group_start(const PagedParams& p, int level, int g) {
  return min(max(((const i32*)p.group_starts)[level * p.group_level + g * p.group_step], 0), p.all_requests);
}
// Shared keys end where segments do.
WS_INLINE int shared_len(const PagedParams& p, int level, int g) {
  return min(max(((const i32*)p.prefix_lens)[level * p.prefix_level + g * p.prefix_step], 0), p.max_keys) / kSegment * kSegment;
}
// The number of keys of request r that the first `levels` levels cover.
WS_INLINE int shared_upto(const PagedParams& p, int levels, int r) {
  int keys = 0;
  for (int level = 0; level < levels; ++level) {
    int lo = 0, hi = p.groups;
    while (lo < hi) {
      const int middle = (lo + hi) / 2;
      if (group_start(p, level, middle + 1) <= r) lo = middle + 1;
      else hi = middle;
    }
    if (lo == p.groups) continue;
    const int first = group_start(p, level, lo), len = shared_len(p, level, lo);
    if (first <= r) keys = max(keys, len);
  }
  return keys;
}

// A request, or a group of them: its first token, the number of its queries, its keys from `from` to below `kv_len`, and
// its row of the page table. No input is trusted: everything is clamped to the tensors.
struct Request {
  int first, count, from, kv_len, row;
};
WS_INLINE int start_at(const PagedParams& p, int r) {
  if (p.queries >= 0) return r * p.queries;
  return min(max(((const i32*)p.q_starts)[r * p.q_starts_step], 0), p.num_tokens);
}
WS_INLINE Request request_at(const PagedParams& p, int r) {
  const bool group = p.level < p.levels;
  Request request;
  request.row = group ? group_start(p, p.level, r) : r;
  if (DENSE)
    request.kv_len = p.max_keys;
  else
    request.kv_len = group ? shared_len(p, p.level, r) : min(max(((const i32*)p.kv_lens)[r * p.kv_lens_step], 0), p.max_keys);
  request.first = start_at(p, request.row);
  // A group that ends before it begins has no requests, and a group past the last request has no row of the table.
  const int end = group ? max(group_start(p, p.level, r + 1), request.row) : r + 1;
  request.count = max(start_at(p, end) - request.first, 0);
  request.from = shared_upto(p, p.level, request.row);
  return request;
}

// The offset of a token in a tensor with `step` elements between tokens and, if DENSE, `batch` between requests.
WS_INLINE i64 token_at(const PagedParams& p, int token, i64 batch, i64 step) {
  if (!DENSE) return token * step;
  const int b = token / p.queries;
  return b * batch + (token - b * p.queries) * step;
}

// Finds the request of a token; executed by a block of kThreads threads or, if kThreads is 32, by each warp. Returns false
// for tokens before the first start or after the last, and for requests whose number of queries belongs to another launch.
template <int kThreads> WS_INLINE bool find_request(const PagedParams& p, int token, int& index, Request& request) {
  index = 0;
  if (p.queries < 0) {
    for (int base = 0; base < p.requests; base += kThreads) {
      const int i = base + threadIdx.x % kThreads;
      const bool after = i < p.requests && start_at(p, i + 1) <= token;
      index += kThreads == 32 ? __popc(__ballot_sync(0xffffffffu, after)) : __syncthreads_count(after);
    }
  } else {
    index = token / p.queries;
  }
  if (index >= p.requests) return false;
  request = request_at(p, index);
  const bool inside = token >= request.first && token < request.first + request.count;
  return inside && request.count >= p.min_queries && request.count <= p.max_queries;
}

// The keys from lo to below hi.
struct Keys {
  int lo, hi;
};
// What query i of a request sees, of the keys this launch works on.
WS_INLINE Keys keys_of(const PagedParams& p, const Request& request, int i) {
  const int position = request.kv_len - request.count + i;
  const int hi = p.causal ? max(position + 1, 0) : request.kv_len;
  return {min(max(p.window > 0 ? position - p.window : 0, request.from), hi), hi};
}

// The page of a key.
WS_INLINE int page_of(const PagedParams& p, int key) { return (int)divide((u32)key, p.page_magic, p.page_shift); }

// How a state with maximum `m` is joined with the next one: both sums are multiplied before they are added.
struct Fold {
  float m, keep, add;
};
WS_INLINE Fold fold_of(float m, float next) {
  const float most = fmaxf(m, next);
  // If neither has seen a key: minus infinity minus itself would be NaN.
  const float base = most == minus_infinity() ? 0.0f : most;
  return {most, exp2_approx(m - base), exp2_approx(next - base)};
}
// Callers skip states with l = 0, whose o may be anything, or make sure that it is zero.
WS_INLINE float folded(const Fold& f, float sum, float next) { return fmaf(next, f.add, sum * f.keep); }

// The sink of a head in units of log2 e, as a score; minus infinity without sinks.
WS_INLINE float sink_of(const PagedParams& p, int head) {
  return p.sinks ? ((const float*)p.sinks)[head * p.sinks_step] * kLog2E : minus_infinity();
}
WS_INLINE float scale_of(u64 scales, i64 step, int kv_head) { return scales ? ((const float*)scales)[kv_head * step] : 1.0f; }

// What is stored for a row, from the state of all its keys: the factor that turns o into the result (zero for a row that
// has seen nothing), and the logarithm of the sum of exponentials.
struct Finish {
  float factor, lse;
};
WS_INLINE Finish finish_of(const PagedParams& p, int head, float m, float l) {
  const Fold f = fold_of(m, sink_of(p, head));
  const float sum = folded(f, l, 1.0f);
  const float scale = scale_of(p.v_scale, p.v_scale_step, head / p.group);
  return {l == 0.0f ? 0.0f : f.keep * (scale / sum), sum == 0.0f ? minus_infinity() : fmaf(f.m, kLn2, logf(sum))};
}
WS_INLINE void write_lse(const PagedParams& p, int token, int head, float lse) {
  if (p.lse) ((float*)p.lse)[token_at(p, token, p.lse_batch, p.lse_token) + head * p.lse_head] = lse;
}

// The states of a row that wait for the merge: for each, o in HEAD_DIM floats, m and l in two. A row has up to p.ranges
// of them, in slots. Without shared prefixes they are its segments or its spans. With shared prefixes, a level leaves
// spans, of which the last may be incomplete; the next level then leaves segments up to the end of that span, and the
// merge folds them onto it. The slots of these segments come after the spans of the level before and before the spans of
// their own level.
WS_INLINE bool is_cut(const Request& request, int span) {
  return request.from % kSpan != 0 && span == request.from / kSpan;
}
WS_INLINE int slot_of_span(int level, int span) { return span + level * kSegments; }
WS_INLINE int slot_of_segment(int level, int segment) {
  return slot_of_span(level - 1, segment / kSegments) + 1 + segment % kSegments;
}
WS_INLINE i64 partial_row(const PagedParams& p, int range, int token, int head) {
  return ((i64)range * p.num_tokens + token) * p.num_heads + head;
}
WS_INLINE float* partial_sums(const PagedParams& p, i64 row) { return (float*)p.partial + row * HEAD_DIM; }
WS_INLINE float2* partial_weights(const PagedParams& p, i64 row) {
  return (float2*)((float*)p.partial + (i64)p.ranges * p.num_tokens * p.num_heads * HEAD_DIM) + row;
}

}  // namespace warpsmith::paged
