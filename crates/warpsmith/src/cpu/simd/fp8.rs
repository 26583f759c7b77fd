//! The 8-bit floats: codes in lanes of 32 bits to values and back, on any tier.

use super::Simd;

/// What [`Simd::load_e4m3_pair`] does where nothing is known that is faster.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn load_pair<S: Simd>(s: S, p: *const u8) -> [S::V; 2] {
    // SAFETY: passed on; any alignment will do.
    let codes = s.h_to_i(unsafe { s.load_h(p.cast()) });
    let (even, odd) = (s.iand(codes, s.isplat(0xff)), s.shr(codes, 8));
    [even_nan(s, decode_e4m3(s, even)), even_nan(s, decode_e4m3(s, odd))]
}

/// What [`Simd::store_e4m3_pair`] does where nothing is known that is faster.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn store_pair<S: Simd>(
    s: S,
    p: *mut u8,
    [low, high]: [S::V; 2],
    zipped: bool,
    stream: bool,
) {
    // SAFETY: passed on; any alignment will do.
    unsafe {
        if !zipped {
            s.store_e4m3(p, low, false, stream);
            return s.store_e4m3(p.add(S::N), high, false, stream);
        }
        let codes = s.i_to_h(s.ior(encode_e4m3(s, low), s.shl(encode_e4m3(s, high), 8)));
        if stream { s.stream_h(p.cast(), codes) } else { s.store_h(p.cast(), codes) }
    }
}

/// The values with a NaN that rounding to bf16 keeps however it is done.
#[inline(always)]
pub(super) fn even_nan<S: Simd>(s: S, v: S::V) -> S::V {
    s.select(s.is_nan(v), s.splat(f32::NAN), v)
}

/// The NaN both 8-bit types decode to; what the scalar conversion gives.
const FP8_NAN: f32 = f32::from_bits(0x7fff_e000);

/// Through f16, whose exponent field holds that of e4m3: the conversion normalises subnormals at no cost, where
/// f32 arithmetic on them would trap into microcode. The biases differ by 8, hence the factor.
#[inline(always)]
pub(in crate::cpu) fn decode_e4m3<S: Simd>(s: S, code: S::I) -> S::V {
    let magnitude = s.iand(code, s.isplat(0x7f));
    let sign = s.shl(s.isub(code, magnitude), 8);
    let half = s.i_to_h(s.ior(sign, s.shl(magnitude, 7)));
    let value = s.mul(s.f16_to_f32(half), s.splat(256.0));
    s.select(s.igt(magnitude, s.isplat(0x7e)), s.splat(FP8_NAN), value)
}

/// e5m2 is the upper half of f16.
#[inline(always)]
pub(in crate::cpu) fn decode_e5m2<S: Simd>(s: S, code: S::I) -> S::V {
    let value = s.f16_to_f32(s.i_to_h(s.shl(code, 8)));
    s.select(s.is_nan(value), s.splat(FP8_NAN), value)
}

/// What distinguishes the two 8-bit formats to the encoder.
struct Format {
    mantissa_bits: u32,
    /// Bits of the smallest normal value.
    min_normal: i32,
    /// `2^23` times the smallest subnormal: adding it leaves a small value rounded to the subnormal grid.
    magic: f32,
    /// Code of the largest finite value.
    max: i32,
    /// Code of NaN, before its payload.
    nan: i32,
    /// Whether NaN has bits to spare for its payload.
    keeps_payload: bool,
}

#[inline(always)]
fn encode<S: Simd>(s: S, v: S::V, format: Format) -> S::I {
    let dropped = 23u32.wrapping_sub(format.mantissa_bits);
    let bits = s.bits_of(v);
    let abs = s.iand(bits, s.isplat(i32::MAX));

    // Normal: rebias, round the mantissa to even in place (a carry moves the exponent as it should), drop the rest. What
    // comes out for smaller numbers is not used.
    let odd = s.iand(s.shr(abs, dropped), s.isplat(1));
    let smallest = (1i32 << 23).wrapping_sub(format.min_normal);
    let bias = s.isplat(smallest.wrapping_add((1i32 << dropped.wrapping_sub(1)).wrapping_sub(1)));
    let normal = s.sar(s.iadd(s.iadd(abs, bias), odd), dropped);
    let normal = s.imin(normal, s.isplat(format.max));

    let magic = s.splat(format.magic);
    let subnormal = s.isub(s.bits_of(s.add(s.of_bits(abs), magic)), s.bits_of(magic));

    let code = s.iselect(s.igt(s.isplat(format.min_normal), abs), subnormal, normal);
    let nan = if format.keeps_payload {
        let payload = s.iand(s.shr(abs, dropped), s.isplat((1i32 << format.mantissa_bits).wrapping_sub(1)));
        s.ior(payload, s.isplat(format.nan))
    } else {
        s.isplat(format.nan)
    };
    let code = s.iselect(s.is_nan(v), nan, code);
    // The sign is the bit above the code.
    s.ior(code, s.iand(s.shr(bits, 24), s.isplat(0x80)))
}

#[inline(always)]
pub(in crate::cpu) fn encode_e4m3<S: Simd>(s: S, v: S::V) -> S::I {
    let format = Format {
        mantissa_bits: 3,
        min_normal: 0x3c80_0000,
        magic: 16384.0,
        max: 0x7e,
        nan: 0x7f,
        keeps_payload: false,
    };
    encode(s, v, format)
}

#[inline(always)]
pub(in crate::cpu) fn encode_e5m2<S: Simd>(s: S, v: S::V) -> S::I {
    let format = Format {
        mantissa_bits: 2,
        min_normal: 0x3880_0000,
        magic: 128.0,
        max: 0x7b,
        nan: 0x7e,
        keeps_payload: true,
    };
    encode(s, v, format)
}
