// Copies pages of a cache onto others. A page consists of runs of contiguous bytes, in every layer; a job is one run of
// one pair of pages.
//
// Threads to data: 2^lane_bits threads work on a job, each with ITEMS accesses that are 2^lane_bits accesses apart; a
// block takes 256 >> lane_bits jobs. All loads of a thread are issued before its first store.
//
// The first blocks prefetch their pages before the kernel before has ended, going by the pairs as they are at that time:
// if that kernel changes a pair, the wrong page was prefetched, and nothing else happens.
//
// Defines: WIDTH, bytes of an access, of which starts and lengths of runs are multiples; ITEMS.

#include "warpsmith/l2.cuh"
#include "warpsmith/rows.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;

template <int kBytes> struct Access;
template <> struct Access<1> { using Type = u8; };
template <> struct Access<2> { using Type = u16; };
template <> struct Access<4> { using Type = u32; };
template <> struct Access<8> { using Type = u64; };
struct alignas(16) Words {
  u32 items[4];
};
template <> struct Access<16> { using Type = Words; };

template <class A> WS_INLINE void load(A& a, const char* p, u64) { a = *(const volatile A*)p; }
template <> WS_INLINE void load(Words& a, const char* p, u64 policy) { load_words(a.items, p, policy); }
template <class A> WS_INLINE void store(char* p, const A& a) { *(volatile A*)p = a; }
template <> WS_INLINE void store(char* p, const Words& a) { store_words(p, a.items); }

// The source (0) or target (1) of a pair.
WS_INLINE i64 page_of(const KvCopyParams& p, u32 pair, int side) {
  return load_integer(p.pairs, p.wide_pairs, pair * p.pair_strides[0] + side * p.pair_strides[1]);
}
// The source of a pair as it is before `begin_kernel`. Volatile: the value must not stay in L1, where page_of would
// find it.
WS_INLINE i64 probable_source(const KvCopyParams& p, u32 pair) {
  const i64 at = pair * p.pair_strides[0];
  return p.wide_pairs ? ((const volatile i64*)p.pairs)[at] : ((const volatile i32*)p.pairs)[at];
}
// Converted to unsigned, a negative number is too large.
WS_INLINE bool exists(const KvCopyParams& p, i64 page) { return (u64)page < (u64)p.num_pages; }

extern "C" __global__ void __launch_bounds__(kThreads) kv_copy(const KvCopyParams p) {
  const BlockPlace tile(p.tiles);
  const Lines<kThreads> lines{p.lane_bits};
  const u32 job = tile.row * lines.count() + lines.line();
  const bool works = job < p.num_jobs;
  const u32 run = job / p.num_pairs, pair = job - run * p.num_pairs;
  const int lane = lines.lane();
  const i64 first = ((i64)tile.column * ITEMS << p.lane_bits) + lane;
  // Accesses of this thread, at most ITEMS of them.
  const i64 left = works ? (p.units - first + (1 << p.lane_bits) - 1) >> p.lane_bits : 0;
  const int count = (int)min(left, (i64)ITEMS), stride = WIDTH << p.lane_bits;
  char* start = (char*)p.cache + (works ? row_offset(p.runs, 0, run) * p.size : 0) + first * WIDTH;

  if (WIDTH == 16 && works && (int)blockIdx.x < p.blocks_ahead) {
    const i64 src = probable_source(p, pair);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (i < count && exists(p, src)) prefetch_chunk(start + src * p.page_stride + i * stride, p.is_large);
  }
  begin_kernel();
  if (!works) return;
  const i64 src = page_of(p, pair, 0), dst = page_of(p, pair, 1);
  if (!exists(p, src) || !exists(p, dst) || src == dst) return;

  const char* from = start + src * p.page_stride;
  char* to = start + dst * p.page_stride;
  const u64 policy = load_policy(p.is_large);
  typename Access<WIDTH>::Type pieces[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) load(pieces[i], from + i * stride, policy);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) store(to + i * stride, pieces[i]);
}
