//! The engine of the elementwise ops: each element of the outputs is an expression of the elements at the same index
//! of the inputs.
//!
//! An op says which tensors take part ([`Grid::new`]) and gives the expression, once as an [`cpu::Expression`] and once
//! as a lambda in its `kernel.cu`; the engine finds the cheapest way through memory. No result depends on the position
//! of its element, so dimensions are reordered and merged freely: tensors that are all transposed in the same way are
//! as good as contiguous ones. A vector that every row shares (a bias) is a tensor whose leading strides are zero.

#[cfg(feature = "lab")]
pub(super) mod cases;
pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub(super) mod function;
#[cfg(feature = "lab")]
mod reference;

use crate::error::Result;
use crate::op::Args;
use crate::tensor::{DType, Layout, MAX_RANK, Shape, Space};

/// Most tensors of a call: inputs, then outputs.
pub(super) const MAX_STREAMS: usize = 5;

/// One tensor of an elementwise call, as the engine sees it.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    pub layout: Layout,
    pub address: usize,
}

impl Stream {
    /// Argument `index` as it is.
    pub fn of(args: &Args<'_>, index: usize) -> Stream {
        Stream { layout: *args.at(index).layout(), address: args.address(index) }
    }

    /// The vector that is argument `index`, repeated for every row of `shape`.
    pub fn repeated(args: &Args<'_>, index: usize, shape: &Shape) -> Result<Stream> {
        let mut strides = [0; MAX_RANK];
        strides[shape.len() - 1] = args.at(index).layout().step();
        Ok(Stream { layout: Layout::strided(*shape, &strides[..shape.len()])?, address: args.address(index) })
    }
}

/// The way through memory of an elementwise call: rows of columns. Addresses are not part of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Grid {
    pub dtype: DType,
    /// All dimensions but the innermost; unused streams repeat the first.
    pub rows: Space<MAX_STREAMS>,
    pub num_rows: usize,
    /// The innermost dimension.
    pub columns: usize,
    /// Strides of columns in each stream.
    pub steps: [isize; MAX_STREAMS],
    /// The first two inputs, and the first two outputs if there are two, are the even and odd elements of one tensor.
    pub paired: bool,
    /// Columns can be moved in aligned 16-byte pieces: dense and aligned, and whole unless there is a single row.
    pub vector: bool,
    /// Several rows, but each tensor is one aligned run or a vector that every row shares.
    pub repeats: bool,
}

impl Grid {
    /// The grid of tensors of one shape. `paired` holds the positions of tensors that are the even elements of
    /// another, whose odd elements are the next tensor.
    pub fn new<const N: usize>(dtype: DType, streams: [Stream; N], paired: &[usize]) -> Grid {
        const { assert!(N <= MAX_STREAMS) };
        let all: [Stream; MAX_STREAMS] = std::array::from_fn(|t| streams[if t < N { t } else { 0 }]);
        // Innermost is what is innermost in the last output.
        let by = streams[N - 1].layout;
        let mut order: Vec<usize> = (0..by.rank()).collect();
        order.sort_by_key(|&d| {
            std::cmp::Reverse(if by.shape()[d] > 1 { by.strides()[d] } else { isize::MAX })
        });
        let layouts = all.map(|stream| stream.layout.permute(&order));
        let whole = Space::new(by.rank(), layouts.each_ref());
        let (inner, mut rows) = (whole.rank - 1, whole);
        rows.rank = inner.max(1);
        if inner == 0 {
            rows.sizes[0] = 1;
            rows.strides = [[0; MAX_RANK]; MAX_STREAMS];
        }
        let columns = whole.sizes[inner];
        let steps = whole.strides.map(|s| if columns > 1 { s[inner] } else { 1 });
        let is_paired = |t: usize| paired.iter().any(|&even| t == even || t == even + 1);
        let paired_up = !paired.is_empty() && (0..N).all(|t| !is_paired(t) || steps[t] == 2);
        let size = dtype.size();
        let vector = (0..N).all(|t| {
            let even_address =
                all[t].address - if paired.iter().any(|&even| t == even + 1) { size } else { 0 };
            let dense = steps[t] == if paired_up && is_paired(t) { 2 } else { 1 };
            let rows_aligned = (0..rows.rank)
                .all(|d| rows.sizes[d] <= 1 || (rows.strides[t][d] as usize * size).is_multiple_of(16));
            dense && rows_aligned && even_address.is_multiple_of(16)
        });
        let is_run = |t: usize| {
            steps[t] == 1 && rows.strides[t][0] == columns as isize && all[t].address.is_multiple_of(16)
        };
        let repeats =
            rows.rank == 1 && rows.len() > 1 && (0..N).all(|t| is_run(t) || rows.strides[t][0] == 0);
        let whole_pieces = (columns * size).is_multiple_of(16);
        Grid {
            dtype,
            rows,
            num_rows: rows.len(),
            columns,
            steps,
            paired: paired_up,
            vector: vector && (whole_pieces || rows.len() == 1),
            repeats,
        }
    }

