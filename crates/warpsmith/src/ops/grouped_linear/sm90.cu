// `grouped_linear` on Hopper.
//
// Threads to data: persistent and warp-specialised, as in linear/sm90.cu. Warpgroup 0 brings tiles of x and w to a ring of STAGES
// stages: w through the copy engine, whose map has the groups as a dimension, and x too, unless its rows are gathered. The others are
// consumers: each multiplies rows of the tile by its columns with the tensor cores (wgmma.cuh says which sums a lane has), applies the
// epilogue in registers and hands the result to the copy engine through shared memory. Every warp walks the counts by itself; blocks take tiles in turn.
//
// The consumers share a tile, each with rows of its own; or, with PINGPONG, the two take tiles in turn, so that the epilogue of one
// overlaps with the products of the other.
//
// Rows past the end of a group are those of the next, or zeros: whatever they give is not stored. Every element is summed over K in
// ascending steps of 32 bytes into one accumulator, whatever the tile, so the bits of a row depend only on that row and its matrix.
//
// Defines: BLOCK_M, BLOCK_N, the tile; X_ROWS, the rows of x that a tile has, fewer than BLOCK_M where groups have few rows; STAGES;
// CONSUMERS, warpgroups (1 or 2); PINGPONG; GATHER, whether there is an index; W_ACROSS, whether rows of w lie side by side and K
// across them, as in the gradient of x; those of linear_output.cuh and grouped_linear.cuh. With
// a gate, BLOCK_N counts rows of w, half of them gate and half up, and a tile has BLOCK_N / 2 columns; gate and up are the third
// dimension of the map of w.

#include "warpsmith/async_copy.cuh"
#include "warpsmith/grouped_linear.cuh"
#include "warpsmith/linear_output.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;
using namespace warpsmith::grouped;

constexpr int kThreads = (1 + CONSUMERS) * 128;
constexpr int kRowBytes = 128;  // of K in a stage
constexpr int kBlockK = kRowBytes / (int)sizeof(X_T), kSteps = 4;
// Blocks of 64 rows that one consumer multiplies.
constexpr int kRowBlocks = BLOCK_M / 64 / (PINGPONG ? 1 : CONSUMERS);
constexpr int kParts = GATE ? 2 : 1, kPartRows = BLOCK_N / kParts;
constexpr u32 kXBytes = X_ROWS * kRowBytes, kWBytes = BLOCK_N * kRowBytes;

// The output of `linear`, but that a group may end inside of a slice of 16 rows: the copy engine stores whole slices, threads the rows
// of others, behind which lie those of the next group.
struct TileOutput : Output<kRowBlocks> {
  using Output<kRowBlocks>::Output;

  WS_INLINE void store_rows(const LinearParams& p, const void* map, const linear::Tile& tile,
                            const float (&d)[kRowBlocks][BLOCK_N / 2]) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      // The same in all lanes of the warp.
      if (tile.m + r * 64 + (int)warp * 16 >= p.m) break;
#pragma unroll
      for (int column = 0; column < kOutN; column += kSlices * kSliceN) store_part(p, map, tile, d[r], r, column);
    }
  }

 private:
  WS_INLINE void store_part(const LinearParams& p, const void* map, const linear::Tile& tile, const float (&d)[BLOCK_N / 2], int r,
                            int first) {
    constexpr int kMost = kSlices * kSliceN / 16, kStep = SMALL_STEPS ? 1 : HAS_RESIDUAL ? kSliceN / 16 : kMost;
    const int groups = min(kSlices * kSliceN, kOutN - first) / 16, row = tile.m + r * 64 + (int)warp * 16;
    u32 words[kMost][kWords];
#pragma unroll
    for (int step = 0; step < kMost; step += kStep) {
      // The branch keeps the compiler from evaluating several steps at a time.
      if (step < groups && (kStep == kMost || tile.n + first + 16 * step < p.n)) {
#pragma unroll
        for (int g = step; g < step + kStep; ++g) {
          if (g >= groups) break;
          float y[2][2][2];
          this->evaluate(y, p, tile, d, r, first + 16 * g);
          this->template pack_group<OUT_T>(words[g], y);
        }
      }
    }
    // The buffer is free once the copy engine has read it; that overlapped with the evaluation.
    if (elect_one()) tma_store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int g = 0; g < kMost; ++g)
      if (g < groups) this->template write_group<OUT_T>(words[g], 16 * g);
    if (p.m - row < kSliceRows) {
      __syncwarp();
      return this->store_lines(p, tile, r, first, min(groups * 16, p.n - tile.n - first));
    }
    async_proxy_fence();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
      for (int column = 0; column < kSlices * kSliceN; column += kBoxN)
        if (column < groups * 16) tma_store(map, this->place(0, column), tile.n + first + column, row, 0);
      tma_store_commit();
    }
  }
};

