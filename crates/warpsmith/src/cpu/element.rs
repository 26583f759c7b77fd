//! Elements in memory, `f32` in registers: loads widen, stores round to nearest with ties to even.

use super::prefetch::{AHEAD, claim_ahead, fetch};
use super::scratch::Plain;
use super::simd::Simd;
use super::simd::fp8::{decode_e4m3, decode_e5m2, encode_e4m3, encode_e5m2};
use crate::tensor::{DType, Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type the CPU kernels compute on: widened to `f32` when loaded, rounded when stored.
///
/// Every conversion gives the same bits on every tier and as the scalar `to_f32` and `from_f32`. `f16` and `bf16`
/// overflow to infinity; the 8-bit floats saturate to their largest value, infinity included. NaN stays NaN.
pub trait CpuElement: Element + Plain {
    /// Reads `S::N` elements.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;

    /// Reads `S::N` elements into an unspecified order of lanes, the same for every address: for sums and elementwise
    /// work, where order does not matter. The order is that of bf16 for e4m3 too.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    #[inline(always)]
    unsafe fn load_unordered<S: Simd>(s: S, p: *const Self) -> S::V {
        if Self::DTYPE == DType::BF16 {
            // SAFETY: passed on; bf16 is a transparent wrapper of its bits.
            return unsafe { s.load_bf16_unordered(p.cast()) };
        }
        if Self::DTYPE == DType::F8E4M3 {
            // SAFETY: passed on; the type is a transparent wrapper of its bits.
            return unsafe { s.load_e4m3_unordered(p.cast()) };
        }
        // SAFETY: passed on.
        unsafe { Self::load(s, p) }
    }

    /// Writes `S::N` elements; past the caches if `stream`, as [`CpuElement::stream`].
    ///
    /// # Safety
    /// As [`CpuElement::store`] or [`CpuElement::stream`].
    #[inline(always)]
    unsafe fn put<S: Simd>(s: S, p: *mut Self, v: S::V, stream: bool) {
        // SAFETY: passed on; both types are transparent wrappers of their bits.
        unsafe {
            if Self::DTYPE == DType::BF16 {
                s.store_bf16(p.cast(), v, stream);
            } else if Self::DTYPE == DType::F8E4M3 {
                s.store_e4m3(p.cast(), v, false, stream);
            } else if stream {
                Self::stream(s, p, v);
            } else {
                Self::store(s, p, v);
            }
        }
    }

    /// [`CpuElement::put`] of lanes in the order of [`CpuElement::load_unordered`], to where they would be read from.
    ///
    /// # Safety
    /// As [`CpuElement::put`].
    #[inline(always)]
    unsafe fn put_unordered<S: Simd>(s: S, p: *mut Self, v: S::V, stream: bool) {
        // SAFETY: passed on; both types are transparent wrappers of their bits.
        unsafe {
            if Self::DTYPE == DType::BF16 {
                s.store_bf16_unordered(p.cast(), v, stream);
            } else if Self::DTYPE == DType::F8E4M3 {
                s.store_e4m3(p.cast(), v, true, stream);
            } else {
                Self::put(s, p, v, stream);
            }
        }
    }

    /// [`CpuElement::put_unordered`] of approximations, whose halfway cases may be rounded away from zero.
    ///
    /// # Safety
    /// As [`CpuElement::put`].
    #[inline(always)]
    unsafe fn put_near<S: Simd>(s: S, p: *mut Self, v: S::V, stream: bool) {
        // SAFETY: passed on; bf16 is a transparent wrapper of its bits.
        unsafe {
            if Self::DTYPE == DType::BF16 {
                s.store_bf16_near(p.cast(), v, stream);
            } else {
                Self::put(s, p, v, stream);
            }
        }
    }

    /// Permutes the lanes of a vector into the order of [`CpuElement::load_unordered`].
    #[inline(always)]
    fn to_unordered<S: Simd>(s: S, v: S::V) -> S::V {
        if Self::DTYPE == DType::BF16 { s.to_bf16_unordered(v) } else { v }
    }

    /// Swaps neighbouring elements, in lanes ordered as by [`CpuElement::load_unordered`].
    #[inline(always)]
    fn swap_pairs_unordered<S: Simd>(s: S, v: S::V) -> S::V {
        if Self::DTYPE == DType::BF16 { s.swap_pairs_bf16_unordered(v) } else { s.swap_pairs(v) }
    }

    /// Reads `n` elements (`n <= N`), the other lanes are zero. Touches nothing past `p + n`.
    ///
    /// # Safety
    /// `p..p + n` must be readable and `n <= N`.
    unsafe fn load_partial<S: Simd>(s: S, p: *const Self, n: usize) -> S::V;

    /// Writes `S::N` elements.
    ///
    /// # Safety
    /// `p..p + N` must be writable.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);

    /// Writes the first `n` elements (`n <= N`). Touches nothing past `p + n`.
    ///
    /// # Safety
    /// `p..p + n` must be writable and `n <= N`.
    unsafe fn store_partial<S: Simd>(s: S, p: *mut Self, v: S::V, n: usize);

    /// Writes `S::N` elements past the caches; call [`Simd::fence`] before others read them.
    ///
    /// # Safety
    /// `p..p + N` must be writable, and `p` a multiple of `N * size_of::<Self>()` bytes, or of 64.
    unsafe fn stream<S: Simd>(s: S, p: *mut Self, v: S::V);

    /// What is left of the lanes after a store: rounded to this type and widened again.
    fn rounded<S: Simd>(s: S, v: S::V) -> S::V;

    /// Widens one element.
    fn to_f32(self) -> f32;

    /// Rounds one value.
    fn from_f32(x: f32) -> Self;
}

impl CpuElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: the contracts are the same.
        unsafe { s.load(p) }
    }

    #[inline(always)]
    unsafe fn load_partial<S: Simd>(s: S, p: *const f32, n: usize) -> S::V {
        // SAFETY: the contracts are the same.
        unsafe { s.load_partial(p, n) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut f32, v: S::V) {
        // SAFETY: the contracts are the same.
        unsafe { s.store(p, v) }
    }

    #[inline(always)]
    unsafe fn store_partial<S: Simd>(s: S, p: *mut f32, v: S::V, n: usize) {
        // SAFETY: the contracts are the same.
        unsafe { s.store_partial(p, v, n) }
    }

    #[inline(always)]
    unsafe fn stream<S: Simd>(s: S, p: *mut f32, v: S::V) {
        // SAFETY: the contracts are the same.
        unsafe { s.stream(p, v) }
    }

    #[inline(always)]
    fn rounded<S: Simd>(_: S, v: S::V) -> S::V {
        v
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

/// Implements [`CpuElement`] for a type stored in narrow lanes, given how registers are decoded and encoded.
macro_rules! narrow_element {
    ($t:ty, $bits:ty, $load:ident, $load_partial:ident, $store:ident, $store_partial:ident, $stream:ident,
     $decode:path, $encode:path, |$x:ident| $widen:expr) => {
        impl CpuElement for $t {
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
                // SAFETY: the type is a transparent wrapper of its bits and the contracts are the same.
                $decode(s, unsafe { s.$load(p.cast::<$bits>()) })
            }

            #[inline(always)]
            unsafe fn load_partial<S: Simd>(s: S, p: *const Self, n: usize) -> S::V {
                // SAFETY: the type is a transparent wrapper of its bits and the contracts are the same.
                $decode(s, unsafe { s.$load_partial(p.cast::<$bits>(), n) })
            }

            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
                // SAFETY: the type is a transparent wrapper of its bits and the contracts are the same.
                unsafe { s.$store(p.cast::<$bits>(), $encode(s, v)) }
            }

            #[inline(always)]
            unsafe fn store_partial<S: Simd>(s: S, p: *mut Self, v: S::V, n: usize) {
                // SAFETY: the type is a transparent wrapper of its bits and the contracts are the same.
                unsafe { s.$store_partial(p.cast::<$bits>(), $encode(s, v), n) }
            }

            #[inline(always)]
            unsafe fn stream<S: Simd>(s: S, p: *mut Self, v: S::V) {
                // SAFETY: the type is a transparent wrapper of its bits and the contracts are the same.
                unsafe { s.$stream(p.cast::<$bits>(), $encode(s, v)) }
            }

            #[inline(always)]
            fn rounded<S: Simd>(s: S, v: S::V) -> S::V {
                $decode(s, $encode(s, v))
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                let $x = self;
                $widen
            }

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                <$t>::from_f32(x)
            }
        }
    };
}

