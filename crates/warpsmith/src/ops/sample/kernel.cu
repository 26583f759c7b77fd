// A token for each row of logits: see mod.rs for what is drawn, and arithmetic.rs for the operations, which are the
// same here. Every one that decides about a token is written with its rounding, so that the compiler fuses none.
//
// Threads to data: block b has row b; its threads take columns in turn, neighbours neighbouring ones, in several
// passes over the row, which L2 holds. Comparisons are of whole numbers, and so are sums that decide: no order shows.
//
// Defines: ELEM (element type).

#include "warpsmith/random.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct Largest {
  static WS_INLINE u64 join(u64 a, u64 b) { return a > b ? a : b; }
};

// Over the block; every thread gets the result. Begins with a barrier, so that scratch may be used again.
template <class R> WS_INLINE u64 block_join(u64 x, u64* scratch) {
  x = warp_reduce<R>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_reduce<R, kWarps>(scratch[threadIdx.x % kWarps]);
}

struct Row {
  const T* at;
  i64 step;

  WS_INLINE float operator[](int j) const { return clean(to_f32(at[j * step])); }
};

// The largest of a row above the bits of its first place, flipped.
WS_INLINE u64 largest(const Row& row, int vocab, u64* scratch) {
  u64 best = 0;
  // Few rows have few blocks: loads in flight are what hides the latency of L2.
#pragma unroll 8
  for (int j = threadIdx.x; j < vocab; j += kThreads)
    best = Largest::join(best, (u64)ordered_bits(row[j]) << 32 | ~(u32)j);
  return block_join<Largest>(best, scratch);
}

// The tokens that remain: their weights and their logits are at least these.
struct Remaining {
  float most, inverse, least_weight;
  u32 least_key;

  // The weight, or zero.
  WS_INLINE float of(float logit) const {
    const float e = decisive_exp(__fmul_rn(__fsub_rn(logit, most), inverse));
    return e >= least_weight && ordered_bits(logit) >= least_key ? e : 0.0f;
  }
};

// What one token adds to the sum of those that remain: one, or its weight.
template <bool kCount> WS_INLINE u64 share(float e) { return e == 0.0f ? 0 : kCount ? 1 : whole_weight(e); }

template <bool kCount> WS_INLINE u64 total(const Row& row, int vocab, const Remaining& left, u64* scratch) {
  u64 sum = 0;
#pragma unroll 4
  for (int j = threadIdx.x; j < vocab; j += kThreads) sum += share<kCount>(left.of(row[j]));
  return block_join<Sum>(sum, scratch);
}

// The largest key from which on the shares of tokens are `missing` together, found eight bits at a time. The shares of
// a digit are added in `sums`; lanes with the same digit add theirs first. `found` holds a digit and what is missing in
// it.
template <bool kCount>
WS_INLINE u32 select(const Row& row, int vocab, const Remaining& left, u64 missing, u64* sums, u64* found) {
  u32 key = 0, known = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += kThreads) sums[i] = 0;
    __syncthreads();
    // All lanes of a warp go on together.
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 32; first < vocab; first += kThreads) {
      const int j = first + threadIdx.x % 32;
      const float logit = j < vocab ? row[j] : minus_infinity();
      const u32 own = ordered_bits(logit);
      const bool fits = j < vocab && (own & known) == key;
      const u64 mine = fits ? share<kCount>(left.of(logit)) : 0;
      const u32 digit = own >> shift & 255;
      u32 todo = __ballot_sync(kAllLanes, mine > 0);
      while (todo) {
        const int leader = __ffs((int)todo) - 1;
        const u32 wanted = __shfl_sync(kAllLanes, digit, leader);
        const bool same = mine > 0 && digit == wanted;
        const u64 sum = warp_reduce<Sum>(same ? mine : (u64)0);
        if ((int)(threadIdx.x % 32) == leader) atomicAdd(&sums[wanted], sum);
        todo &= ~__ballot_sync(kAllLanes, same);
      }
    }
    __syncthreads();
    // A lane has eight digits, the first lane the highest.
    if (threadIdx.x < 32) {
      const int high = 255 - 8 * (int)threadIdx.x;
      u64 own = 0;
      for (int i = 0; i < 8; ++i) own += sums[high - i];
      const u64 up_to = warp_scan<Sum>(own, (int)threadIdx.x);
      const u64 above = up_to - own;
      if (above < missing && missing <= up_to) {
        u64 need = missing - above;
        int digit = high;
        while (digit > high - 7 && sums[digit] < need) need -= sums[digit--];
        found[0] = (u64)digit;
        found[1] = need;
      }
    }
    __syncthreads();
    key |= (u32)found[0] << shift;
    known |= 255u << shift;
    missing = found[1];
  }
  return key;
}

