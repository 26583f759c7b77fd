// out = epilogue(x W^T) on Hopper: x [batch, M, K], w [batch, N, K], out [batch, M, N].
//
// Threads to data: persistent and warp-specialised. Warpgroup 0 is the producer: one thread of it copies the tiles of x
// and w into a ring of STAGES stages. The others are consumers: each multiplies rows of the tile by its columns with the
// tensor cores (wgmma.cuh says which sums a lane has), applies the epilogue in registers, and hands the result to the
// copy engine through shared memory. `TileScheduler` alone decides which tile comes next.
//
// The consumers share a tile, each with rows of its own; or, with PINGPONG, the two consumers take tiles in turn, so that
// the epilogue of one overlaps with the products of the other.
//
// EXCHANGED: rows of w are the first operand of the products and rows of x the second. A tile can then have any multiple
// of 8 rows of x, which suits an M that is badly divided by 64 or 128. The sums are transposed.
//
// Every element is summed over K in ascending steps of 32 bytes into one accumulator, whatever the tile, the schedule
// or M, even with exchanged operands: the bits of a row depend only on that row and w.
//
// Defines: BLOCK_M, BLOCK_N, the tile; X_ROWS, the rows of x that are loaded, fewer than BLOCK_M where M is known to be
// small; STAGES; PIECES, of 128 bytes of K in a stage (if more than one, K must be a multiple of a stage, or end inside
// of a piece: then every tile adds zeros); CONSUMERS, warpgroups (1 to 3); PINGPONG; EXCHANGED; CLUSTER_M, CLUSTER_N,
// blocks of a cluster along M or N, which share what they load of w or x; BLOCKS_PER_SM; EARLY, w is constant and its
// first stages are loaded while the kernel before may still run; DIRECT, rows of w start anywhere and the producer's
// threads load them instead of the copy engine; X_MAJOR_MN, W_MAJOR_MN, whether M or N is the dense dimension instead of
// K; those of linear_output.cuh and linear.cuh. With a gate, BLOCK_N counts rows of w, half of them gate and half up, and
// a tile has BLOCK_N / 2 columns; gate and up are the third dimension of the map of w, so that halves and interleaved
// rows are loaded in the same way.

#if EXCHANGED
#include "warpsmith/linear_exchanged.cuh"
#else
#include "warpsmith/linear_output.cuh"
#endif
#include "warpsmith/division.cuh"
#if DIRECT
#include "warpsmith/linear_direct.cuh"
#endif
#include "warpsmith/mbarrier.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/wgmma.cuh"

using namespace warpsmith;
using namespace warpsmith::linear;

constexpr int kThreads = (1 + CONSUMERS) * 128;
constexpr int kCluster = CLUSTER_M * CLUSTER_N;
constexpr int kRowBytes = 128;  // of K in a piece
constexpr int kBlockK = kRowBytes / (int)sizeof(X_T);
constexpr int kSteps = 4;
// Rows of the first operand of the products, which come in blocks of 64, and of the second.
constexpr int kRowsA = EXCHANGED ? BLOCK_N : BLOCK_M, kRowsB = EXCHANGED ? BLOCK_M : BLOCK_N;
// Blocks of the first that one consumer multiplies.
constexpr int kRowBlocks = kRowsA / 64 / (PINGPONG ? 1 : CONSUMERS);
typedef Output<kRowBlocks> TileOutput;

// Rows of x past X_ROWS are whatever lies there: the rows of the result that they give are not stored.
constexpr u32 kXPiece = X_ROWS * kRowBytes, kWPiece = BLOCK_N * kRowBytes;
constexpr u32 kXBytes = PIECES * kXPiece, kWBytes = PIECES * kWPiece;

