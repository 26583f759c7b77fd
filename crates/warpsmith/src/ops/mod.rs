//! The ops, one folder and one line each, and those that other crates register.

pub mod activation;
pub mod add_gelu;
pub mod argmax;
pub mod attention;
pub mod cast;
mod column_sum;
pub mod copy;
pub mod cross_entropy;
mod elementwise;
pub mod embedding;
pub mod gated_act;
mod grouped;
pub mod grouped_linear;
pub mod kl_div;
pub mod kv_copy;
pub mod kv_store;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod linear_quant;
pub mod merge_states;
pub mod moe_ffn;
pub mod moe_losses;
pub mod moe_route;
pub mod mul_add;
mod norm;
pub mod paged_attention;
pub mod penalize;
pub mod prefix_match;
pub mod qk_norm_rope;
pub mod qkv_store;
mod registry;
pub mod rms_norm;
pub mod rope;
pub mod sample;
pub mod softmax;

pub use activation::{Activation, ActivationBackward};
pub use add_gelu::{AddGelu, AddGeluBackward};
pub use argmax::Argmax;
pub use attention::{Attention, AttentionBackward};
pub use cast::Cast;
pub use copy::{Copy, concat, concat_into};
pub use cross_entropy::{CrossEntropy, CrossEntropyBackward};
pub use embedding::{Embedding, EmbeddingBackward};
pub use gated_act::{GatedAct, GatedActBackward};
pub use grouped_linear::{GroupedLinear, GroupedLinearBackward};
pub use kl_div::{KlDiv, KlDivBackward};
pub use kv_copy::KvCopy;
pub use kv_store::KvStore;
pub use layer_norm::{LayerNorm, LayerNormBackward};
pub use linear::{Linear, LinearBackward, PackedWeight};
pub use linear_cross_entropy::{LinearCrossEntropy, LinearCrossEntropyBackward};
pub use linear_quant::{LinearQuant, PackedQuantWeight, QuantFormat, QuantPrecision};
pub use merge_states::MergeStates;
pub use moe_ffn::{MoeFfn, MoeFfnBackward};
pub use moe_losses::{MoeLosses, MoeLossesBackward};
pub use moe_route::{MoeRoute, MoeRouteBackward};
pub use mul_add::{MulAdd, MulAddBackward};
pub use paged_attention::PagedAttention;
pub use penalize::Penalize;
pub use prefix_match::PrefixMatch;
pub use qk_norm_rope::QkNormRope;
pub use qkv_store::QkvStore;
pub use registry::{all, register};
#[cfg(feature = "lab")]
pub use registry::{provable, register_provable};
pub use rms_norm::{RmsNorm, RmsNormBackward};
pub use rope::{Rope, RopeBackward};
pub use sample::Sample;
pub use softmax::{Softmax, SoftmaxBackward};

#[cfg(feature = "lab")]
use crate::lab::AnyProvable;
use crate::op::AnyOp;
use crate::tensor::DType;

/// The ops, one line each: [`ALL`], and for the lab [`PROVABLE`].
macro_rules! list {
    ($($op:path),* $(,)?) => {
        /// Every op of the library. [`all`] has those of other crates too.
        pub static ALL: &[&dyn AnyOp] = &[$(&$op),*];

        /// Every op of the library, with its cases and its reference. [`provable`] has those of other crates too.
        #[cfg(feature = "lab")]
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
    qk_norm_rope::Forward,
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
    linear_quant::Forward,
    grouped_linear::Forward,
    grouped_linear::Backward,
    moe_ffn::Forward,
    moe_ffn::Backward,
    argmax::Forward,
    sample::Forward,
    penalize::Forward,
    prefix_match::Forward,
    kv_store::Forward,
    qkv_store::Forward,
    kv_copy::Forward,
    merge_states::Forward,
    attention::Forward,
    attention::Backward,
    paged_attention::Forward,
    cross_entropy::Forward,
    cross_entropy::Backward,
    linear_cross_entropy::Forward,
    linear_cross_entropy::Backward,
    kl_div::Forward,
    kl_div::Backward,
    moe_route::Forward,
    moe_route::Backward,
    moe_losses::Forward,
    moe_losses::Backward,
];

/// The op of a name: the library's own, or a registered one.
pub fn find(name: &str) -> Option<&'static dyn AnyOp> {
    ALL.iter().copied().find(|op| op.spec().name == name).or_else(|| registry::registered(name))
}

/// Where tests run kernels: the CPU, and a GPU if there is one.
#[cfg(feature = "tests")]
fn devices() -> Vec<crate::device::Device> {
    use crate::device::Device;
    match Device::best() {
        Device::Cpu => vec![Device::Cpu],
        gpu => vec![Device::Cpu, gpu],
    }
}

/// The types the memory-bound ops compute on.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// What `warpsmith new-op` writes: it must go on compiling and passing its checks. Its example runs where it is an op of the library.
#[cfg(all(feature = "tests", not(doctest)))]
#[path = "../../../cli/templates/op/mod.rs"]
mod new_op;

/// The same for `warpsmith new-op --rows`.
#[cfg(all(feature = "tests", not(doctest)))]
#[path = "../../../cli/templates/row-op/mod.rs"]
#[allow(dead_code, reason = "nobody calls what it is a template of")]
mod new_row_op;

#[cfg(all(feature = "tests", not(doctest)))]
mod tests {
    use super::*;
    use crate::lab::proof::Prepared;
    use crate::lab::{Case, Values};

    /// From the smallest subnormal to the largest number.
    #[test]
    fn every_type_of_every_op_has_a_case_of_all_exponents() {
        for op in PROVABLE {
            let cases = op.cases();
            for case in cases.iter().filter(|case| case.dtype.is_float()) {
                let has = |other: &Case| other.dtype == case.dtype && other.values == Values::Exponents;
                assert!(cases.iter().any(has), "{} {}", op.spec().name, case.dtype);
            }
        }
    }

    #[test]
    fn a_new_op_passes_its_cases() {
        passes_its_cases(&new_op::Forward);
        passes_its_cases(&new_row_op::Forward);
    }

    fn passes_its_cases(op: &'static dyn AnyProvable) {
        for (seed, case) in (0..).zip(op.cases()) {
            for device in devices() {
                let kernels = crate::lab::proof::kernels_on(op, device);
                let mut prepared = Prepared::many(op, &[(seed, case.clone())], &kernels, device).unwrap();
                for kernel in &kernels {
                    let outcome = prepared[0].judge(kernel, &device.default_stream().unwrap()).unwrap();
                    let outcome = outcome.unwrap_or_else(|| panic!("{} runs every case", kernel.name));
                    assert_eq!(outcome.failure, None, "{}: {}", kernel.name, case.name(op.spec()));
                }
            }
        }
    }
}
