//! Products of matrices, in waves of tiles over the multiprocessors.

use super::{Family, LAUNCH, Parts, parameter};
use crate::machine::Machine;
use crate::work::Work;

/// `linear` in 16-bit types on Hopper's tensor cores.
pub const HALF: Family = Family {
    name: "linear, 16-bit",
    form: "launch + max(waves of the best tile, bytes / copy rate)",
    in_cache: false,
    parameters: &[LAUNCH, OF_PRODUCTS, EPILOGUE],
    takes: |work| is_half(work) && !work.in_cache,
    group: |work| work.key(&["n", "k"]),
    time: |work, machine, p| {
        let tiles = Tiles { efficiency: p[1], epilogue: p[2], rate: machine.half_tflops, slower: 1.0 };
        Parts { launch: p[0], math: tiles.time(work, machine), ..Parts::moving(work, machine) }
    },
};

/// The same with operands in the L2.
pub const HALF_IN_CACHE: Family = Family {
    name: "linear, in cache",
    form: "launch + max(waves of the best tile, bytes / rate of the L2)",
    in_cache: true,
    parameters: &[LAUNCH, OF_PRODUCTS, parameter("of the copy rate", 0.3, 6.0)],
    takes: |work| is_half(work) && work.in_cache,
    group: |work| work.key(&["n", "k"]),
    time: |work, machine, p| {
        let tiles = Tiles { efficiency: p[1], epilogue: 0.5, rate: machine.half_tflops, slower: 1.0 };
        let memory = machine.moving(work.bytes) / p[2];
        Parts { launch: p[0], memory, math: tiles.time(work, machine), serial: 0.0 }
    },
};

/// `linear` in 8-bit types, and in f32 cut to TF32.
pub const NARROW: Family = Family {
    name: "linear, fp8 and TF32",
    form: "as in 16 bits; scales of blocks of K make products slower",
    in_cache: false,
    parameters: &[OF_PRODUCTS, EPILOGUE, parameter("times as long with scales of blocks", 1.0, 3.0)],
    takes: |work| {
        work.kernel == "linear_sm90" && (work.dtype == "f8e4m3" || work.option("precision") == "tf32")
    },
    group: |work| work.key(&["m", "n", "k"]),
    time: |work, machine, p| {
        // Four shapes cannot tell it from the rest: the launch of the 16-bit kernel, which is the same code.
        const LAUNCHED: f64 = 1.8;
        let rate = if work.dtype == "f8e4m3" { machine.fp8_tflops } else { machine.tf32_tflops };
        let slower = if work.option("scaling") == "block" { p[2] } else { 1.0 };
        let math = Tiles { efficiency: p[0], epilogue: p[1], rate, slower }.time(work, machine);
        Parts { launch: LAUNCHED, math, ..Parts::moving(work, machine) }
    },
};

/// `linear` in f32 at full precision: six products of bf16 for one of f32.
pub const FULL: Family = Family {
    name: "linear, f32",
    form: "as in 16 bits, with six products for one",
    in_cache: false,
    parameters: &[LAUNCH, parameter("of the product rate", 0.1, 1.0)],
    takes: |work| work.kernel == "linear_bf16x3",
    group: |work| work.key(&["m", "n", "k"]),
    time: |work, machine, p| {
        let tiles = Tiles { efficiency: p[1], epilogue: 0.0, rate: machine.half_tflops, slower: 6.0 };
        Parts { launch: p[0], math: tiles.time(work, machine), ..Parts::moving(work, machine) }
    },
};

/// `linear_quant`: a block expands weights and multiplies them without tensor cores.
pub const QUANTISED: Family = Family {
    name: "linear, quantised",
    form: "launch + bytes / rate + cycles for each product",
    in_cache: false,
    parameters: &QUANTISED_PARAMETERS,
    takes: |work| work.op == "linear_quant" && !work.in_cache,
    group: |work| work.key(&["n", "k"]) + work.option("format"),
    time: quantised,
};

/// The same with operands in the L2.
pub const QUANTISED_IN_CACHE: Family = Family {
    name: "linear, quantised, in cache",
    in_cache: true,
    takes: |work| work.op == "linear_quant" && work.in_cache,
    ..QUANTISED
};