// The paths `f16::to_f32` and so on name the inherent functions, which go before the trait's.
narrow_element!(
    f16,
    u16,
    load_h,
    load_h_partial,
    store_h,
    store_h_partial,
    stream_h,
    decode_f16,
    encode_f16,
    |x| f16::to_f32(x)
);
narrow_element!(
    bf16,
    u16,
    load_h,
    load_h_partial,
    store_h,
    store_h_partial,
    stream_h,
    decode_bf16,
    encode_bf16,
    |x| bf16::to_f32(x)
);
narrow_element!(
    F8E4M3,
    u8,
    load_b,
    load_b_partial,
    store_b,
    store_b_partial,
    stream_b,
    bytes_to_e4m3,
    e4m3_to_bytes,
    |x| F8E4M3::to_f32(&x)
);
narrow_element!(
    F8E5M2,
    u8,
    load_b,
    load_b_partial,
    store_b,
    store_b_partial,
    stream_b,
    bytes_to_e5m2,
    e5m2_to_bytes,
    |x| F8E5M2::to_f32(&x)
);

#[inline(always)]
fn decode_f16<S: Simd>(s: S, h: S::H) -> S::V {
    s.f16_to_f32(h)
}

#[inline(always)]
fn encode_f16<S: Simd>(s: S, v: S::V) -> S::H {
    s.f32_to_f16(v)
}

