// Gradients of rms_norm (CENTER 0) and layer_norm (CENTER 1). With y the normalised row, r its scale and
// g = dout * weight:  dx = r (g - y mean(g y) - mean(g)) + dsum,  dweight = sum dout y,  dbias = sum dout; the term
// mean(g) and dbias only if CENTER. Mean and scale are computed again from x: that is cheaper than reading them.
// Weight and dsum may be null.
//
// Threads to data: as in the forward kernel. A group of threads takes every num_groups-th row, keeps its columns of
// dweight and dbias in registers, and writes one partial sum a group, which `column_sum` adds up. Nothing is added
// atomically: every run gives the same bits, and dx of a row does not depend on other rows.
//
// A group is LANES threads of a block, in each of the SPLIT blocks of a cluster. Only the number of threads and chunks of
// a row matters for its bits, not how they are shared out over blocks.
//
// With CENTER each warp sums around the mean of its own elements, without waiting for the others; what it found is
// moved to the mean of the row when the warps join their sums, all of them at once.
//
// Between reading and writing a row, a group waits for sums over that row. To keep memory busy meanwhile, the next
// STAGES - 1 rows are being copied to shared memory. Each thread copies the chunks that it will read itself, so no
// barrier is needed. Of dense rows that begin anywhere it reads what its neighbour copied too: shared_row.cuh.
//
// Defines: ELEM, LANES, SPLIT, ROWS, ITEMS, VECTOR, STAGES (0: nothing is staged in shared memory), CENTER, SUMS (whether
// the sums over rows are needed), APART (the weight is not like rows: neighbours may be apart, or it begins anywhere).

#include "warpsmith/async_copy.cuh"
#include "warpsmith/dense.cuh"
#include "warpsmith/exchange.cuh"
#include "warpsmith/group.cuh"
#include "warpsmith/norm.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/shared_row.cuh"
#include "warpsmith/spread.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int V = kVec<T>;
constexpr int kWarps = LANES < 32 ? 1 : LANES / 32;
constexpr int kWidth = LANES < 32 ? LANES : 32;
constexpr int kRowLanes = SPLIT * LANES;
constexpr int kRowWarps = SPLIT * kWarps;

struct RowPointers {
  const T *x, *dout, *dsum;
  T* dx;
  WS_INLINE RowPointers(const NormBackwardParams& p, i64 index) {
    x = row_at<const T>(p.x, p.rows, 0, index);
    dout = row_at<const T>(p.dout, p.rows, 1, index);
    dx = row_at<T>(p.dx, p.rows, 2, index);
    dsum = p.dsum ? row_at<const T>(p.dsum, p.rows, 3, index) : nullptr;
  }
};

// x minus a mean, of one chunk; zero past the end of the row.
WS_INLINE void centered(float (&a)[V], const Chunk<T>& x, float mean, int count) {
  unpack_words(a, x);
  if (!CENTER) return;
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = VECTOR == kExact || j < count ? a[j] - mean : 0.0f;
}

// g of one chunk, of which dout is zero past the end of the row.
WS_INLINE void weighted(float (&g)[V], const float (&dout)[V], const Chunk<T>& weight) {
  unpack_words(g, weight);
#pragma unroll
  for (int j = 0; j < V; ++j) g[j] *= dout[j];
}

// dx of one chunk.
WS_INLINE void gradient(Chunk<T>& out, const float (&a)[V], const float (&g)[V], const T* dsum, int at, i64 step,
                        int hidden, float scale, float mean_gy, float mean_g) {
  float d[V];
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] = scale * (fmaf(-a[j] * scale, mean_gy, g[j]) - (CENTER ? mean_g : 0.0f));
  if (dsum) {
    Chunk<T> c;
    float s[V];
    // Of dense rows element by element: there are no registers for more.
    if (VECTOR == kDense) load_chunk<kAny>(c, dsum, at, 1, min(V, hidden - at), from_f32<T>(0.0f));
    else get_part<VECTOR, kWidth>(c, dsum, at, step, hidden, load_policy(false));
    unpack_words(s, c);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] += s[j];
  }
  pack(out, d);
}

