//! Owned tensors and borrowed views on any device.

mod dtype;
mod layout;
mod random;
pub(crate) mod storage;

pub use dtype::{DType, Element, F8E4M3, F8E5M2};
pub use layout::{Layout, MAX_RANK, Shape, Space};
pub use random::Random;

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use std::marker::PhantomData;
use storage::Storage;

/// A tensor that owns its memory.
pub struct Tensor {
    storage: Storage,
    dtype: DType,
    layout: Layout,
}

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
    lifetime: PhantomData<&'a mut u8>,
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

/// Elements as raw memory.
fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: `Element` types are plain numbers of `DTYPE.size()` bytes without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) }
}

impl Tensor {
    /// A tensor whose contents are not defined (host memory is zeroed).
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::with_layout(Layout::contiguous(Shape::new(shape)?), dtype, device, &device.default_stream()?)
    }

    /// Like [`Tensor::empty`], allocated in the order of `stream`.
    pub fn empty_on(shape: &[usize], dtype: DType, stream: &Stream) -> Result<Tensor> {
        Tensor::with_layout(Layout::contiguous(Shape::new(shape)?), dtype, stream.device(), stream)
    }

    /// A tensor with rows padded so that each starts on a multiple of `align` bytes (a power of two).
    pub fn empty_padded(shape: &[usize], dtype: DType, device: Device, align: usize) -> Result<Tensor> {
        let shape = Shape::new(shape)?;
        let Some(&row) = shape.last() else { return Tensor::empty(&shape, dtype, device) };
        let step = (align / dtype.size()).max(1);
        let mut padded = shape.to_vec();
        padded[shape.len() - 1] = row.next_multiple_of(step);
        let strides = Layout::contiguous(Shape::new(&padded)?).strides().to_vec();
        let layout = Layout::strided(shape, &strides)?;
        Tensor::with_layout(layout, dtype, device, &device.default_stream()?)
    }

    fn with_layout(layout: Layout, dtype: DType, device: Device, stream: &Stream) -> Result<Tensor> {
        debug_assert_eq!(device, stream.device());
        Ok(Tensor { storage: Storage::allocate(layout.span() * dtype.size(), stream)?, dtype, layout })
    }

    /// A tensor of zeros.
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut tensor = Tensor::empty(shape, dtype, device)?;
        tensor.storage.fill(0, &device.default_stream()?)?;
        Ok(tensor)
    }

    /// Fills all memory of the tensor with zeros, in the order of `stream`.
    pub(crate) fn clear_on(&mut self, stream: &Stream) -> Result<()> {
        self.storage.fill(0, stream)
    }

    /// A tensor holding `data` in row-major order.
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        Tensor::from_bytes(bytes_of(data), shape, T::DTYPE, device)
    }

    /// A tensor holding raw elements in row-major order.
    pub fn from_bytes(bytes: &[u8], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut tensor = Tensor::empty(shape, dtype, device)?;
        if bytes.len() != tensor.layout.numel() * dtype.size() {
            return Err(Error::parse(
                "tensor data",
                format!("{} bytes for shape {shape:?} of {dtype}", tensor.layout.numel() * dtype.size()),
                format!("{} bytes", bytes.len()),
            ));
        }
        tensor.storage.upload(0, bytes, &device.default_stream()?)?;
        Ok(tensor)
    }

    /// A tensor holding `data` rounded to `dtype`.
    pub fn from_f64(data: &[f64], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut bytes = vec![0; data.len() * dtype.size()];
        for (value, slot) in data.iter().zip(bytes.chunks_exact_mut(dtype.size())) {
            dtype.write(*value, slot);
        }
        Tensor::from_bytes(&bytes, shape, dtype, device)
    }

    /// A tensor of standard normal values that depend only on `seed`, the index and the dtype.
    pub fn randn(shape: &[usize], dtype: DType, device: Device, seed: u64) -> Result<Tensor> {
        let count = Shape::new(shape)?.numel();
        let mut rng = crate::tensor::Random::new(seed);
        let mut values: Vec<f64> = Vec::new();
        values.try_reserve_exact(count).map_err(|_| crate::tensor::storage::host_out_of_memory(count * 8))?;
        values.extend((0..count).map(|_| rng.normal()));
        Tensor::from_f64(&values, shape, dtype, device)
    }

    /// Overwrites elements of a contiguous tensor with `data`, from the one at row-major position `at` on, in the
    /// order of `stream`. The data may be changed or freed as soon as this returns.
    ///
    /// # Errors
    /// If the dtype is not `T`'s, the tensor not contiguous, or the data does not fit.
    pub fn write<T: Element>(&mut self, at: usize, data: &[T], stream: &Stream) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::parse("tensor elements", self.dtype.name(), T::DTYPE.name()));
        }
        let fits = at.checked_add(data.len()).is_some_and(|end| end <= self.layout.numel());
        if !fits || !self.layout.is_contiguous() {
            let expected = format!("at most {} elements of a contiguous tensor", self.layout.numel());
            return Err(Error::parse("tensor data", expected, format!("{} from {at} on", data.len())));
        }
        self.storage.upload(at * self.dtype.size(), bytes_of(data), stream)
    }

    /// The whole tensor, read-only.
    pub fn view(&self) -> TensorView<'_> {
        TensorView {
            address: self.storage.address(),
            device: self.storage.device(),
            dtype: self.dtype,
            layout: self.layout,
            storage: Some(&self.storage),
            lifetime: PhantomData,
        }
    }

    /// The whole tensor, to be written.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { view: self.view(), lifetime: PhantomData }
    }

    /// A copy on another device (or the same).
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        Tensor::from_bytes(&self.view().to_bytes()?, self.shape(), self.dtype, device)
    }

    /// A copy with elements rounded to another type.
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        Tensor::from_f64(&self.view().to_f64()?, self.shape(), dtype, self.device())
    }

    /// The elements in row-major order. The dtype must be `T`'s.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.view().to_vec()
    }

    /// The elements in row-major order, widened.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        self.view().to_f64()
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.storage.device()
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
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}, {:?}, {})", self.dtype, self.layout, self.device())
    }
}