static_assert(sizeof(X_T) == sizeof(W_T), "types");
// One scale of w for all gate columns of a tile, and one for its up columns (the host sees to n with a gate in halves);
// and sums beside partial sums.
static_assert(SCALING != 2 || (kBlockK == kScaleBlock && kScaleBlock % (GATE == 2 ? BLOCK_N : kOutN) == 0), "scales");
static_assert(SCALING != 2 || kRowBlocks * BLOCK_N <= 128, "accumulators fit the registers");
static_assert(!EXCHANGED || (!SCALING && !GATE && sizeof(X_T) == 2 && sizeof(OUT_T) == 2), "exchanged operands");
static_assert(!EXCHANGED || (TMA_STORE && (RESIDUAL_ROWS || !HAS_RESIDUAL)), "exchanged operands");
static_assert(!EXCHANGED || (!X_MAJOR_MN && !W_MAJOR_MN && BLOCK_M % 8 == 0), "exchanged operands");
static_assert(PIECES == 1 || (SCALING != 2 && !X_MAJOR_MN && !W_MAJOR_MN), "pieces");
static_assert(!DIRECT || (CONSUMERS == 1 && kCluster == 1 && PIECES == 1 && !EARLY && !W_MAJOR_MN), "direct loads");
static_assert(!DIRECT || (sizeof(W_T) == 2 && !SCALING && !EXCHANGED), "direct loads");
static_assert(CONSUMERS >= 1 && CONSUMERS <= 3, "consumers");
static_assert(!PINGPONG || CONSUMERS == 2, "two consumers take turns");
static_assert(kRowBlocks >= 1 && kRowsA == kRowBlocks * 64 * (PINGPONG ? 1 : CONSUMERS), "blocks of 64 rows");
static_assert(kRowBlocks * kRowsB <= (EXCHANGED ? 368 : CONSUMERS == 3 ? 192 : 256), "accumulators fit the registers");
static_assert(X_ROWS == BLOCK_M || (X_ROWS < 64 && BLOCK_M == 64 && X_ROWS % 8 == 0 && !X_MAJOR_MN), "rows of x");
static_assert(CLUSTER_M == 1 || CLUSTER_N == 1, "clusters have one dimension");
static_assert(X_ROWS % (8 * CLUSTER_N) == 0 && BLOCK_N % (GATE ? 16 * CLUSTER_M : 8 * CLUSTER_M) == 0, "shares of a cluster");
static_assert(!X_MAJOR_MN || sizeof(X_T) == 2, "transposed operands have 16 bits");
static_assert(!W_MAJOR_MN || (sizeof(X_T) == 2 && BLOCK_N % 64 == 0 && !GATE), "transposed operands have 16 bits");

// Where things lie in shared memory.
constexpr u32 kXAt = 0, kWAt = kXAt + STAGES * kXBytes, kStoreAt = kWAt + STAGES * kWBytes;
constexpr u32 kTermsAt = kStoreAt + CONSUMERS * TileOutput::kBufferBytes;
constexpr u32 kBarriersAt = kTermsAt + CONSUMERS * TileOutput::kTermBytes;
constexpr u32 kSharedBytes = kBarriersAt + STAGES * 16;
static_assert(kSharedBytes <= 232448, "shared memory");
static_assert(STAGES * kXBytes - kXPiece + BLOCK_M * kRowBytes <= kSharedBytes, "rows of x past X_ROWS exist");

// Named barriers: one to synchronise each consumer, one to give each its turn.
constexpr u32 kConsumerBarrier = 1, kTurnBarrier = kConsumerBarrier + CONSUMERS;

// The tiles of a block, one after the other. All blocks of a cluster get tiles that share rows or columns, and the same
// number of them. Neighbouring tiles run at the same time and should share operands in L2: tiles are ordered in bands
// of `band` rows of tiles, and in a band column by column. Every other round assigns tiles to blocks in reverse order:
// tiles get cheaper towards the end, so a block that had an expensive one gets a cheaper one next.
struct TileScheduler {
  u32 first, step, round = 0;