static_assert(sizeof(X_T) == 2 && sizeof(W_T) == 2 && !SCALING && !(W_ACROSS && GATE), "16-bit types");
static_assert(CONSUMERS == 2 || (CONSUMERS == 1 && !PINGPONG), "two consumers take turns");
static_assert(kRowBlocks >= 1 && BLOCK_M == kRowBlocks * 64 * (PINGPONG ? 1 : CONSUMERS), "blocks of 64 rows");
static_assert(kRowBlocks * BLOCK_N <= 256, "accumulators fit the registers");
static_assert(X_ROWS % 16 == 0 && (X_ROWS == BLOCK_M || BLOCK_M == 64), "rows of x");
static_assert(TMA_STORE && RESIDUAL_ROWS, "results and residual have whole pieces");

// Where things lie in shared memory.
constexpr u32 kWAt = STAGES * kXBytes, kStoreAt = kWAt + STAGES * kWBytes;
constexpr u32 kTermsAt = kStoreAt + CONSUMERS * TileOutput::kBufferBytes;
constexpr u32 kBarriersAt = kTermsAt + CONSUMERS * TileOutput::kTermBytes;
constexpr u32 kSharedBytes = kBarriersAt + STAGES * 16;
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert((STAGES - 1) * kXBytes + BLOCK_M * kRowBytes <= kSharedBytes, "rows of x past X_ROWS exist");

// Named barriers: one to synchronise each consumer, one to give each its turn.
constexpr u32 kConsumerBarrier = 1, kTurnBarrier = kConsumerBarrier + CONSUMERS;
// Arrivals at a full barrier: of the thread that starts the copy engine, and of warps that gather.
constexpr u32 kProducers = GATHER ? 1 + 4 : 1;
// Registers of a producer's and of a consumer's thread, where there are two consumers.
constexpr int kProducerRegisters = GATHER ? 40 : 24, kConsumerRegisters = GATHER ? 232 : 240;

// The tiles of a block, one after the other.
struct Tiles {
  GroupWalk<X_ROWS, 1, GroupedLinearParams> walk;
  u32 columns, at;

  WS_INLINE Tiles(const GroupedSm90Params& p) : walk(p.grouped), columns((p.grouped.linear.n + kOutN - 1) / kOutN), at(blockIdx.x) {}

  // Whether there is one for the block, or so many rounds ahead. Rounds are asked for in ascending order.
  WS_INLINE bool has(u32 ahead) { return walk.find((int)((at + ahead * gridDim.x) / columns)).number < walk.p.groups; }
  // False past the last.
  WS_INLINE bool get(GroupTile& tile) {
    tile = group_tile<X_ROWS>(walk, at, columns);
    return tile.group < walk.p.groups;
  }
  WS_INLINE void advance(u32 rounds) { at += rounds * gridDim.x; }
};

// A place in the ring of stages. At a full barrier the producers and the bytes arrive, at an empty one the warps that read the stage.
struct Ring {
  u32 shared, stage = 0, parity = 0;

  WS_INLINE Ring(u32 shared) : shared(shared) {}
  WS_INLINE u32 full() const { return shared + kBarriersAt + stage * 8; }
  WS_INLINE u32 empty() const { return full() + STAGES * 8; }
  WS_INLINE u32 x() const { return shared + stage * kXBytes; }
  WS_INLINE u32 w() const { return shared + kWAt + stage * kWBytes; }
  WS_INLINE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  WS_INLINE void skip(u32 count) {
    stage += count;
    parity ^= (stage / STAGES) & 1;
    stage %= STAGES;
  }
};

// Starts to load the k-th stage of the matrix of a tile.
WS_INLINE void load_w(const GroupedSm90Params& p, const Ring& ring, const GroupTile& tile, int k) {
  if constexpr (W_ACROSS) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 64; ++i)
      tma_load(ring.w() + i * kBlockK * 128, &p.w_map, ring.full(), tile.column * BLOCK_N + i * 64, k * kBlockK, 0, tile.group);
  } else {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      tma_load(ring.w() + part * kPartRows * kRowBytes, &p.w_map, ring.full(), k * kBlockK, tile.column * kPartRows, part, tile.group);
  }
}

