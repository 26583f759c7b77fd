// out = residual + scale * act(x wT + bias) with a weight in the blocks of GGUF and activations in eight bits.
//
// Threads to data: a warp has a column of the result (with a gate, its two rows of w) and up to eight rows of x. Lane l
// has the weights 32 (l + 32 i) to 32 (l + 32 i) + 31 of the column: it adds the products of their quants exactly, and
// multiplies them with the scales. The lanes' sums are added last. So a row's bits depend on K alone.
//
// Defines: FORMAT (of the blocks), ALIGNED (blocks are on even addresses, and their bytes neighbours), GATED.

#include "warpsmith/math.cuh"
#include "warpsmith/reduce.cuh"
#include "warpsmith/rows.cuh"
#include "warpsmith/vec.cuh"

using namespace warpsmith;

enum Format { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kQ2_K, kQ3_K, kIQ4_NL, kIQ4_XS, kMXFP4 };

constexpr int kThreads = 128;
constexpr int kColumns = kThreads / 32;
constexpr int kRows = 8;
constexpr int kSets = GATED ? 2 : 1;
constexpr bool kMin =
    FORMAT == kQ4_1 || FORMAT == kQ5_1 || FORMAT == kQ4_K || FORMAT == kQ5_K || FORMAT == kQ2_K;
// The halves of 32 weights have scales of their own.
constexpr bool kHalves = FORMAT == kQ2_K || FORMAT == kQ3_K || FORMAT == kQ6_K;
constexpr bool kSuper = kHalves || FORMAT == kQ4_K || FORMAT == kQ5_K || FORMAT == kIQ4_XS;
constexpr int kBlockBytes = FORMAT == kQ8_0     ? 34
                            : FORMAT == kQ4_0   ? 18
                            : FORMAT == kQ4_1   ? 20
                            : FORMAT == kQ5_0   ? 22
                            : FORMAT == kQ5_1   ? 24
                            : FORMAT == kQ4_K   ? 144
                            : FORMAT == kQ5_K   ? 176
                            : FORMAT == kQ6_K   ? 210
                            : FORMAT == kQ2_K   ? 84
                            : FORMAT == kQ3_K   ? 110
                            : FORMAT == kIQ4_NL ? 18
                            : FORMAT == kIQ4_XS ? 136
                                                : 17;
// What is subtracted from the unsigned quants.
constexpr int kZero = FORMAT == kQ8_0 || FORMAT == kIQ4_NL || FORMAT == kIQ4_XS ? 128
                      : FORMAT == kQ4_0                                         ? 8
                      : FORMAT == kQ5_0                                         ? 16
                      : FORMAT == kQ6_K                                         ? 32
                      : FORMAT == kQ3_K                                         ? 4
                      : FORMAT == kMXFP4                                        ? 12
                                                                                : 0;
// The numbers that nibbles stand for in the last three formats, plus kZero: of 0 to 7, and of 8 to 15.
constexpr u64 kFirstNumbers = FORMAT == kMXFP4 ? 0x181412100f0e0d0cull : 0x766a5d4f3f2d1801ull;
constexpr u64 kLastNumbers = FORMAT == kMXFP4 ? 0x00040608090a0b0cull : 0xf1d9c5b5a6998d81ull;

// The bytes of a block.
struct Block {
  const u8* at;
  i64 step;

  WS_INLINE u32 byte(int i) const { return ALIGNED ? at[i] : at[i * step]; }
  // Two and four bytes from an even place on.
  WS_INLINE u32 half(int i) const { return ALIGNED ? *(const u16*)(at + i) : byte(i) | byte(i + 1) << 8; }
  // Four bytes.
  WS_INLINE u32 word(int i) const { return half(i) | half(i + 2) << 16; }
  WS_INLINE float number(int i) const { return to_f32(f16{(u16)half(i)}); }
};

// 32 weights: scale of their half times (quant - kZero), plus its minimum. Quants are unsigned bytes, in fours.
struct Group {
  u32 quants[8];
  float scales[2], mins[2];
};

// Four bits, each the lowest of a byte.
WS_INLINE u32 spread(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// The numbers that four nibbles stand for, each the low half of a byte.
WS_INLINE u32 numbers(u32 nibbles) {
  u32 four = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 n = nibbles >> (8 * i) & 15;
    four |= (u32)((n < 8 ? kFirstNumbers : kLastNumbers) >> (8 * (n & 7)) & 255) << (8 * i);
  }
  return four;
}

// The numbers of 16 bytes from `at` on: low nibbles, then high ones.
WS_INLINE void decode_numbers(Group& g, const Block& b, int at) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 both = b.word(at + 4 * i);
    g.quants[i] = numbers(both & 0x0f0f0f0fu);
    g.quants[i + 4] = numbers(both >> 4 & 0x0f0f0f0fu);
  }
}

