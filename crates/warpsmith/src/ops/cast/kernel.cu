// out = round(x), round(x * scale) or round(x / scale), element by element.
//
// Threads to data: a row is cut into groups of K elements, so many that both sides move at least 8 bytes at once and
// the wider one 16. 2^lane_bits threads work on a row; a block takes ITEMS groups a thread of 256 >> lane_bits rows.
// Tensors that are dense as a whole are one row.
//
// Defines: IN, OUT (element types), SCALE (0: none, 1: multiply, 2: divide), VECTOR (rows are dense and start where
// groups can be moved at once), ITEMS.

#include "warpsmith/fp8.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

constexpr int kThreads = 256;
constexpr int kWide = sizeof(IN) > sizeof(OUT) ? sizeof(IN) : sizeof(OUT);
constexpr int kNarrow = sizeof(IN) < sizeof(OUT) ? sizeof(IN) : sizeof(OUT);
constexpr int K = 16 / kWide > 8 / kNarrow ? 16 / kWide : 8 / kNarrow;

// The elements in one word.
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

template <class T> WS_INLINE u32 pack_halves(const float* in) {
  return from_f32<T>(in[0]).bits | ((u32)from_f32<T>(in[1]).bits << 16);
}
WS_INLINE u32 pack_word(const float* in, f32) { return float_bits(in[0]); }
WS_INLINE u32 pack_word(const float* in, f16) {
#if __CUDA_ARCH__ >= 800
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
  return word;
#else
  return pack_halves<f16>(in);
#endif
}
WS_INLINE u32 pack_word(const float* in, bf16) {
#if __CUDA_ARCH__ >= 800
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
  return word;
#else
  return pack_halves<bf16>(in);
#endif
}
WS_INLINE u32 pack_word(const float* in, f8e4m3) {
  return encode_e4m3x2(in[0], in[1]) | ((u32)encode_e4m3x2(in[2], in[3]) << 16);
}
WS_INLINE u32 pack_word(const float* in, f8e5m2) {
  return encode_e5m2x2(in[0], in[1]) | ((u32)encode_e5m2x2(in[2], in[3]) << 16);
}

// K elements of T as words.
template <class T> struct Group {
  static constexpr int kWords = K * (int)sizeof(T) / 4;
  static constexpr int kPerWord = 4 / (int)sizeof(T);
  u32 words[kWords];

  WS_INLINE void load(const T* p) {
    if constexpr (kWords == 2) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(p) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) load_words((u32(&)[4])words[i], (const char*)p + 4 * i);
    }
  }
  WS_INLINE void store(T* p) const {
    if constexpr (kWords == 2) {
      asm volatile("st.global.v2.u32 [%2], {%0, %1};" ::"r"(words[0]), "r"(words[1]), "l"(p) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) store_words((char*)p + 4 * i, (const u32(&)[4])words[i]);
    }
  }
  WS_INLINE void unpack(float (&out)[K]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) unpack_word(out + i * kPerWord, words[i], T());
  }
  WS_INLINE void pack(const float (&in)[K]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack_word(in + i * kPerWord, T());
  }
};

WS_INLINE float scaled(float x, float scale) {
  if (SCALE == 1) return __fmul_rn(x, scale);
  if (SCALE == 2) return __fdiv_rn(x, scale);
  return x;
}

// Blocks a multiprocessor must hold; the slow path of the division takes registers.
constexpr int kResident = SCALE == 2 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(kThreads, kResident) cast(const CastParams p) {
  begin_kernel();
  const int lane = threadIdx.x & ((1 << p.lane_bits) - 1);
  const u32 row_block = blockIdx.x / p.col_tiles, tile = blockIdx.x - row_block * p.col_tiles;
  const i64 row = (i64)row_block * (kThreads >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
  if (row >= p.num_rows) return;
  i64 start[SCALE ? 3 : 2];
  row_offsets<0>(start, p.rows, row);
  const IN* x = (const IN*)p.x + start[0];
  OUT* out = (OUT*)p.out + start[1];
  const float scale = SCALE ? ((const float*)p.scale)[start[SCALE ? 2 : 0]] : 1.0f;
  const i64 first = (((i64)tile * ITEMS << p.lane_bits) + lane) * K;
  const i64 stride = (i64)K << p.lane_bits;

  // Whole groups are all loaded before the first is stored; the end of a row goes element by element.
  Group<IN> groups[ITEMS];
  if (VECTOR) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (first + i * stride + K <= p.num_cols) groups[i].load(x + first + i * stride);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const i64 at = first + i * stride;
    if (VECTOR && at + K <= p.num_cols) {
      float values[K];
      groups[i].unpack(values);
#pragma unroll
      for (int j = 0; j < K; ++j) values[j] = scaled(values[j], scale);
      Group<OUT> result;
      result.pack(values);
      result.store(out + at);
    } else {
      const int count = (int)min(p.num_cols - at, (i64)K);
#pragma unroll 1
      for (int j = 0; j < count; ++j)
        out[(at + j) * p.out_step] = from_f32<OUT>(scaled(to_f32(x[(at + j) * p.x_step]), scale));
    }
  }
}
