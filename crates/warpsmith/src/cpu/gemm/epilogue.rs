//! What happens to a finished sum: the caller's last steps, on a tile that is still in L1.

use super::isa::Isa;
use super::panel::{HALF, PANEL};
use crate::cpu::prefetch::claim;
use crate::cpu::rows::can_stream;
use crate::cpu::simd::{MAX_LANES, Pair};
use crate::cpu::{CpuElement, Simd, Task, dispatch};
use std::ops::Range;

/// A tile of finished sums: rows `row .. row + rows` and columns `col .. col + cols` of the product.
#[derive(Copy, Clone)]
pub struct Tile {
    pub(super) sums: *const f32,
    /// First row.
    pub(crate) row: usize,
    /// First column.
    pub(crate) col: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Number of columns.
    pub(crate) cols: usize,
}

impl Tile {
    /// Calls `f(row, col, count, sums)` for each vector of the tile: `count` lanes hold the sums of `row` from `col`
    /// on, the others anything.
    #[inline(always)]
    pub fn for_vectors<S: Simd>(&self, s: S, mut f: impl FnMut(usize, usize, usize, S::V)) {
        for r in 0..self.rows {
            let mut c = 0usize;
            while c < self.cols {
                // SAFETY: a tile holds whole rows of PANEL sums, a multiple of the lanes of every tier and of its pairs.
                let sums = unsafe { s.load(self.sums.add(r * PANEL + c)) };
                f(
                    self.row.wrapping_add(r),
                    self.col.wrapping_add(c),
                    S::N.min(self.cols.wrapping_sub(c)),
                    sums,
                );
                c = c.wrapping_add(S::N);
            }
        }
    }

    /// [`Tile::for_vectors`] of a gated product: `f(row, col, count, gate, up)`.
    #[inline(always)]
    pub fn for_pairs<S: Simd>(&self, s: S, mut f: impl FnMut(usize, usize, usize, S::V, S::V)) {
        for r in 0..self.rows {
            let mut c = 0usize;
            while c < self.cols {
                // SAFETY: as above; the second half of a row of PANEL sums holds the second product.
                let (gate, up) = unsafe {
                    let sums = self.sums.add(r * PANEL + c);
                    (s.load(sums), s.load(sums.add(HALF)))
                };
                let count = S::N.min(self.cols.wrapping_sub(c));
                f(self.row.wrapping_add(r), self.col.wrapping_add(c), count, gate, up);
                c = c.wrapping_add(S::N);
            }
        }
    }
}

/// Turns sums into results and stores them.
pub trait Epilogue: Sync {
    /// Finishes a tile. Every element of the product arrives exactly once, in a tile of any size: what is done to an
    /// element must depend on its sum, row and column alone.
    ///
    /// Implementations must be `#[inline(always)]`, and so must what they call with vectors.
    ///
    /// # Safety
    /// What the implementation writes to must hold the tile's rows and columns.
    unsafe fn finish<S: Simd>(&self, s: S, tile: &Tile);

    /// Called before the sums of a tile are computed: a chance to prefetch the memory the results go to.
    fn expect(&self, rows: Range<usize>, cols: Range<usize>) {
        let _ = (rows, cols);
    }

    /// Whether it computes enough to be worth overlapping with the products.
    fn computes(&self) -> bool {
        false
    }

    /// Called on each thread after its last tile: orders streamed stores, if there were any.
    #[inline(always)]
    fn end<S: Simd>(&self, s: S) {
        let _ = s;
    }
}

/// Where results go: elements of `T` with any strides.
#[derive(Copy, Clone)]
pub struct Output<T> {
    /// The element of row 0, column 0.
    pub data: *mut T,
    /// Elements from one row to the next.
    pub row_stride: isize,
    /// Elements from one column to the next.
    pub col_stride: isize,
}

// SAFETY: the threads of one product write disjoint elements.
unsafe impl<T: Send> Send for Output<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Output<T> {}