  WS_INLINE TileScheduler() : first(blockIdx.x / kCluster), step(gridDim.x / kCluster) {}

  WS_INLINE u32 index(u32 ahead) const {
    const u32 at = round + ahead;
    return at * step + (at % 2 ? step - 1 - first : first);
  }
  WS_INLINE bool has(const Sm90Params& p, u32 ahead) const { return index(ahead) < p.tiles; }
  WS_INLINE void advance(u32 rounds) { round += rounds; }

  WS_INLINE Tile tile(const Sm90Params& p, u32 rank) const {
    const u32 batch = divide(index(0), p.per_batch);
    u32 at = index(0) - batch * p.per_batch.value;
    const u32 band = divide(at, p.per_band);
    at -= band * p.per_band.value;
    // The last band may have fewer rows.
    const bool whole = (band + 1) * p.per_band.value <= p.per_batch.value;
    u32 n = divide(at, whole ? p.band : p.last_band), m = band * p.band.value + at - n * (whole ? p.band : p.last_band).value;
    if (CLUSTER_M > 1) m = m * CLUSTER_M + rank;
    if (CLUSTER_N > 1) n = n * CLUSTER_N + rank;
    return {(int)(m * BLOCK_M), (int)(n * kOutN), (int)batch};
  }
};

// A place in the ring of stages. At a full barrier the producer and the bytes arrive. At an empty barrier the warps that
// read the stage arrive, of all blocks of the cluster, because all blocks write it.
struct Ring {
  u32 shared, stage = 0, parity = 0;

  WS_INLINE Ring(u32 shared) : shared(shared) {}
  WS_INLINE u32 full() const { return shared + kBarriersAt + stage * 8; }
  WS_INLINE u32 empty() const { return full() + STAGES * 8; }
  WS_INLINE u32 x() const { return shared + kXAt + stage * kXBytes; }
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

// The rows of an operand that a tile needs: all, fewer at its end, or none past it.
//
// The copy engine would fill rows past the end with zeros, which takes it longer than loading existing rows. Their results
// are not stored, so they are not loaded at all: tiles at the end have boxes of their own, with as many rows as are left.
template <bool kMajorMN, int kRows, int kParts, int kShare> struct Operand {
  static constexpr int kPartRows = kRows / kParts;
  const void* map;
  int box_rows, row;

  WS_INLINE Operand(const void* whole, const Edge& edge, int row, int rows) : map(whole), box_rows(kPartRows / kShare), row(row) {
    const int left = rows - row;
    if (kMajorMN || left >= kPartRows) return;
    map = &edge.map;
    box_rows = left > 0 ? edge.box_rows : 0;
  }

  WS_INLINE u32 bytes() const { return PIECES * kParts * kShare * box_rows * kRowBytes; }

  // Calls `box` for every box of the k-th stage, with its offset in the stage and its coordinates. Blocks that share the
  // operand load a part each. A tile consists of kParts boxes of rows, one for each index of the third dimension (gate
  // and up).
  template <class Box> WS_INLINE void each_box(u32 rank, int k, const Box& box) const {
    if (kShare == 1) rank = 0;
    if (kMajorMN) {
      constexpr int kBoxK = kBlockK / kShare;
#pragma unroll
      for (int i = 0; i < kRows / 64; ++i)
        box(i * (kBlockK * 128) + rank * (kBoxK * 128), row + i * 64, k * kBlockK + (int)rank * kBoxK, 0);
    } else if (box_rows > 0) {
      const int skipped = (int)rank * box_rows;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int i = 0; i < kParts; ++i)
          box((piece * kRows + i * kPartRows + skipped) * kRowBytes, (k * PIECES + piece) * kBlockK, row + skipped, i);
    }
  }
  // Loads a stage, into all blocks that share it.
  WS_INLINE void load(u32 to, u32 barrier, u32 rank, int k, int batch) const {
    constexpr u16 kAll = (1 << kShare) - 1;
    each_box(rank, k, [&](u32 at, int c0, int c1, int part) {
      if (kShare > 1) tma_load_multicast(to + at, map, barrier, kAll, c0, c1, part, batch);
      else tma_load(to + at, map, barrier, c0, c1, part, batch);
    });
  }
  // Prefetches a stage to L2.
  WS_INLINE void prefetch(u32 rank, int k, int batch) const {
    each_box(rank, k, [&](u32, int c0, int c1, int part) { tma_prefetch_box((u64)map, c0, c1, part, batch); });
  }
};
typedef Operand<X_MAJOR_MN, X_ROWS, 1, CLUSTER_N> OperandX;
typedef Operand<W_MAJOR_MN, BLOCK_N, GATE ? 2 : 1, CLUSTER_M> OperandW;

