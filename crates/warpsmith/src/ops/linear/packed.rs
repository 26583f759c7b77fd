//! Weights in the layout of the CPU kernels, made once and used by many calls.

use super::cpu::Weight;
use super::{GATE, Gate, Linear, SPEC, W, X, problem};
use crate::cpu::Tier;
use crate::cpu::gemm::{self, Isa, PackedWeights};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Call, survey};
use crate::tensor::{Tensor, TensorView};

/// A weight of `linear` that was rearranged for the processor: calls with it need not do so again, which counts most where
/// `x` has few rows. Results have the same bits as without.
///
/// It keeps the tensor too, for kernels that take it as it is: those of other tiers, scales by block, gradients. On a GPU,
/// whose kernels need no other layout, it is only the tensor.
///
/// ```
/// use warpsmith::{ops::{Linear, PackedWeight}, DType, Device, Tensor};
/// let weight = PackedWeight::new(Tensor::randn(&[32, 64], DType::BF16, Device::Cpu, 1)?)?;
/// let x = Tensor::randn(&[4, 64], DType::BF16, Device::Cpu, 0)?;
/// let out = Linear::packed(&x, &weight).gelu().run()?;
/// assert_eq!(out.shape(), [4, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
#[derive(Debug)]
pub struct PackedWeight {
    tensor: Tensor,
    gate: Gate,
    packed: Option<PackedWeights>,
}

impl PackedWeight {
    /// Packs `[n, k]`.
    ///
    /// # Errors
    /// If `w` has another rank, or a type that `linear` does not have, or there is no memory for the packed form.
    pub fn new(w: Tensor) -> Result<PackedWeight> {
        Self::gated(w, Gate::None)
    }

    /// Packs `[2 * n, k]`, the rows of gate and up stored as `gate` says.
    ///
    /// # Errors
    /// As [`PackedWeight::new`], and if the number of rows is odd.
    pub fn gated(w: Tensor, gate: Gate) -> Result<PackedWeight> {
        let wrong = |expected: &str, got: String| Err(Error::argument(SPEC.name, "w", expected, got));
        let dtype = w.dtype();
        if !problem::INPUTS.contains(&dtype) {
            return wrong("dtype f32, f16, bf16, f8e4m3 or f8e5m2", dtype.to_string());
        }
        let &[rows, k] = w.shape() else { return wrong("shape [rows, k]", format!("{:?}", w.shape())) };
        if gate != Gate::None && rows % 2 == 1 {
            return wrong("an even number of rows, half of them gates", rows.to_string());
        }
        let n = if gate == Gate::None { rows } else { rows / 2 };
        let view = w.view();
        let strides = view.layout().strides();
        let packed = match w.device() {
            // There, the tensor stands for one of a GPU.
            Device::Cpu if survey::is_running() => None,
            Device::Cpu => {
                let weight = Weight { data: view.address(), dtype, n, k, row: strides[0], col: strides[1] };
                // SAFETY: the matrix is that of a live tensor.
                unsafe { gemm::pack(Isa::of_tier(Tier::best()), dtype, &weight.matrices(gate)) }?
            }
            Device::Cuda(_) => None,
        };
        Ok(PackedWeight { tensor: w, gate, packed })
    }

    /// The weight as it was given.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Bytes that the packed form takes beside the tensor.
    pub fn packed_bytes(&self) -> usize {
        self.packed.as_ref().map_or(0, PackedWeights::bytes)
    }

    /// The packed form, if it was made for these instructions and this gate.
    pub(super) fn matching(&self, isa: Isa, gate: Gate) -> Option<&PackedWeights> {
        self.packed.as_ref().filter(|packed| packed.isa() == isa && self.gate == gate)
    }
}

impl<'a> Linear<'a> {
    /// `x · wᵀ` with a weight packed beforehand; with a gate if it was packed with one, whose activation
    /// [`Linear::activation`] sets.
    pub fn packed(x: impl Into<TensorView<'a>>, w: &'a PackedWeight) -> Self {
        Call::start().input(X, x).input(W, &w.tensor).choice(GATE, w.gate).prepared(W, w)
    }
}