impl<T: CpuElement> Output<T> {
    /// A matrix whose rows of `n` elements follow each other without gaps.
    pub fn dense(data: &mut [T], n: usize) -> Output<T> {
        Output { data: data.as_mut_ptr(), row_stride: n as isize, col_stride: 1 }
    }

    /// Rounds and writes `count` lanes to `row` from `col` on; whole vectors bypass the caches if `stream` and their
    /// alignment allow it, which [`Epilogue::end`] must then fence.
    ///
    /// # Safety
    /// The elements must be writable and `count <= S::N`.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, s: S, row: usize, col: usize, count: usize, v: S::V, stream: bool) {
        let p = self.at(row, col);
        // SAFETY: the elements are the caller's promise.
        unsafe {
            if self.col_stride != 1 {
                let mut lanes = [0f32; MAX_LANES];
                s.store(lanes.as_mut_ptr(), v);
                for (i, &x) in lanes.iter().take(count).enumerate() {
                    *p.wrapping_offset(self.col_stride.wrapping_mul(i as isize)) = T::from_f32(x);
                }
            } else if count == S::N {
                T::put(s, p, v, stream && can_stream::<S, T>(p));
            } else {
                T::store_partial(s, p, v, count);
            }
        }
    }

    /// Reads `count` elements of `row` from `col` on, as a residual added in place needs them.
    ///
    /// # Safety
    /// The elements must be readable and `count <= S::N`.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(&self, s: S, row: usize, col: usize, count: usize) -> S::V {
        let p = self.at(row, col);
        // SAFETY: the elements are the caller's promise.
        unsafe {
            if self.col_stride != 1 {
                let mut lanes = [0f32; MAX_LANES];
                for (i, x) in lanes.iter_mut().take(count).enumerate() {
                    *x = (*p.wrapping_offset(self.col_stride.wrapping_mul(i as isize))).to_f32();
                }
                s.load(lanes.as_ptr())
            } else if count == S::N {
                T::load(s, p)
            } else {
                T::load_partial(s, p, count)
            }
        }
    }

    /// Prefetches some elements for writing.
    pub fn claim(&self, rows: Range<usize>, cols: Range<usize>) {
        if self.col_stride == 1 {
            for row in rows {
                claim(self.at(row, cols.start).cast(), cols.len() * size_of::<T>());
            }
        }
    }

    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> *mut T {
        let offset = (row as isize).wrapping_mul(self.row_stride);
        self.data.wrapping_offset(offset.wrapping_add((col as isize).wrapping_mul(self.col_stride)))
    }
}

/// The plain product: sums rounded to the type of the output.
impl<T: CpuElement> Epilogue for Output<T> {
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, tile: &Tile) {
        let s = Pair(s);
        tile.for_vectors(
            s,
            #[inline(always)]
            // SAFETY: the caller promised the tile's elements.
            |row, col, count, sums| unsafe { self.store(s, row, col, count, sums, false) },
        );
    }

    fn expect(&self, rows: Range<usize>, cols: Range<usize>) {
        self.claim(rows, cols);
    }
}

/// Runs the epilogue on the tier's vectors.
///
/// # Safety
/// The tile must hold whole rows of [`PANEL`] sums.
// Not inlined: every product calls it, and epilogues are large.
#[inline(never)]
pub(super) unsafe fn finish<E: Epilogue>(isa: Isa, tile: Tile, epilogue: &E) {
    struct Finish<'a, E>(Tile, &'a E);
    impl<E: Epilogue> Task for Finish<'_, E> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            // SAFETY: a tile holds whole rows; the epilogue's memory is the promise of the product's caller.
            unsafe { self.1.finish(s, &self.0) };
        }
    }
    dispatch(isa.tier(), Finish(tile, epilogue));
}

/// Tells the epilogue that this thread has no more tiles for now.
pub(super) fn end<E: Epilogue>(isa: Isa, epilogue: &E) {
    struct End<'a, E>(&'a E);
    impl<E: Epilogue> Task for End<'_, E> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            self.0.end(s);
        }
    }
    dispatch(isa.tier(), End(epilogue));
}
