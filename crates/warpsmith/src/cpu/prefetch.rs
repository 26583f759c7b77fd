//! Software prefetch.
//!
//! The hardware prefetcher follows a loop through memory, but only to the end of a page and not far ahead; a loop with
//! some arithmetic leaves memory idle half of the time. All of these are hints: any address is allowed.

pub use super::scratch::LINE;
use super::simd::Simd;

/// How many bytes ahead of its loads a loop prefetches: past the end of the page.
pub const AHEAD: usize = 4096;
/// The most runs of memory that a loop goes through side by side.
pub const SIDE_BY_SIDE: usize = 4;
/// How many bytes ahead a loop prefetches what it reads into L2, with [`fetch_near`].
pub const FAR_AHEAD: usize = 8192;
/// How many bytes ahead of a store its cache line is prefetched for writing. A plain store waits in the store buffer
/// until the core owns its line, and the core requests few lines by itself.
const CLAIM_AHEAD: usize = 1024;

/// Rows of more bytes than this are not prefetched: they would evict what is in use.
const FARTHEST_AHEAD: usize = 1 << 17;

/// How many runs of memory a loop goes through side by side, and how many bytes ahead it prefetches. With non-temporal
/// stores (`stream`) several: the L2 prefetcher follows each page by itself and has more requests in flight than L1 has
/// fill buffers, which such stores use as well. It then needs help only across page boundaries.
pub fn side_by_side(stream: bool) -> (usize, usize) {
    if stream { (SIDE_BY_SIDE, 1024) } else { (1, AHEAD) }
}

/// A row that is needed soon. While one row is processed in the caches, memory would idle; prefetching the next row
/// keeps it busy.
#[derive(Clone, Copy)]
pub struct Ahead<T>(*const T);

impl<T> Ahead<T> {
    /// The row of `n` elements, `step` apart, at `p`; it need not exist.
    #[inline(always)]
    pub fn new(p: *const T, n: usize, step: isize) -> Self {
        let worth = step == 1 && n.saturating_mul(size_of::<T>()) <= FARTHEST_AHEAD;
        Ahead(if worth { p } else { std::ptr::null() })
    }

    /// Prefetches the elements of the vector of `S` at `i`. Best in the pass that stores: it reads from the cache, so
    /// memory can read while it writes.
    #[inline(always)]
    pub fn fetch<S: Simd>(self, i: usize) {
        if !self.0.is_null() {
            fetch::<S, T>(self.0.wrapping_add(i));
        }
    }
}

/// Prefetches the cache lines of the vector of `S` at `p`; any address is allowed.
#[inline(always)]
pub fn fetch<S: Simd, T>(p: *const T) {
    for line in 0..(S::N * size_of::<T>()).div_ceil(LINE) {
        fetch_line(p.cast::<u8>().wrapping_add(line * LINE));
    }
}

/// Prefetches the cache line of `p`; any address is allowed.
#[inline(always)]
pub fn fetch_line(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; any address is allowed.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Prefetches `len` bytes at `p` into L2: for what is needed only after other work.
#[inline(always)]
pub fn fetch_near(p: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..len.div_ceil(LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(line * LINE).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (p, len);
}

/// Prefetches for writing the cache lines [`CLAIM_AHEAD`] of the vector of `S` at `p`.
#[inline(always)]
pub fn claim_ahead<S: Simd, T>(p: *mut T) {
    claim(p.wrapping_byte_add(CLAIM_AHEAD).cast(), S::N * size_of::<T>());
}

/// Prefetches for writing the cache lines of `len` bytes at `p`.
#[inline(always)]
pub fn claim(p: *mut u8, len: usize) {
    for line in 0..len.div_ceil(LINE) {
        let address = (p as usize).wrapping_add(line * LINE);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, and no operation on processors without it; any address is allowed. Written as assembly,
        // because the intrinsic asks for a shared line unless the function is compiled for PRFCHW.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) address, options(nomem, nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
}
