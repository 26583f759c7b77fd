//! Shapes, strides, and the joint iteration space of several strided tensors.

use crate::error::{Error, Result};
use std::fmt;
use std::ops::Deref;

/// The most dimensions a tensor can have.
pub const MAX_RANK: usize = 8;

/// The sizes of a tensor's dimensions. The number of elements is known to fit `isize`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape, if it has at most [`MAX_RANK`] dimensions and its element count fits `isize`.
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_RANK {
            return Err(Error::parse("shape", format!("at most {MAX_RANK} dimensions"), format!("{dims:?}")));
        }
        // Zero sizes hide an overflow of the others, so the product is taken over the non-zero ones.
        let product = dims.iter().filter(|&&d| d > 0).try_fold(1usize, |n, &d| n.checked_mul(d));
        if product.is_none_or(|n| n > isize::MAX as usize / 8) {
            return Err(Error::parse("shape", "a size that can be addressed", format!("{dims:?}")));
        }
        let mut shape = Shape { dims: [0; MAX_RANK], rank: dims.len() as u8 };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.iter().product()
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &**self)
    }
}

/// A shape with the stride, in elements, of each dimension.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    shape: Shape,
    strides: [isize; MAX_RANK],
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} strides {:?}", self.shape, self.strides())
    }
}

impl Layout {
    /// Row-major layout without gaps.
    pub fn contiguous(shape: Shape) -> Self {
        let mut strides = [0; MAX_RANK];
        let mut next = 1isize;
        for d in (0..shape.len()).rev() {
            strides[d] = next;
            next *= shape[d].max(1) as isize;
        }
        Layout { shape, strides }
    }

    /// A layout with given strides (zero repeats an element; negative strides are not supported).
    /// The stride of a dimension of size one is meaningless and is replaced by the contiguous one.
    pub fn strided(shape: Shape, strides: &[isize]) -> Result<Self> {
        let bad = |expected: &str| {
            Err(Error::parse("strides", expected, format!("{strides:?} for shape {shape:?}")))
        };
        if strides.len() != shape.len() {
            return bad("one stride for each dimension");
        }
        if strides.iter().any(|&s| s < 0) {
            return bad("strides of zero or more");
        }
        let mut layout = Layout::contiguous(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        let layout = layout.canonical();
        let reach = (0..shape.len()).try_fold(0i128, |sum, d| {
            (shape[d] as i128 - 1).max(0).checked_mul(layout.strides[d] as i128).map(|x| sum + x)
        });
        if reach.is_none_or(|r| r > isize::MAX as i128 / 8) {
            return bad("strides whose span can be addressed");
        }
        Ok(layout)
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.shape.len()]
    }

    /// Stride of the last dimension; one for scalars.
    pub fn step(&self) -> isize {
        self.strides().last().copied().unwrap_or(1)
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Whether elements follow each other in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.numel() == 0 || self.strides == Layout::contiguous(self.shape).strides
    }

    /// Whether two different indices can name the same element (stride zero, or strides that interleave).
    /// Conservative: layouts that nest properly are recognised as distinct, all others count as overlapping.
    pub fn overlaps_itself(&self) -> bool {
        self.overlaps(None)
    }

    /// Whether this and the same layout `distance` elements further on can name the same element; conservative in the
    /// same way.
    pub fn overlaps_copy(&self, distance: usize) -> bool {
        self.overlaps(Some((distance as isize, 2)))
    }

    /// Whether the dimensions together with another one, given as stride and size, name an element twice.
    fn overlaps(&self, more: Option<(isize, usize)>) -> bool {
        let mut dims = [(0, 0); MAX_RANK + 1];
        let mut count = 0;
        let wide = (0..self.rank()).filter(|&d| self.shape[d] > 1);
        for dim in wide.map(|d| (self.strides[d], self.shape[d])).chain(more) {
            dims[count] = dim;
            count += 1;
        }
        let dims = &mut dims[..count];
        dims.sort_unstable();
        let mut reach = 0isize;
        for &mut (stride, size) in dims {
            if stride <= reach {
                return true;
            }
            reach += stride * (size as isize - 1);
        }
        false
    }

    /// Elements from the first to one past the last; zero for an empty tensor.
    pub fn span(&self) -> usize {
        if self.numel() == 0 {
            return 0;
        }
        1 + (0..self.rank()).map(|d| (self.shape[d] - 1) * self.strides[d] as usize).sum::<usize>()
    }

    /// Dimensions in another order.
    ///
    /// # Panics
    /// If `order` is not a permutation of the dimensions.
    pub fn permute(&self, order: &[usize]) -> Layout {
        self.permuted(order).expect("a permutation names each dimension once")
    }

    /// Dimensions in another order; `None` if `order` is not a permutation of them.
    pub fn permuted(&self, order: &[usize]) -> Option<Layout> {
        if order.len() != self.rank() {
            return None;
        }
        let mut out = *self;
        let mut seen = [false; MAX_RANK];
        for (to, &from) in order.iter().enumerate() {
            if from >= self.rank() || std::mem::replace(&mut seen[from], true) {
                return None;
            }
            out.shape.dims[to] = self.shape.dims[from];
            out.strides[to] = self.strides[from];
        }
        Some(out.canonical())
    }

