//! Attention: over prompts, over the keys of decoded tokens, and its gradient.

use super::{Family, Parts, parameter};
use crate::machine::Machine;
use crate::work::Work;

/// Many queries on Hopper's tensor cores.
pub const PROMPTS: Family = Family {
    name: "attention, prompts",
    form: "launch + waves of tiles; max(products, exponentials) + part of the other",
    in_cache: false,
    parameters: &[
        parameter("of the shorter that is not hidden", 0.0, 1.0),
        parameter("start and end of a tile, us", 0.0, 5.0),
        parameter("launch, us", 0.5, 8.0),
    ],
    takes: |work| is_plain(work) && work.kernel.ends_with("attention_sm90") && work.size("q_len") > 1.0,
    group: |work| {
        work.key(&["batch", "requests", "q_len", "num_heads", "num_kv_heads", "head_dim"])
            + work.option("causal")
    },
    time: prompts,
};

/// One query of each sequence.
pub const DECODE: Family = Family {
    name: "attention, decode",
    form: "launch, longer with scales, + bytes of keys and values / rate",
    in_cache: false,
    parameters: &[
        parameter("launch and merge, us", 1.0, 15.0),
        parameter("of the copy rate", 0.5, 1.3),
        parameter("longer with 8-bit keys, us", 0.0, 8.0),
    ],
    takes: |work| {
        let is_split = work.kernel == "attention_split" || work.kernel.starts_with("paged_attention_sm");
        is_plain(work) && is_split && work.size("q_len") == 1.0
    },
    group: |work| format!("{} {}", work.sequences(), work.size("kv_len")),
    time: |work, machine, p| {
        let launch = p[0] + p[2] * work.if_has("+k_scale");
        let bytes = (work.bytes - machine.kv_on_chip).max(0.0);
        Parts { launch, memory: machine.moving(bytes) / p[1], ..Parts::default() }
    },
};

/// The gradient, by blocks of 64 queries and keys.
pub const BACKWARD: Family = Family {
    name: "attention, gradient",
    form: "max(all tiles over the blocks that run, the longest) + cycles of a tile",
    in_cache: false,
    parameters: &[
        parameter("ps for a score, but for its dot products", 0.1, 3.0),
        parameter("elements of a head that take as long again", 8.0, 200.0),
        parameter("start and end of a tile, us", 0.0, 60.0),
    ],
    takes: |work| {
        work.op == "attention_backward" && work.kernel == "attention_backward_sm80" && work.is_half()
    },
    group: |work| {
        work.key(&["batch", "q_len", "num_heads", "num_kv_heads", "head_dim"]) + work.option("causal")
    },
    time: backward,
};

/// The gradient on wgmma, by tiles of 128 queries and 128 keys.
pub const BACKWARD_WGMMA: Family = Family {
    name: "attention, gradient on wgmma",
    form: "max(all tiles over the multiprocessors, the longest), of products, scores and the ends of tiles",
    in_cache: false,
    parameters: &[
        parameter("over the products' rate", 1.0, 3.0),
        parameter("ps of a multiprocessor for a score", 0.0, 300.0),
        parameter("start and end of a tile, us", 0.0, 20.0),
    ],
    takes: |work| {
        work.op == "attention_backward" && work.kernel == "attention_backward_sm90" && work.is_half()
    },
    group: |work| work.key(&["batch", "q_len", "num_heads", "head_dim"]),
    time: |work, machine, p| {
        let rows = (work.size("q_len") / TILE).ceil();
        let pairs = if work.option("causal") == "true" { 0.5 * rows * (rows + 1.0) } else { rows * rows };
        let scores = TILE * TILE;
        // Scores again, and the gradients of scores, queries, keys and values: five products.
        let products = 10.0 * scores * work.size("head_dim") / (machine.half_tflops * 1e6 / machine.units);
        // Measured at the clock of the H200.
        const MEASURED_MHZ: f64 = 1980.0;
        let pair = products * p[0] + scores * p[1] * 1e-6 * MEASURED_MHZ / machine.clock_mhz;
        let all = (pairs * pair + rows * p[2]) * work.sequences() * work.size("num_heads");
        let longest = rows * pair + p[2];
        Parts { math: (all / machine.units).max(longest), ..Parts::moving(work, machine) }
    },
};