// Prefetches the first weights of this block to L2 before begin_kernel: memory is idle while the last blocks of the kernel
// before finish. Nothing is read: if that kernel still writes these weights, its writes reach the same L2 lines, where the
// later loads find them. Executed by one thread.
WS_INLINE void prefetch_first_stages(const Sm90Params& p, u32 rank) {
  const Tile tile = TileScheduler().tile(p, rank);
  const OperandW w(&p.w_map, p.w_edge, tile.n, p.linear.n);
#pragma unroll 1
  for (int k = 0; k < p.ahead; ++k) w.prefetch(rank, k, p.linear.w_batch ? tile.batch : 0);
  if (p.linear.m > BLOCK_M) return;
  // All blocks have the same rows of x: each prefetches a few columns.
  const OperandX x(&p.x_map, p.x_edge, tile.m, p.linear.m);
#pragma unroll 1
  for (int k = blockIdx.x; k < p.k_tiles; k += gridDim.x) x.prefetch(rank, k, tile.batch);
}

// Loads the first p.early stages of w alone, which nobody writes any more, while the kernel before may still run.
WS_INLINE void produce_early(const Sm90Params& p, Ring ring, u32 rank) {
  int left = p.early;
#pragma unroll 1
  for (TileScheduler tiles; left > 0 && tiles.has(p, 0); tiles.advance(1)) {
    const Tile tile = tiles.tile(p, rank);
    const OperandX x(&p.x_map, p.x_edge, tile.m, p.linear.m);
    const OperandW w(&p.w_map, p.w_edge, tile.n, p.linear.n);
#pragma unroll 1
    for (int k = 0; k < p.k_tiles && left > 0; ++k, --left) {
      mbarrier_arrive_expect(ring.full(), x.bytes() + w.bytes());
      w.load(ring.w(), ring.full(), rank, k, p.linear.w_batch ? tile.batch : 0);
      ring.next();
    }
  }
}

WS_INLINE void produce(const Sm90Params& p, Ring ring, u32 rank) {
  int early = EARLY ? p.early : 0;
  for (TileScheduler tiles; tiles.has(p, 0); tiles.advance(1)) {
    const Tile tile = tiles.tile(p, rank);
    const int w_batch = p.linear.w_batch ? tile.batch : 0;
    const OperandX x(&p.x_map, p.x_edge, tile.m, p.linear.m);
    const OperandW w(&p.w_map, p.w_edge, tile.n, p.linear.n);
    const u32 bytes = x.bytes() + w.bytes();
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k) {
      if (!EARLY || early == 0) {
        mbarrier_wait(ring.empty(), ring.parity ^ 1);
        mbarrier_arrive_expect(ring.full(), bytes);
      }
      x.load(ring.x(), ring.full(), rank, k, tile.batch);
      if (!EARLY || early == 0) w.load(ring.w(), ring.full(), rank, k, w_batch);
      else --early;
      ring.next();
    }
  }
}

#if DIRECT

// The stages of a block, one after the other through all its tiles, as a producer's thread sees them.
struct StageCursor {
  TileScheduler tiles;
  DirectRows<BLOCK_N> rows;
  int k = 0;

