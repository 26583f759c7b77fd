#pragma once
// `paged_attention` on tensor cores: the fragments of queries, scores and sums that a warp holds, and the arithmetic on
// them. Defines: those of the kernel.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith::paged {

constexpr int kThreads = 32 * ROW_WARPS * KEY_WARPS, kGroupThreads = 32 * ROW_WARPS, kRows = ROWS * ROW_WARPS;
// Products of queries and keys have 16 rows. If eight are enough, the other eight are unused, and sums are transposed, so
// that there are half as many products of weights and values, without unused rows.
static_assert(ROWS == 16 || (ROWS == 8 && ROW_WARPS == 1), "tiles are those of products, or half of one");
constexpr bool kTransposedSums = ROWS == 8;
// A block of so many warps has a multiprocessor to itself.
constexpr bool kAlone = KEY_WARPS == 8;
constexpr int kHalves = kTransposedSums ? 1 : 2;
// Keys of a step. Long heads leave few registers for scores. Fewer where there are no more keys: what is left out are
// weights of zero, so that changes no bit.
constexpr int kMostStep = HEAD_DIM > 160 ? 16 : HEAD_DIM == 128 ? 32 : 64, kStep = STEP;
static_assert(kStep <= kMostStep && kStep % 16 == 0, "whole units that registers hold");
constexpr int smaller(int a, int b) { return a < b ? a : b; }
// Units of 8-bit caches have twice the keys, for the same number of bytes.
constexpr int kUnitKeys = smaller(sizeof(KV) == 1 && ROW_WARPS < 2 ? 32 : 16 * ROW_WARPS, kStep), kUnits = kStep / kUnitKeys;
// Rows are stored in pieces of 16 bytes. Rows whose number of pieces is a multiple of eight are swizzled, others padded to
// an odd number: either way the eight rows that one ldmatrix reads lie in different banks.
constexpr int pitch_of(int pieces) { return pieces % 8 == 0 ? pieces : pieces | 1; }
template <int kPieces> WS_INLINE u32 place(int row, int piece) {
  return (u32)(row * pitch_of(kPieces) + (kPieces % 8 == 0 ? piece ^ (row & 7) : piece)) * 16;
}
constexpr int kPieces = HEAD_DIM * (int)sizeof(KV) / 16, kUnitBytes = kUnitKeys * pitch_of(kPieces) * 16;
constexpr int kDims = HEAD_DIM / 16, kTiles = HEAD_DIM / 8;

// 8-bit caches are multiplied as f16, which represents all their values exactly. Their matrices are loaded as if pairs of
// elements were single ones: of each 16 elements, a thread has the four from 4 (lane % 4) on, while with 16-bit types it
// has the two from 2 (lane % 4) on of each 8.
constexpr bool kNarrow = sizeof(KV) == 1;
template <bool> struct Product {
  typedef ELEM type;
};
template <> struct Product<true> {
  typedef f16 type;
};
typedef Product<kNarrow>::type MUL;
// Two elements of a query as they are multiplied.
WS_INLINE u32 multiplied(u32 pair, bf16) {
  return kNarrow ? pack_pair(bits_float(pair << 16), bits_float(pair & 0xffff0000u), f16()) : pair;
}
WS_INLINE u32 multiplied(u32 pair, f16) { return pair; }
// Four 8-bit elements as two pairs of f16.
WS_INLINE void widen(u32 (&y)[2], u32 codes, f8e5m2) {
  y[0] = __byte_perm(codes, 0, 0x1404), y[1] = __byte_perm(codes, 0, 0x3424);
}
WS_INLINE void widen(u32 (&y)[2], u32 codes, f8e4m3) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(y[0]), "=r"(y[1]) : "r"(codes));
#else
  widen(y, codes, f8e5m2());
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 spread = y[i], magnitude = (spread & 0x7f007f00u) >> 1;
    // The biases differ by 8; the largest code is NaN.
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y[i]) : "r"(magnitude), "r"(0x5c005c00u));
    y[i] |= (spread & 0x80008000u) | (((magnitude + 0x00800080u) >> 14 & 0x00010001u) * 0x7fffu);
  }
#endif
}
WS_INLINE void widen(u32 (&y)[2], u32, bf16) { y[0] = y[1] = 0; }
WS_INLINE void widen(u32 (&y)[2], u32, f16) { y[0] = y[1] = 0; }

