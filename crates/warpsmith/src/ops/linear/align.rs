//! Copies of operands that the copy engine of Hopper cannot load, because their lines are not dense or do not start at
//! multiples of 16 bytes. A product with the copies has the bits of one with aligned operands.

use super::problem::{Order, Part, Strides};
use super::sm90::Divisor;
use super::{Gate, Problem};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::flag;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;

// What the kernel and the device fix.

/// The most copies a call makes: both operands of both products of a gradient.
const MOST: usize = 4;
/// Threads of a block, units of a warp, and bytes of a piece, of which a unit has one for each lane, as in the device code.
const THREADS: usize = 256;
const ITEMS: usize = 4;
const LANES: usize = 32;
const PIECE: usize = 16;
/// Lines of copies start at multiples of this many bytes: the copy engine reads lines that straddle two sectors of memory
/// at a third of its speed. Lines of at least [`LONG`] bytes start where cache lines do.
const SECTOR: usize = 32;
const CACHE_LINE: usize = 128;
/// Copies start at multiples of this many bytes.
const COPY_UNIT: usize = 256;

// What was chosen by times on an H200. No result depends on these.

const LONG: usize = 1024;
/// The most rows of `x` for which threads load `w` in place: copying it would take longer than the product.
const DIRECT_ROWS: usize = 64;
/// Even then, a `w` of at most [`SMALL`] bytes is copied if its lines have [`LONG_LINE`] bytes or more: threads take about
/// 900 cycles for every 128 bytes of a line, one after the other, and the copy engine takes 200.
const LONG_LINE: usize = 3072;
const SMALL: usize = 16 << 20;

kernel_params! {
    struct AlignParams { matrices: [AlignedMatrix; 4] }
}

kernel_params! {
    /// Lines of `length` elements, in a number of batches, whose copies are `pitch` elements apart. A batch has `groups` of
    /// lines with `per_line` units each; there are `units` in all. Blocks from `first_block` on copy it.
    struct AlignedMatrix {
        from: u64, to: u64,
        batch_stride: i64, line_stride: i64, step: i64, pitch: i64,
        groups: Divisor, per_line: Divisor,
        units: u32, first_block: u32, lines: i32, length: i32,
    }
}

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_align", code: include_str!("align.cu") },
    prelude: AlignParams::prelude,
    function: "linear_align",
    min_arch: Arch::new(9, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        [(2, true), (4, true), (1, false), (2, false), (4, false)]
            .map(|(size, dense)| defines(size, dense))
            .into()
    },
};

fn defines(size: usize, dense: bool) -> Defines {
    vec![("SIZE", size.to_string()), flag("DENSE", dense), ("ITEMS", ITEMS.to_string())]
}

/// An operand that is copied, line by line.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Lines {
    /// What a line of the copy is.
    order: Order,
    /// Bytes of an element.
    size: usize,
    batch: usize,
    lines: usize,
    length: usize,
    batch_stride: isize,
    line_stride: isize,
    /// From one element of a line to the next.
    step: isize,
}

impl Lines {
    /// The lines of `x`, if it must be copied.
    fn of_x(p: &Problem) -> Option<Lines> {
        Lines::of(p, p.x_starts, p.x, [p.batch, p.m], false)
    }

    /// Those of `w`.
    fn of_w(p: &Problem) -> Option<Lines> {
        Lines::of_unaligned_w(p).filter(|_| !loads_directly(p))
    }

    fn of_unaligned_w(p: &Problem) -> Option<Lines> {
        let batch = if p.w.batch == 0 { 1 } else { p.batch };
        Lines::of(p, p.w_starts, p.w, [batch, p.weight_rows()], p.gate != Gate::None)
    }