  WS_INLINE StageCursor(const Sm90Params& p) { begin_tile(p); }
  WS_INLINE bool has(const Sm90Params& p) const { return tiles.has(p, 0); }
  WS_INLINE Tile tile(const Sm90Params& p) const { return tiles.tile(p, 0); }
  WS_INLINE void begin_tile(const Sm90Params& p) {
    if (!has(p)) return;
    const Tile at = tile(p);
    rows = DirectRows<BLOCK_N>(p.linear, at.n, p.linear.w_batch ? at.batch : 0);
  }
  WS_INLINE void next(const Sm90Params& p) {
    if (++k < p.k_tiles) return;
    k = 0;
    tiles.advance(1);
    begin_tile(p);
  }
};
constexpr int kRounds = DirectRows<BLOCK_N>::kRounds;
// Stages that a thread holds in registers, and stages ahead of them that are brought to L2: together they keep memory busy.
constexpr int kHeld = kRounds <= 6 ? 12 / kRounds : kRounds <= 8 ? 2 : 1, kBrought = kHeld + (256 + BLOCK_N - 1) / BLOCK_N;

// As prefetch_first_stages, by all threads of the producer.
WS_INLINE void prefetch_direct(const Sm90Params& p) {
  const StageCursor cursor(p);
#pragma unroll 1
  for (int k = 0; k < p.ahead; ++k)
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
      if (DirectRows<BLOCK_N>::place() == 0) cursor.rows.prefetch(round, k);
}

// As produce, by all threads of the producer: w passes through their registers, x is copied by the copy engine. Each warp
// arrives at a full barrier for its part of w, and one thread for x.
WS_INLINE void produce_direct(const Sm90Params& p, Ring ring) {
  PiecePair held[kHeld][kRounds];
  StageCursor loads(p), stores(p);
  // The first pass through `held` only loads.
  bool filled = false;
#pragma unroll 1
  do {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (filled && stores.has(p)) {
        mbarrier_wait(ring.empty(), ring.parity ^ 1);
        if (threadIdx.x == 0) {
          const Tile tile = stores.tile(p);
          const OperandX x(&p.x_map, p.x_edge, tile.m, p.linear.m);
          mbarrier_arrive_expect(ring.full(), x.bytes());
          x.load(ring.x(), ring.full(), 0, stores.k, tile.batch);
        }
        stores.rows.store(ring.w(), held[i], p.linear, stores.k);
        async_proxy_fence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full());
        ring.next();
        stores.next(p);
      }
      if (loads.has(p)) {
        loads.rows.load(held[i], p.linear, loads.k, kBrought);
        loads.next(p);
      }
    }
    filled = true;
  } while (stores.has(p));
}

#endif

// The sums of one consumer, in blocks of 64 rows.
struct Accumulator {
  float d[kRowBlocks][kRowsB / 2];
};

WS_INLINE void release(u32 barrier) {
  const u32 lane = threadIdx.x % 32;
  if (kCluster == 1) {
    if (lane == 0) mbarrier_arrive(barrier);
  } else if (lane < kCluster) {
    mbarrier_arrive_at(barrier, lane);
  }
}

