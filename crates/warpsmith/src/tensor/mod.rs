//! Owned tensors and borrowed views on any device.

mod dtype;
mod foreign;
mod layout;
mod random;
pub(crate) mod storage;
mod transfer;
mod view;

pub use dtype::{DType, Element, F8E4M3, F8E5M2};
pub use foreign::{Foreign, MappedFile};
pub use layout::{Layout, MAX_RANK, Shape, Space};
pub use random::Random;
pub use transfer::Download;
pub(crate) use view::Refusal;
pub use view::{TensorView, TensorViewMut};

use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use std::sync::Arc;
use storage::Storage;

/// A tensor: a view of memory that it owns together with its clones.
///
/// Cloning and taking parts ([`narrow`](Tensor::narrow), [`permute`](Tensor::permute), [`reshape`](Tensor::reshape))
/// share the memory and copy nothing. Any handle can read. Writing needs the only handle: while there are others, calls
/// refuse the tensor as an output.
///
/// ```
/// use warpsmith::{DType, Device, Tensor, ops::Activation};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let first = x.narrow(0, 0, 2).expect("it has four rows");
/// let mut out = Tensor::zeros(&[2, 64], DType::F32, Device::Cpu)?;
/// let stream = Device::Cpu.default_stream()?;
/// let other = out.clone();
/// assert!(Activation::gelu(&first).run_into(&mut out, &stream).is_err());
/// drop(other);
/// Activation::gelu(&first).run_into(&mut out, &stream)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// Bytes from the start of the storage to the first element.
    offset: usize,
    dtype: DType,
    layout: Layout,
}

/// Elements as raw memory.
fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: `Element` types are plain numbers of `DTYPE.size()` bytes without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) }
}

impl Tensor {
    /// A CPU tensor of this shape that owns a single element, a zero, which all indices share.
    pub(crate) fn of_shape_alone(shape: &[usize], dtype: DType) -> Result<Tensor> {
        let one = Tensor::zeros(&[1], dtype, Device::Cpu)?;
        let layout = Layout::strided(Shape::new(shape)?, &vec![0; shape.len()])?;
        Ok(Tensor { layout, ..one })
    }