    /// The number of rows of `x` must not decide which kernel runs: rows must have the same bits whatever their number.
    fn of(
        p: &Problem,
        starts: Order,
        strides: Strides,
        [batch, rows]: [usize; 2],
        gated: bool,
    ) -> Option<Lines> {
        let size = p.x_dtype.size();
        if p.w_dtype.size() != size || p.k == 0 {
            return None;
        }
        let transposable = size == 2 && !gated;
        let repeats =
            rows > 1 && strides.row <= 0 || p.k > 1 && strides.col <= 0 || batch > 1 && strides.batch <= 0;
        match starts {
            _ if repeats => {}
            Order::Any => {}
            Order::Columns if !transposable => {}
            Order::Rows | Order::Columns => return None,
        }
        let batch_stride = strides.batch;
        let lines = if transposable && strides.row == 1 && strides.col != 1 && p.k > 1 {
            let (order, line_stride) = (Order::Columns, strides.col);
            Lines { order, size, batch, lines: p.k, length: rows, batch_stride, line_stride, step: 1 }
        } else {
            let step = if p.k > 1 { strides.col } else { 1 };
            let (order, line_stride) = (Order::Rows, strides.row);
            Lines { order, size, batch, lines: rows, length: p.k, batch_stride, line_stride, step }
        };
        // Units are counted in 31 bits.
        (lines.units() < i32::MAX as usize).then_some(lines)
    }

    /// Whether lines are read in aligned pieces instead of elements.
    fn dense(&self) -> bool {
        self.step == 1 && self.size > 1
    }

    fn units_per_line(&self) -> usize {
        (self.length * self.size).div_ceil(if self.dense() { LANES * PIECE } else { PIECE })
    }

    fn groups(&self) -> usize {
        if self.dense() { self.lines } else { self.lines.div_ceil(LANES) }
    }

    fn units(&self) -> usize {
        self.batch.saturating_mul(self.groups()).saturating_mul(self.units_per_line())
    }

    fn blocks(&self) -> usize {
        self.units().div_ceil(THREADS / LANES * ITEMS)
    }

    /// Elements from one line of the copy to the next.
    fn pitch(&self) -> usize {
        let bytes = self.length * self.size;
        bytes.next_multiple_of(if bytes < LONG { SECTOR } else { CACHE_LINE }) / self.size
    }

    fn bytes(&self) -> usize {
        (self.batch * self.lines * self.pitch() * self.size).next_multiple_of(COPY_UNIT)
    }

    /// The strides of the copy.
    fn strides(&self) -> Strides {
        let pitch = self.pitch() as isize;
        let batch = if self.batch > 1 { self.lines as isize * pitch } else { 0 };
        match self.order {
            Order::Columns => Strides { batch, row: 1, col: pitch },
            _ => Strides { batch, row: pitch, col: 1 },
        }
    }

    /// Whether the copies are identical, whichever operand they are for.
    fn copies_alike(&self, other: &Lines) -> bool {
        *self == Lines { order: self.order, ..*other }
    }

    fn matrix(&self, from: usize, to: usize) -> AlignedMatrix {
        AlignedMatrix {
            from: from as u64,
            to: to as u64,
            batch_stride: self.batch_stride as i64,
            line_stride: self.line_stride as i64,
            step: self.step as i64,
            pitch: self.pitch() as i64,
            groups: Divisor::new(self.groups()),
            per_line: Divisor::new(self.units_per_line()),
            units: self.units() as u32,
            first_block: 0,
            lines: self.lines as i32,
            length: self.length as i32,
        }
    }
}

/// Whether rows of `w` start at any alignment and are loaded in place.
fn loads_directly(p: &Problem) -> bool {
    Lines::of_unaligned_w(p).is_some_and(|w| {
        let in_order = (w.lines <= 1 || w.line_stride > 0) && (w.batch <= 1 || w.batch_stride > 0);
        let is_copied = w.length * w.size >= LONG_LINE && w.bytes() <= SMALL;
        p.m <= DIRECT_ROWS && !is_copied && w.order == Order::Rows && w.dense() && w.size == 2 && in_order
    })
}

/// The product with copies in place of the operands that must be copied.
pub(in crate::ops) fn aligned(p: &Problem) -> Problem {
    let mut aligned = *p;
    // The copy engine takes lines of any length.
    (aligned.x_order, aligned.w_order) = (p.x_starts, p.w_starts);
    if let Some(x) = Lines::of_x(p) {
        (aligned.x, aligned.x_order) = (x.strides(), x.order);
    }
    if let Some(w) = Lines::of_w(p) {
        (aligned.w, aligned.w_order) = (w.strides(), w.order);
        // The launch before this one writes it.
        (aligned.constant_w, aligned.copied_w) = (false, true);
    }
    if loads_directly(p) {
        (aligned.w_order, aligned.constant_w, aligned.direct_w) = (Order::Rows, false, true);
    }
    aligned
}