// Multiplies the stages of a tile. `first_block` is this consumer's first block of 64 rows; kBlocks of its blocks have rows
// of the operand. The products of the last stage may still be running when it returns.
template <int kBlocks> WS_INLINE void multiply(Accumulator& acc, Ring& ring, int k_tiles, u32 first_block) {
  constexpr bool kAMajorMN = EXCHANGED ? W_MAJOR_MN : X_MAJOR_MN, kBMajorMN = EXCHANGED ? X_MAJOR_MN : W_MAJOR_MN;
  constexpr int kAStep = kAMajorMN ? kMNMajorStep : kKMajorStep, kBStep = kBMajorMN ? kMNMajorStep : kKMajorStep;
  constexpr u32 kAPiece = EXCHANGED ? kWPiece : kXPiece, kBPiece = EXCHANGED ? kXPiece : kWPiece;
  constexpr u32 kBlockBytes = 64 * kRowBytes;  // of 64 rows in a stage, whichever dimension is dense
  u32 last = 0;
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) pin(acc.d[r]);
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k) {
    mbarrier_wait(ring.full(), ring.parity);
    if constexpr (kBlocks > 0) {
      const u64 a = wgmma_descriptor<kAMajorMN, kBlockK>((EXCHANGED ? ring.w() : ring.x()) + first_block * kBlockBytes);
      const u64 b = wgmma_descriptor<kBMajorMN, kBlockK>(EXCHANGED ? ring.x() : ring.w());
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < PIECES * kSteps; ++step) {
        const int piece = step / kSteps, inside = step % kSteps;
#pragma unroll
        for (int r = 0; r < kBlocks; ++r)
          Wgmma<X_T, W_T, kRowsB>::template mma<kAMajorMN, kBMajorMN>(
              acc.d[r], a + (piece * (kAPiece >> 4) + inside * kAStep + r * (kBlockBytes >> 4)),
              b + (piece * (kBPiece >> 4) + inside * kBStep), step > 0 || k > 0);
      }
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

// A thread's scales for a stage: of its rows of x, and of the gate and up rows of w.
struct StageScales {
  float x[kRowBlocks][2], w[2];

  WS_INLINE StageScales() {}
  WS_INLINE StageScales(const LinearParams& p, const Tile& tile, int k) {
    const int first = tile.m + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + r * 64 + h * 8;
        x[r][h] = row < p.m ? x_scale_at(p, tile.batch, row, k) : 0.0f;
      }
    const int column = min(tile.n, p.n - 1);
    w[0] = w_scale_at(p, tile.batch, gate_row(p, column), k);
    w[1] = GATE ? w_scale_at(p, tile.batch, up_row(p, column), k) : 0.0f;
  }
};

// As multiply and finish_multiply, with scales for every stage: the products of a stage are summed separately and then
// added in f32. This also avoids the lower precision of long sums of 8-bit products.
WS_INLINE void multiply_scaled(Accumulator& acc, Ring& ring, const Sm90Params& p, const Tile& tile, u32 first_block) {
  constexpr int kHalf = BLOCK_N / 4;
  Accumulator part;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
    for (int i = 0; i < kRowsB / 2; ++i) acc.d[r][i] = 0.0f;
  StageScales scales(p.linear, tile, 0);
#pragma unroll 1
  for (int k = 0; k < p.k_tiles; ++k) {
    mbarrier_wait(ring.full(), ring.parity);
    const u64 x = wgmma_descriptor<false>(ring.x() + first_block * (64 * kRowBytes)), w = wgmma_descriptor<false>(ring.w());
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) pin(part.d[r]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
        Wgmma<X_T, W_T, kRowsB>::template mma<false, false>(
            part.d[r], x + (step * kKMajorStep + r * (64 * kRowBytes >> 4)), w + step * kKMajorStep, step > 0);
    wgmma_commit();
    // The next scales arrive while the products are computed.
    const StageScales next(p.linear, tile, min(k + 1, p.k_tiles - 1));
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) pin(part.d[r]);
    release(ring.empty());
    ring.next();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < kRowsB / 2; ++i)
        acc.d[r][i] = add_block(acc.d[r][i], part.d[r][i], scales.x[r][i / 2 % 2], scales.w[GATE && i >= kHalf]);
    scales = next;
  }
}