    /// `len` indices of dimension `dim` from `start`, and the offset of the first element. `None` if out of range.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Option<(Layout, usize)> {
        if dim >= self.rank() || start.checked_add(len)? > self.shape[dim] {
            return None;
        }
        let mut out = *self;
        out.shape.dims[dim] = len;
        // An empty view must not point past the end of its memory.
        let offset = if out.numel() == 0 { 0 } else { start * self.strides[dim] as usize };
        Some((out.canonical(), offset))
    }

    /// Normalises meaningless strides, those of dimensions of at most one index, as if contiguous: layouts of the same
    /// elements are then equal.
    fn canonical(self) -> Layout {
        let mut out = Layout::contiguous(self.shape);
        for d in (0..self.rank()).filter(|&d| self.shape[d] > 1) {
            out.strides[d] = self.strides[d];
        }
        out
    }

    /// The same elements seen with another shape; `None` unless contiguous with equal element counts.
    pub fn reshape(&self, shape: Shape) -> Option<Layout> {
        (self.is_contiguous() && shape.numel() == self.numel()).then(|| Layout::contiguous(shape))
    }

    /// Offset in elements of the `index`-th element in row-major order.
    pub fn offset_of(&self, mut index: usize) -> usize {
        let mut offset = 0;
        for d in (0..self.rank()).rev() {
            let size = self.shape[d];
            offset += (index % size) * self.strides[d] as usize;
            index /= size;
        }
        offset
    }
}

/// The index space that `N` tensors of one shape share, with neighbouring dimensions merged wherever every
/// tensor allows it: all-contiguous tensors become a single dimension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Space<const N: usize> {
    /// Number of merged dimensions; at least one unless the space is empty.
    pub rank: usize,
    /// Sizes, outermost first.
    pub sizes: [usize; MAX_RANK],
    /// Strides in elements of each tensor.
    pub strides: [[isize; MAX_RANK]; N],
}

impl<const N: usize> Space<N> {
    /// The space over the first `dims` dimensions of `layouts`, which must agree in those sizes
    /// (the shape checks of every op establish this).
    pub fn new(dims: usize, layouts: [&Layout; N]) -> Self {
        let mut space = Space { rank: 0, sizes: [0; MAX_RANK], strides: [[0; MAX_RANK]; N] };
        for d in 0..dims {
            let size = layouts[0].shape[d];
            debug_assert!(layouts.iter().all(|l| l.shape[d] == size));
            if size == 1 {
                continue;
            }
            let last = space.rank.wrapping_sub(1);
            let merges = space.rank > 0
                && (0..N).all(|t| space.strides[t][last] == layouts[t].strides[d] * size as isize);
            let slot = if merges { last } else { space.rank };
            space.sizes[slot] = if merges { space.sizes[slot] * size } else { size };
            for (t, layout) in layouts.iter().enumerate() {
                space.strides[t][slot] = layout.strides[d];
            }
            space.rank = slot + 1;
        }
        if space.rank == 0 {
            space.rank = 1;
            space.sizes[0] = 1;
        }
        space
    }

    /// Number of points.
    pub fn len(&self) -> usize {
        self.sizes[..self.rank].iter().product()
    }

    /// Whether there is no point.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Offset in elements of the `index`-th point in each tensor.
    // Called from kernels: as a function of its own it would mix SSE with their vectors, which costs a hundred cycles.
    #[inline(always)]
    pub fn offsets(&self, mut index: usize) -> [usize; N] {
        let mut out = [0; N];
        for d in (0..self.rank).rev() {
            let at = if d == 0 { index } else { index % self.sizes[d] };
            index /= self.sizes[d].max(1);
            for (o, strides) in out.iter_mut().zip(&self.strides) {
                *o += at * strides[d] as usize;
            }
        }
        out
    }

    /// Whether every tensor is one run of neighbouring elements.
    pub fn is_contiguous(&self) -> bool {
        self.rank == 1 && (self.sizes[0] <= 1 || self.strides.iter().all(|s| s[0] == 1))
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn shape(dims: &[usize]) -> Shape {
        Shape::new(dims).unwrap()
    }

    #[test]
    fn shapes_that_cannot_be_addressed_are_refused() {
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(Shape::new(&[usize::MAX, 0]).is_err(), "a zero must not hide the overflow");
        assert!(Shape::new(&[1; 9]).is_err());
        assert_eq!(shape(&[]).numel(), 1);
    }

    #[test]
    fn strides_of_single_dimensions_are_canonical() {
        let l = Layout::strided(shape(&[4, 1, 8]), &[8, 12345, 1]).unwrap();
        assert!(l.is_contiguous());
    }

    #[test]
    fn spans_and_overlap() {
        let l = Layout::strided(shape(&[3, 4]), &[10, 2]).unwrap();
        assert_eq!(l.span(), 27);
        assert!(!l.overlaps_itself());
        assert!(Layout::strided(shape(&[3, 4]), &[0, 1]).unwrap().overlaps_itself());
        assert!(Layout::strided(shape(&[3, 4]), &[2, 1]).unwrap().overlaps_itself());
        assert!(Layout::strided(shape(&[3]), &[-1]).is_err());
        // Keys and values by turns: pages of 8 elements, 16 apart.
        let pages = Layout::strided(shape(&[3, 8]), &[16, 1]).unwrap();
        assert!(!pages.overlaps_copy(8) && !pages.overlaps_copy(48));
        assert!(pages.overlaps_copy(0) && pages.overlaps_copy(4) && pages.overlaps_copy(16));
    }

    #[test]
    fn joint_spaces_merge_what_all_tensors_allow() {
        let a = Layout::contiguous(shape(&[2, 3, 4]));
        let b = Layout::strided(shape(&[2, 3, 4]), &[24, 8, 1]).unwrap();
        assert!(Space::new(3, [&a, &a]).is_contiguous());
        let s = Space::new(3, [&a, &b]);
        assert_eq!((s.rank, &s.sizes[..2]), (2, &[6, 4][..]));
        for i in 0..24 {
            assert_eq!(s.offsets(i), [a.offset_of(i), b.offset_of(i)]);
        }
    }
}