// The weight's elements, zero past the end of the row; ones if there is no weight.
WS_INLINE void load_weight(Chunk<T>& c, const NormBackwardParams& p, int at) {
  if (p.weight) {
    constexpr int kWeight = !APART ? VECTOR : is_spread(VECTOR) ? kSpreadAny : kAny;
    get_part<kWeight, kWidth>(c, (const T*)p.weight, at, p.weight_step, p.hidden, load_policy(false));
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) c.items[j] = from_f32<T>(1.0f);
  }
}

// Stores the V sums of the part at element `at` to a row of floats.
WS_INLINE void store_sums(float* row, int at, const float (&sums)[V], int hidden) {
  const int count = part_count<VECTOR, kWidth, T>(at, hidden);
  float* to = row + (is_spread(VECTOR) ? part_start<kWidth, T>(at) : at);
  if (VECTOR == kExact || (VECTOR == kAligned && count > 0)) {
#pragma unroll
    for (int j = 0; j < V; j += 4) {
      u32 w[4] = {float_bits(sums[j]), float_bits(sums[j + 1]), float_bits(sums[j + 2]), float_bits(sums[j + 3])};
      store_words(to + j, w);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < count) to[is_spread(VECTOR) ? j * kWidth : j] = sums[j];
  }
}

// Sums over elements of a row, with a = x - mean: of a a, a g and, if CENTER, of g; then the mean.
constexpr int kSums = CENTER ? 4 : 2;
using WarpSums = Exchange<SPLIT, kWarps, kSums>;
using Share = WarpShare<kRowWarps>;

// How many elements of a row a warp has.
WS_INLINE int warp_elements(int warp, int hidden) {
  constexpr int kOwn = kWidth * V, kAll = kRowWarps * kOwn;
  return hidden / kAll * kOwn + min(max(hidden % kAll - warp * kOwn, 0), kOwn);
}

// One over the number of elements that a warp has, at least one.
WS_INLINE float warp_inverse(int warp, int hidden) {
  return 1.0f / fmaxf((float)warp_elements(warp, hidden), 1.0f);
}

struct RowSums {
  float mean, squares, products, weighted;
};

// From what the warps found around their own means to the sums around the row's.
WS_INLINE RowSums join_warps(const WarpSums::Values* warps, int hidden, float inverse) {
  RowSums r = {0.0f, 0.0f, 0.0f, 0.0f};
  if (CENTER) {
#pragma unroll
    for (int i = 0; i < Share::kShare; ++i)
      r.mean = fmaf((float)warp_elements(Share::warp(i), hidden), warps[Share::warp(i)].at[kSums - 1], r.mean);
    r.mean = warp_reduce<Sum, Share::kWidth>(r.mean) * inverse;
  }
#pragma unroll
  for (int i = 0; i < Share::kShare; ++i) {
    const WarpSums::Values v = warps[Share::warp(i)];
    float squares = v.at[0], products = v.at[1];
    if (CENTER) {
      const float off = v.at[kSums - 1] - r.mean, weighted = v.at[kSums / 2];
      squares = fmaf((float)warp_elements(Share::warp(i), hidden) * off, off, squares);
      products = fmaf(off, weighted, products);
      r.weighted += weighted;
    }
    r.squares += squares;
    r.products += products;
  }
  r.squares = warp_reduce<Sum, Share::kWidth>(r.squares);
  r.products = warp_reduce<Sum, Share::kWidth>(r.products);
  if (CENTER) r.weighted = warp_reduce<Sum, Share::kWidth>(r.weighted);
  return r;
}

// Blocks of a multiprocessor, as the host counts on. Left to itself, the compiler would rather spill than have few. Elements
// that are moved one by one take so many registers that there are fewer.
constexpr int kThreadsAtOnce = ITEMS % 3 == 0 ? 384 : 512;
constexpr int kBlocks =
    VECTOR == kAny || VECTOR == kSpreadAny || LANES * ROWS >= kThreadsAtOnce ? 1 : kThreadsAtOnce / (LANES * ROWS);

// Strided rows of one block are left to the kernel below: they do not fit its registers.
#if (VECTOR != 0 && VECTOR != 5) || SPLIT > 1