/// Bytes of the copies that [`aligned`] asks for.
pub(in crate::ops) fn bytes(p: &Problem) -> usize {
    [Lines::of_x(p), Lines::of_w(p)].iter().flatten().map(Lines::bytes).sum()
}

/// What is copied, as text; empty if nothing is.
pub(super) fn describe(p: &Problem) -> &'static str {
    match (Lines::of_x(p), Lines::of_w(p)) {
        (None, None) => "",
        (Some(_), None) => ", from an aligned copy of x",
        (None, Some(_)) => ", from an aligned copy of w",
        (Some(_), Some(_)) => ", from aligned copies of x and w",
    }
}

/// A copy to make: the operand, its source and its destination.
struct Copy {
    from: usize,
    lines: Lines,
    to: usize,
}

/// Makes the copies of `products` at `workspace`, and gives the products that use them.
///
/// # Safety
/// The parts must hold the tensors of their products, and `workspace` must have [`bytes`] for each, until the work on the
/// stream is done.
pub(in crate::ops) unsafe fn run<P>(
    launch: &Launch<'_, P>,
    products: impl IntoIterator<Item = (Problem, Part)>,
    workspace: usize,
) -> Result<Vec<(Problem, Part)>> {
    let (mut copies, mut to) = (Vec::<Copy>::new(), workspace);
    let mut copy = |lines: Option<Lines>, from: &mut usize| {
        let Some(lines) = lines else { return };
        // Both products of a gradient read `dz`, one by rows and one by columns: its lines are the same.
        match copies.iter().find(|copy| copy.from == *from && copy.lines.copies_alike(&lines)) {
            Some(copy) => *from = copy.to,
            None => {
                copies.push(Copy { from: *from, lines, to });
                *from = to;
                to += lines.bytes();
            }
        }
    };
    let products = products
        .into_iter()
        .map(|(product, mut part)| {
            copy(Lines::of_x(&product), &mut part.x);
            copy(Lines::of_w(&product), &mut part.w);
            (aligned(&product), part)
        })
        .collect();
    for dense in [true, false] {
        let alike: Vec<&Copy> = copies.iter().filter(|copy| copy.lines.dense() == dense).collect();
        if !alike.is_empty() {
            // SAFETY: the caller vouches for the tensors and the scratch memory.
            unsafe { record(launch, &alike, dense)? };
        }
    }
    Ok(products)
}

