//! Borrowed tensors.

use super::storage::Storage;
use super::{DType, Element, Layout, Shape};
use crate::device::Device;
use crate::error::{Error, Result};
use std::marker::PhantomData;

/// A borrowed, read-only tensor. Cheap to copy.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    pub(crate) address: usize,
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) storage: Option<&'a Storage>,
    lifetime: PhantomData<&'a u8>,
}

/// A borrowed tensor that is written to.
pub struct TensorViewMut<'a> {
    view: TensorView<'a>,
    refusal: Option<Refusal>,
    lifetime: PhantomData<&'a mut u8>,
}

/// Why memory must not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Its owner does not allow it.
    ReadOnly,
    /// Other tensors are views of it, this many together.
    Shared(usize),
}

impl Refusal {
    /// What a tensor must be to be written.
    pub const EXPECTED: &str = "a tensor that is the only handle to its memory";
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::ReadOnly => write!(f, "read-only memory"),
            Refusal::Shared(handles) => write!(f, "one of {handles} handles to the same memory"),
        }
    }
}

// SAFETY: a view is a device address plus plain data; like `&[u8]`/`&mut [u8]` it may be sent and shared, and the
// lifetimes keep mutable views exclusive.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorView<'_> {}
// SAFETY: as above.
unsafe impl Send for TensorViewMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorViewMut<'_> {}

impl<'a> TensorView<'a> {
    /// A view of a tensor's memory.
    pub(super) fn new(
        address: usize,
        device: Device,
        dtype: DType,
        layout: Layout,
        storage: &'a Storage,
    ) -> TensorView<'a> {
        TensorView { address, device, dtype, layout, storage: Some(storage), lifetime: PhantomData }
    }

    /// The same memory from `offset` bytes on with another type and layout.
    ///
    /// # Panics
    /// If that does not lie inside this view.
    #[cfg(feature = "lab")]
    pub(crate) fn recast(&self, offset: usize, dtype: DType, layout: Layout) -> TensorView<'a> {
        let end = offset + layout.span() * dtype.size();
        assert!(end <= self.layout.span() * self.dtype.size(), "outside of the view");
        TensorView { address: self.address + offset, dtype, layout, ..*self }
    }

    /// A view of memory that someone else owns, on the host or a device.
    ///
    /// # Safety
    /// `address` must stay valid on `device` for reads of `layout.span()` elements during `'a`, and nothing may
    /// write there while work that reads the view is enqueued.
    pub unsafe fn from_raw(address: usize, dtype: DType, layout: Layout, device: Device) -> TensorView<'a> {
        TensorView { address, device, dtype, layout, storage: None, lifetime: PhantomData }
    }

    /// A host slice as a tensor.
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Result<TensorView<'a>> {
        let layout = Layout::contiguous(Shape::new(shape)?);
        if layout.numel() != data.len() {
            return Err(Error::parse(
                "slice",
                format!("{} elements", layout.numel()),
                data.len().to_string(),
            ));
        }
        // SAFETY: the slice is borrowed for `'a` and covers the contiguous layout.
        Ok(unsafe { TensorView::from_raw(data.as_ptr() as usize, T::DTYPE, layout, Device::Cpu) })
    }

    /// Dimensions in another order, without moving data; `None` if `order` does not name each of them once.
    pub fn permute(&self, order: &[usize]) -> Option<TensorView<'a>> {
        Some(TensorView { layout: self.layout.permuted(order)?, ..*self })
    }

    /// `len` indices of dimension `dim` from `start`; `None` if out of range.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Option<TensorView<'a>> {
        let (layout, offset) = self.layout.narrow(dim, start, len)?;
        Some(TensorView { layout, address: self.address + offset * self.dtype.size(), ..*self })
    }

    /// The same elements seen with another shape; `None` unless contiguous with equal element counts.
    pub fn reshape(&self, shape: &[usize]) -> Option<TensorView<'a>> {
        Some(TensorView { layout: self.layout.reshape(Shape::new(shape).ok()?)?, ..*self })
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether nothing that was given to a device can still write it.
    pub fn is_constant(&self) -> bool {
        self.storage.is_some_and(Storage::is_constant)
    }

    /// Address of the first element, on its device.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Whether the address is a multiple of `bytes`.
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.address.is_multiple_of(bytes)
    }

    /// Whether rows (the last dimension) can be moved `piece` elements at once: they are dense, and each `piece` elements of
    /// them start at a multiple of their size.
    pub fn has_rows_of(&self, piece: usize) -> bool {
        let (shape, strides) = (self.shape(), self.layout.strides());
        let Some((row, leading)) = shape.split_last() else { return false };
        self.layout.step() == 1
            && row.is_multiple_of(piece)
            && self.is_aligned(piece * self.dtype.size())
            && leading.iter().zip(strides).all(|(&n, &s)| n <= 1 || (s as usize).is_multiple_of(piece))
    }

    /// Whether the two are known to share no element: one lies before the other, or they have the same layout and lie in
    /// each other's gaps, as keys and values of a cache may.
    pub fn is_apart_from(&self, other: &TensorView<'_>) -> bool {
        let (a, b) = (self.byte_range(), other.byte_range());
        if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
            return true;
        }
        let (size, distance) = (self.dtype.size(), self.address.abs_diff(other.address));
        self.dtype == other.dtype
            && self.layout == other.layout
            && distance.is_multiple_of(size)
            && !self.layout.overlaps_copy(distance / size)
    }

    /// The byte range from the first to past the last element.
    pub fn byte_range(&self) -> std::ops::Range<usize> {
        self.address..self.address + self.layout.span() * self.dtype.size()
    }
}