    /// Number of elements of each tensor.
    pub fn len(&self) -> usize {
        self.num_rows * self.columns
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn stream(shape: &[usize], strides: &[isize], address: usize) -> Stream {
        Stream { layout: Layout::strided(Shape::new(shape).unwrap(), strides).unwrap(), address }
    }

    #[test]
    fn tensors_of_one_order_in_memory_are_one_row() {
        let transposed = stream(&[3, 5, 7], &[7, 21, 1], 64);
        let grid = Grid::new(DType::F32, [transposed, transposed], &[]);
        assert_eq!((grid.num_rows, grid.columns, grid.vector), (1, 105, true));
        let other = stream(&[3, 5, 7], &[35, 7, 1], 64);
        let grid = Grid::new(DType::F32, [transposed, other], &[]);
        assert_eq!((grid.num_rows, grid.columns, grid.vector), (15, 7, false));
    }

    #[test]
    fn shared_vectors_make_rows_and_misaligned_ones_forbid_vectors() {
        let (x, bias) = (stream(&[4, 6, 8], &[48, 8, 1], 64), stream(&[4, 6, 8], &[0, 0, 1], 128));
        let grid = Grid::new(DType::BF16, [x, bias, x], &[]);
        assert_eq!((grid.num_rows, grid.columns, grid.vector), (24, 8, true));
        let grid = Grid::new(DType::BF16, [x, Stream { address: 130, ..bias }, x], &[]);
        assert!(!grid.vector && grid.repeats);
        let apart = stream(&[24, 8], &[9, 1], 64);
        let bias = stream(&[24, 8], &[0, 1], 128);
        assert!(!Grid::new(DType::BF16, [apart, bias, apart], &[]).repeats);
        let single = Grid::new(DType::BF16, [stream(&[1], &[1], 64); 2], &[]);
        assert_eq!((single.num_rows, single.columns), (1, 1));
    }

    #[test]
    fn pairs_are_recognised() {
        let (even, out) = (stream(&[4, 8], &[16, 2], 64), stream(&[4, 8], &[8, 1], 1024));
        let odd = Stream { address: 66, ..even };
        let grid = Grid::new(DType::BF16, [even, odd, out], &[0]);
        assert!(grid.paired && grid.vector);
        let (even, out) = (stream(&[9], &[2], 64), stream(&[9], &[1], 1024));
        let grid = Grid::new(DType::BF16, [even, Stream { address: 66, ..even }, out], &[0]);
        assert!(grid.paired && grid.vector, "one row may end anywhere");
        let apart = stream(&[4, 8], &[32, 4], 64);
        let out = stream(&[4, 8], &[8, 1], 1024);
        let grid = Grid::new(DType::BF16, [apart, Stream { address: 68, ..apart }, out], &[0]);
        assert!(!grid.paired && !grid.vector);
    }
}
