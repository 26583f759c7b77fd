//! Ops that read and write rows: norms, softmax, element by element, copies.

use super::{Family, LAUNCH, OF_COPY, Parts, parameter};
use crate::machine::Machine;
use crate::work::Work;

const OPS: [&str; 24] = [
    "activation",
    "activation_backward",
    "add_gelu",
    "add_gelu_backward",
    "cast",
    "column_sum",
    "copy",
    "embedding",
    "gated_act",
    "gated_act_backward",
    "kv_copy",
    "layer_norm",
    "layer_norm_backward",
    "merge_states",
    "mul_add",
    "mul_add_backward",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "silu_mul",
    "softmax",
    "softmax_backward",
];

/// Their time is that of their bytes.
pub const ROWS: Family = Family {
    name: "rows",
    form: "launch + bytes / rate, long rows of softmax in two passes",
    in_cache: false,
    parameters: &[LAUNCH, OF_COPY],
    takes: |work| is_rows(work) && !work.in_cache,
    group: |work| work.kernel.clone(),
    time,
};

/// The same while their tensors stay in the L2.
pub const ROWS_IN_CACHE: Family = Family {
    name: "rows, in cache",
    form: "launch + bytes / rate of the L2",
    in_cache: true,
    parameters: &[LAUNCH, parameter("of the copy rate", 0.3, 6.0)],
    takes: |work| is_rows(work) && work.in_cache,
    group: |work| work.kernel.clone(),
    time,
};

/// Copies into another order of dimensions.
pub const TRANSPOSES: Family = Family {
    name: "transposing copies",
    form: "launch + bytes / rate + cycles for each element",
    in_cache: false,
    parameters: &[LAUNCH, OF_COPY, parameter("cycles of a multiprocessor for an element", 0.0, 3.0)],
    takes: |work| work.op == "copy" && work.has("order"),
    group: |work| work.key(&["batch", "rows", "cols"]) + &work.dtype,
    time: |work, machine, p| {
        let elements = work.size("batch") * work.size("rows") * work.size("cols");
        Parts { serial: machine.cycles(p[2] * elements), ..time(work, machine, p) }
    },
};

fn is_rows(work: &Work) -> bool {
    OPS.contains(&work.op.as_str()) && !work.has("order")
}

/// Rows that do not fit in registers are read twice, by the kernels with this ending: 3 passes over what others do in 2 of
/// softmax, 5 in place of 3 of its gradient.
fn passes(work: &Work) -> f64 {
    match work.kernel.as_str() {
        "softmax_long" => 3.0 / 2.0,
        "softmax_backward_long" => 5.0 / 3.0,
        _ => 1.0,
    }
}

fn time(work: &Work, machine: &Machine, p: &[f64]) -> Parts {
    let memory = machine.moving(work.bytes * passes(work)) / p[1];
    Parts { launch: p[0], memory, ..Parts::default() }
}
