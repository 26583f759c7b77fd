// Penalties and biases on logits in place, for the tokens listed for each row.
//
// Threads to data: block b has 256 slots of row b / row_blocks; a thread has a slot.
//
// Defines: ELEM (element type).

#include "warpsmith/base.cuh"

using namespace warpsmith;

using T = ELEM;
constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) penalize(const PenalizeParams p) {
  begin_kernel();
  const i64 row = blockIdx.x / p.row_blocks;
  const i64 slot = (i64)(blockIdx.x % p.row_blocks) * kThreads + threadIdx.x;
  if (slot >= p.slots) return;
  const i64 id = ((const i32*)p.ids)[row * p.ids_row + slot * p.ids_step];
  if (id < 0 || id >= p.columns) return;
  T* at = (T*)p.logits + row * p.logits_row + id * p.logits_step;
  float l = to_f32(*at);
  const i32 count = ((const i32*)p.counts)[row * p.counts_row + slot * p.counts_step];
  if (count >= 0 && p.repetition) {
    const float repetition = ((const float*)p.repetition)[row * p.repetition_step];
    l = l > 0.0f ? __fdiv_rn(l, repetition) : l * repetition;
  }
  if (count > 0) {
    const float frequency = p.frequency ? ((const float*)p.frequency)[row * p.frequency_step] : 0.0f;
    const float presence = p.presence ? ((const float*)p.presence)[row * p.presence_step] : 0.0f;
    l = __fsub_rn(l, __fadd_rn(__fmul_rn(frequency, (float)count), presence));
  }
  if (p.bias) l = __fadd_rn(l, ((const float*)p.bias)[row * p.bias_row + slot * p.bias_step]);
  *at = from_f32<T>(l);
}