extern "C" __global__ void __launch_bounds__(LANES * ROWS, kBlocks) norm_backward_row(const NormBackwardParams p) {
  static_assert(STAGES == 0 || (VECTOR != kAny && VECTOR != kSpreadAny), "staged rows are dense");
  static_assert(ROWS == 1 || (LANES <= 32 && SPLIT == 1), "the threads of a row meet at the barrier of the block");
  __shared__ WarpSums exchange;
  extern __shared__ __align__(128) u8 memory[];
  // [stage][x or dout][item][thread]
  Chunk<T>* staged = (Chunk<T>*)memory + threadIdx.x;
  constexpr int kThreads = LANES * ROWS, kTensor = ITEMS * kThreads, kStage = 2 * kTensor;
  // The same of rows that begin anywhere: [stage][x or dout][item][row]
  constexpr bool kUnaligned = VECTOR == kDense || VECTOR == kSpread;
  using Neighbours = SharedRow<T, LANES>;
  const int slot = threadIdx.x % LANES;
  const auto shared_row = [&](int stage, int tensor, int item) {
    return (Neighbours*)memory + ((stage * 2 + tensor) * ITEMS + item) * ROWS + threadIdx.x / LANES;
  };
  exchange.begin();
  begin_kernel();
  const RowsOfThread<LANES, ROWS, 1, SPLIT> own;
  const int lane = own.lane;
  // Groups that share a warp go on together as long as the first of them has rows.
  constexpr int kTogether = 32 / kWidth;
  // Rows and groups are fewer than 2^31, so that the stages ahead have room in 32 bits.
  const u32 group = (u32)own.index, first_group = group / kTogether * kTogether, num_groups = (u32)p.num_groups;
  if (ROWS > 1 && first_group >= num_groups) return;
  const u32 num_rows = kTogether == 1 || group < num_groups ? (u32)p.num_rows : 0;
  const u64 policy = load_policy(false);
  const float inverse = 1.0f / (float)p.hidden;
  const float own_inverse = kRowWarps == 1 ? inverse : warp_inverse(lane / 32, p.hidden);

  Chunk<T> weight[ITEMS];
  float dweight[ITEMS][V], dbias[ITEMS][V];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int k = (i * kRowLanes + lane) * V;
    load_weight(weight[i], p, k);
#pragma unroll
    for (int j = 0; j < V; ++j) dweight[i][j] = dbias[i][j] = 0.0f;
  }

  auto fetch = [&](u32 index, int stage) {
    if (index < num_rows) {
      const RowPointers at(p, index);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        int k = (i * kRowLanes + lane) * V;
        if (kUnaligned) {
          shared_row(stage, 0, i)->copy(slot, i * kRowLanes + lane, at.x, p.hidden);
          shared_row(stage, 1, i)->copy(slot, i * kRowLanes + lane, at.dout, p.hidden);
        } else if (VECTOR == kExact || k < p.hidden) {
          copy_async(staged + stage * kStage + i * kThreads, at.x + k);
          copy_async(staged + stage * kStage + kTensor + i * kThreads, at.dout + k);
        }
      }
    }
    commit_copies();
  };
  int stage = 0;
  u32 round = 0;
  if (STAGES > 0) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(group + s * num_groups, s);
  }

  for (u32 index = group; index - group + first_group < (u32)p.num_rows; index += num_groups) {
    const bool exists = kTogether == 1 || index < num_rows;
    const RowPointers at(p, exists ? index : 0);
    const int hidden = exists ? p.hidden : 0;
    Chunk<T> x[ITEMS], dout[ITEMS];
    if (kUnaligned) {
      // Past the barrier, what others copied has arrived, and the stage before is free.
      wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
      meet<kWarps>();
      fetch(index + (STAGES - 1) * num_groups, stage == 0 ? STAGES - 1 : stage - 1);
    } else if (STAGES > 0) {
      fetch(index + (STAGES - 1) * num_groups, stage == 0 ? STAGES - 1 : stage - 1);
      wait_copies<(STAGES > 0 ? STAGES - 1 : 0)>();
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      int k = (i * kRowLanes + lane) * V, count = min(V, hidden - k);
      if (VECTOR == kDense) {
        shared_row(stage, 0, i)->get(x[i], slot, row_shift(at.x));
        shared_row(stage, 1, i)->get(dout[i], slot, row_shift(at.dout));
      } else if (VECTOR == kSpread) {
        count = part_count<VECTOR, kWidth, T>(k, hidden);
        get_staged_part<kWidth>(x[i], *shared_row(stage, 0, i), slot, row_shift(at.x), count);
        get_staged_part<kWidth>(dout[i], *shared_row(stage, 1, i), slot, row_shift(at.dout), count);
      } else if (STAGES > 0 && (VECTOR == kExact || count > 0)) {
        x[i] = staged[stage * kStage + i * kThreads];
        dout[i] = staged[stage * kStage + kTensor + i * kThreads];
      } else {
        get_part<VECTOR, kWidth>(x[i], at.x, k, p.x_step, hidden, policy);
        get_part<VECTOR, kWidth>(dout[i], at.dout, k, p.dout_step, hidden, policy);
      }
    }
    const int own_stage = stage;
    stage = stage + 1 >= STAGES ? 0 : stage + 1;

    float own_mean = 0.0f, sums[kSums] = {};
    if (CENTER) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
          float a[V];
        unpack_words(a, x[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) total += a[j];
      }
      total = warp_reduce<Sum, kWidth>(total);
      own_mean = sums[kSums - 1] = total * own_inverse;
    }
    // One pass gives the sums of a a, a g and g; y = a * scale is applied afterwards.
    float d[ITEMS][V], g[ITEMS][V];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float a[V];
      centered(a, x[i], own_mean, part_count<VECTOR, kWidth, T>((i * kRowLanes + lane) * V, p.hidden));
      unpack_words(d[i], dout[i]);
      weighted(g[i], d[i], weight[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[0] = fmaf(a[j], a[j], sums[0]);
        sums[1] = fmaf(a[j], g[i][j], sums[1]);
        if (CENTER) sums[kSums / 2] += g[i][j];
      }
    }
