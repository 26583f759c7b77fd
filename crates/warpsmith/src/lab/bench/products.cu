// Multiplies and adds and does nothing else, to measure how fast that can go. Operands are random numbers: products of
// zeros need less power, so that the clock would be higher than for any real product.
//
// Threads to data: every thread (with wgmma, every warpgroup) multiplies operands of its own and writes one sum, so that
// the compiler keeps the work.
//
// Defines: WAY, 0 for fused multiply-adds in f32, 1 for `mma.sync` from registers (sm_80 and later), 2 for `wgmma` from
// shared memory (sm_90a); ELEM, the type of the operands (the tensor cores multiply f32 as TF32).

#include "warpsmith/hash.cuh"
#include "warpsmith/mma.cuh"
#include "warpsmith/tma.cuh"
#include "warpsmith/wgmma.cuh"

using namespace warpsmith;

constexpr int kThreads = 256;

// A word of numbers between 0.5 and 2 of either sign.
WS_INLINE u32 random_word(u32 x, f32) { return (mix_bits(x) & 0x80ffffff) | 0x3f000000; }
WS_INLINE u32 random_word(u32 x, bf16) { return (mix_bits(x) & 0x80ff80ff) | 0x3f003f00; }
WS_INLINE u32 random_word(u32 x, f8e4m3) { return (mix_bits(x) & 0x8f8f8f8f) | 0x30303030; }

#if WAY == 0
extern "C" __global__ void __launch_bounds__(kThreads) fma_rate(const ProductsParams p) {
  constexpr int kChains = 16;
  begin_kernel();
  const u32 thread = blockIdx.x * kThreads + threadIdx.x;
  // Below one, so that sums stay ordinary numbers however long this runs.
  const float factor = 0.5f * bits_float(random_word(thread, f32{}) & 0x3f7fffff);
  float sums[kChains], total = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sums[i] = (float)i;
  for (int round = 0; round < p.rounds; ++round)
#pragma unroll
    for (int i = 0; i < kChains; ++i) sums[i] = fmaf(sums[i], factor, factor);
#pragma unroll
  for (int i = 0; i < kChains; ++i) total += sums[i];
  ((float*)p.out)[thread] = total;
}

#elif WAY == 1
extern "C" __global__ void __launch_bounds__(kThreads) mma_rate(const ProductsParams p) {
  constexpr int kChains = 8;
  begin_kernel();
  const u32 thread = blockIdx.x * kThreads + threadIdx.x;
  u32 a[4], b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = random_word(8 * thread + i, ELEM{});
#pragma unroll
  for (int i = 0; i < 2; ++i) b[i] = random_word(8 * thread + 4 + i, ELEM{});
  float sums[kChains][4] = {}, total = 0;
  for (int round = 0; round < p.rounds; ++round)
#pragma unroll
    for (int i = 0; i < kChains; ++i) multiply(sums[i], a, b[0], b[1], ELEM{});
#pragma unroll
  for (int i = 0; i < kChains; ++i) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  ((float*)p.out)[thread] = total;
}

#else
// Two warpgroups of a block multiply 64 x 128 bytes each by the same 256 x 128 bytes, four steps to a round.
extern "C" __global__ void __launch_bounds__(kThreads) wgmma_rate(const ProductsParams p) {
  constexpr int kColumns = 256, kSteps = 4, kWords = (2 * 64 + kColumns) * 128 / 4;
  __shared__ alignas(1024) u32 operands[kWords];
  begin_kernel();
  for (int i = threadIdx.x; i < kWords; i += kThreads) operands[i] = random_word(blockIdx.x * kWords + i, ELEM{});
  async_proxy_fence();
  __syncthreads();
  const u32 start = shared_address(operands);
  const u64 a = wgmma_descriptor<false>(start + threadIdx.x / 128 * (64 * 128));
  const u64 b = wgmma_descriptor<false>(start + 2 * 64 * 128);
  float sums[kColumns / 2] = {}, total = 0;
  for (int round = 0; round < p.rounds; ++round) {
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Wgmma<ELEM, ELEM, kColumns>::mma<false, false>(sums, a + step * kKMajorStep, b + step * kKMajorStep, 1);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(sums);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) total += sums[i];
  ((float*)p.out)[blockIdx.x * kThreads + threadIdx.x] = total;
}
#endif