#[inline(always)]
fn decode_bf16<S: Simd>(s: S, h: S::H) -> S::V {
    s.of_bits(s.shl(s.h_to_i(h), 16))
}

#[inline(always)]
fn encode_bf16<S: Simd>(s: S, v: S::V) -> S::H {
    s.f32_to_bf16(v)
}

#[inline(always)]
fn bytes_to_e4m3<S: Simd>(s: S, b: S::B) -> S::V {
    decode_e4m3(s, s.b_to_i(b))
}

#[inline(always)]
fn e4m3_to_bytes<S: Simd>(s: S, v: S::V) -> S::B {
    s.i_to_b(encode_e4m3(s, v))
}

#[inline(always)]
fn bytes_to_e5m2<S: Simd>(s: S, b: S::B) -> S::V {
    decode_e5m2(s, s.b_to_i(b))
}

#[inline(always)]
fn e5m2_to_bytes<S: Simd>(s: S, v: S::V) -> S::B {
    s.i_to_b(encode_e5m2(s, v))
}

/// `dst[i] = f(src[i])` for `i` in `0..n`: the loop of every elementwise kernel.
///
/// An element's result does not depend on its place: heads and tails go through the same vector code. With `stream`,
/// full vectors bypass the caches (see [`super::should_stream`]) and are fenced before this returns.
///
/// # Safety
/// `src..src + n` must be readable, `dst..dst + n` writable, and the two either apart or (for equal types) the same.
#[inline(always)]
pub unsafe fn map<S: Simd, T: CpuElement, U: CpuElement>(
    s: S,
    mut src: *const T,
    mut dst: *mut U,
    n: usize,
    stream: bool,
    f: impl Fn(S::V) -> S::V,
) {
    let mut left = n;
    // SAFETY: `src` and `dst` advance together and `left` counts what remains of the caller's `n`; each block
    // accesses at most `left` elements. Streaming starts only once `dst` is aligned.
    unsafe {
        let head = if stream { dst.align_offset((S::N * size_of::<U>()).min(64)).min(left) } else { 0 };
        // Addresses that no whole number of elements aligns are not streamed.
        let stream = stream && head < S::N;
        if stream {
            U::store_partial(s, dst, f(T::load_partial(s, src, head)), head);
            (src, dst, left) = (src.add(head), dst.add(head), left.wrapping_sub(head));
        }
        while left >= S::N {
            fetch::<S, T>(src.wrapping_byte_add(AHEAD));
            let v = f(T::load(s, src));
            if !stream {
                claim_ahead::<S, U>(dst);
            }
            U::put(s, dst, v, stream);
            (src, dst, left) = (src.add(S::N), dst.add(S::N), left.wrapping_sub(S::N));
        }
        if left > 0 {
            U::store_partial(s, dst, f(T::load_partial(s, src, left)), left);
        }
        if stream {
            s.fence();
        }
    }
}

#[cfg(feature = "tests")]
#[path = "element_tests.rs"]
mod tests;
