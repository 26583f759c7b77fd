//! Products of rows that are sorted by group with a matrix of each group: what `moe_ffn` and `grouped_linear` share.

pub(in crate::ops) mod cpu;
#[cfg(feature = "lab")]
pub(in crate::ops) mod reference;
#[cfg(feature = "lab")]
pub(in crate::ops) mod skew;
pub(in crate::ops) mod slots;
pub(in crate::ops) mod sums;

/// Distances in elements between the matrices of groups and inside of one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(in crate::ops) struct Matrices {
    /// From one group's matrix to the next.
    pub group: isize,
    /// From one row to the next.
    pub row: isize,
    /// From one element of a row to the next.
    pub col: isize,
}

impl Matrices {
    /// Of a tensor `[groups, rows, columns]`, or of one matrix.
    pub fn of(view: &crate::tensor::TensorView<'_>) -> Matrices {
        match *view.layout().strides() {
            [group, row, col] => Matrices { group, row, col },
            [row, col] => Matrices { group: 0, row, col },
            _ => unreachable!("the shapes of the ops have two or three dimensions"),
        }
    }
}