const QUANTISED_PARAMETERS: [crate::fit::Parameter; 3] = [
    LAUNCH,
    parameter("of the copy rate", 0.05, 1.0),
    parameter("cycles of a multiprocessor for a product", 0.005, 0.1),
];
const OF_PRODUCTS: crate::fit::Parameter = parameter("of the product rate", 0.5, 1.0);
const EPILOGUE: crate::fit::Parameter = parameter("epilogue of the largest tile, us", 0.0, 3.0);

/// Products whose time an output costs besides those of its sum: adding up over threads, and storing.
const OUTPUT: f64 = 440.0;

fn quantised(work: &Work, machine: &Machine, p: &[f64]) -> Parts {
    let products = work.size("m") * work.size("n") * (work.size("k") + OUTPUT);
    Parts {
        launch: p[0],
        memory: machine.moving(work.bytes) / p[1],
        serial: machine.cycles(p[2] * products),
        math: 0.0,
    }
}

fn is_half(work: &Work) -> bool {
    work.kernel == "linear_sm90" && work.op == "linear" && work.is_half()
}

/// Rows and columns of the tiles of a block: those of `linear_sm90`, of which a problem gets the fastest.
const WIDE: [(f64, f64); 19] = [
    (128.0, 256.0),
    (256.0, 128.0),
    (128.0, 208.0),
    (128.0, 192.0),
    (128.0, 160.0),
    (128.0, 144.0),
    (128.0, 128.0),
    (128.0, 112.0),
    (128.0, 96.0),
    (128.0, 80.0),
    (128.0, 64.0),
    (64.0, 256.0),
    (64.0, 224.0),
    (64.0, 192.0),
    (64.0, 128.0),
    (64.0, 96.0),
    (64.0, 64.0),
    (64.0, 48.0),
    (64.0, 32.0),
];
/// Heights that fit an odd number of rows.
const ODD: [(f64, f64); 12] = [
    (136.0, 256.0),
    (96.0, 256.0),
    (112.0, 256.0),
    (120.0, 256.0),
    (184.0, 256.0),
    (136.0, 128.0),
    (152.0, 128.0),
    (168.0, 128.0),
    (72.0, 128.0),
    (112.0, 128.0),
    (200.0, 128.0),
    (216.0, 128.0),
];
const ODD_ROWS: f64 = 2048.0;
/// For few rows.
const FEW: [(f64, f64); 8] = [
    (64.0, 128.0),
    (64.0, 112.0),
    (64.0, 96.0),
    (64.0, 80.0),
    (64.0, 64.0),
    (64.0, 48.0),
    (64.0, 32.0),
    (64.0, 16.0),
];
const FEW_ROWS: f64 = 64.0;
/// Small tiles read more for each product: the rate falls with this power of their area.
const AREA_POWER: f64 = 0.2;
const LARGEST: f64 = 128.0 * 256.0;

/// How fast tiles are.
struct Tiles {
    /// Of the rate, for the largest tile.
    efficiency: f64,
    /// Microseconds after the products of the largest tile.
    epilogue: f64,
    /// TFLOP/s of the whole GPU.
    rate: f64,
    /// Products for one.
    slower: f64,
}

impl Tiles {
    /// Microseconds of all waves with the fastest tile.
    fn time(&self, work: &Work, machine: &Machine) -> f64 {
        let (m, n, k) = (work.size("m"), work.size("n"), work.size("k"));
        let batch = work.size("batch");
        // With a gate twice as many columns are multiplied as result.
        let columns = n * (work.flops / (2.0 * batch * m * n * k)).round().max(1.0);
        // Curved functions take twice as long as the rest of the epilogue.
        let curved = if ["gelu", "gelu_tanh", "silu"].contains(&work.option("act")) { 2.0 } else { 1.0 };
        let unit_rate = self.rate * 1e6 / machine.units * self.efficiency / self.slower;
        let of_tile = |&(rows, wide): &(f64, f64)| {
            let tiles = (m / rows).ceil() * (columns / wide).ceil() * batch;
            let area = rows * wide;
            let products = 2.0 * area * k / (unit_rate * (area / LARGEST).powf(AREA_POWER));
            (tiles / machine.units).ceil() * (products + self.epilogue * curved * area / LARGEST)
        };
        let least = |tiles: &[(f64, f64)]| tiles.iter().map(of_tile).fold(f64::INFINITY, f64::min);
        match m {
            m if m <= FEW_ROWS => least(&FEW),
            m if m <= ODD_ROWS => least(&WIDE).min(least(&ODD)),
            _ => least(&WIDE),
        }
    }
}
