//! What happens to tokens around the products: storing keys and values, choosing, finding prefixes.

use super::{Family, LAUNCH, OF_COPY, Parts, parameter};

/// Microseconds of a launch that waits for one load. It is not fitted: few rows of this family are short, and held back they would
/// leave nothing that tells it. The shortest rows of other families, casts and activations in the L2, have 0.6 to 0.8 beside
/// their bytes.
const SHORTEST: f64 = 0.75;
/// Instructions of a warp for a head of 128 elements: to load and store it, to rotate it, to norm it, to divide it by its
/// scale and pack it in 8 bits; and for the angles of a token, once for all its heads. Counted in the kernels' sources, roughly.
const HEAD: f64 = 30.0;
const ROTATION: f64 = 40.0;
const NORM: f64 = 35.0;
const CAST: f64 = 15.0;
const ANGLES: f64 = 400.0;
/// Norms and scales are waited for too: the first for the sums of a warp and its weights, the second for one load.
const NORM_WAIT: f64 = 0.5;
const SCALE_WAIT: f64 = 0.25;

/// `kv_store` and `qkv_store`.
pub const STORES: Family = Family {
    name: "stores of keys and values",
    form: "0.75 us + waits for positions, norms and scales + max(bytes / rate, instructions)",
    in_cache: false,
    parameters: &[
        OF_COPY,
        parameter("waiting for positions and angles, us", 0.3, 1.5),
        // A multiprocessor issues at most four in a cycle.
        parameter("cycles of a multiprocessor for an instruction of a warp", 0.25, 1.5),
    ],
    takes: |work| ["kv_store", "qkv_store"].contains(&work.op.as_str()),
    group: |work| {
        format!(
            "{} {} {} {}",
            work.op,
            work.size("num_tokens"),
            work.has("+positions"),
            work.has("+q_weight")
        )
    },
    time: |work, machine, p| {
        let [rotated, normed, cast] = ["+positions", "+q_weight", "to"].map(|name| work.if_has(name));
        let values = work.size("num_kv_heads");
        let heads = work.size_or("heads", 2.0 * values);
        let each = HEAD * heads
            + (ROTATION * rotated + NORM * normed) * (heads - values)
            + CAST * cast * 2.0 * values
            + ANGLES * rotated;
        let instructions = each * work.size_or("head_dim", 128.0) / 128.0 * work.size("num_tokens");
        Parts {
            launch: SHORTEST,
            serial: p[1] * (rotated + NORM_WAIT * normed + SCALE_WAIT * cast),
            memory: machine.moving(work.bytes) / p[0],
            math: machine.cycles(p[2] * instructions),
        }
    },
};

/// `sample`: a block for each row goes over the columns, with top-k or top-p again and again.
pub const SAMPLING: Family = Family {
    name: "sampling",
    form: "launch + rounds of rows x columns x cycles",
    in_cache: false,
    parameters: &[
        parameter("launch, us", 0.0, 10.0),
        parameter("cycles for a column", 0.5, 5.0),
        parameter("further cycles with top-k or top-p", 1.0, 30.0),
    ],
    takes: |work| work.op == "sample",
    group: |work| work.key(&["rows", "columns"]),
    time: |work, machine, p| {
        let selects = ["+top_k", "+top_p", "+min_p"].iter().any(|name| work.has(name));
        let cycles = p[1] + if selects { p[2] } else { 0.0 };
        let rounds = (work.size("rows") / machine.units).ceil();
        let serial = rounds * work.size("columns") * cycles / machine.clock_mhz;
        Parts { launch: p[0], serial, ..Parts::default() }
    },
};

/// `argmax`.
pub const ARGMAX: Family = Family {
    name: "argmax",
    form: "launch + max(bytes, cycles for each element)",
    in_cache: false,
    parameters: &[LAUNCH, parameter("cycles of a multiprocessor for an element", 0.05, 1.0)],
    takes: |work| work.op == "argmax",
    group: |work| work.key(&["num_tokens", "n"]),
    time: |work, machine, p| {
        let elements = work.size("num_tokens") * work.size("n");
        Parts { launch: p[0], math: machine.cycles(p[1] * elements), ..Parts::moving(work, machine) }
    },
};

/// `prefix_match`: a walk down the tree, whose steps wait for each other.
pub const PREFIXES: Family = Family {
    name: "prefix matching",
    form: "launch + depth x step + bytes",
    in_cache: false,
    parameters: &[parameter("launch, us", 1.0, 20.0), parameter("a step down the tree, us", 0.2, 2.0)],
    takes: |work| work.op == "prefix_match" && !work.in_cache,
    group: |work| work.key(&["batch", "length", "depth"]),
    time: |work, machine, p| Parts {
        launch: p[0],
        serial: p[1] * work.size("depth"),
        ..Parts::moving(work, machine)
    },
};

/// The same with a small tree and short prompts.
pub const PREFIXES_IN_CACHE: Family = Family {
    name: "prefix matching, in cache",
    in_cache: true,
    takes: |work| work.op == "prefix_match" && work.in_cache,
    ..PREFIXES
};
