// `linear` in f32 at full precision on the tensor cores of sm_80 and later, through mma.sync.
//
// Every element is the sum of three numbers of bf16: itself rounded, what that leaves rounded, and what that leaves. Of the
// nine products of two elements six are computed, smallest first; the other three are below the precision of f32. Tensor
// cores cut off what they add, so the products of 16 elements of K are added to a sum that starts at zero, which is then
// added in f32. K is summed in ascending order in these slices, whatever the tile, so each element has the same bits in
// tiles of any size.
//
// Threads to data: a block of 4 warps, or 8 for 128 rows, computes a tile of TILE_M rows of x by TILE_N rows of w. The warps
// form two lines along w, or from 16 rows down one. Steps of STEP elements of K go through STAGES stages of shared memory,
// copied ahead by cp.async as f32, and are split on the way to the tensor cores. A lane reads four neighbours along K at
// once; they take the places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of an mma, in x as in w, so that the sum is the same. With
// a gate, blocks of 8 gate rows and 8 up rows alternate, which are neighbouring fragments of a thread.
//
// Elements are multiplied by kRaise, so that the parts of subnormal ones, too, are normal numbers of bf16, and the sums are
// divided by its square. Sums that are then not finite are computed again, element by element, without tensor cores.
//
// Defines: those of linear.cuh; TILE_M, 8, 16, or 32, 64 and 128 with TILE_N the same; TILE_N, with fewer rows 32 (not
// with a gate) or 64; STEP, a multiple of 32; STAGES; RESIDENT, blocks per multiprocessor that the registers must suffice
// for; LOAD_X, LOAD_W, how a step is moved (0: element by element, any strides; 1: in pieces of 16 bytes along K; 2, from
// 32 rows on: in pieces of 16 bytes along the rows, stored as [k][row]; 3, from 32 rows on: stored like that too, but
// element by element, for columns that are dense and start anywhere); OUT_PAIRS, as in linear_pairs.cuh.

#include "warpsmith/linear.cuh"
#include "warpsmith/linear_pairs.cuh"
#include "warpsmith/mma.cuh"

using namespace warpsmith;
using namespace warpsmith::linear;

constexpr int kWarps = TILE_M >= 128 ? 8 : 4, kThreads = kWarps * 32;
constexpr int kStep = STEP, kSlice = 16, kSlices = kStep / kSlice, kPiece = 4, kParts = 3, kProducts = 6;
constexpr int kWarpsM = TILE_M >= 32 ? 2 : 1, kWarpsN = kWarps / kWarpsM;
constexpr int kWarpRows = TILE_M / kWarpsM, kWarpColumns = TILE_N / kWarpsN;
constexpr int kFragments = (kWarpRows + 15) / 16, kBlocks = kWarpColumns / 8;
// Blocks whose products take turns, and slices that do: each chain of products waits for its own results only.
constexpr int kGroup = kBlocks < 4 ? kBlocks : 4, kTogether = kFragments * kBlocks <= 4 ? kSlices : 1;
// Large tiles have no registers for splitting a slice while the one before it is multiplied.
constexpr int kUnroll = kFragments * kBlocks >= 8 ? 1 : kSlices;
constexpr int kStageBytes = (TILE_M + TILE_N) * kStep * 4;
static_assert(kWarpColumns % (GATE ? 16 : 8) == 0, "a warp has gate and up of its columns");

// f32 ends at 2^-149 and bf16 at 2^-133, but only from 2^-126 on are its products fast.
constexpr float kRaise = 0x1p24f, kLower = 0x1p-48f, kLargest = 0x1.fffffep127f;

extern __shared__ __align__(128) u8 shared[];

