// Attention of tensors with keys and values one after the other; see attention_sm90.cuh.

#define PAGED 0
#include "warpsmith/attention_sm90.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_sm90(const __grid_constant__ Sm90Params p) {
  prepare(p);
  begin_kernel();
  attend(p);
}
