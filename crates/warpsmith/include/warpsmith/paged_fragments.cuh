#pragma once
// `paged_attention` on tensor cores: what a warp holds of queries, scores and sums, and the arithmetic on it. The defines
// are those of the kernel.

#include "warpsmith/mma.cuh"
#include "warpsmith/paged_attention.cuh"
#include "warpsmith/vec.cuh"

constexpr int kThreads = 32 * ROW_WARPS * KEY_WARPS, kGroupThreads = 32 * ROW_WARPS, kRows = ROWS * ROW_WARPS;
// Products of queries and keys have 16 rows. Where eight are enough, the rest is left alone, and sums are held turned
// round, so that products of weights and values are half as many and have no rows in vain.
static_assert(ROWS == 16 || (ROWS == 8 && ROW_WARPS == 1), "tiles are those of products, or half of one");
constexpr bool kTurned = ROWS == 8;
// A block of so many warps has a multiprocessor for itself.
constexpr bool kAlone = KEY_WARPS == 8;
constexpr int kHalves = kTurned ? 1 : 2;
// The longest heads leave no registers for the scores of more keys.
constexpr int kStep = HEAD_DIM > 160 ? 16 : HEAD_DIM == 128 ? 32 : 64;
constexpr int smaller(int a, int b) { return a < b ? a : b; }
// Units of narrow caches have as many keys again, which are as many bytes.
constexpr int kUnitKeys = smaller(sizeof(KV) == 1 && ROW_WARPS < 2 ? 32 : 16 * ROW_WARPS, kStep), kUnits = kStep / kUnitKeys;
// Pieces of 16 bytes of a row. Rows of eight or a multiple are swizzled, others padded to an odd number: either way the
// eight rows that one ldmatrix reads lie in different banks.
constexpr int pitch_of(int pieces) { return pieces % 8 == 0 ? pieces : pieces | 1; }
template <int kPieces> WS_INLINE u32 place(int row, int piece) {
  return (u32)(row * pitch_of(kPieces) + (kPieces % 8 == 0 ? piece ^ (row & 7) : piece)) * 16;
}
constexpr int kPieces = HEAD_DIM * (int)sizeof(KV) / 16, kUnitBytes = kUnitKeys * pitch_of(kPieces) * 16;
constexpr int kDims = HEAD_DIM / 16, kTiles = HEAD_DIM / 8;

// 8-bit caches are multiplied as f16, which holds all their values. Their matrices are loaded as if pairs of elements
// were single ones; so the four neighbours 4 (lane % 4) of each 16 belong to a thread, where 16-bit types give it
// 2 (lane % 4) and the next of each 8.
constexpr bool kNarrow = sizeof(KV) == 1;
template <bool> struct Product {
  typedef ELEM type;
};
template <> struct Product<true> {
  typedef f16 type;
};
typedef Product<kNarrow>::type MUL;
WS_INLINE u32 pack_pair(float lo, float hi, bf16) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
WS_INLINE u32 pack_pair(float lo, float hi, f16) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
// Two elements of a query as they are multiplied.
WS_INLINE u32 multiplied(u32 pair, bf16) {
  return kNarrow ? pack_pair(bits_float(pair << 16), bits_float(pair & 0xffff0000u), f16()) : pair;
}
WS_INLINE u32 multiplied(u32 pair, f16) { return pair; }
// Four 8-bit elements, two and two.
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

// A thread's elements of a row come in pairs: where pair i begins, and the place of its element e in the fragments.
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

// Token and head of a row of a tile; there is none past the request's queries.
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

// The fragments of a warp's queries: in registers, or, where heads are long, read again and again from shared memory.
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
    // Seen by all after the barrier that comes before the first step. Sixteen elements at a time, in the order of
    // pair_dim.
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

