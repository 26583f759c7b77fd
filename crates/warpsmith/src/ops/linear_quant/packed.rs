//! Quantised weights in the layout of the CPU kernels, made once and used by many calls.

use super::cpu::Panels;
use super::tiles::pack::Rows;
use super::{FORMAT, GATE, LinearQuant, QuantFormat, SPEC, W, X};
use crate::cpu::parallel_for;
use crate::cpu::scratch::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Call, survey};
use crate::ops::linear::Gate;
use crate::tensor::{DType, Tensor, TensorView};

/// A quantised weight that was repacked for the processor: calls with it do not repack it. Results have the same bits
/// as without.
///
/// It keeps the tensor too, unless [`PackedQuantWeight::without_tensor`] drops it. On a GPU, whose kernels need no other layout,
/// it is only the tensor.
///
/// ```
/// use warpsmith::{ops::{LinearQuant, PackedQuantWeight, QuantFormat}, DType, Device, Tensor};
/// let bytes = Tensor::zeros(&[32, 34 * 2], DType::U8, Device::Cpu)?; // 32 rows of 64 weights
/// let weight = PackedQuantWeight::new(bytes, QuantFormat::Q8_0)?;
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// assert_eq!(LinearQuant::packed(&x, &weight).run()?.shape(), [4, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub struct PackedQuantWeight {
    tensor: Tensor,
    format: QuantFormat,
    gate: Gate,
    /// Panels; empty on a GPU.
    packed: Buffer,
    /// Whether the tensor holds the weight, and not only its shape.
    has_tensor: bool,
}

impl std::fmt::Debug for PackedQuantWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (shape, format, gate) = (self.tensor.shape(), self.format.name(), self.gate);
        write!(f, "PackedQuantWeight({shape:?} bytes of {format}, gate: {gate:?})")
    }
}

impl PackedQuantWeight {
    /// Packs `[n, bytes]`, rows of blocks.
    ///
    /// # Errors
    /// If `w` is no matrix of bytes, its rows are no whole blocks, or there is no memory for the packed form.
    pub fn new(w: Tensor, format: QuantFormat) -> Result<PackedQuantWeight> {
        Self::gated(w, format, Gate::None)
    }

    /// Packs `[2 * n, bytes]`, the rows of gate and up stored as `gate` says.
    ///
    /// # Errors
    /// As [`PackedQuantWeight::new`], and if the number of rows is odd.
    pub fn gated(w: Tensor, format: QuantFormat, gate: Gate) -> Result<PackedQuantWeight> {
        let wrong = |expected: String, got: String| Err(Error::argument(SPEC.name, "w", expected, got));
        if w.dtype() != DType::U8 {
            return wrong("dtype u8".into(), w.dtype().to_string());
        }
        let &[rows, bytes] = w.shape() else {
            return wrong("shape [rows, bytes]".into(), format!("{:?}", w.shape()));
        };
        let Some(k) = format.row_len(bytes) else {
            let expected = format!("rows of whole blocks of {} bytes", format.block_bytes());
            return wrong(expected, format!("{bytes} bytes"));
        };
        if gate != Gate::None && rows % 2 == 1 {
            return wrong("an even number of rows, half of them gates".into(), rows.to_string());
        }
        // In a survey the tensor stands for one of a GPU.
        if w.device() != Device::Cpu || survey::is_running() {
            return Ok(PackedQuantWeight {
                tensor: w,
                format,
                gate,
                packed: Buffer::default(),
                has_tensor: true,
            });
        }
        let view = w.view();
        let strides = view.layout().strides();
        let weight = Rows { format, data: view.address(), row: strides[0], col: strides[1] };
        let n = if gate == Gate::None { rows } else { rows / 2 };
        let panels = Panels { weight, gate, n, k };
        let Some(size) = panels.bytes().checked_mul(panels.count()) else {
            return wrong("a weight smaller than the address space".into(), format!("{:?}", w.shape()));
        };
        let packed = Buffer::zeroed(size)?;
        let start = packed.as_ptr() as usize;
        parallel_for(panels.count(), 1, |part| {
            for index in part {
                // SAFETY: the buffer has room for all panels, each of which one thread packs; the tensor is alive.
                unsafe { panels.pack(index, (start + index * panels.bytes()) as *mut u8) };
            }
        });
        Ok(PackedQuantWeight { tensor: w, format, gate, packed, has_tensor: true })
    }

    /// Keeps the packed form alone, if there is one: half the memory. Calls that would need the tensor are refused.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn without_tensor(mut self) -> Result<PackedQuantWeight> {
        if self.packed.len() > 0 {
            self.tensor = Tensor::of_shape_alone(self.tensor.shape(), DType::U8)?;
            self.has_tensor = false;
        }
        Ok(self)
    }

    /// The weight as it was given; `None` if it was dropped.
    pub fn tensor(&self) -> Option<&Tensor> {
        self.has_tensor.then_some(&self.tensor)
    }

    /// The format of its blocks.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Bytes that the packed form takes beside the tensor.
    pub fn packed_bytes(&self) -> usize {
        self.packed.len()
    }

    /// The packed panels, if they were made for this call; `None` where the tensor is to be used.
    ///
    /// # Errors
    /// If the tensor would have to be used, and was dropped.
    pub(super) fn matching(&self, format: QuantFormat, gate: Gate) -> Result<Option<*const u8>> {
        let fits = self.format == format && self.gate == gate && self.packed.len() > 0;
        if !fits && !self.has_tensor {
            let of = |format: QuantFormat, gate: Gate| {
                format!("format={} and gate={}", format.name(), gate.name())
            };
            let expected = format!("{}, for which it was packed", of(self.format, self.gate));
            return Err(Error::argument(SPEC.name, "w", expected, of(format, gate)));
        }
        Ok(fits.then(|| self.packed.as_ptr().cast_const()))
    }
}

impl<'a> LinearQuant<'a> {
    /// `x · wᵀ` with a weight packed beforehand; with a gate if it was packed with one, whose activation
    /// [`LinearQuant::activation`] sets.
    pub fn packed(x: impl Into<TensorView<'a>>, w: &'a PackedQuantWeight) -> Self {
        let call = Call::start().input(X, x).input(W, &w.tensor);
        call.choice(FORMAT, w.format).choice(GATE, w.gate).prepared(W, w)
    }
}