// Executed by a warp, one lane of which copies.
WS_INLINE void produce(const GroupedSm90Params& p, Ring ring) {
  GroupTile tile;
#pragma unroll 1
  for (Tiles tiles(p); tiles.get(tile); tiles.advance(1)) {
    if (elect_one()) {
#pragma unroll 1
      for (int k = 0; k < p.k_tiles; ++k, ring.next()) {
        mbarrier_wait(ring.empty(), ring.parity ^ 1);
        mbarrier_arrive_expect(ring.full(), kXBytes + kWBytes);
        tma_load(ring.x(), &p.x_map, ring.full(), k * kBlockK, tile.row, 0, 0);
        load_w(p, ring, tile, k);
      }
    }
    __syncwarp();
  }
}

// The same where rows of x are gathered, by all threads of the producer: eight neighbouring lanes copy the 128 bytes that a stage needs
// of a row.
WS_INLINE void produce_gathered(const GroupedSm90Params& p, Ring ring) {
  constexpr int kRounds = X_ROWS / 16;
  // Stages whose rows may still be on their way. A consumer releases a stage once it has begun with the next, so two of the ring
  // must be neither.
  constexpr int kUnderway = STAGES >= 8 ? 4 : STAGES - 2;
  static_assert(kUnderway >= 1, "stages");
  const LinearParams& linear = p.grouped.linear;
  const X_T* x = (const X_T*)linear.x;
  const int line = threadIdx.x / 8, first = threadIdx.x % 8 * 8;
  const u32 place = swizzled<kRowBytes>(line * kRowBytes + first * 2);
  Ring arrived = ring;
  int underway = 0;
  auto hand_over = [&]() {
    // Tensor cores read what this thread wrote as ordinary memory.
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(arrived.full());
    arrived.next();
    --underway;
  };
  GroupTile tile;
#pragma unroll 1
  for (Tiles tiles(p); tiles.get(tile); tiles.advance(1)) {
    int rows[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) rows[i] = x_row_of(p.grouped, tile, tile.row + line + i * 16);
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k) {
      mbarrier_wait(ring.empty(), ring.parity ^ 1);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(ring.full(), kWBytes);
        load_w(p, ring, tile, k);
      }
      const int column = k * kBlockK + first;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const bool exists = rows[i] >= 0 && column < linear.k;
        copy_async(ring.x() + place + i * 16 * kRowBytes, x + (exists ? rows[i] * linear.x_row + column : 0), exists);
      }
      commit_copies();
      ring.next();
      if (++underway > kUnderway) {
        wait_copies<kUnderway>();
        hand_over();
      }
    }
  }
  wait_copies<0>();
  while (underway > 0) hand_over();
}

// The sums of one consumer, in blocks of 64 rows.
struct Accumulator {
  float d[kRowBlocks][BLOCK_N / 2];
};

WS_INLINE void release(u32 barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Multiplies the stages of a tile. `first_block` is this consumer's first block of 64 rows; kBlocks of its blocks have rows. The
// products of the last stage may still be running when it returns.
template <int kBlocks> WS_INLINE void multiply(Accumulator& acc, Ring& ring, int k_tiles, u32 first_block) {
  constexpr u32 kBlockBytes = 64 * kRowBytes;
  constexpr int kWStep = W_ACROSS ? kMNMajorStep : kKMajorStep;
  u32 last = 0;
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) pin(acc.d[r]);
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k) {
    mbarrier_wait(ring.full(), ring.parity);
    if constexpr (kBlocks > 0) {
      const u64 a = wgmma_descriptor<false>(ring.x() + first_block * kBlockBytes), b = wgmma_descriptor<W_ACROSS>(ring.w());
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int r = 0; r < kBlocks; ++r)
          Wgmma<X_T, W_T, BLOCK_N>::template mma<false, W_ACROSS>(
              acc.d[r], a + (step * kKMajorStep + r * (kBlockBytes >> 4)), b + step * kWStep, step > 0 || k > 0);
      wgmma_commit();
      // The stage before this one is done with; this one keeps the tensor cores busy meanwhile.
      wgmma_wait<1>();
    }
    if (k > 0) release(last);
    last = ring.empty();
    ring.next();
  }
}

