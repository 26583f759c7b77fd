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

/// A quantised weight that was rearranged for the processor: calls with it need not do so again. Results have the same
/// bits as without.
///
/// It keeps the tensor too. On a GPU, whose kernels need no other layout, it is only the tensor.
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
            return Ok(PackedQuantWeight { tensor: w, format, gate, packed: Buffer::default() });
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
        Ok(PackedQuantWeight { tensor: w, format, gate, packed })
    }

    /// The weight as it was given.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The format of its blocks.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Bytes that the packed form takes beside the tensor.
    pub fn packed_bytes(&self) -> usize {
        self.packed.len()
    }

    /// The packed panels, if they were made for this call.
    pub(super) fn matching(&self, format: QuantFormat, gate: Gate) -> Option<*const u8> {
        let fits = self.format == format && self.gate == gate && self.packed.len() > 0;
        fits.then(|| self.packed.as_ptr().cast_const())
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