WS_INLINE void decode(Group& g, const Block& b, int part) {
  g.mins[0] = g.mins[1] = 0.0f;
  if (FORMAT == kQ4_K || FORMAT == kQ5_K) {
    // Scale and minimum have six bits each.
    u32 scale, min;
    if (part < 4) {
      scale = b.byte(4 + part) & 63;
      min = b.byte(8 + part) & 63;
    } else {
      const u32 both = b.byte(8 + part);
      scale = (both & 15) | b.byte(part) >> 6 << 4;
      min = both >> 4 | b.byte(4 + part) >> 6 << 4;
    }
    g.scales[0] = g.scales[1] = b.number(0) * (float)scale;
    g.mins[0] = g.mins[1] = -(b.number(2) * (float)min);
    const int low = (FORMAT == kQ4_K ? 16 : 48) + 32 * (part / 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g.quants[i] = b.word(low + 4 * i) >> (4 * (part % 2)) & 0x0f0f0f0fu;
      if (FORMAT == kQ5_K) g.quants[i] |= (b.word(16 + 4 * i) >> part & 0x01010101u) << 4;
    }
  } else if (FORMAT == kQ6_K) {
    const int h = part / 4, quarter = part % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 low = b.word(64 * h + 32 * (quarter % 2) + 4 * i) >> (4 * (quarter / 2)) & 0x0f0f0f0fu;
      g.quants[i] = low | (b.word(128 + 32 * h + 4 * i) >> (2 * quarter) & 0x03030303u) << 4;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      g.scales[i] = b.number(208) * (float)(signed char)b.byte(192 + 2 * part + i);
  } else if (FORMAT == kQ2_K) {
    const int h = part / 4, quarter = part % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) g.quants[i] = b.word(16 + 32 * h + 4 * i) >> (2 * quarter) & 0x03030303u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 pair = b.byte(2 * part + i);
      g.scales[i] = b.number(80) * (float)(pair & 15);
      g.mins[i] = -(b.number(82) * (float)(pair >> 4));
    }
  } else if (FORMAT == kQ3_K) {
    const int h = part / 4, quarter = part % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 low = b.word(32 + 32 * h + 4 * i) >> (2 * quarter) & 0x03030303u;
      g.quants[i] = low | (b.word(4 * i) >> part & 0x01010101u) << 2;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Scales have six bits.
      const int j = 2 * part + i;
      const u32 low = b.byte(96 + j % 8) >> (4 * (j / 8)) & 15;
      const u32 scale = low | (b.byte(104 + j % 4) >> (2 * (j / 4)) & 3) << 4;
      g.scales[i] = b.number(108) * (float)((int)scale - 32);
    }
  } else if (FORMAT == kIQ4_NL) {
    g.scales[0] = g.scales[1] = b.number(0);
    decode_numbers(g, b, 2);
  } else if (FORMAT == kIQ4_XS) {
    const u32 scale = (b.byte(4 + part / 2) >> (4 * (part % 2)) & 15) | (b.half(2) >> (2 * part) & 3) << 4;
    g.scales[0] = g.scales[1] = b.number(0) * (float)((int)scale - 32);
    decode_numbers(g, b, 8 + 16 * part);
  } else if (FORMAT == kMXFP4) {
    // A power of two, the first two of which are subnormal.
    const u32 exponent = b.byte(0);
    g.scales[0] = g.scales[1] = bits_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    decode_numbers(g, b, 1);
  } else if (FORMAT == kQ8_0) {
    g.scales[0] = g.scales[1] = b.number(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) g.quants[i] = b.word(2 + 4 * i) ^ 0x80808080u;
  } else {
    g.scales[0] = g.scales[1] = b.number(0);
    if (kMin) g.mins[0] = g.mins[1] = b.number(2);
    constexpr bool kFifth = FORMAT == kQ5_0 || FORMAT == kQ5_1;
    constexpr int kHigh = kMin ? 4 : 2, kLow = kHigh + (kFifth ? 4 : 0);
    const u32 high = kFifth ? b.word(kHigh) : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 both = b.word(kLow + 4 * i);
      g.quants[i] = (both & 0x0f0f0f0fu) | spread(high >> (4 * i)) << 4;
      g.quants[i + 4] = (both >> 4 & 0x0f0f0f0fu) | spread(high >> (4 * i + 16)) << 4;
    }
  }
}

