//! Weights packed once, for many products.

use super::isa::Isa;
use super::matrix::Unit;
use super::narrow::{NarrowPanels, is_narrow};
use super::panel::{HALF, PANEL, Panels, Side};
use crate::cpu::scratch::Buffer;
use crate::error::Result;
use crate::tensor::DType;

/// Packed weights as they lie in memory.
#[derive(Copy, Clone)]
pub(super) enum Packed {
    /// In units.
    Wide(Panels),
    /// In 16 bits, to be widened to units of f32.
    Narrow(NarrowPanels),
}

/// Weights in the layout of the kernels, made once and used by many products.
pub struct PackedWeights {
    buffer: Buffer,
    unit: Unit,
    /// The type of the elements as they are packed.
    dtype: DType,
    isa: Isa,
    n: usize,
    k: usize,
    gated: bool,
}

impl std::fmt::Debug for PackedWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { unit, dtype, isa, n, k, gated, .. } = self;
        write!(f, "PackedWeights({n} x {k} {dtype} as {unit:?} for {isa:?}, gated: {gated})")
    }
}

impl PackedWeights {
    /// # Safety
    /// The matrices of `side` must be readable.
    pub(super) unsafe fn pack(isa: Isa, unit: Unit, side: &Side) -> Result<PackedWeights> {
        let stored = side.halves[0].dtype;
        let mut packed = PackedWeights {
            buffer: Buffer::default(),
            unit,
            dtype: if is_narrow(unit, stored) { stored } else { unit.dtype() },
            isa,
            n: side.len(),
            k: side.k(),
            gated: side.gated,
        };
        let count = side.panels();
        packed.buffer = Buffer::zeroed(match packed.panels() {
            Packed::Wide(panels) => panels.bytes(count),
            Packed::Narrow(panels) => NarrowPanels::bytes(panels.k, count),
        })?;
        // SAFETY: the buffer was made for these panels.
        unsafe {
            match packed.panels() {
                Packed::Wide(panels) => panels.pack(isa.tier(), side, 0, count),
                Packed::Narrow(panels) => panels.pack(side),
            }
        }
        Ok(packed)
    }

    pub(super) fn panels(&self) -> Packed {
        let (data, k) = (self.buffer.as_ptr(), self.k);
        if is_narrow(self.unit, self.dtype) {
            return Packed::Narrow(NarrowPanels { data: data.cast(), dtype: self.dtype, k });
        }
        let units = self.unit.packed_len(k);
        Packed::Wide(Panels { data: data.cast(), unit: self.unit, units, width: PANEL })
    }

    /// Whether they can be multiplied with an `x` of this type.
    pub fn fits(&self, x_dtype: DType) -> bool {
        Unit::of(self.isa, x_dtype, self.dtype) == self.unit
    }

    /// Outputs in a panel.
    pub(super) fn panel_len(&self) -> usize {
        if self.gated { HALF } else { PANEL }
    }

    pub(super) fn unit(&self) -> Unit {
        self.unit
    }

    /// The instruction set the layout was made for; products use it too.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of outputs: rows of the weights, or of each of the two matrices in the gated form.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes it occupies.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }
}
