//! Conversions against the scalar ones, bit for bit, and the elementwise loop at every length and alignment.

use super::*;
use crate::cpu::simd::{MAX_LANES, Pair, Task};
use crate::cpu::{Tier, dispatch, math};

/// `src` converted to `U` by one tier, through `map`, with vectors and with pairs of them.
struct Convert<'a, T, U>(&'a [T], [&'a mut [U]; 2]);

impl<T: CpuElement, U: CpuElement> Task for Convert<'_, T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Convert(src, [single, paired]) = self;
        let n = src.len().min(single.len()).min(paired.len());
        // SAFETY: all slices hold `n` elements and are borrowed apart.
        unsafe {
            map(
                s,
                src.as_ptr(),
                single.as_mut_ptr(),
                n,
                false,
                #[inline(always)]
                |v| v,
            );
            map(
                Pair(s),
                src.as_ptr(),
                paired.as_mut_ptr(),
                n,
                false,
                #[inline(always)]
                |v| v,
            );
        }
    }
}

fn convert<T: CpuElement, U: CpuElement>(tier: Tier, src: &[T]) -> Vec<U> {
    let mut out = vec![U::from_f32(0.0); src.len()];
    let mut paired = out.clone();
    dispatch(tier, Convert(src, [&mut out, &mut paired]));
    // SAFETY: floats are plain bytes.
    let bytes =
        |v: &[U]| unsafe { std::slice::from_raw_parts(v.as_ptr().cast::<u8>(), size_of_val(v)).to_vec() };
    assert!(bytes(&out) == bytes(&paired), "{tier} {} to {} differs in pairs", T::DTYPE, U::DTYPE);
    out
}

/// Every f16 and bf16 value, every tie and neighbour of ties of the narrow types, and random bits.
fn samples() -> Vec<f32> {
    let mut out: Vec<f32> = Vec::new();
    for bits in 0..=u16::MAX {
        out.push(f16::from_bits(bits).to_f32());
        out.push(bf16::from_bits(bits).to_f32());
        // Half way to the next bf16 value, and one step to either side.
        let tie = (bits as u32) << 16 | 0x8000;
        out.extend([tie - 1, tie, tie + 1].map(f32::from_bits));
        // The same for f16, whose neighbours' mean is exact in f32.
        let mean = (f16::from_bits(bits).to_f32() + f16::from_bits(bits.wrapping_add(1)).to_f32()) * 0.5;
        out.extend([mean, mean.next_up(), mean.next_down()]);
    }
    for code in 0..=255u8 {
        let next = code.wrapping_add(1);
        let pairs = [
            (F8E4M3::from_bits(code).to_f32(), F8E4M3::from_bits(next).to_f32()),
            (F8E5M2::from_bits(code).to_f32(), F8E5M2::from_bits(next).to_f32()),
        ];
        for (a, b) in pairs {
            let mean = (a + b) * 0.5;
            out.extend([mean, mean.next_up(), mean.next_down()]);
        }
    }
    // Where the 8-bit types saturate: half way to the value their next code would have had.
    for edge in [464.0f32, 480.0, 61440.0, 65536.0] {
        out.extend([edge, -edge, edge.next_up(), edge.next_down()]);
    }
    let mut state = 0x2545_f491_4f6c_dd1du64;
    for _ in 0..400_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.push(f32::from_bits((state >> 24) as u32));
    }
    out
}

fn check_encode<U: CpuElement, B: PartialEq + std::fmt::Debug>(bits: impl Fn(U) -> B) {
    let values = samples();
    for tier in Tier::available() {
        for (x, got) in values.iter().zip(convert::<f32, U>(tier, &values)) {
            assert_eq!(
                bits(got),
                bits(U::from_f32(*x)),
                "{tier} {} from {x:e} ({:#x})",
                U::DTYPE,
                x.to_bits()
            );
        }
    }
}

fn check_decode<T: CpuElement>(codes: Vec<T>) {
    for tier in Tier::available() {
        for (i, (code, got)) in codes.iter().zip(convert::<T, f32>(tier, &codes)).enumerate() {
            let want = code.to_f32();
            assert_eq!(
                got.to_bits(),
                want.to_bits(),
                "{tier} {} code {i:#x}: {got:e}, want {want:e}",
                T::DTYPE
            );
        }
    }
}

#[test]
fn stores_round_like_the_scalar_conversions_on_every_tier() {
    check_encode::<f32, _>(f32::to_bits);
    check_encode::<f16, _>(f16::to_bits);
    check_encode::<bf16, _>(bf16::to_bits);
    check_encode::<F8E4M3, _>(|x| x.to_bits());
    check_encode::<F8E5M2, _>(|x| x.to_bits());
}