// sum + the products of four unsigned with four signed bytes.
WS_INLINE int add_products(int sum, u32 unsigned_bytes, u32 signed_bytes) {
#if __CUDA_ARCH__ >= 610
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(unsigned_bytes), "r"(signed_bytes));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum += (int)(unsigned_bytes >> (8 * i) & 255) * (int)(signed char)(signed_bytes >> (8 * i));
#endif
  return sum;
}

// A group of weights with one of a row of x, whose place among all groups is `at`.
WS_INLINE float add_group(const LinearQuantParams& p, float sum, const Group& g, i64 at) {
  u32 x[8];
  load_words(*(u32(*)[4])x, (const u8*)p.quants + at * 32);
  load_words(*(u32(*)[4])(x + 4), (const u8*)p.quants + at * 32 + 16);
  const float scale = ((const float*)p.scales)[at];
  const i32 first = ((const i32*)p.sums)[at * 2], second = ((const i32*)p.sums)[at * 2 + 1];
  int low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low = add_products(low, g.quants[i], x[i]);
    high = add_products(high, g.quants[i + 4], x[i + 4]);
  }
  if (kHalves) {
    sum = fmaf((float)(low - kZero * first), __fmul_rn(scale, g.scales[0]), sum);
    if (kMin) sum = fmaf(__fmul_rn((float)first, scale), g.mins[0], sum);
    sum = fmaf((float)(high - kZero * second), __fmul_rn(scale, g.scales[1]), sum);
    return kMin ? fmaf(__fmul_rn((float)second, scale), g.mins[1], sum) : sum;
  }
  sum = fmaf((float)(low + high - kZero * (first + second)), __fmul_rn(scale, g.scales[0]), sum);
  return kMin ? fmaf(__fmul_rn((float)(first + second), scale), g.mins[0], sum) : sum;
}

WS_INLINE float load_value(u64 base, i64 at, int type) {
  if (type == 0) return ((const f32*)base)[at];
  return type == 1 ? to_f32(((const f16*)base)[at]) : to_f32(((const bf16*)base)[at]);
}

WS_INLINE float activate(float x, int act) {
  switch (act) {
    case 1: return Gelu::value<f32>(x);
    case 2: return GeluTanh::value<f32>(x);
    case 3: return Silu::value<f32>(x);
    case 4: return Relu::value<f32>(x);
    default: return x;
  }
}

// One block at least: left to itself the compiler spills to have more of them.
extern "C" __global__ void __launch_bounds__(kThreads, 1) linear_quant(const LinearQuantParams p) {
  begin_kernel();
  const u32 row_block = blockIdx.x / p.column_blocks, column_block = blockIdx.x - row_block * p.column_blocks;
  const i64 column = (i64)column_block * kColumns + threadIdx.x / 32;
  if (column >= p.n) return;
  const int lane = threadIdx.x % 32;
  const u32 first_row = row_block * kRows;
  const int rows = (int)min((u32)kRows, p.num_rows - first_row);
  const int groups = (int)(p.k / 32);
  // Rows of w, and of the bias.
  i64 w_rows[kSets];
  w_rows[0] = column * p.column_rows;
  if (GATED) w_rows[kSets - 1] = w_rows[0] + p.up_row;
  float sums[kSets][kRows];
#pragma unroll
  for (int s = 0; s < kSets; ++s)
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[s][r] = 0.0f;
#pragma unroll 1
  for (int group = lane; group < groups; group += 32) {
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const i64 block = kSuper ? group / 8 : group;
      const i64 offset = w_rows[s] * p.w_row + block * kBlockBytes * (ALIGNED ? 1 : p.w_step);
      Group g;
      decode(g, Block{(const u8*)p.w + offset, p.w_step}, kSuper ? group % 8 : 0);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < rows) sums[s][r] = add_group(p, sums[s][r], g, (i64)(first_row + r) * groups + group);
    }
  }
  // Lane r gets the sum of row r.
  float own[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    own[s] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_reduce<Sum>(sums[s][r]);
      if (lane == r) own[s] = sum;
    }
    if (p.bias) own[s] += load_value(p.bias, w_rows[s] * p.bias_step, p.out_type);
  }
  if (lane >= rows) return;
  const i64 row = first_row + lane;
  float y = activate(own[0], p.act);
  if (GATED) y *= own[kSets - 1];
  y *= p.scale;
  if (p.residual)
    y += load_value(p.residual, row_offset(p.rows, 1, row) + column * p.residual_step, p.out_type);
  const i64 at = row_offset(p.rows, 2, row) + column * p.out_step;
  if (p.out_type == 0)
    ((f32*)p.out)[at] = y;
  else if (p.out_type == 1)
    ((f16*)p.out)[at] = from_f32<f16>(y);
  else
    ((bf16*)p.out)[at] = from_f32<bf16>(y);
}