// A thread's elements of a row come in pairs: the first element of pair i, and the place of its element e in the
// fragments.
WS_INLINE int pair_dim(int i) {
  const int lane = threadIdx.x % 4;
  return kNarrow ? i / 2 * 16 + lane * 4 + i % 2 * 2 : i * 8 + lane * 2;
}
constexpr int pair_place(int i, int half, int e) { return kNarrow ? (i / 2 * 2 + e) * 4 + 2 * half + i % 2 : i * 4 + 2 * half + e; }
constexpr bool kKeepQuery = HEAD_DIM <= 128;
constexpr int kQueryPieces = HEAD_DIM / 8, kQueryBytes = kKeepQuery ? 0 : 16 * ROW_WARPS * pitch_of(kQueryPieces) * 16;

// A piece of work: a tile of the rows of a request and KV head, and a range of keys.
struct Piece {
  Request request;
  int tile, range, head;
};

// Token and head of a row of a tile. Rows past the queries of the request do not exist.
struct Row {
  bool exists;
  int i, token, head;
};
WS_INLINE Row row_of(const PagedParams& p, const Piece& piece, int row) {
  const int packed = piece.tile * kRows + row, i = packed / p.group;
  return {i < piece.request.count, i, piece.request.first + i, piece.head * p.group + packed - i * p.group};
}
// The rows of a thread: lane / 4 of those of its warp, and 8 more.
WS_INLINE int thread_row(int half) { return threadIdx.x / 32 % ROW_WARPS * 16 + threadIdx.x % 32 / 4 + 8 * half; }

extern __shared__ __align__(128) u8 shared_bytes[];

// The fragments of a warp's queries: in registers or, for long heads, in shared memory.
struct Query {
  u32 kept[kKeepQuery ? kDims : 1][4];
  u32 at;

  WS_INLINE void load(const PagedParams& p, const Piece& piece) {
    const u32 flip = p.scale < 0.0f ? 0x80008000u : 0;
    if (kKeepQuery) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Row row = row_of(p, piece, thread_row(half));
        row.exists &= half < kHalves;
        const ELEM* from = (const ELEM*)p.q + token_at(p, row.token, p.q_batch, p.q_token) + row.head * p.q_head;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          kept[kKeepQuery ? i / 2 : 0][i % 2 * 2 + half] =
              row.exists ? multiplied(*(const u32*)(from + pair_dim(i)) ^ flip, ELEM()) : 0;
      }
      return;
    }
    // The barrier before the first step makes them visible. Sixteen elements at a time, in the order of pair_dim.
    for (int index = threadIdx.x; index < kRows * kDims; index += kThreads) {
      const int k = index % kDims;
      const Row row = row_of(p, piece, index / kDims);
      u32 words[2][4] = {};
      if (row.exists) {
        const ELEM* from = (const ELEM*)p.q + token_at(p, row.token, p.q_batch, p.q_token) + row.head * p.q_head + 16 * k;
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
        *(uint4*)(shared_bytes + place<kQueryPieces>(index / kDims, 2 * k + half)) = {to[0], to[1], to[2], to[3]};
      }
    }
    at = shared_address(shared_bytes) + place<kQueryPieces>(threadIdx.x / 32 % ROW_WARPS * 16, 0);
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

// m is in units of the products, without the scale; l covers this thread's columns only. Transposed sums o[i][e] belong to
// row 2 (lane % 4) + e % 2, while m and l belong to row lane / 4 as always.
constexpr int kSums = kTransposedSums ? kDims : kTiles;
struct State {
  float o[kSums][4], m[kHalves], l[kHalves];
  WS_INLINE float at(int place) const { return o[place / 4][place % 4]; }
};
// A value for each row of the sums, from the values that threads hold for their own rows.
struct ForSums {
  float of[2];
  WS_INLINE ForSums(const float (&x)[kHalves]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of[i] = kTransposedSums ? __shfl_sync(kAllLanes, x[0], 4 * (threadIdx.x % 4 * 2 + i)) : x[i % kHalves];
  }
  WS_INLINE float operator[](int e) const { return of[kTransposedSums ? e % 2 : e / 2]; }
};
WS_INLINE void clear(State& state) {
#pragma unroll
  for (int i = 0; i < kSums; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) state.o[i][e] = 0.0f;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) state.m[half] = minus_infinity(), state.l[half] = 0.0f;
}