#pragma unroll
    for (int i = 0; i < (CENTER ? 3 : 2); ++i) sums[i] = warp_reduce<Sum, kWidth>(sums[i]);
    RowSums row = {own_mean, sums[0], sums[1], CENTER ? sums[kSums / 2] : 0.0f};
    if (kRowWarps > 1) row = join_warps(exchange.swap(sums, round++), p.hidden, inverse);
    // All have read their chunks before results take their places. The exchange with other blocks is no barrier of this one.
    if (VECTOR == kDense && (kRowWarps == 1 || SPLIT > 1)) meet<kWarps>();
    const float scale = inverse_sqrt(fmaf(row.squares, inverse, p.eps));
    const float mean_gy = row.products * scale * inverse, mean_g = row.weighted * inverse;
    // Found again rather than kept: there are no registers to spare.
    asm volatile("" : "+r"(index));
    const RowPointers to(p, exists ? index : 0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * kRowLanes + lane) * V;
      float a[V];
      unpack_words(a, x[i]);
      if (CENTER) {
#pragma unroll
        for (int j = 0; j < V; ++j) a[j] -= row.mean;
      }
      if (SUMS && exists) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dweight[i][j] = fmaf(d[i][j], a[j] * scale, dweight[i][j]);
          if (CENTER) dbias[i][j] += d[i][j];
        }
      }
      gradient(dout[i], a, g[i], to.dsum, k, p.dsum_step, hidden, scale, mean_gy, mean_g);
      if (VECTOR == kDense) shared_row(own_stage, 0, i)->leave(slot, dout[i]);
      else if (exists) put_part<VECTOR, kWidth>(to.dx, k, p.dx_step, hidden, dout[i]);
    }
    if (VECTOR == kDense) {
      meet<kWarps>();
#pragma unroll 1
      for (int i = 0; i < ITEMS; ++i)
        if (exists) shared_row(own_stage, 0, i)->store(slot, i * kRowLanes + lane, to.dx, p.hidden);
    }
  }

  if (SUMS && (kTogether == 1 || group < num_groups)) {
    float* partial = (float*)p.partial + group * (i64)p.hidden;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int k = (i * kRowLanes + lane) * V;
      store_sums(partial, k, dweight[i], p.hidden);
      if (CENTER) store_sums(partial + p.num_groups * p.hidden, k, dbias[i], p.hidden);
    }
  }
}

