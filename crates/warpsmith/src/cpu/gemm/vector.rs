//! Register-blocked kernels on vectors: rows of the left operand, broadcast, times a panel.
//!
//! The units of a block of k are added to one accumulator in ascending order, and the sums of blocks likewise, whatever the number
//! of rows or the orientation: that makes a row's bits independent of the others.

use super::isa::Isa;
use super::matrix::Unit;
use super::panel::PANEL;
use crate::cpu::prefetch::{LINE, fetch_line, fetch_near};
use crate::cpu::{Simd, Task, Tier, dispatch};

/// Units from one row of the left block to the next. A constant, so that rows are displacements in the instructions;
/// not a multiple of 1 KiB, so that rows do not compete for the same sets of the cache.
pub(super) const LEFT_STRIDE: usize = 512 + 16;

/// One product of a block: `rows` rows at `left`, `units` units of a panel at `right`, into rows of [`PANEL`] at `out`.
#[derive(Copy, Clone)]
pub(super) struct Product {
    pub rows: usize,
    pub units: usize,
    pub left: *const u32,
    pub right: *const u32,
    /// Units from one unit of the panel to the next: [`PANEL`], except for columns that are used in place.
    pub right_width: isize,
    /// Units from a unit of the panel to the one prefetched with it: [`PANEL_AHEAD`], except for such columns.
    pub right_ahead: isize,
    pub out: *mut f32,
    pub start: Start,
    pub ahead: Option<Ahead>,
}

/// What the sums of a product begin with.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) enum Start {
    /// Nothing: `out` is overwritten.
    Zero,
    /// What is at `out`, the sum over the units before of the same block.
    Resume,
    /// Zero, and in the end they are added to what is at `out`, the sum of the blocks before.
    Add,
}

impl Start {
    /// Of a product that resumes another, or begins.
    pub fn resuming(resume: bool) -> Start {
        if resume { Start::Resume } else { Start::Zero }
    }

    /// Of the block of k that begins at unit `from`.
    pub fn of_block(from: usize) -> Start {
        if from > 0 { Start::Add } else { Start::Zero }
    }
}

/// Adds rows of the sums of a block to those of the blocks before.
///
/// # Safety
/// Both must hold so many rows of [`PANEL`].
pub(super) unsafe fn add_block(sums: *mut f32, block: *const f32, rows: usize) {
    for i in 0..rows * PANEL {
        // SAFETY: passed on.
        unsafe { *sums.add(i) += *block.add(i) };
    }
}

/// Units of a cache line.
pub(super) const LINE_UNITS: usize = LINE / size_of::<u32>();
/// Rows that a product may prefetch while it runs.
pub(super) const AHEAD: usize = 4;

/// How far ahead a product prefetches a panel, which comes from L2: further than the hardware prefetcher.
pub(super) const PANEL_AHEAD: isize = 16 * PANEL as isize;

/// What is needed after a product: with every line of its rows it prefetches a line of each.
#[derive(Copy, Clone)]
pub(super) struct Ahead {
    /// Wanted in L2.
    pub rows: [*const u8; AHEAD],
    /// Wanted in the first.
    pub sums: *const f32,
}

impl Ahead {
    #[inline(always)]
    fn fetch(self, bytes: usize) {
        for row in self.rows {
            fetch_near(row.wrapping_add(bytes), LINE);
        }
        fetch_line(self.sums.wrapping_byte_add(bytes).cast());
    }
}

/// Rows that a kernel of this instruction set computes at once.
pub(super) const fn block_rows(isa: Isa) -> usize {
    match isa.tier() {
        Tier::Avx512 => 14,
        Tier::Avx2 | Tier::Portable => 6,
    }
}