/// Records the launch of some copies, which are all dense or all not. The elements of a call have one size.
///
/// # Safety
/// As [`run`].
unsafe fn record<P>(launch: &Launch<'_, P>, copies: &[&Copy], dense: bool) -> Result<()> {
    let matrix = |copy: &Copy| copy.lines.matrix(copy.from, copy.to);
    // Missing matrices have no blocks.
    let mut matrices = [AlignedMatrix { first_block: u32::MAX, ..matrix(copies[0]) }; MOST];
    let mut blocks = 0;
    for (slot, copy) in matrices.iter_mut().zip(copies) {
        *slot = AlignedMatrix { first_block: blocks as u32, ..matrix(copy) };
        blocks += copy.lines.blocks();
    }
    let config = LaunchConfig::new([blocks as u32, 1, 1], [THREADS as u32, 1, 1], 0);
    let defines = defines(copies[0].lines.size, dense);
    // SAFETY: the caller vouches for the memory; the blocks cover every unit of every matrix.
    unsafe { launch.record_part(&DEVICE, &defines, &config, &AlignParams { matrices }) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::problem::Matrix;
    use super::*;
    use crate::tensor::DType;

    fn product(dtype: DType, [x, w]: [Matrix; 2]) -> Problem {
        let out = Matrix { row: 64, col: 1, aligned: true };
        Problem::product(dtype, dtype == DType::F32, [70, 40, 333], [x, w, out])
    }

    #[test]
    fn lines_that_start_anywhere_are_copied_and_no_others() {
        let dense = Matrix { row: 333, col: 1, aligned: true };
        let padded = Matrix { row: 336, ..dense };
        let p = product(DType::BF16, [dense, padded]);
        let aligned = aligned(&p);
        assert_eq!((aligned.x_order, aligned.w_order), (Order::Rows, Order::Rows));
        assert_eq!((aligned.x, aligned.w), (Strides { batch: 0, row: 336, col: 1 }, p.w));
        assert_eq!(bytes(&p), (70 * 336 * 2usize).next_multiple_of(256));
        assert!(!aligned.copied_w, "w is read where it is");
        let misaligned = Matrix { aligned: false, ..padded };
        let p = product(DType::BF16, [padded, misaligned]);
        let copied = super::aligned(&p);
        assert!(copied.copied_w && copied.w.row == 336 && copied.x == p.x);
        assert_eq!(describe(&p), ", from an aligned copy of w");
    }

    #[test]
    fn few_rows_read_w_where_it_is() {
        let dense = Matrix { row: 333, col: 1, aligned: true };
        let p = Problem { m: 33, ..product(DType::BF16, [dense, dense]) };
        let direct = aligned(&p);
        assert!(direct.direct_w && !direct.copied_w && direct.w == p.w && direct.w_order == Order::Rows);
        assert_eq!(bytes(&p), (33 * 336 * 2usize).next_multiple_of(256));
        assert!(!aligned(&Problem { m: 65, ..p }).direct_w);
        assert!(!aligned(&product(DType::F32, [dense, dense])).direct_w);
    }

    #[test]
    fn few_long_rows_of_w_are_copied() {
        let copies = |n: usize, k: usize| {
            let dense = |columns: usize| Matrix { row: columns as isize, col: 1, aligned: true };
            let p = Problem::product(DType::BF16, false, [12, n, k], [dense(k), dense(k), dense(n)]);
            let aligned = aligned(&p);
            assert_ne!(aligned.direct_w, aligned.copied_w);
            aligned.copied_w
        };
        assert!(copies(592, 3631));
        assert!(!copies(592, 1033), "a few stages");
        assert!(!copies(10440, 3631), "too large");
    }

    #[test]
    fn columns_stay_columns_where_tensor_cores_transpose() {
        let dense = Matrix { row: 336, col: 1, aligned: true };
        let columns = Matrix { row: 1, col: 41, aligned: true };
        let p = product(DType::BF16, [dense, columns]);
        let copied = aligned(&p);
        assert_eq!(copied.w_order, Order::Columns);
        assert_eq!(copied.w, Strides { batch: 0, row: 1, col: 48 });
        assert_eq!(bytes(&p), (333 * 48 * 2usize).next_multiple_of(256));
        for p in [
            product(DType::F32, [dense, columns]),
            product(DType::BF16, [dense, Matrix { row: 700, col: 2, aligned: true }]),
            product(DType::BF16, [dense, Matrix { row: 0, col: 1, aligned: true }]),
        ] {
            let copied = aligned(&p);
            assert_eq!((copied.w_order, copied.w.col), (Order::Rows, 1));
            assert!(copied.w.row >= 333 && bytes(&p) > 0);
        }
    }

    #[test]
    fn blocks_cover_every_piece() {
        for (lines, length, batch) in [(1, 1, 1), (3, 256, 2), (70, 257, 1), (4096, 4097, 3)] {
            for (size, step) in [(1, 1), (2, 1), (2, 3), (4, 1), (4, 100)] {
                let (order, batch_stride, line_stride) = (Order::Rows, 0, 0);
                let all = Lines { order, size, batch, lines, length, batch_stride, line_stride, step };
                let pieces = (length * size).div_ceil(PIECE);
                assert!(all.units() * LANES >= batch * lines * pieces);
                assert!(all.blocks() * (THREADS / LANES) * ITEMS >= all.units());
                assert!(all.pitch() >= length && (all.pitch() * size).is_multiple_of(SECTOR));
                assert!(all.bytes() >= batch * lines * all.pitch() * size);
            }
        }
    }
}
