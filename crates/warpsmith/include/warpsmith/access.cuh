#pragma once
// Moving bits as they are, 1, 2, 4, 8 or 16 bytes at a time.

#include "warpsmith/vec.cuh"

namespace warpsmith::access {

struct alignas(16) Words {
  u32 items[4];
};

template <int kBytes> struct Of;
template <> struct Of<1> { using Type = u8; };
template <> struct Of<2> { using Type = u16; };
template <> struct Of<4> { using Type = u32; };
template <> struct Of<8> { using Type = u64; };
template <> struct Of<16> { using Type = Words; };

// What one access of kBytes moves.
template <int kBytes> using Type = typename Of<kBytes>::Type;

// Volatile: launches overlap, so nothing may come from a cache that is not kept up to date.
template <class A> WS_INLINE void load(A& a, const void* p) { a = *(const volatile A*)p; }
template <> WS_INLINE void load(Words& a, const void* p) { load_words(a.items, p); }
template <class A> WS_INLINE void store(void* p, const A& a) { *(volatile A*)p = a; }
template <> WS_INLINE void store(void* p, const Words& a) { store_words(p, a.items); }

}  // namespace warpsmith::access