/// Computes `product`.
///
/// # Safety
/// The memory of `product` must be as its fields say; `isa` must be supported and have the unit's instructions.
// Never inlined: callers in several codegen units would each get a copy of all tiers, half a megabyte.
#[inline(never)]
pub(super) unsafe fn multiply(isa: Isa, unit: Unit, product: Product) {
    match unit {
        Unit::F32 => dispatch(isa.tier(), product),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller promised the instructions and the memory.
        Unit::Bf16 => unsafe { dot::multiply_bf16(product) },
        #[cfg(not(target_arch = "x86_64"))]
        Unit::Bf16 => unreachable!("no dot products of bf16 here"),
        Unit::F16 => unreachable!("no dot products of f16 on vectors"),
    }
}

impl Task for Product {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `multiply`'s caller promised the memory.
        unsafe {
            match S::TIER {
                Tier::Avx512 => wide(Multiply(s), self),
                Tier::Avx2 | Tier::Portable => narrow(Multiply(s), self),
            }
        }
    }
}

/// One step along k for a vector of sums.
trait Dot: Copy {
    type V: Copy;
    const N: usize;
    fn zero(self) -> Self::V;
    unsafe fn load(self, p: *const u32) -> Self::V;
    unsafe fn store(self, p: *mut u32, v: Self::V);
    /// The unit at `p` in every lane.
    unsafe fn broadcast(self, p: *const u32) -> Self::V;
    fn step(self, sum: Self::V, a: Self::V, b: Self::V) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
}

/// `sum + a * b` in f32, as all products on vectors add it.
#[inline(always)]
pub(super) fn add_product<S: Simd>(s: S, sum: S::V, a: S::V, b: S::V) -> S::V {
    // Where the target has no fused instruction its exact emulation costs ten times the two roundings.
    let fused = S::TIER > Tier::Portable || cfg!(any(target_feature = "fma", target_arch = "aarch64"));
    if fused { s.fma(a, b, sum) } else { s.add(sum, s.mul(a, b)) }
}

/// `f32` by fused multiply-add.
#[derive(Copy, Clone)]
struct Multiply<S>(S);

impl<S: Simd> Dot for Multiply<S> {
    type V = S::V;
    const N: usize = S::N;