WS_INLINE void log_probability(const SampleParams& p, const Row& raw, int token, u64* scratch) {
  const float most = ordered_number((u32)(largest(raw, p.vocab, scratch) >> 32));
  float sum[1] = {0.0f};
#pragma unroll 4
  for (int j = threadIdx.x; j < p.vocab; j += kThreads) sum[0] += expf(raw[j] - most);
  __syncthreads();
  block_reduce<Sum, kThreads>(sum, (float*)scratch);
  if (threadIdx.x == 0)
    ((float*)p.logprob)[blockIdx.x * p.logprob_step] = (raw[token] - most) - logf(sum[0]);
}

extern "C" __global__ void __launch_bounds__(kThreads) sample(const SampleParams p) {
  begin_kernel();
  __shared__ u64 scratch[kWarps];
  __shared__ u64 sums[256];
  __shared__ u64 found[2];
  const i64 index = blockIdx.x;
  const Row row{(const T*)p.logits + index * p.logits_row, p.logits_step};
  const u64 top = largest(row, p.vocab, scratch);
  const float most = ordered_number((u32)(top >> 32));
  if (most == minus_infinity()) {
    if (threadIdx.x > 0) return;
    ((i32*)p.token)[index * p.token_step] = -1;
    if (p.logprob) ((float*)p.logprob)[index * p.logprob_step] = bits_float(0x7fc00000u);
    return;
  }
  int token = (int)~(u32)top;
  const float temperature = p.temperature ? ((const float*)p.temperature)[index * p.temperature_step] : 1.0f;
  if (temperature >= 1e-5f) {
    Remaining left{most, __fdiv_rn(1.0f, temperature), 1.0f / kWeightUnit, 0};
    const float min_p = p.min_p ? ((const float*)p.min_p)[index * p.min_p_step] : 0.0f;
    if (min_p > 0.0f) left.least_weight = fmaxf(left.least_weight, fminf(min_p, 1.0f));
    const i32 top_k = p.top_k ? ((const i32*)p.top_k)[index * p.top_k_step] : 0;
    if (top_k > 0 && (u64)top_k < total<true>(row, p.vocab, left, scratch))
      left.least_key = select<true>(row, p.vocab, left, (u64)top_k, sums, found);
    const float top_p = p.top_p ? ((const float*)p.top_p)[index * p.top_p_step] : 1.0f;
    if (top_p < 1.0f) {
      const u64 all = total<false>(row, p.vocab, left, scratch);
      const u64 wanted = __double2ull_rz(__dmul_rn((double)top_p, __ull2double_rn(all)));
      const u64 missing = top_p > 0.0f && wanted > 0 ? wanted : 1;
      left.least_key = select<false>(row, p.vocab, left, missing, sums, found);
    }
    const i64 seed = ((const i64*)p.seed)[index * p.seed_step];
    const RandomStream random(seed, ((const i64*)p.position)[index * p.position_step]);
    u64 best = 0;
#pragma unroll 4
    for (int j = threadIdx.x; j < p.vocab; j += kThreads) {
      const float e = left.of(row[j]);
      if (e == 0.0f) continue;
      const float score = __fdiv_rn(e, random_exponential((u32)(random[(u32)j] >> 32)));
      best = Largest::join(best, (u64)float_bits(score) << 32 | ~(u32)j);
    }
    token = (int)~(u32)block_join<Largest>(best, scratch);
  }
  if (threadIdx.x == 0) ((i32*)p.token)[index * p.token_step] = token;
  if (p.logprob) log_probability(p, Row{(const T*)p.raw + index * p.raw_row, p.raw_step}, token, scratch);
}
