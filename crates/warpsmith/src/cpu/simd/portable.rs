//! Plain Rust on arrays of 8, for every target; the compiler vectorises it with what the target always has.
//!
//! Where that is not what the machine has, as on x86-64, operations are calls: inlined copies of them would make up
//! most of the library's code and build time, for processors more than ten years old.

use super::Simd;
use crate::cpu::array;
use crate::cpu::tier::Tier;
use half::f16;

/// The token of the portable tier; every machine has it.
#[derive(Copy, Clone)]
pub struct Portable(());

impl Portable {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Portable(())
    }
}

const N: usize = 8;

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn map<A: Copy, R: Copy + Default>(a: [A; N], f: impl Fn(A) -> R) -> [R; N] {
    let mut out = [R::default(); N];
    for i in 0..N {
        out[i] = f(a[i]);
    }
    out
}

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn zip<A: Copy, B: Copy, R: Copy + Default>(a: [A; N], b: [B; N], f: impl Fn(A, B) -> R) -> [R; N] {
    let mut out = [R::default(); N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn pick<A: Copy + Default>(m: [bool; N], a: [A; N], b: [A; N]) -> [A; N] {
    let mut out = [A::default(); N];
    for i in 0..N {
        out[i] = if m[i] { a[i] } else { b[i] };
    }
    out
}

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn fused_lanes(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
    let mut out = c;
    for i in 0..N {
        out[i] = fused(a[i], b[i], c[i]);
    }
    out
}

/// `a * b + c` rounded once.
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        return a.mul_add(b, c);
    }
    // The product is exact in f64. Its sum with `c` is rounded to odd, which makes the final rounding to f32 see
    // on which side of a tie the exact value lies; without it the two roundings could disagree with one.
    let (p, c) = (a as f64 * b as f64, c as f64);
    let sum = p + c;
    let back = sum - p;
    let error = (p - (sum - back)) + (c - back);
    let bits = sum.to_bits();
    // One step towards the exact value: up where the error has the sum's sign, else down. Free of branches, so that
    // it vectorises. A NaN error (infinite sum) compares false and leaves the sum alone.
    let step = ((error.to_bits() ^ bits) as i64 >> 63) as u64 | 1;
    let wanted = ((error.abs() > 0.0) as u64 & !bits).wrapping_neg();
    f64::from_bits(bits.wrapping_add(step & wanted)) as f32
}

/// The nearest integer, ties to even, for `|x| < 2^31`: the low bits of `x` where one unit is the last bit. The library
/// function is a call per lane on targets without a rounding instruction.
#[inline(always)]
fn nearest(x: f32) -> i32 {
    const UNITS: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    (x as f64 + UNITS).to_bits() as i32
}

/// Reads `n` of `N` lanes; the rest are zero.
///
/// # Safety
/// `p..p + n` must be readable and `n <= N`.
#[inline(always)]
unsafe fn read<T: Copy + Default>(p: *const T, n: usize) -> [T; N] {
    let mut out = [T::default(); N];
    // SAFETY: the caller promised `n` readable elements and `n <= N`.
    // As bytes: `p` may have any alignment.
    unsafe { std::ptr::copy_nonoverlapping(p.cast::<u8>(), out.as_mut_ptr().cast(), n * size_of::<T>()) };
    out
}

/// Writes the first `n` of `N` lanes.
///
/// # Safety
/// `p..p + n` must be writable and `n <= N`.
#[inline(always)]
unsafe fn write<T: Copy>(p: *mut T, lanes: [T; N], n: usize) {
    // SAFETY: the caller promised `n` writable elements and `n <= N`. As bytes: `p` may have any alignment.
    unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), p.cast(), n * size_of::<T>()) };
}

/// Folds lane `i` with lane `i + N/2`, then the halves again, as the vector tiers do.
#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn tree(mut v: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [4, 2, 1] {
        for i in 0..half {
            v[i] = f(v[i], v[i + half]);
        }
    }
    v[0]
}

macro_rules! value_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $t),*) -> $out {
            $body
        }
    )*};
}

macro_rules! memory_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $t),*) $(-> $out)? {
            // SAFETY: the caller promised the lanes that are touched.
            unsafe { $body }
        }
    )*};
}

impl Simd for Portable {
    type V = [f32; N];
    type I = [i32; N];
    type H = [u16; N];
    type B = [u8; N];
    type M = [bool; N];
    #[cfg(target_arch = "x86_64")]
    type Pair = Self;
    #[cfg(not(target_arch = "x86_64"))]
    type Pair = super::Pair<Self>;
    const N: usize = N;
    const TIER: Tier = Tier::Portable;

    #[inline(always)]
    fn pair(self) -> Self::Pair {
        #[cfg(target_arch = "x86_64")]
        return self;
        #[cfg(not(target_arch = "x86_64"))]
        return super::Pair(self);
    }