    #[inline(always)]
    fn zero(self) -> S::V {
        self.0.zero()
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> S::V {
        // SAFETY: the contracts are the same.
        unsafe { self.0.load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u32, v: S::V) {
        // SAFETY: the contracts are the same.
        unsafe { self.0.store(p.cast(), v) }
    }

    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> S::V {
        // SAFETY: `p` is readable.
        self.0.splat(unsafe { *p.cast::<f32>() })
    }

    #[inline(always)]
    fn step(self, sum: S::V, a: S::V, b: S::V) -> S::V {
        add_product(self.0, sum, a, b)
    }

    #[inline(always)]
    fn add(self, a: S::V, b: S::V) -> S::V {
        self.0.add(a, b)
    }
}

/// 32 vector registers: 28 sums, two vectors of the panel, one broadcast.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn wide<D: Dot>(d: D, mut p: Product) {
    // SAFETY: passed on; `split_off` walks through the rows.
    unsafe {
        while p.rows >= 14 {
            rows::<D, 14>(d, p.split_off(14));
        }
        if p.rows >= 8 {
            rows::<D, 8>(d, p.split_off(8));
        }
        if p.rows >= 4 {
            rows::<D, 4>(d, p.split_off(4));
        }
        if p.rows >= 2 {
            rows::<D, 2>(d, p.split_off(2));
        }
        if p.rows >= 1 {
            rows::<D, 1>(d, p);
        }
    }
}

/// 16 vector registers: 12 sums, two vectors of the panel, one broadcast.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
unsafe fn narrow<D: Dot>(d: D, mut p: Product) {
    // SAFETY: passed on; `split_off` walks through the rows.
    unsafe {
        while p.rows >= 6 {
            rows::<D, 6>(d, p.split_off(6));
        }
        if p.rows >= 3 {
            rows::<D, 3>(d, p.split_off(3));
        }
        while p.rows >= 1 {
            rows::<D, 1>(d, p.split_off(1));
        }
    }
}

impl Product {
    /// The first `rows` rows; the rest stays.
    #[inline(always)]
    fn split_off(&mut self, rows: usize) -> Product {
        let first = Product { rows, ..*self };
        self.rows = self.rows.wrapping_sub(rows);
        self.left = self.left.wrapping_add(rows * LEFT_STRIDE);
        self.out = self.out.wrapping_add(rows * PANEL);
        first
    }
}

/// `R` rows of the product, two vectors of columns at a time.
///
/// # Safety
/// As for [`multiply`], with at least `R` rows.
#[inline(always)]
unsafe fn rows<D: Dot, const R: usize>(d: D, p: Product) {
    let mut column = 0;
    while column < PANEL {
        // SAFETY: the left rows hold `units` units each, the panel `units` rows of PANEL, `out` R rows of PANEL.
        unsafe {
            let out = p.out.cast::<u32>().add(column);
            let mut sums = [[d.zero(); 2]; R];
            if p.start == Start::Resume {
                for r in 0..R {
                    sums[r] = [d.load(out.add(r * PANEL)), d.load(out.add(r * PANEL + D::N))];
                }
            }
            let (mut left, mut right) = (p.left, p.right.add(column));
            let end = left.add(p.units);
            while left < end {
                if let Some(ahead) = p.ahead {
                    ahead.fetch(left.byte_offset_from_unsigned(p.left));
                }
                let line =
                    if left.wrapping_add(LINE_UNITS) < end { left.wrapping_add(LINE_UNITS) } else { end };
                while left < line {
                    let b = [d.load(right), d.load(right.add(D::N))];
                    let later = right.wrapping_offset(p.right_ahead);
                    fetch_line(later.cast());
                    fetch_line(later.wrapping_add(D::N).cast());
                    for r in 0..R {
                        let a = d.broadcast(left.add(r * LEFT_STRIDE));
                        sums[r] = [d.step(sums[r][0], a, b[0]), d.step(sums[r][1], a, b[1])];
                    }
                    left = left.add(1);
                    right = right.wrapping_offset(p.right_width);
                }
            }
            if p.start == Start::Add {
                for r in 0..R {
                    let before = [d.load(out.add(r * PANEL)), d.load(out.add(r * PANEL + D::N))];
                    sums[r] = [d.add(before[0], sums[r][0]), d.add(before[1], sums[r][1])];
                }
            }
            for r in 0..R {
                d.store(out.add(r * PANEL), sums[r][0]);
                d.store(out.add(r * PANEL + D::N), sums[r][1]);
            }
        }
        column += 2 * D::N;
    }
}

#[cfg(target_arch = "x86_64")]
mod dot {
    use super::{Dot, Product, wide};
    use std::arch::x86_64::*;
    use std::mem::transmute;

    /// # Safety
    /// As for [`super::multiply`], with AVX-512 BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub unsafe fn multiply_bf16(p: Product) {
        // SAFETY: passed on.
        unsafe { wide(Bf16, p) }
    }

    /// Pairs of bf16, both products added to the sum with a rounding each; subnormals count as zero.
    #[derive(Copy, Clone)]
    struct Bf16;

    impl Dot for Bf16 {
        type V = __m512i;
        const N: usize = 16;

        #[inline(always)]
        fn zero(self) -> __m512i {
            // SAFETY: the entry function is compiled for AVX-512.
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        unsafe fn load(self, p: *const u32) -> __m512i {
            // SAFETY: the caller promised the lanes.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut u32, v: __m512i) {
            // SAFETY: the caller promised the lanes.
            unsafe { _mm512_storeu_si512(p.cast(), v) }
        }

        #[inline(always)]
        unsafe fn broadcast(self, p: *const u32) -> __m512i {
            // SAFETY: the caller promised the unit.
            unsafe { _mm512_set1_epi32(*p.cast::<i32>()) }
        }

        #[inline(always)]
        fn step(self, sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: the entry function is compiled for AVX-512 BF16; the types are views of the same 512 bits.
            unsafe {
                let (a, b) = (transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
                _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), a, b))
            }
        }

        #[inline(always)]
        fn add(self, a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: as above.
            unsafe { _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b))) }
        }
    }
}
