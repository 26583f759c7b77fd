//! Weights in the layout of the CPU kernels, made once and used by many calls.

use super::cpu::Weight;
use super::{GATE, Gate, Linear, Problem, SPEC, W, X, problem};
use crate::cpu::Tier;
use crate::cpu::gemm::{self, Isa, PackedWeights};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Call, survey};
use crate::tensor::{DType, Tensor, TensorView};

/// A weight of `linear` that was repacked for the processor: calls with it do not repack it, which matters most where
/// `x` has few rows. Results have the same bits as without.
///
/// It keeps the tensor too, for kernels that take it as it is: those of other tiers, scales by block, gradients; unless
/// [`PackedWeight::without_tensor`] drops it. On a GPU, whose kernels need no other layout, it is only the tensor.
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
    /// Whether the tensor holds the weight, and not only its shape.
    has_tensor: bool,
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
        let dtype = w.dtype();
        Self::gated_for(w, gate, dtype)
    }

    /// As [`PackedWeight::gated`], for an `x` of type `x_dtype`, if that is not the type of `w`. A call with an `x` of another
    /// type takes the tensor as it is.
    ///
    /// # Errors
    /// As [`PackedWeight::gated`], and if `linear` has no such types.
    pub fn gated_for(w: Tensor, gate: Gate, x_dtype: DType) -> Result<PackedWeight> {
        let wrong = |expected: &str, got: String| Err(Error::argument(SPEC.name, "w", expected, got));
        let dtype = w.dtype();
        let beside = problem::WEIGHTS.iter().find(|(of, _)| *of == x_dtype);
        if dtype != x_dtype && !beside.is_some_and(|(_, types)| types.contains(&dtype)) {
            return wrong("a type that goes with x", format!("{dtype}, where x is {x_dtype}"));
        }
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
            // In a survey, the tensor represents one on a GPU.
            Device::Cpu if survey::is_running() => None,
            Device::Cpu => {
                let weight = Weight { data: view.address(), dtype, n, k, row: strides[0], col: strides[1] };
                // SAFETY: the matrix is that of a live tensor.
                unsafe { gemm::pack(Isa::of_tier(Tier::best()), x_dtype, &weight.matrices(gate)) }?
            }
            Device::Cuda(_) => None,
        };
        Ok(PackedWeight { tensor: w, gate, packed, has_tensor: true })
    }

    /// Keeps the packed form alone, if there is one: half the memory. Calls that would need the tensor are refused.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn without_tensor(mut self) -> Result<PackedWeight> {
        if self.packed.is_some() {
            self.tensor = Tensor::of_shape_alone(self.tensor.shape(), self.tensor.dtype())?;
            self.has_tensor = false;
        }
        Ok(self)
    }

    /// The weight as it was given; `None` if it was dropped.
    pub fn tensor(&self) -> Option<&Tensor> {
        self.has_tensor.then_some(&self.tensor)
    }

    /// Bytes that the packed form takes beside the tensor.
    pub fn packed_bytes(&self) -> usize {
        self.packed.as_ref().map_or(0, PackedWeights::bytes)
    }

    /// The packed form, if it was made for these instructions and this call; `None` where the tensor is to be used.
    ///
    /// # Errors
    /// If the tensor would have to be used, and was dropped.
    pub(super) fn matching(&self, isa: Isa, p: &Problem) -> Result<Option<&PackedWeights>> {
        let packed = self.packed.as_ref();
        let matching = packed.filter(|packed| {
            // Sizes too: the caller may have passed a different tensor.
            let sizes = (packed.n(), packed.k(), self.tensor.dtype()) == (p.n, p.k, p.w_dtype);
            sizes && packed.isa() == isa && self.gate == p.gate && packed.fits(p.x_dtype)
        });
        match (matching, packed) {
            (None, Some(packed)) if !self.has_tensor => {
                let of = |isa: Isa, gate: Gate| format!("{} with gate={}", isa.name(), gate.name());
                let expected = format!("a call for {}, for which it was packed", of(packed.isa(), self.gate));
                let got = format!("{} and x {}", of(isa, p.gate), p.x_dtype);
                Err(Error::argument(SPEC.name, "w", expected, got))
            }
            _ => Ok(matching),
        }
    }

    /// Whether calls can use the weight in its own layout.
    pub(super) fn has_tensor(&self) -> bool {
        self.has_tensor
    }
}

impl<'a> Linear<'a> {
    /// `x · wᵀ` with a weight packed beforehand; with a gate if it was packed with one, whose activation
    /// [`Linear::activation`] sets.
    pub fn packed(x: impl Into<TensorView<'a>>, w: &'a PackedWeight) -> Self {
        Call::start().input(X, x).input(W, &w.tensor).choice(GATE, w.gate).prepared(W, w)
    }
}