    memory_methods! {
        fn load(p: *const f32) -> [f32; N] = read(p, N);
        fn load_partial(p: *const f32, n: usize) -> [f32; N] = read(p, n);
        fn store(p: *mut f32, v: [f32; N]) = write(p, v, N);
        fn store_partial(p: *mut f32, v: [f32; N], n: usize) = write(p, v, n);
        fn stream(p: *mut f32, v: [f32; N]) = write(p, v, N);
        fn load_h(p: *const u16) -> [u16; N] = read(p, N);
        fn load_h_partial(p: *const u16, n: usize) -> [u16; N] = read(p, n);
        fn store_h(p: *mut u16, h: [u16; N]) = write(p, h, N);
        fn store_h_partial(p: *mut u16, h: [u16; N], n: usize) = write(p, h, n);
        fn stream_h(p: *mut u16, h: [u16; N]) = write(p, h, N);
        fn load_b(p: *const u8) -> [u8; N] = read(p, N);
        fn load_b_partial(p: *const u8, n: usize) -> [u8; N] = read(p, n);
        fn store_b(p: *mut u8, b: [u8; N]) = write(p, b, N);
        fn store_b_partial(p: *mut u8, b: [u8; N], n: usize) = write(p, b, n);
        fn stream_b(p: *mut u8, b: [u8; N]) = write(p, b, N);
    }

    value_methods! {
        fn fence() -> () = ();
        fn h_to_i(h: [u16; N]) -> [i32; N] = map(h, i32::from);
        fn i_to_h(i: [i32; N]) -> [u16; N] = map(i, |x| x as u16);
        fn b_to_i(b: [u8; N]) -> [i32; N] = map(b, i32::from);
        fn i_to_b(i: [i32; N]) -> [u8; N] = map(i, |x| x as u8);
        fn f16_to_f32(h: [u16; N]) -> [f32; N] = map(h, |x| f16::from_bits(x).to_f32());
        fn f32_to_f16(v: [f32; N]) -> [u16; N] = map(v, |x| f16::from_f32(x).to_bits());

        fn splat(x: f32) -> [f32; N] = [x; N];
        fn add(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| a + b);
        fn sub(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| a - b);
        fn mul(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| a * b);
        fn div(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| a / b);
        fn fma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] = fused_lanes(a, b, c);
        fn fnma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] = fused_lanes(map(a, |a| -a), b, c);
        fn sqrt(a: [f32; N]) -> [f32; N] = map(a, f32::sqrt);
        fn max(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| if a > b { a } else { b });
        fn min(a: [f32; N], b: [f32; N]) -> [f32; N] = zip(a, b, |a, b| if a < b { a } else { b });
        fn floor(a: [f32; N]) -> [f32; N] = map(a, f32::floor);
        fn round(a: [f32; N]) -> [f32; N] = map(a, f32::round_ties_even);

        fn lt(a: [f32; N], b: [f32; N]) -> [bool; N] = zip(a, b, |a, b| a < b);
        fn le(a: [f32; N], b: [f32; N]) -> [bool; N] = zip(a, b, |a, b| a <= b);
        fn eq(a: [f32; N], b: [f32; N]) -> [bool; N] = zip(a, b, |a, b| a == b);
        fn is_nan(a: [f32; N]) -> [bool; N] = map(a, f32::is_nan);
        fn select(m: [bool; N], a: [f32; N], b: [f32; N]) -> [f32; N] = pick(m, a, b);
        fn any(m: [bool; N]) -> bool = m.into_iter().any(|yes| yes);
        fn swap_pairs(v: [f32; N]) -> [f32; N] = array(|i| v[i ^ 1]);

        fn isplat(x: i32) -> [i32; N] = [x; N];
        fn iadd(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, i32::wrapping_add);
        fn isub(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, i32::wrapping_sub);
        fn iand(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, |a, b| a & b);
        fn ior(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, |a, b| a | b);
        fn ixor(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, |a, b| a ^ b);
        fn imin(a: [i32; N], b: [i32; N]) -> [i32; N] = zip(a, b, i32::min);
        fn shl(a: [i32; N], k: u32) -> [i32; N] = map(a, |x| x.wrapping_shl(k));
        fn shr(a: [i32; N], k: u32) -> [i32; N] = map(a, |x| (x as u32).wrapping_shr(k) as i32);
        fn sar(a: [i32; N], k: u32) -> [i32; N] = map(a, |x| x.wrapping_shr(k));
        fn igt(a: [i32; N], b: [i32; N]) -> [bool; N] = zip(a, b, |a, b| a > b);
        fn iselect(m: [bool; N], a: [i32; N], b: [i32; N]) -> [i32; N] = pick(m, a, b);

        fn bits_of(v: [f32; N]) -> [i32; N] = map(v, |x| x.to_bits() as i32);
        fn of_bits(i: [i32; N]) -> [f32; N] = map(i, |x| f32::from_bits(x as u32));
        fn i_to_f32(i: [i32; N]) -> [f32; N] = map(i, |x| x as f32);
        fn f32_to_i(v: [f32; N]) -> [i32; N] = map(v, nearest);

        fn reduce_add(v: [f32; N]) -> f32 = tree(v, |a, b| a + b);
        fn reduce_max(v: [f32; N]) -> f32 = {
            if v.into_iter().any(f32::is_nan) {
                return f32::NAN;
            }
            tree(v, |a, b| if a > b { a } else { b })
        };
    }
}