#endif

#if LANES >= 32 && SPLIT == 1

// Rows of any length: each pass reads the row again. Partial sums are kept in memory; every column has one owner. Lanes of
// dense rows work together, so loops are counted by the first chunk of the warp.
extern "C" __global__ void __launch_bounds__(LANES, kBlocks) norm_backward_long(const NormBackwardParams p) {
  __shared__ WarpSums exchange;
  begin_kernel();
  const u64 policy = load_policy(false);
  const int warp = threadIdx.x / 32 * 32 * V, lane = threadIdx.x % 32 * V;
  const float inverse = 1.0f / (float)p.hidden;
  const float own_inverse = warp_inverse(threadIdx.x / 32, p.hidden);
  float* dweight = (float*)p.partial + blockIdx.x * (i64)p.hidden;
  float* dbias = dweight + p.num_groups * p.hidden;
  u32 round = 0;
  for (i64 index = blockIdx.x; index < p.num_rows; index += p.num_groups) {
    const RowPointers at(p, index);
    float own_mean = 0.0f, sums[kSums] = {};
    if (CENTER) {
      float total = 0.0f;
      for (int start = warp; start < p.hidden; start += LANES * V) {
        Chunk<T> x;
        float a[V];
        get_part<VECTOR, 32>(x, at.x, start + lane, p.x_step, p.hidden, policy);
        unpack_words(a, x);
#pragma unroll
        for (int j = 0; j < V; ++j) total += a[j];
      }
      total = warp_reduce<Sum>(total);
      own_mean = sums[kSums - 1] = total * own_inverse;
    }
    RowSums row = {own_mean, 0.0f, 0.0f, 0.0f};
    float scale = 0.0f, mean_gy = 0.0f, mean_g = 0.0f;
    for (int pass = 0; pass < 2; ++pass) {
      for (int start = warp; start < p.hidden; start += LANES * V) {
        const int k = start + lane, count = part_count<VECTOR, 32, T>(k, p.hidden);
        Chunk<T> x, dout, weight;
        float a[V], g[V], d[V];
        get_part<VECTOR, 32>(x, at.x, k, p.x_step, p.hidden, policy);
        get_part<VECTOR, 32>(dout, at.dout, k, p.dout_step, p.hidden, policy);
        load_weight(weight, p, k);
        centered(a, x, row.mean, count);
        unpack_words(d, dout);
        weighted(g, d, weight);
        if (pass == 0) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sums[0] = fmaf(a[j], a[j], sums[0]);
            sums[1] = fmaf(a[j], g[j], sums[1]);
            if (CENTER) sums[kSums / 2] += g[j];
          }
          continue;
        }
        if (SUMS) {
          const bool first = round == 1;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            if (j >= count) continue;
            const int at_j = is_spread(VECTOR) ? part_start<32, T>(k) + 32 * j : k + j;
            dweight[at_j] = fmaf(d[j], a[j] * scale, first ? 0.0f : dweight[at_j]);
            if (CENTER) dbias[at_j] = d[j] + (first ? 0.0f : dbias[at_j]);
          }
        }
        gradient(dout, a, g, at.dsum, k, p.dsum_step, p.hidden, scale, mean_gy, mean_g);
        put_part<VECTOR, 32>(at.dx, k, p.dx_step, p.hidden, dout);
      }
      if (pass == 0) {
#pragma unroll
        for (int i = 0; i < (CENTER ? 3 : 2); ++i) sums[i] = warp_reduce<Sum>(sums[i]);
        if (kRowWarps > 1) {
          row = join_warps(exchange.swap(sums, round), p.hidden, inverse);
        } else {
          row.squares = sums[0];
          row.products = sums[1];
          if (CENTER) row.weighted = sums[kSums / 2];
        }
        ++round;
        scale = inverse_sqrt(fmaf(row.squares, inverse, p.eps));
        mean_gy = row.products * scale * inverse;
        mean_g = row.weighted * inverse;
      }
    }
  }
}

#endif
