#pragma once
// Division of numbers below 2^31 by a divisor that the host knows. A division instruction does not exist, and the
// sequence in its place costs tens of cycles; a multiplication by a rounded-up inverse gives the same quotient.

#include "warpsmith/base.cuh"

namespace warpsmith {

// floor(n / d), with shift = 31 + ceil(log2 d) and factor = ceil(2^shift / d).
WS_INLINE u32 divide(u32 n, u32 factor, u32 shift) { return (u32)(((u64)n * factor) >> shift); }

// floor(n / d.value), with d.shift = ceil(log2 d.value) and d.factor = ceil(2^(32 + d.shift) / d.value) - 2^32: one word
// of the product is enough.
template <class Divisor> WS_INLINE u32 divide(u32 n, const Divisor& d) { return (__umulhi(n, d.factor) + n) >> d.shift; }

}  // namespace warpsmith
