// Attention over pages, of requests with many queries; see attention_sm90.cuh.

#define PAGED 1
#include "warpsmith/attention_sm90.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) paged_attention_sm90(const __grid_constant__ Sm90Params p) {
  prepare(p);
  begin_kernel();
  attend(p);
}
