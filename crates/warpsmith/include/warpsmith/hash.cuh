#pragma once

#include "warpsmith/base.cuh"

namespace warpsmith {

// A permutation of 32-bit numbers in which every bit of x changes about half of the bits.
WS_INLINE u32 mix_bits(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

}  // namespace warpsmith
