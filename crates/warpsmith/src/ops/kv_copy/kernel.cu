// Copies pages of a cache onto others. A job is one pair and one of the runs of neighbouring bytes a page consists of,
// layers included.
//
// Threads to data: 2^lane_bits threads take ITEMS accesses each of a job's run, a lane's 2^lane_bits accesses apart; a
// block takes 256 >> lane_bits jobs. All loads of a thread are issued before its first store.
//
// Defines: WIDTH, bytes of an access: every run starts at and consists of multiples; ITEMS.

#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

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

template <class A> WS_INLINE void load(A& a, const char* p) { a = *(const volatile A*)p; }
template <> WS_INLINE void load(Words& a, const char* p) { load_words(a.items, p); }
template <class A> WS_INLINE void store(char* p, const A& a) { *(volatile A*)p = a; }
template <> WS_INLINE void store(char* p, const Words& a) { store_words(p, a.items); }

extern "C" __global__ void __launch_bounds__(kThreads) kv_copy(const KvCopyParams p) {
  begin_kernel();
  const u32 job_block = blockIdx.x / p.tiles, tile = blockIdx.x - job_block * p.tiles;
  const u32 job = job_block * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
  if (job >= p.num_jobs) return;
  const u32 run = job / p.num_pairs, pair = job - run * p.num_pairs;
  const i64 at = pair * p.pair_strides[0];
  i64 src, dst;
  if (p.wide_pairs) {
    const i64* pairs = (const i64*)p.pairs + at;
    src = pairs[0], dst = pairs[p.pair_strides[1]];
  } else {
    const i32* pairs = (const i32*)p.pairs + at;
    src = pairs[0], dst = pairs[p.pair_strides[1]];
  }
  // As unsigned numbers negative ones are large.
  if ((u64)src >= (u64)p.num_pages || (u64)dst >= (u64)p.num_pages || src == dst) return;

  char* start = (char*)p.cache + row_offset(p.runs, 0, run) * p.size;
  const char* from = start + src * p.page_stride;
  char* to = start + dst * p.page_stride;
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const i64 first = ((i64)tile * ITEMS << p.lane_bits) + lane;
  from += first * WIDTH, to += first * WIDTH;
  // Of this thread, in units of a lane's distance; whatever is above ITEMS counts as ITEMS.
  const i64 left = (p.units - first + (1 << p.lane_bits) - 1) >> p.lane_bits;
  const int count = (int)min(left, (i64)ITEMS), stride = WIDTH << p.lane_bits;
  typename Access<WIDTH>::Type pieces[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) load(pieces[i], from + i * stride);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < count) store(to + i * stride, pieces[i]);
}