/// Without what changes which keys are read.
fn is_plain(work: &Work) -> bool {
    let selects = ["+mask", "+bias", "+block_mask", "+group_starts", "window", "+windows"];
    work.is_half() && work.size_or("prefix_len", 0.0) == 0.0 && !selects.iter().any(|name| work.has(name))
}

/// Rows and columns of a tile of scores.
const TILE: f64 = 128.0;
/// The part of the L2 that holds what is read again.
const HELD: f64 = 0.6;

fn prompts(work: &Work, machine: &Machine, p: &[f64]) -> Parts {
    let (queries, keys) = (work.size("q_len"), work.size("kv_len"));
    let (heads, dim) = (work.sequences() * work.size("num_heads"), work.size("head_dim"));
    let is_causal = work.option("causal") == "true" || work.op == "paged_attention";
    let rows = (queries / TILE).ceil();
    let unit_rate = machine.half_tflops * 1e6 / machine.units;
    let of_row = |row: f64| {
        let seen = if is_causal { (keys - queries + (row + 1.0) * TILE).min(keys) } else { keys };
        let scores = TILE * (seen / TILE).ceil() * TILE;
        let products = 4.0 * dim * scores / unit_rate;
        let exponentials = machine.exponentials(scores) * machine.units;
        products.max(exponentials) + p[0] * products.min(exponentials) + p[1]
    };
    let (longest, tiles) = (of_row(rows - 1.0), rows * heads);
    let math = if tiles <= machine.units {
        longest
    } else if is_causal {
        // Longest first: the last to end are short. The sum over a row of tiles grows evenly.
        let all = 0.5 * rows * (of_row(0.0) + longest) * heads;
        (all / machine.units + of_row(0.0)).max(longest)
    } else {
        (tiles / machine.units).ceil() * longest
    };
    let memory = machine.moving(prompt_bytes(work, machine, rows));
    Parts { launch: p[2], memory, math, serial: 0.0 }
}

/// Keys and values are read again by every tile of their head; what the L2 does not hold until then comes from memory.
fn prompt_bytes(work: &Work, machine: &Machine, rows: f64) -> f64 {
    let kv_heads = work.sequences() * work.size("num_kv_heads");
    let tiles = rows * work.size("num_heads") / work.size("num_kv_heads");
    let of_head = 4.0 * work.size("kv_len") * work.size("head_dim");
    let at_once = (machine.units / tiles).ceil().min(kv_heads) * of_head;
    let held = (HELD * machine.l2_mib * 1048576.0 / at_once).min(1.0);
    work.bytes + (1.0 - held) * kv_heads * of_head * (tiles - 1.0)
}

fn backward(work: &Work, machine: &Machine, p: &[f64]) -> Parts {
    const TILE: f64 = 64.0;
    /// Blocks of a multiprocessor.
    const BLOCKS: f64 = 2.0;
    /// Heads that do not fit in registers, whose tiles are multiplied in halves.
    const WIDE: f64 = 128.0;
    let dim = work.size("head_dim");
    let group = work.size("num_heads") / work.size("num_kv_heads");
    let heads = work.sequences() * work.size("num_heads");
    let rows = (work.size("q_len") / TILE).ceil();
    // The parameters are of the measured tensor cores and clock.
    const MEASURED: f64 = 951.8 / 132.0;
    let faster = machine.half_tflops / machine.units / MEASURED;
    let halves = if dim > WIDE { 2.0 } else { 1.0 };
    let pair = TILE * TILE * (1.0 + dim / p[1]) * p[0] * 1e-3 * halves / faster;
    let pairs = if work.option("causal") == "true" { 0.5 * rows * (rows + 1.0) } else { rows * rows };
    let all = (pairs * pair + rows * p[2]) * heads;
    // Keys see all query heads of their group, queries one head: half of the time goes to each.
    let longest = rows * pair * 0.5 * (1.0 + group) + p[2];
    Parts { math: (all / (BLOCKS * machine.units)).max(longest), ..Parts::moving(work, machine) }
}