WS_INLINE void finish_multiply(Accumulator& acc, Ring ring) {
  wgmma_wait<0>();
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) pin(acc.d[r]);
  ring.stage = ring.stage == 0 ? STAGES - 1 : ring.stage - 1;
  release(ring.empty());
}

// Writes zeros to the rows from `row` on, 16 bytes at a time, by the consumers of all blocks.
WS_INLINE void clear_rows(const GroupedLinearParams& p, int row) {
  constexpr int kItems = 16 / (int)sizeof(OUT_T), kClearing = CONSUMERS * 128;
  const u32 zeros[4] = {0, 0, 0, 0};
  const i64 pieces = p.linear.n / kItems, count = (p.rows - row) * pieces;
  for (i64 i = (i64)blockIdx.x * kClearing + threadIdx.x - 128; i < count; i += (i64)gridDim.x * kClearing) {
    const i64 below = i / pieces;
    store_words((OUT_T*)p.linear.out + (row + below) * p.linear.out_row + (i - below * pieces) * kItems, zeros);
  }
}

WS_INLINE void consume(const GroupedSm90Params& p, Ring ring, u32 consumer) {
  Accumulator acc;
  TileOutput output(ring.shared + kStoreAt + consumer * TileOutput::kBufferBytes,
                    ring.shared + kTermsAt + consumer * TileOutput::kTermBytes, kConsumerBarrier + consumer);
  Tiles tiles(p);
  if (PINGPONG) {
    tiles.advance(consumer);
    ring.skip(consumer * p.k_tiles);
  }
  const u32 first_block = PINGPONG ? 0 : consumer * kRowBlocks;
  bool waits = PINGPONG && consumer > 0;
  GroupTile tile;
#pragma unroll 1
  while (tiles.get(tile)) {
    const LinearParams product = product_of(p.grouped, tile);
    const linear::Tile place = {tile.row + (int)first_block * 64, tile.column * kOutN, 0};
    output.begin(product, place);
    if (waits) named_barrier_sync(kTurnBarrier + consumer, 256);
    const int rows = tile.end - place.m;
    if (rows > (kRowBlocks - 1) * 64) multiply<kRowBlocks>(acc, ring, p.k_tiles, first_block);
    else if (kRowBlocks > 1 && rows > 0) multiply<1>(acc, ring, p.k_tiles, first_block);
    else multiply<0>(acc, ring, p.k_tiles, first_block);
    // Somebody waits for each arrival: none is pending when the block ends.
    if (PINGPONG && tiles.has(1)) named_barrier_arrive(kTurnBarrier + (consumer ^ 1), 256);
    output.prepare();
    finish_multiply(acc, ring);
    output.store_rows(product, &p.out_map, place, acc.d);
    if (!PINGPONG) output.meet();
    tiles.advance(PINGPONG ? CONSUMERS : 1);
    if (PINGPONG) {
      ring.skip((CONSUMERS - 1) * p.k_tiles);
      waits = true;
    }
  }
  output.drain();
  if (p.grouped.clears) clear_rows(p.grouped, tiles.walk.rows);
}

extern "C" __global__ void __launch_bounds__(kThreads) grouped_linear_sm90(const __grid_constant__ GroupedSm90Params p) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  const u32 shared = shared_address(shared_memory);
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int i = 0; i < STAGES; ++i, ring.next()) {
      mbarrier_init(ring.full(), kProducers);
      mbarrier_init(ring.empty(), 4 * (PINGPONG ? 1 : CONSUMERS));
    }
    mbarrier_init_fence();
    if (!GATHER) tma_prefetch_map(&p.x_map);
    tma_prefetch_map(&p.w_map);
    tma_prefetch_map(&p.out_map);
  }
  __syncthreads();
  begin_kernel();
  // All warpgroups start with the same number of registers; the producer leaves most of its share to the consumers.
  if (warpgroup == 0) {
    if (CONSUMERS > 1) give_registers<kProducerRegisters>();
    if (GATHER) produce_gathered(p, Ring(shared));
    else if (threadIdx.x / 32 == 0) produce(p, Ring(shared));
  } else {
    if (CONSUMERS > 1) take_registers<kConsumerRegisters>();
    consume(p, Ring(shared), warpgroup - 1);
  }
}