// m of the scores as they come from the product, l for this thread's columns alone. Sums that are turned round are of
// rows 2 (lane % 4) and the next, as o[i][e] with e % 2, while m and l are those of row lane / 4 all the same.
constexpr int kSums = kTurned ? kDims : kTiles;
struct State {
  float o[kSums][4], m[kHalves], l[kHalves];
  WS_INLINE float at(int place) const { return o[place / 4][place % 4]; }
};
// What belongs to the rows of the sums, from what a thread has of its own rows.
struct OfSums {
  float of[2];
  WS_INLINE OfSums(const float (&x)[kHalves]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of[i] = kTurned ? __shfl_sync(0xffffffffu, x[0], 4 * (threadIdx.x % 4 * 2 + i)) : x[i % kHalves];
  }
  WS_INLINE float operator[](int e) const { return of[kTurned ? e % 2 : e / 2]; }
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

// What turns products into scores, in units of log2 e after the last factor.
struct Scale {
  float inner, cap, factor;
};
WS_INLINE Scale scale_of(const PagedParams& p, int kv_head) {
  const float scale = fabsf(p.scale) * scale_of(p.k_scale, p.k_scale_step, kv_head);
  if (!SOFTCAP) return {0.0f, 0.0f, scale * kLog2E};
  return {2.0f * kLog2E * scale / p.softcap, p.softcap, kLog2E};
}

// Takes the scores of the next step into the state, but for the values: leaves their weights in s.
WS_INLINE void weigh(State& state, Scores& s, const Scale& scale) {
  float keep[kHalves];
  bool changes = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i) most = fmaxf(most, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    most = fmaxf(most, state.m[half]);
    const float base = most == minus_infinity() ? 0.0f : most * scale.factor;
    keep[half] = exp2_approx(fmaf(state.m[half], scale.factor, -base));
    // Sums that are not begun are zeros.
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
  if (__any_sync(0xffffffffu, changes)) {
    const OfSums factors(keep);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[i][e] *= factors[e];
  }
}

// Ends a segment: from here on the state can be folded.
WS_INLINE void close(State& state, const Scale& scale) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    state.l[half] += __shfl_xor_sync(0xffffffffu, state.l[half], 1);
    state.l[half] += __shfl_xor_sync(0xffffffffu, state.l[half], 2);
    // Rounded here: where it is used next, it must not be fused with other factors in one kernel and not in another.
    if (state.m[half] != minus_infinity()) state.m[half] = __fmul_rn(state.m[half], scale.factor);
  }
}

// The sums as they are written: kCount pairs of neighbouring elements of each of kRuns rows. Of sums that are turned round,
// neighbours are in lanes that exchange halves, so that each has pairs of one row; narrow caches have them in one thread.
struct Pairs {
  static constexpr int kRuns = kTurned && !kNarrow ? 1 : 2, kCount = kTurned && kNarrow ? kDims : kTiles;
  float2 of[kRuns][kCount];

  static WS_INLINE int odd() { return threadIdx.x / 4 % 2; }
  WS_INLINE Pairs(const State& state) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!kTurned) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          of[half % kRuns][i] = {state.at(pair_place(i, half, 0)), state.at(pair_place(i, half, 1))};
      } else if (kNarrow) {
        const float(&o)[4] = state.o[i % kSums];
        of[0][i] = {o[0], o[2]}, of[1 % kRuns][i] = {o[1], o[3]};
      } else {
        const float first = state.at(2 * i), second = state.at(2 * i + 1);
        const float other = __shfl_xor_sync(0xffffffffu, odd() ? first : second, 4);
        of[0][i] = odd() ? float2{other, second} : float2{first, other};
      }
    }
  }
  static WS_INLINE int row(int run) {
    if (!kTurned) return thread_row(run);
    return threadIdx.x % 4 * 2 + (kNarrow ? run : odd());
  }
  static WS_INLINE int dim(int i) {
    if (!kTurned) return pair_dim(i);
    const int lane = threadIdx.x % 32 / 4;
    return kNarrow ? 16 * i + 2 * lane : 8 * i + lane / 2 * 2;
  }
  // Of the rows: what threads have of theirs.
  static WS_INLINE float of_row(const float (&x)[kHalves], int run) {
    return kTurned ? __shfl_sync(0xffffffffu, x[0], 4 * row(run)) : x[run % kHalves];
  }
  // Whether this thread is the one that writes what a row has once.
  static WS_INLINE bool speaks() { return kTurned ? threadIdx.x % 32 / (kNarrow ? 4 : 8) == 0 : threadIdx.x % 4 == 0; }
};