// A step of an operand of kRows rows: kRows lines along K or, transposed, kStep lines of kRows elements. Pieces
// of 16 bytes are swizzled, so that the lanes of a warp read from different banks.
template <int kRows, int kLoad> struct Stage {
  static constexpr bool kTransposed = kLoad >= 2;
  static constexpr int kPerLine = (kTransposed ? kRows : kStep) / kPiece;
  static_assert(!kTransposed || kRows >= 32, "the swizzle takes eight pieces");

  static WS_INLINE u32 place(int line, int piece) {
    const int swizzled = kTransposed ? piece ^ (line / 4 % 4 * 2) : piece ^ (line % 2 * 4);
    return (u32)(line * kPerLine + swizzled) * 16;
  }
  // Four neighbours of a row along K: the `lane_k`-th four of a slice.
  static WS_INLINE void read(float (&v)[4], u32 base, int row, int slice, int lane_k) {
    if (kTransposed) {
      const u32 at = base + place(slice * kSlice + lane_k * 4, row / kPiece) + row % kPiece * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) load_shared(v[i], at + i * (kPerLine * 16));
    } else {
      load_shared(v, base + place(row, slice * (kSlice / kPiece) + lane_k));
    }
  }
  // `map` turns a row of the tile into a row of the matrix; rows from `count` on are zeros. What does not exist is not read, so
  // its address does not matter.
  template <class Map>
  static WS_INLINE void load(u32 to, const float* base, i64 row_stride, i64 col_stride, int count, int k0, int depth, Map map) {
    if (kLoad == 0 || kLoad == 3) {
      const bool along_k = kLoad == 0 && col_stride == 1;
#pragma unroll 4
      for (int i = 0; i < kRows * kStep / kThreads; ++i) {
        const int index = threadIdx.x + i * kThreads;
        const int row = along_k ? index / kStep : index % kRows, k = along_k ? index % kStep : index / kRows;
        const int from = map(row);
        const bool exists = from < count && k0 + k < depth;
        const int line = kTransposed ? k : row, inside = kTransposed ? row : k;
        copy_word(to + place(line, inside / kPiece) + inside % kPiece * 4, base + from * row_stride + (k0 + k) * col_stride,
                  exists);
      }
    } else {
      constexpr int kPieces = kRows * kStep / kPiece;
#pragma unroll
      for (int i = 0; i < (kPieces + kThreads - 1) / kThreads; ++i) {
        const int index = threadIdx.x + i * kThreads;
        if (kPieces % kThreads && index >= kPieces) break;
        const int line = index / kPerLine, piece = index % kPerLine;
        const int row = kTransposed ? piece * kPiece : line, k = k0 + (kTransposed ? line : piece * kPiece);
        const int from = map(row);
        const bool exists = from < count && k < depth;
        copy_async(to + place(line, piece), base + from * row_stride + (kTransposed ? k * col_stride : k), exists);
      }
    }
  }
  static WS_INLINE void copy_word(u32 to, const float* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
  }
};
using XStage = Stage<TILE_M, LOAD_X>;
using WStage = Stage<TILE_N, LOAD_W>;

// The parts of two neighbours, raised, as pairs of bf16. The differences are exact.
WS_INLINE void split(u32 (&parts)[kParts], float low, float high) {
  // Raised after it is rounded: that is one instruction for both.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(parts[0]) : "r"(pack_pair(low, high, bf16())), "r"(0x4b804b80u), "r"(0x80008000u));
  low = fmaf(low, kRaise, -bits_float(parts[0] << 16));
  high = fmaf(high, kRaise, -bits_float(parts[0] & 0xffff0000u));
#pragma unroll
  for (int part = 1; part < kParts; ++part) {
    parts[part] = pack_pair(low, high, bf16());
    if (part + 1 == kParts) break;
    low -= bits_float(parts[part] << 16);
    high -= bits_float(parts[part] & 0xffff0000u);
  }
}
// The parts of x and of w in each of the six products.
WS_INLINE int x_part(int product) { return 0x001102 >> (4 * product) & 3; }
WS_INLINE int w_part(int product) { return 0x010120 >> (4 * product) & 3; }

// The operands of a call, and where a block's tile begins in them.
struct Operands {
  const float *x, *w;
  int first_row, first_w, w_rows;

  WS_INLINE Operands(const LinearParams& p, const Tile& tile)
      : x((const float*)p.x + tile.batch * p.x_batch), w((const float*)p.w + tile.batch * p.w_batch),
        first_row(tile.m * TILE_M), first_w(tile.n * TILE_N), w_rows(num_weight_rows(p)) {}

  WS_INLINE void load(const LinearParams& p, u32 stage, int step) const {
    XStage::load(stage, x, p.x_row, p.x_col, p.m, step * kStep, p.k, [&](int row) { return first_row + row; });
    WStage::load(stage + TILE_M * kStep * 4, w, p.w_row, p.w_col, w_rows, step * kStep, p.k,
                 [&](int row) { return weight_row<8>(p, first_w + row, w_rows); });
  }

  // A sum over K without tensor cores. NaN ends it.
  WS_INLINE float sum(const LinearParams& p, int row, int w_row) const {
    const float *a = x + row * p.x_row, *b = w + w_row * p.w_row;
    float sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < p.k && sum == sum; ++k) sum = fmaf(a[k * p.x_col], b[k * p.w_col], sum);
    return sum;
  }
};

// The elements of a thread: rows lane / 4 and 8 more of a fragment, and columns 2 (lane % 4) and the next of a block.
struct Place {
  int warp_row, warp_w, lane;

  WS_INLINE int row(int i, int half) const { return warp_row + i * 16 + half * 8 + lane / 4; }
  WS_INLINE int w_row(int j, int e) const { return warp_w + j * 8 + lane % 4 * 2 + e; }
};

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) linear_bf16x3(const LinearParams p) {
  begin_kernel();
  const Tile tile = tile_at<TILE_M, GATE ? TILE_N / 2 : TILE_N>(p, blockIdx.x);
  const Operands operands(p, tile);
  const int warp = threadIdx.x / 32;
  const Place place = {warp % kWarpsM * kWarpRows, warp / kWarpsM * kWarpColumns, (int)threadIdx.x % 32};
  const int lane = place.lane;

  float sums[kFragments][kBlocks][4];
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;

  const u32 base = shared_address(shared);
  const int steps = (p.k + kStep - 1) / kStep;
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) {
    if (step < steps) operands.load(p, base + step * kStageBytes, step);
    commit_copies();
  }