impl std::fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TensorView({}, {:?}, {}, at {:#x})", self.dtype, self.layout, self.device, self.address)
    }
}

impl<'a> TensorViewMut<'a> {
    /// A writable view of memory that someone else owns.
    ///
    /// # Safety
    /// As [`TensorView::from_raw`], for reads and writes, and no other view of the memory may be used during `'a`.
    pub unsafe fn from_raw(
        address: usize,
        dtype: DType,
        layout: Layout,
        device: Device,
    ) -> TensorViewMut<'a> {
        // SAFETY: passed on to the caller.
        let view = unsafe { TensorView::from_raw(address, dtype, layout, device) };
        TensorViewMut { view, refusal: None, lifetime: PhantomData }
    }

    /// A view of a tensor's memory, to be written unless that is refused.
    pub(super) fn new(view: TensorView<'a>, refusal: Option<Refusal>) -> TensorViewMut<'a> {
        TensorViewMut { view, refusal, lifetime: PhantomData }
    }

    /// The memory of `view`, to be written.
    ///
    /// # Safety
    /// No other view of the memory may be used during `'a`.
    #[cfg(feature = "lab")]
    pub(crate) unsafe fn assume_unique(view: TensorView<'a>) -> TensorViewMut<'a> {
        TensorViewMut::new(view, None)
    }

    /// A host slice as a writable tensor.
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<TensorViewMut<'a>> {
        let view = TensorView::from_slice::<T>(data, shape)?;
        // SAFETY: the slice is borrowed mutably for `'a` and covers the layout.
        Ok(unsafe { TensorViewMut::from_raw(view.address, view.dtype, view.layout, Device::Cpu) })
    }

    /// Dimensions in another order, without moving data; `None` if `order` does not name each of them once.
    pub fn permute(self, order: &[usize]) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.permute(order)?, ..self })
    }

    /// `len` indices of dimension `dim` from `start`; `None` if out of range.
    pub fn narrow(self, dim: usize, start: usize, len: usize) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.narrow(dim, start, len)?, ..self })
    }

    /// The same elements seen with another shape; `None` unless contiguous with equal element counts.
    pub fn reshape(self, shape: &[usize]) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.reshape(shape)?, ..self })
    }

    /// The indices of dimension `dim` below `at` and the others, as two tensors that can be written at the same time; `None` if
    /// out of range, or if elements of the two may share memory.
    ///
    /// ```
    /// use warpsmith::{DType, Device, Tensor};
    /// // Keys and values of one layer out of a cache that is one tensor: two, 4 layers, 8 pages of 16 tokens.
    /// let mut cache = Tensor::zeros(&[2, 4, 8, 16, 2, 64], DType::BF16, Device::Cpu)?;
    /// let (keys, values) = cache.view_mut().narrow(1, 3, 1).and_then(|layer| layer.split_at(0, 1)).expect("a fourth layer");
    /// let page_pool = [8, 16, 2, 64];
    /// let (keys, values) = (keys.reshape(&page_pool), values.reshape(&page_pool));
    /// assert!(keys.is_some() && values.is_some());
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn split_at(self, dim: usize, at: usize) -> Option<(TensorViewMut<'a>, TensorViewMut<'a>)> {
        let rest = self.shape().get(dim)?.checked_sub(at)?;
        if self.view.layout.overlaps_itself() {
            return None;
        }
        let half = |start, len| Some(TensorViewMut::new(self.view.narrow(dim, start, len)?, self.refusal));
        Some((half(0, at)?, half(at, rest)?))
    }

    /// Reborrows the view for a shorter lifetime.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::new(self.view, self.refusal)
    }

    /// Sizes.
    pub fn shape(&self) -> &[usize] {
        self.view.shape()
    }

    /// Read-only access while nothing writes.
    pub fn as_view(&self) -> TensorView<'_> {
        self.view
    }

    /// The memory, and why it must not be written, for building calls. Whoever holds both must keep reads and writes apart.
    pub(crate) fn into_parts(self) -> (TensorView<'a>, Option<Refusal>) {
        (self.view, self.refusal)
    }
}