// Scores of 16 rows and kStep keys.
typedef float Scores[kStep / 8][4];

// What turns products into scores; the last factor includes log2 e.
struct Scale {
  float inner, cap, factor;
};
WS_INLINE Scale scale_of(const PagedParams& p, int kv_head) {
  const float scale = fabsf(p.scale) * scale_of(p.k_scale, p.k_scale_step, kv_head);
  if (!SOFTCAP) return {0.0f, 0.0f, scale * kLog2E};
  return {2.0f * kLog2E * scale / p.softcap, p.softcap, kLog2E};
}

// Updates the state by the scores of the next step, except for the values; leaves the weights in s.
WS_INLINE void weigh(State& state, Scores& s, const Scale& scale) {
  float keep[kHalves];
  bool changes = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i) most = fmaxf(most, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
    most = fmaxf(quad_reduce<MaxIgnoringNan>(most), state.m[half]);
    const float base = most == minus_infinity() ? 0.0f : most * scale.factor;
    keep[half] = exp2_approx(fmaf(state.m[half], scale.factor, -base));
    // Sums that have not begun are zero, and need no factor.
    changes |= keep[half] != 1.0f && state.m[half] != minus_infinity();
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
  // A factor of 1 changes no bit.
  if (__any_sync(kAllLanes, changes)) {
    const ForSums factors(keep);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[i][e] *= factors[e];
  }
}

// Ends a segment: m gets its scale and l is summed over the row, so that the state can be folded.
WS_INLINE void close(State& state, const Scale& scale) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    state.l[half] = quad_reduce<Sum>(state.l[half]);
    // Rounded here, so that no compiler fuses the multiplication with what follows in one kernel and not in another.
    if (state.m[half] != minus_infinity()) state.m[half] = __fmul_rn(state.m[half], scale.factor);
  }
}

// The sums in the order in which they are written: kCount pairs of neighbouring elements for each of kRuns rows. In
// transposed sums, neighbours are in different lanes, which exchange halves, so that each has pairs of one row; with 8-bit
// caches they are in one thread.
struct Pairs {
  static constexpr int kRuns = kTransposedSums && !kNarrow ? 1 : 2, kCount = kTransposedSums && kNarrow ? kDims : kTiles;
  float2 of[kRuns][kCount];

  static WS_INLINE int odd() { return threadIdx.x / 4 % 2; }
  WS_INLINE Pairs(const State& state) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!kTransposedSums) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          of[half % kRuns][i] = {state.at(pair_place(i, half, 0)), state.at(pair_place(i, half, 1))};
      } else if (kNarrow) {
        const float(&o)[4] = state.o[i % kSums];
        of[0][i] = {o[0], o[2]}, of[1 % kRuns][i] = {o[1], o[3]};
      } else {
        const float first = state.at(2 * i), second = state.at(2 * i + 1);
        const float other = __shfl_xor_sync(kAllLanes, odd() ? first : second, 4);
        of[0][i] = odd() ? float2{other, second} : float2{first, other};
      }
    }
  }
  static WS_INLINE int row(int run) {
    if (!kTransposedSums) return thread_row(run);
    return threadIdx.x % 4 * 2 + (kNarrow ? run : odd());
  }
  static WS_INLINE int dim(int i) {
    if (!kTransposedSums) return pair_dim(i);
    const int lane = threadIdx.x % 32 / 4;
    return kNarrow ? 16 * i + 2 * lane : 8 * i + lane / 2 * 2;
  }
  // The value for the row of a run, from the values that threads hold for their own rows.
  static WS_INLINE float of_row(const float (&x)[kHalves], int run) {
    return kTransposedSums ? __shfl_sync(kAllLanes, x[0], 4 * row(run)) : x[run % kHalves];
  }
  // Whether this thread writes what is written once a row.
  static WS_INLINE bool writes_row() { return kTransposedSums ? threadIdx.x % 32 / (kNarrow ? 4 : 8) == 0 : threadIdx.x % 4 == 0; }
};

}  // namespace warpsmith::paged
