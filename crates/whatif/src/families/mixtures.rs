//! Mixtures of experts.

use super::{Family, OF_COPY, Parts, parameter};
use crate::fit::Parameter;
use crate::machine::Machine;
use crate::work::Work;

/// Four launches: sorting, both products, and the sum over slots.
const LAUNCHES: Parameter = parameter("launches, us", 1.0, 40.0);

/// `moe_ffn` on tensor cores.
pub const HALF: Family = Family {
    name: "mixtures, 16-bit",
    form: "launches + max(bytes / rate, products / rate)",
    in_cache: false,
    parameters: &[LAUNCHES, OF_COPY, parameter("of the product rate", 0.1, 1.0)],
    takes: |work| work.op == "moe_ffn" && work.is_half() && is_even(work),
    group: |work| work.key(&["num_tokens", "experts"]),
    time: ffn,
};

/// `moe_ffn` without.
pub const FULL: Family = Family {
    name: "mixtures, f32",
    parameters: &[LAUNCHES, OF_COPY, parameter("of the product rate of 16 bits", 0.002, 0.2)],
    takes: |work| work.op == "moe_ffn" && !work.is_half() && is_even(work),
    ..HALF
};

/// `grouped_linear` and its gradient on tensor cores.
pub const GROUPED_HALF: Family = Family {
    name: "grouped products, 16-bit",
    takes: |work| is_grouped(work) && work.is_half() && is_even(work),
    group: |work| work.key(&["rows", "groups"]),
    ..HALF
};

/// The same without.
pub const GROUPED_FULL: Family = Family {
    name: "grouped products, f32",
    parameters: FULL.parameters,
    takes: |work| is_grouped(work) && !work.is_half() && is_even(work),
    ..GROUPED_HALF
};

fn is_grouped(work: &Work) -> bool {
    matches!(work.op.as_str(), "grouped_linear" | "grouped_linear_backward")
}

/// Whether all experts have about the same number of tokens. For the other rows, the record does not say which matrices were
/// read.
fn is_even(work: &Work) -> bool {
    !work.has("zipf") && !work.has("all-to-one")
}

fn ffn(work: &Work, machine: &Machine, p: &[f64]) -> Parts {
    Parts {
        launch: p[0],
        memory: machine.moving(work.bytes) / p[1],
        math: work.flops / (machine.half_tflops * 1e6 * p[2]),
        serial: 0.0,
    }
}