WS_INLINE void consume(const Sm90Params& p, Ring ring, u32 rank, u32 consumer) {
  Accumulator acc;
  TileOutput output(ring.shared + kStoreAt + consumer * TileOutput::kBufferBytes,
                    ring.shared + kTermsAt + consumer * TileOutput::kTermBytes, kConsumerBarrier + consumer);
  TileScheduler tiles;
  if (PINGPONG) {
    tiles.advance(consumer);
    ring.skip(consumer * p.k_tiles);
  }
  const u32 first_block = PINGPONG ? 0 : consumer * kRowBlocks;
  bool waits = PINGPONG && consumer > 0;
  while (tiles.has(p, 0)) {
    Tile tile = tiles.tile(p, rank);
    (EXCHANGED ? tile.n : tile.m) += first_block * 64;
    output.begin(p.linear, tile);
    if (waits) named_barrier_sync(kTurnBarrier + consumer, 256);
    if constexpr (SCALING == 2) {
      multiply_scaled(acc, ring, p, tile, first_block);
    } else {
      // Tiles at the end of the first operand are cheaper.
      const int rows = EXCHANGED ? p.linear.n - tile.n : p.linear.m - tile.m;
      if (rows > (kRowBlocks - 1) * 64) multiply<kRowBlocks>(acc, ring, p.k_tiles, first_block);
      else if (kRowBlocks > 1 && rows > 0) multiply<1>(acc, ring, p.k_tiles, first_block);
      else multiply<0>(acc, ring, p.k_tiles, first_block);
    }
    // Somebody waits for each arrival: none is pending when the block ends.
    if (PINGPONG && tiles.has(p, 1)) named_barrier_arrive(kTurnBarrier + (consumer ^ 1), 256);
    output.prepare();
    if constexpr (SCALING != 2) finish_multiply(acc, ring);
    output.store(p.linear, &p.out_map, tile, acc.d);
    if (!PINGPONG) output.meet();
    tiles.advance(PINGPONG ? CONSUMERS : 1);
    if (PINGPONG) {
      ring.skip((CONSUMERS - 1) * p.k_tiles);
      waits = true;
    }
  }
  output.drain();
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) linear_sm90(const __grid_constant__ Sm90Params p) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  const u32 shared = shared_address(shared_memory);
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const u32 rank = kCluster > 1 ? cluster_rank() : 0;
  // By a warp that has nothing else to do.
#if DIRECT
  if (warpgroup == 0) prefetch_direct(p);
#else
  if (threadIdx.x / 32 == 1 && elect_one()) prefetch_first_stages(p, rank);
#endif
  if (threadIdx.x == 0) {
    Ring ring(shared);
    for (int i = 0; i < STAGES; ++i, ring.next()) {
      mbarrier_init(ring.full(), DIRECT ? 5 : 1);
      mbarrier_init(ring.empty(), kCluster * 4 * (PINGPONG ? 1 : CONSUMERS));
    }
    mbarrier_init_fence();
    tma_prefetch_map(&p.x_map);
    tma_prefetch_map(&p.x_edge.map);
    if (!DIRECT) {
      tma_prefetch_map(&p.w_map);
      tma_prefetch_map(&p.w_edge.map);
    }
    if (TMA_STORE) tma_prefetch_map(&p.out_map);
  }
  if (kCluster > 1) cluster_sync();
  else __syncthreads();
  if (EARLY && threadIdx.x / 32 == 0 && elect_one()) produce_early(p, Ring(shared), rank);
  // Nothing above reads or writes memory that another kernel could write.
  begin_kernel();
  // All warpgroups start with the same number of registers; the producer leaves most of its share to the consumers.
  if (warpgroup == 0) {
    if (CONSUMERS > 1) give_registers<24>();
#if DIRECT
    produce_direct(p, Ring(shared));
#else
    if (threadIdx.x / 32 == 0 && elect_one()) produce(p, Ring(shared), rank);
#endif
  } else {
    if (CONSUMERS > 1) take_registers<CONSUMERS == 2 ? 240 : 160>();
    consume(p, Ring(shared), rank, warpgroup - 1);
  }
  // No block may end while another can still write to its memory or its barriers.
  if (kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}