#pragma unroll 1
  for (int step = 0, stage = 0; step < steps; ++step) {
    // The copies of this step are done, and all warps have left the stage that is filled next.
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    if (step + STAGES - 1 < steps) operands.load(p, base + free * kStageBytes, step + STAGES - 1);
    commit_copies();
    const u32 x_base = base + stage * kStageBytes, w_base = x_base + TILE_M * kStep * 4;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll kUnroll
    for (int first = 0; first < kSlices; first += kTogether) {
      u32 b[kTogether][kBlocks][kParts][2];
#pragma unroll
      for (int s = 0; s < kTogether; ++s)
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          float v[4];
          WStage::read(v, w_base, place.warp_w + j * 8 + lane / 4, first + s, lane % 4);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            u32 parts[kParts];
            split(parts, v[pair * 2], v[pair * 2 + 1]);
#pragma unroll
            for (int part = 0; part < kParts; ++part) b[s][j][part][pair] = parts[part];
          }
        }
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        u32 a[kTogether][kParts][4];
#pragma unroll
        for (int s = 0; s < kTogether; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            // In tiles of 8 rows the other half of a fragment is zero.
            if (half == 0 || kWarpRows >= 16) XStage::read(v, x_base, place.row(i, half), first + s, lane % 4);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              u32 parts[kParts];
              split(parts, v[pair * 2], v[pair * 2 + 1]);
  #pragma unroll
              for (int part = 0; part < kParts; ++part) a[s][part][pair * 2 + half] = parts[part];
            }
          }
#pragma unroll
        for (int group = 0; group < kBlocks; group += kGroup) {
          float d[kTogether][kGroup][4];
#pragma unroll
          for (int s = 0; s < kTogether; ++s)
#pragma unroll
            for (int j = 0; j < kGroup; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) d[s][j][e] = 0.0f;
#pragma unroll
          for (int product = 0; product < kProducts; ++product)
#pragma unroll
            for (int s = 0; s < kTogether; ++s)
#pragma unroll
              for (int j = 0; j < kGroup; ++j) {
                const u32(&w)[2] = b[s][group + j][w_part(product)];
                multiply(d[s][j], a[s][x_part(product)], w[0], w[1], bf16());
              }
#pragma unroll
          for (int s = 0; s < kTogether; ++s)
#pragma unroll
            for (int j = 0; j < kGroup; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[i][group + j][e] += d[s][j][e];
        }
      }
    }
  }

  // Columns of a gate have two sums.
  constexpr int kColumnBlocks = GATE ? 2 : 1;
  // A bit for each element that is to be computed again.
  constexpr int kWords = (kFragments * kBlocks / kColumnBlocks * 4 + 31) / 32;
  u32 again[kWords];
#pragma unroll
  for (int word = 0; word < kWords; ++word) again[word] = 0;
#pragma unroll
  for (int j = 0; j < kBlocks; j += kColumnBlocks) {
    const int column = column_of<8>(operands.first_w + place.w_row(j, 0));
    if (column >= p.n) continue;
    const ColumnTerms terms[2] = {column_terms(p, tile.batch, column), column_terms(p, tile.batch, column + 1)};
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = operands.first_row + place.row(i, half);
        if (row >= p.m) continue;
        bool bad[2] = {false, false};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int of = 0; of < kColumnBlocks; ++of) {
            float& sum = sums[i][j + of][half * 2 + e];
            bad[e] |= !(fabsf(sum) <= kLargest);
            sum *= kLower;
          }
          const int index = (j / kColumnBlocks * kFragments + i) * 4 + half * 2 + e;
          if (bad[e]) again[index / 32] |= 1u << index % 32;
        }
        const float *sum = &sums[i][j][half * 2], *up = &sums[i][j + kColumnBlocks - 1][half * 2];
        if (!bad[0] && !bad[1]) {
          write_pair(p, tile.batch, row, column, sum, up, row_term(p, tile.batch, row), terms);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!bad[e] && column + e < p.n)
              write_element(p, tile.batch, row, column + e, sum[e], up[e], row_term(p, tile.batch, row), terms[e]);
        }
      }
    }
  }

#pragma unroll 1
  for (;;) {
    int index = -1;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      if (index < 0 && again[word]) {
        index = word * 32 + __ffs(again[word]) - 1;
        again[word] &= again[word] - 1;
      }
    if (index < 0) break;
    const int e = index % 2, half = index / 2 % 2, i = index / 4 % kFragments, j = index / 4 / kFragments * kColumnBlocks;
    const int row = operands.first_row + place.row(i, half), column = column_of<8>(operands.first_w + place.w_row(j, e));
    if (column >= p.n) continue;
    const float sum = operands.sum(p, row, gate_row(p, column)), up = GATE ? operands.sum(p, row, up_row(p, column)) : 0.0f;
    write_element(p, tile.batch, row, column, sum, up, row_term(p, tile.batch, row), column_terms(p, tile.batch, column));
  }
}
