#pragma once
// A few neighbouring elements of any float type, moved at once as 32-bit words and converted together.

#include "warpsmith/fp8.cuh"
#include "warpsmith/vec.cuh"

namespace warpsmith {

// The elements of one word, as floats.
WS_INLINE void unpack_word(float* out, u32 word, f32) { out[0] = bits_float(word); }
WS_INLINE void unpack_word(float* out, u32 word, f16) {
  out[0] = to_f32(f16{(u16)word});
  out[1] = to_f32(f16{(u16)(word >> 16)});
}
WS_INLINE void unpack_word(float* out, u32 word, bf16) {
  out[0] = bits_float(word << 16);
  out[1] = bits_float(word & 0xffff0000u);
}
template <class T> WS_INLINE void unpack_word(float* out, u32 word, T type) {
  decode_x2(out[0], out[1], (u16)word, type);
  decode_x2(out[2], out[3], (u16)(word >> 16), type);
}

// All elements of a chunk, word by word: fewer instructions than element by element.
template <class T> WS_INLINE void unpack_words(float (&out)[kVec<T>], const Chunk<T>& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack_word(out + i * (kVec<T> / 4), c.words[i], T());
}

// One word from as many floats as it has elements.
WS_INLINE u32 pack_word(const float* in, f32) { return float_bits(in[0]); }
WS_INLINE u32 pack_word(const float* in, f16 type) { return pack_pair(in[0], in[1], type); }
WS_INLINE u32 pack_word(const float* in, bf16 type) { return pack_pair(in[0], in[1], type); }
WS_INLINE u32 pack_word(const float* in, f8e4m3) {
  return encode_e4m3x2(in[0], in[1]) | ((u32)encode_e4m3x2(in[2], in[3]) << 16);
}
WS_INLINE u32 pack_word(const float* in, f8e5m2) {
  return encode_e5m2x2(in[0], in[1]) | ((u32)encode_e5m2x2(in[2], in[3]) << 16);
}

// kCount elements of T: 4, 8 or a multiple of 16 bytes, at an address aligned to that size (at most to 16).
template <class T, int kCount> struct Group {
  static constexpr int kWords = kCount * (int)sizeof(T) / 4;
  static constexpr int kPerWord = 4 / (int)sizeof(T);
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0, "whole accesses");
  u32 words[kWords];

  WS_INLINE void load(const T* p) {
    if constexpr (kWords == 1) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(p) : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(p) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) load_words((u32(&)[4])words[i], (const char*)p + 4 * i);
    }
  }
  WS_INLINE void store(T* p) const {
    if constexpr (kWords == 1) {
      asm volatile("st.global.u32 [%1], %0;" ::"r"(words[0]), "l"(p) : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("st.global.v2.u32 [%2], {%0, %1};" ::"r"(words[0]), "r"(words[1]), "l"(p) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) store_words((char*)p + 4 * i, (const u32(&)[4])words[i]);
    }
  }
  WS_INLINE void unpack(float (&out)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack_word(out + i * kPerWord, words[i], T());
  }
  WS_INLINE void pack(const float (&in)[kCount]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack_word(in + i * kPerWord, T());
  }
};

// Stores rounded values to a row, from element `at` on: all at once with kVector; otherwise there is just one.
template <bool kVector, class T, int kCount>
WS_INLINE void store_values(T* row, i64 at, i64 step, const float (&values)[kCount]) {
  if constexpr (kVector) {
    Group<T, kCount> group;
    group.pack(values);
    group.store(row + at);
  } else {
    static_assert(kCount == 1, "a single element");
    row[at * step] = from_f32<T>(values[0]);
  }
}

}  // namespace warpsmith