impl<'a> From<&'a Tensor> for TensorView<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        tensor.view()
    }
}

impl<'a> From<&'a mut Tensor> for TensorViewMut<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        tensor.view_mut()
    }
}

impl<'a> TensorView<'a> {
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

    /// The elements in row-major order as raw bytes, fetched from the device if needed.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let size = self.dtype.size();
        let mut raw = vec![0u8; self.layout.span() * size];
        crate::tensor::storage::download(self.device, self.address, &mut raw)?;
        if self.layout.is_contiguous() {
            return Ok(raw);
        }
        let mut out = Vec::with_capacity(self.layout.numel() * size);
        for i in 0..self.layout.numel() {
            let at = self.layout.offset_of(i) * size;
            out.extend_from_slice(&raw[at..at + size]);
        }
        Ok(out)
    }

    /// The elements in row-major order. The dtype must be `T`'s.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::parse("tensor elements", self.dtype.name(), T::DTYPE.name()));
        }
        let bytes = self.to_bytes()?;
        let count = bytes.len() / size_of::<T>();
        let mut out = Vec::<T>::with_capacity(count);
        // SAFETY: `out` has room for `count` elements, the byte copy initialises them all, and every bit pattern
        // is valid for an `Element`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.as_mut_ptr().cast::<u8>(), bytes.len());
            out.set_len(count);
        }
        Ok(out)
    }

    /// The elements in row-major order, widened.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        Ok(self.to_bytes()?.chunks_exact(self.dtype.size()).map(|b| self.dtype.read(b)).collect())
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
        TensorViewMut { view, lifetime: PhantomData }
    }

    /// A host slice as a writable tensor.
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<TensorViewMut<'a>> {
        let view = TensorView::from_slice::<T>(data, shape)?;
        // SAFETY: the slice is borrowed mutably for `'a` and covers the layout.
        Ok(unsafe { TensorViewMut::from_raw(view.address, view.dtype, view.layout, Device::Cpu) })
    }

    /// Dimensions in another order, without moving data; `None` if `order` does not name each of them once.
    pub fn permute(self, order: &[usize]) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.permute(order)?, lifetime: PhantomData })
    }

    /// `len` indices of dimension `dim` from `start`; `None` if out of range.
    pub fn narrow(self, dim: usize, start: usize, len: usize) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.narrow(dim, start, len)?, lifetime: PhantomData })
    }

    /// The same elements seen with another shape; `None` unless contiguous with equal element counts.
    pub fn reshape(self, shape: &[usize]) -> Option<TensorViewMut<'a>> {
        Some(TensorViewMut { view: self.view.reshape(shape)?, lifetime: PhantomData })
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
        let half = |start, len| {
            Some(TensorViewMut { view: self.view.narrow(dim, start, len)?, lifetime: PhantomData })
        };
        Some((half(0, at)?, half(at, rest)?))
    }

    /// The same view for a shorter time, after which this one can be used again.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { view: self.view, lifetime: PhantomData }
    }

    /// Sizes.
    pub fn shape(&self) -> &[usize] {
        self.view.shape()
    }

    /// Read-only access while nothing writes.
    pub fn as_view(&self) -> TensorView<'_> {
        self.view
    }

    /// The view's description, for building calls. Whoever holds both must keep reads and writes apart.
    pub(crate) fn raw(&self) -> TensorView<'a> {
        self.view
    }
}