#[test]
fn loads_widen_like_the_scalar_conversions_on_every_tier() {
    check_decode::<f16>((0..=u16::MAX).map(f16::from_bits).filter(|x| !x.is_nan()).collect());
    check_decode::<bf16>((0..=u16::MAX).map(bf16::from_bits).filter(|x| !x.is_nan()).collect());
    check_decode::<F8E4M3>((0..=255).map(F8E4M3::from_bits).collect());
    check_decode::<F8E5M2>((0..=255).map(F8E5M2::from_bits).collect());
    for tier in Tier::available() {
        let nans: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_nan()).collect();
        assert!(convert::<f16, f32>(tier, &nans).iter().all(|x| x.is_nan()));
        let nans: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| x.is_nan()).collect();
        assert!(convert::<bf16, f32>(tier, &nans).iter().all(|x| x.is_nan()));
    }
}

/// The 8-bit casts against the definition, found by search: the nearest code, the even one at ties.
#[test]
fn eight_bit_casts_are_the_nearest_codes() {
    fn check(decode: impl Fn(u8) -> f32, encode: impl Fn(f32) -> u8, max: u8) {
        for x in samples().into_iter().step_by(37).filter(|x| !x.is_nan()) {
            let magnitude = x.abs().min(decode(max)) as f64;
            let nearest = (0..=max)
                .min_by(|&a, &b| {
                    let distance = |code: u8| (decode(code) as f64 - magnitude).abs();
                    distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
                })
                .unwrap();
            let want = nearest | if x.is_sign_negative() { 0x80 } else { 0 };
            assert_eq!(encode(x), want, "{x:e}");
        }
    }
    check(|c| F8E4M3::from_bits(c).to_f32(), |x| F8E4M3::from_f32(x).to_bits(), 0x7e);
    check(|c| F8E5M2::from_bits(c).to_f32(), |x| F8E5M2::from_f32(x).to_bits(), 0x7b);
}

struct Gelu<T> {
    x: *const T,
    y: *mut T,
    n: usize,
    stream: bool,
}

impl<T: CpuElement> Task for Gelu<T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the test hands over `n` readable and `n` writable elements.
        unsafe {
            map(
                s,
                self.x,
                self.y,
                self.n,
                self.stream,
                #[inline(always)]
                |v| math::gelu(s, v),
            )
        }
    }
}

/// gelu over every length and offset: the value of an element depends on neither, and nothing outside is written.
fn check_gelu<T: CpuElement + PartialEq + std::fmt::Debug>() {
    const LONGEST: usize = 70;
    const OFFSETS: usize = 16;
    let guard = T::from_f32(7.0);
    let x: Vec<T> = (0..LONGEST + OFFSETS).map(|i| T::from_f32(i as f32 * 0.11 - 4.0)).collect();
    for tier in Tier::available() {
        let one_by_one: Vec<T> = x
            .iter()
            .map(|x| {
                let mut y = guard;
                dispatch(tier, Gelu { x, y: &raw mut y, n: 1, stream: false });
                y
            })
            .collect();
        for n in 0..=LONGEST {
            for offset in 0..OFFSETS {
                for stream in [false, true] {
                    let mut y = [guard; LONGEST + 2 * OFFSETS];
                    let source = &x[offset..offset + n];
                    dispatch(tier, Gelu { x: source.as_ptr(), y: y[offset..].as_mut_ptr(), n, stream });
                    assert_eq!(
                        y[offset..offset + n],
                        one_by_one[offset..offset + n],
                        "{tier} n={n} offset={offset}"
                    );
                    assert!(
                        y[..offset].iter().chain(&y[offset + n..]).all(|v| *v == guard),
                        "{tier} wrote outside"
                    );
                }
            }
        }
    }
}

#[test]
fn gelu_over_slices_of_every_length_alignment_type_and_tier() {
    check_gelu::<f32>();
    check_gelu::<f16>();
    check_gelu::<bf16>();
    check_gelu::<F8E4M3>();
    check_gelu::<F8E5M2>();
}

struct Near<'a>(&'a [f32], &'a mut [bf16]);

impl Task for Near<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        for (x, out) in self.0.iter().zip(self.1) {
            let mut lanes = [bf16::ZERO; MAX_LANES];
            // SAFETY: no vector has more lanes.
            unsafe { bf16::put_near(s, lanes.as_mut_ptr(), s.splat(*x), false) };
            *out = lanes[0];
        }
    }
}

#[test]
fn approximations_are_rounded_to_a_nearest_number_on_every_tier() {
    let steps = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).filter(|x| !x.is_nan());
    let halfway = (0..0x7f80u32).step_by(7).map(|bits| f32::from_bits((bits << 16) + 0x8000));
    let nans = [0x7fc0_0000, 0xffc0_0000, 0x7fff_0000, 0xffff_0000].map(f32::from_bits);
    let x: Vec<f32> = steps.chain(halfway).chain(nans).collect();
    for tier in Tier::available() {
        let mut out = vec![bf16::ZERO; x.len()];
        dispatch(tier, Near(&x, &mut out));
        for (x, got) in x.iter().zip(out) {
            let tie = x.to_bits() & 0xffff == 0x8000 && !x.is_nan();
            let want = if tie { bf16::from_bits((x.to_bits() >> 16) as u16 + 1) } else { bf16::from_f32(*x) };
            let same = got.to_bits() == want.to_bits() || (x.is_nan() && got.is_nan());
            assert!(same, "{tier} {x:e}: {got}, want {want}");
        }
    }
}