    /// A tensor whose contents are not defined (host memory is zeroed).
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        Tensor::empty_on(shape, dtype, &device.default_stream()?)
    }

    /// Like [`Tensor::empty`], allocated in the order of `stream`.
    pub fn empty_on(shape: &[usize], dtype: DType, stream: &Stream) -> Result<Tensor> {
        Tensor::with_layout(Layout::contiguous(Shape::new(shape)?), dtype, stream)
    }

    /// A tensor with rows padded so that each starts on a multiple of `align` bytes (a power of two).
    pub fn empty_padded(shape: &[usize], dtype: DType, device: Device, align: usize) -> Result<Tensor> {
        let shape = Shape::new(shape)?;
        let Some(&row) = shape.last() else { return Tensor::empty(&shape, dtype, device) };
        let step = (align / dtype.size()).max(1);
        let mut padded = shape.to_vec();
        padded[shape.len() - 1] = row.next_multiple_of(step);
        let strides = Layout::contiguous(Shape::new(&padded)?).strides().to_vec();
        Tensor::with_layout(Layout::strided(shape, &strides)?, dtype, &device.default_stream()?)
    }

    fn with_layout(layout: Layout, dtype: DType, stream: &Stream) -> Result<Tensor> {
        let storage = Arc::new(Storage::allocate(layout.span() * dtype.size(), stream)?);
        Ok(Tensor { storage, offset: 0, dtype, layout })
    }

    /// A tensor of zeros. On the host its pages are not touched until they are used.
    pub fn zeros(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut tensor = Tensor::empty(shape, dtype, device)?;
        if device != Device::Cpu {
            tensor.clear_on(&device.default_stream()?)?;
        }
        Ok(tensor)
    }

    /// Fills all memory of a new tensor with zeros, in the order of `stream`.
    pub(crate) fn clear_on(&mut self, stream: &Stream) -> Result<()> {
        debug_assert_eq!(Arc::strong_count(&self.storage), 1);
        // SAFETY: the only handle is borrowed mutably.
        unsafe { self.storage.fill(0, stream) }
    }

    /// A tensor holding `data` in row-major order.
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: Device) -> Result<Tensor> {
        Tensor::from_bytes(bytes_of(data), shape, T::DTYPE, device)
    }

    /// A tensor holding raw elements in row-major order.
    pub fn from_bytes(bytes: &[u8], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let tensor = Tensor::empty(shape, dtype, device)?;
        if bytes.len() != tensor.layout.numel() * dtype.size() {
            return Err(Error::parse(
                "tensor data",
                format!("{} bytes for shape {shape:?} of {dtype}", tensor.layout.numel() * dtype.size()),
                format!("{} bytes", bytes.len()),
            ));
        }
        // SAFETY: nobody else has the new tensor.
        unsafe { tensor.storage.upload(0, bytes, &device.default_stream()?) }?;
        Ok(tensor)
    }

    /// A tensor holding `data` rounded to `dtype`.
    pub fn from_f64(data: &[f64], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let mut bytes = storage::zeroed::<u8>(data.len() * dtype.size())?;
        for (value, slot) in data.iter().zip(bytes.chunks_exact_mut(dtype.size())) {
            dtype.write(*value, slot);
        }
        Tensor::from_bytes(&bytes, shape, dtype, device)
    }

    /// A tensor of standard normal values that depend only on `seed`, the index and the dtype.
    pub fn randn(shape: &[usize], dtype: DType, device: Device, seed: u64) -> Result<Tensor> {
        let count = Shape::new(shape)?.numel();
        let mut rng = Random::new(seed);
        let mut values = storage::room_for::<f64>(count)?;
        values.extend((0..count).map(|_| rng.normal()));
        Tensor::from_f64(&values, shape, dtype, device)
    }

    /// Overwrites elements of a contiguous tensor with `data`, from the one at row-major position `at` on, in the
    /// order of `stream`. The data may be changed or freed as soon as this returns.
    ///
    /// # Errors
    /// If the dtype is not `T`'s, the tensor not contiguous or not the only handle to its memory, or the data does not fit.
    pub fn write<T: Element>(&mut self, at: usize, data: &[T], stream: &Stream) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::parse("tensor elements", self.dtype.name(), T::DTYPE.name()));
        }
        if let Some(refusal) = self.refusal() {
            return Err(Error::parse("tensor to write", Refusal::EXPECTED, refusal.to_string()));
        }
        let fits = at.checked_add(data.len()).is_some_and(|end| end <= self.layout.numel());
        if !fits || !self.layout.is_contiguous() {
            let expected = format!("at most {} elements of a contiguous tensor", self.layout.numel());
            return Err(Error::parse("tensor data", expected, format!("{} from {at} on", data.len())));
        }
        // SAFETY: the only handle is borrowed mutably.
        unsafe { self.storage.upload(self.offset + at * self.dtype.size(), bytes_of(data), stream) }
    }

    /// Why the tensor must not be written, if it must not.
    fn refusal(&mut self) -> Option<Refusal> {
        if self.storage.is_read_only() {
            return Some(Refusal::ReadOnly);
        }
        // `get_mut` instead of the bare count: it synchronises with other threads that dropped their handles, so that
        // the write that follows cannot overtake their last reads.
        match Arc::get_mut(&mut self.storage) {
            Some(_) => None,
            None => Some(Refusal::Shared(Arc::strong_count(&self.storage))),
        }
    }

    /// Makes the tensor constant: waits for everything that writes it, and makes its memory read-only for good.
    ///
    /// Meant for weights. Kernels may read constant memory before the work ahead of them has ended, which they must not do
    /// with memory that this work could write: `linear` then loads its weights while the kernel before it still runs.
    ///
    /// ```
    /// use warpsmith::{DType, Device, Stream, Tensor};
    /// let mut weight = Tensor::randn(&[64, 64], DType::F32, Device::Cpu, 0)?;
    /// weight.make_constant()?;
    /// assert!(weight.write(0, &[0f32], &Stream::Host).is_err());
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    ///
    /// # Errors
    /// If it is not the only handle to its memory, if the memory is somebody else's, or if a graph uses it.
    pub fn make_constant(&mut self) -> Result<()> {
        if self.is_constant() {
            return Ok(());
        }
        let handles = Arc::strong_count(&self.storage);
        match Arc::get_mut(&mut self.storage) {
            Some(storage) => storage.make_constant(),
            None => {
                let got = Refusal::Shared(handles).to_string();
                Err(Error::parse("tensor to make constant", Refusal::EXPECTED, got))
            }
        }
    }

    /// Whether it was made [constant](Tensor::make_constant).
    pub fn is_constant(&self) -> bool {
        self.storage.is_constant()
    }

    /// The whole tensor, read-only.
    pub fn view(&self) -> TensorView<'_> {
        let address = self.storage.address() + self.offset;
        TensorView::new(address, self.storage.device(), self.dtype, self.layout, &self.storage)
    }

    /// The whole tensor, to be written. If there are other handles to its memory, calls will refuse it as an output.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let refusal = self.refusal();
        TensorViewMut::new(self.view(), refusal)
    }

    /// Dimensions in another order, of the same memory; `None` if `order` does not name each of them once.
    pub fn permute(&self, order: &[usize]) -> Option<Tensor> {
        Some(Tensor { layout: self.layout.permuted(order)?, ..self.clone() })
    }

    /// `len` indices of dimension `dim` from `start`, of the same memory; `None` if out of range.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Option<Tensor> {
        let (layout, offset) = self.layout.narrow(dim, start, len)?;
        Some(Tensor { layout, offset: self.offset + offset * self.dtype.size(), ..self.clone() })
    }

    /// The same elements with another shape, of the same memory; `None` unless contiguous with equal element counts.
    pub fn reshape(&self, shape: &[usize]) -> Option<Tensor> {
        Some(Tensor { layout: self.layout.reshape(Shape::new(shape).ok()?)?, ..self.clone() })
    }

    /// Whether two tensors are views of the same memory.
    pub fn shares_memory_with(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
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

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn parts_share_memory_and_forbid_writing_until_they_are_gone() {
        let mut whole = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3], Device::Cpu).unwrap();
        let row = whole.narrow(0, 1, 1).unwrap();
        let column = whole.permute(&[1, 0]).unwrap().narrow(0, 2, 1).unwrap();
        assert!(row.shares_memory_with(&whole) && column.shares_memory_with(&row));
        assert_eq!(row.to_vec::<f32>().unwrap(), [4.0, 5.0, 6.0]);
        assert_eq!(column.to_vec::<f32>().unwrap(), [3.0, 6.0]);
        assert_eq!(whole.reshape(&[6]).unwrap().shape(), [6]);
        assert!(whole.reshape(&[5]).is_none() && whole.narrow(0, 1, 2).is_none());
        let error = whole.write(0, &[0f32], &Stream::Host).unwrap_err().to_string();
        assert!(error.contains("3 handles"), "{error}");
        drop(column);
        drop(whole);
        let mut row = row;
        row.write(1, &[9f32], &Stream::Host).unwrap();
        assert_eq!(row.to_vec::<f32>().unwrap(), [4.0, 9.0, 6.0], "the last handle may write its part");
    }

    /// A write must not overtake the reads of handles that other threads have dropped. Where processors keep that order anyway,
    /// the thread sanitizer sees a mistake.
    #[test]
    fn writes_come_after_the_reads_of_handles_that_are_gone() {
        const COUNT: usize = 256;
        let mut tensor = Tensor::from_slice(&[0i32; COUNT], &[COUNT], Device::Cpu).unwrap();
        for round in 1..=200 {
            let other = tensor.clone();
            // The handle ends with the closure.
            let reader = std::thread::spawn(move || other.to_vec::<i32>().unwrap());
            while tensor.write(0, &[round; COUNT], &Stream::Host).is_err() {
                std::thread::yield_now();
            }
            assert_eq!(reader.join().unwrap(), [round - 1; COUNT]);
        }
    }

    #[test]
    fn constant_tensors_are_read_only_for_good() {
        let mut tensor = Tensor::from_slice(&[1f32, 2.0], &[2], Device::Cpu).unwrap();
        let other = tensor.clone();
        let error = tensor.make_constant().unwrap_err().to_string();
        assert!(error.contains("2 handles"), "{error}");
        drop(other);
        tensor.make_constant().unwrap();
        tensor.make_constant().unwrap();
        let part = tensor.narrow(0, 1, 1).unwrap();
        assert!(tensor.is_constant() && part.is_constant() && part.view().is_constant());
        drop(part);
        let error = tensor.write(0, &[0f32], &Stream::Host).unwrap_err().to_string();
        assert!(error.contains("read-only"), "{error}");
    }

    #[test]
    fn zeros_on_the_host_touch_no_page() {
        // Far more than the machine has: untouched pages cost nothing.
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident();
        let zeros = Tensor::zeros(&[4 << 30], DType::U8, Device::Cpu).unwrap();
        assert!(resident() < before + (1 << 30), "{} MiB became resident", (resident() - before) >> 20);
        let end = zeros.narrow(0, (4 << 30) - 2, 2).unwrap();
        assert_eq!(end.to_vec::<u8>().unwrap(), [0, 0]);
    }
}
