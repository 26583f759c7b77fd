// Attention with keys and values in tensors. Threads to data, and defines: as in attention_sm90.cuh.

#define PAGED 0
#include "warpsmith/attention_sm90.cuh"

using namespace warpsmith;
using namespace warpsmith::attention;

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_sm90(const __grid_constant__ Sm90Params p) {
  prepare(p);
  begin_kernel();
  attend(p);
}
