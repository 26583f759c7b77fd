//! What happens to tokens around the products: storing keys and values, choosing, finding prefixes.

use super::{Family, LAUNCH, Parts, parameter};

/// `kv_store` and `qkv_store`.
pub const STORES: Family = Family {
    name: "stores of keys and values",
    form: "launch + what must be waited for + max(bytes, cycles of a head)",
    in_cache: false,
    parameters: &[
        parameter("launch, us", 0.7, 1.5),
        parameter("for positions, and again for norms, us", 0.3, 1.2),
        parameter("cycles of a multiprocessor for a rotated head", 10.0, 100.0),
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
        let [rotated, normed] = ["+positions", "+q_weight"].map(|name| work.if_has(name));
        let heads = work.size_or("heads", 2.0 * work.size("num_kv_heads"));
        // A norm takes half as long again as a rotation.
        let cycles = rotated * (1.0 + 0.5 * normed) * p[2] * work.size("num_tokens") * heads;
        Parts {
            launch: p[0],
            serial: p[1] * (rotated + normed),
            math: machine.cycles(cycles),
            ..Parts::moving(work, machine)
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
