//! The ops, one folder and one line each.

pub mod activation;
pub mod add_gelu;
pub mod attention;
pub mod cast;
mod column_sum;
pub mod copy;
mod elementwise;
pub mod embedding;
pub mod gated_act;
pub mod kv_copy;
pub mod kv_store;
pub mod layer_norm;
pub mod linear;
pub mod merge_states;
pub mod mul_add;
mod norm;
pub mod paged_attention;
pub mod prefix_match;
pub mod rms_norm;
pub mod rope;
pub mod softmax;

pub use activation::{Activation, ActivationBackward};
pub use add_gelu::{AddGelu, AddGeluBackward};
pub use attention::Attention;
pub use cast::Cast;
pub use copy::{Copy, concat, concat_into};
pub use embedding::{Embedding, EmbeddingBackward};
pub use gated_act::{GatedAct, GatedActBackward};
pub use kv_copy::KvCopy;
pub use kv_store::KvStore;
pub use layer_norm::{LayerNorm, LayerNormBackward};
pub use linear::{Gemm, Linear, LinearBackward, PackedWeight};
pub use merge_states::MergeStates;
pub use mul_add::{MulAdd, MulAddBackward};
pub use paged_attention::PagedAttention;
pub use prefix_match::PrefixMatch;
pub use rms_norm::{RmsNorm, RmsNormBackward};
pub use rope::{Rope, RopeBackward};
pub use softmax::{Softmax, SoftmaxBackward};

use crate::lab::AnyProvable;
use crate::op::AnyOp;
use crate::tensor::DType;

/// The ops, one line each: [`ALL`], and for the lab [`PROVABLE`].
macro_rules! list {
    ($($op:path),* $(,)?) => {
        /// Every op.
        pub static ALL: &[&dyn AnyOp] = &[$(&$op),*];

        /// Every op with its cases and its reference.
        pub static PROVABLE: &[&dyn AnyProvable] = &[$(&$op),*];
    };
}

list![
    rms_norm::Forward,
    rms_norm::Backward,
    layer_norm::Forward,
    layer_norm::Backward,
    softmax::Forward,
    softmax::Backward,
    rope::Forward,
    rope::Backward,
    cast::Forward,
    copy::Forward,
    activation::Forward,
    activation::Backward,
    add_gelu::Forward,
    add_gelu::Backward,
    mul_add::Forward,
    mul_add::Backward,
    gated_act::Forward,
    gated_act::Backward,
    embedding::Forward,
    embedding::Backward,
    linear::Forward,
    linear::Backward,
    prefix_match::Forward,
    kv_store::Forward,
    kv_copy::Forward,
    merge_states::Forward,
    attention::Forward,
    paged_attention::Forward,
];

/// The op of a name.
pub fn find(name: &str) -> Option<&'static dyn AnyOp> {
    ALL.iter().copied().find(|op| op.spec().name == name)
}

/// Where tests run kernels: the CPU, and a GPU if there is one.
#[cfg(test)]
fn devices() -> Vec<crate::device::Device> {
    use crate::device::Device;
    match Device::best() {
        Device::Cpu => vec![Device::Cpu],
        gpu => vec![Device::Cpu, gpu],
    }
}

/// The types the memory-bound ops compute on.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Row counts and lengths that reach every path of a row kernel: empty, one element, one short of and one past
/// vector, warp and block sizes, and rows that do not fit registers.
pub(crate) const ROW_SIZES: &[&[usize]] = &[
    &[0, 64],
    &[1, 1],
    &[3, 7],
    &[2, 8],
    &[65, 31],
    &[17, 129],
    &[4, 256],
    &[3, 1023],
    &[2, 4096],
    &[2, 4099],
    &[1, 70_001],
];
