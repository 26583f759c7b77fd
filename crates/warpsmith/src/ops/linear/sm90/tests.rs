use super::super::problem::{Dequant, Matrix};
use super::config::STAGE_ROW;
use super::tile::{Cluster, EXCHANGED, Schedule, TILES};
use super::variants::variants;
use super::*;
use crate::ops::elementwise::function::Kind;

const UNITS: usize = 132;

/// Rows of `x`, `w` and `out` without gaps.
fn problem(dtype: DType, [m, n, k]: [usize; 3]) -> Problem {
    let dense = |cols: usize| Matrix { row: cols as isize, col: 1, aligned: true };
    let sizes = [m, n, k];
    let product = Problem::product(dtype, dtype == DType::F32, sizes, [dense(k), dense(k), dense(n)]);
    Problem { out_dtype: if dtype.size() == 1 { DType::BF16 } else { dtype }, bias_step: 1, ..product }
}

/// The device code's static asserts.
fn assert_compiles(p: &Problem, config: &Config) {
    let Tile { schedule, m, n, x_rows, pieces, blocks_per_unit, exchanged, .. } = config.tile;
    let (tile, size) = (config.tile, p.x_dtype.size());
    let (cluster_m, cluster_n) = (tile.cluster_m(), tile.cluster_n());
    let shares = if schedule == Schedule::Cooperative { 2 } else { 1 };
    let row_blocks = tile.row_blocks();
    let [a, b] = tile.operand_rows();
    let columns = tile.columns(p.gate);
    assert!(a == row_blocks * 64 * shares && row_blocks >= 1);
    assert!(row_blocks * b <= if exchanged { 368 } else { 256 } && b <= 256);
    assert!(b.is_multiple_of(if exchanged { 8 } else { 16 }) && n <= 256 && columns.is_multiple_of(16));
    assert!(!exchanged || size == 2 && p.out_dtype.size() == 2 && p.gate == Gate::None && config.tma_store);
    assert!(
        !exchanged || !config.x_columns && !config.w_columns && (!p.has_residual || config.residual_rows)
    );
    assert!(x_rows == m || (x_rows < 64 && m == 64 && x_rows.is_multiple_of(8) && !config.x_columns));
    assert!(p.m <= x_rows || x_rows == m, "every row of x is loaded");
    assert!(cluster_m == 1 || cluster_n == 1);
    assert!([1, 2, 4, 8].contains(&tile.cluster_blocks()));
    assert!(x_rows.is_multiple_of(8 * cluster_n));
    assert!(n.is_multiple_of(if p.gate == Gate::None { 8 } else { 16 } * cluster_m));
    assert!(!config.x_columns || size == 2);
    assert!(pieces == 1 || p.x_order == Order::Rows && p.w_order == Order::Rows);
    let past_k = (p.k * size).next_multiple_of(pieces * 128) - p.k * size;
    assert!(
        pieces == 1 || p.dequant != Dequant::Blocks && (past_k == 0 || !(p.k * size).is_multiple_of(128))
    );
    assert!(!config.w_columns || (size == 2 && n.is_multiple_of(64) && p.gate == Gate::None));
    if p.dequant == Dequant::Blocks {
        assert!(row_blocks * n <= 128);
        assert_eq!(128 % if p.gate == Gate::Interleaved { n } else { columns }, 0);
    }
    let shared = config.shared_bytes();
    assert!(config.stages >= 2 && shared <= if blocks_per_unit == 1 { 232_448 } else { 115_712 });
    assert!((config.stages * tile.pieces - 1) * x_rows * 128 + m * 128 <= shared);
}

#[test]
fn every_choice_is_one_that_compiles() {
    let sizes = [1, 7, 8, 9, 16, 33, 64, 65, 128, 129, 333, 777, 1000, 4096];
    let mut chosen = 0;
    for dtype in [DType::BF16, DType::F32, DType::F8E4M3] {
        for m in sizes {
            for [n, k] in [[16, 16], [1024, 4096], [3000, 2064], [5000, 1040], [14336, 4096], [152064, 1024]]
            {
                for gate in [Gate::None, Gate::Halves, Gate::Interleaved] {
                    let plain = Problem { gate, ..problem(dtype, [m, n, k]) };
                    let mut all =
                        vec![plain, Problem { has_bias: true, activation: Some(Kind::Gelu), ..plain }];
                    if dtype.size() == 1 {
                        all.push(Problem { dequant: Dequant::Whole, has_bias: true, ..plain });
                        all.push(Problem { dequant: Dequant::Blocks, ..plain });
                    }
                    if dtype.size() == 2 && gate == Gate::None {
                        all.push(Problem { x_order: Order::Columns, w_order: Order::Columns, ..plain });
                        all.push(Problem { out_order: Order::Any, scale_bits: 0.5f32.to_bits(), ..plain });
                    }
                    let constant = all.clone().into_iter().map(|p| Problem { constant_w: true, ..p });
                    for p in all.iter().copied().chain(constant) {
                        match Tile::choose(&p, UNITS) {
                            Some(tile) => assert_compiles(&p, &Config::of(&p, tile, UNITS)),
                            None => assert!(p.dequant == Dequant::Blocks && gate == Gate::Halves, "{p:?}"),
                        }
                        chosen += 1;
                    }
                }
            }
        }
    }
    assert!(chosen > 1000);
}

/// The tiles that were within two percent of the fastest on an H200, for shapes that tell the estimate's terms apart.
const MEASURED: [([usize; 3], &str); 46] = [
    ([96, 4096, 14336], "s64x64m2"),
    ([128, 1024, 3072], "s64x32 s64x48"),
    ([128, 4096, 1024], "s64x64m2"),
    ([128, 4096, 12288], "s64x64m2"),
    ([128, 6144, 4096], "s64x96m2"),
    ([128, 10240, 8192], "c128x80 p64x192m2"),
    ([128, 24576, 4096], "p64x192m2 c128x96 p128x96 c128x192"),
    ([160, 14336, 4096], "xp168x128"),
    ([192, 4096, 4096], "s64x96 p64x128 s64x128"),
    ([200, 14336, 4096], "xc200x128"),
    ([256, 256, 256], "s64x32"),
    ([256, 4096, 1024], "c128x64 s64x128m2"),
    ([256, 4096, 4096], "s64x128m2"),
    ([272, 11008, 4096], "xc96x256"),
    ([330, 4096, 1024], "c128x96"),
    ([333, 5000, 1032], "c128x128n4"),
    ([333, 5120, 4096], "xc112x128"),
    ([384, 6144, 4096], "c128x144"),
    ([400, 14336, 4096], "xc200x128 xp136x128"),
    ([512, 1024, 3072], "s64x64 s64x64m2"),
    ([512, 4096, 1024], "c128x128 p128x128n2 p128x128"),
    ([500, 6144, 4096], "c128x192 c128x192m2"),
    ([512, 10240, 8192], "c128x160"),
    ([600, 4096, 4096], "xc152x128 xp152x128"),
    ([650, 10240, 8192], "xc112x256"),
    ([777, 4096, 4096], "xc200x128"),
    ([777, 11008, 4096], "xc136x256"),
    ([777, 14336, 4096], "xc112x256"),
    ([900, 8192, 4096], "xp152x128 xc152x128"),
    ([1000, 3000, 2056], "c128x192m2"),
    ([1024, 1024, 1024], "p64x128 s64x128"),
    ([1024, 4096, 4096], "c128x256 c128x256m2 c256x128"),
    ([1100, 11008, 4096], "xc184x256"),
    ([1500, 28672, 4096], "xp152x128 xp168x128"),
    ([2000, 4096, 11008], "c128x256 c256x128 xp168x128"),
    ([2048, 2048, 2048], "p128x128 p128x128n2 c256x128 c128x256 c128x256m2"),
    ([2048, 10240, 8192], "c128x256 c128x256m2 c256x128"),
    ([3000, 152064, 1024], "p128x128n2"),
    ([4096, 4096, 1024], "p128x128 p128x128n2"),
    ([4096, 4096, 4096], "p128x128n2 c128x256 c128x256m2"),
    ([4096, 4096, 12288], "c128x256 c128x256m2"),
    ([4100, 4104, 4104], "c128x224m2"),
    ([8192, 8192, 8192], "c128x192 c128x256 c128x256m2"),
    ([8192, 16384, 4096], "p128x128 p128x128n2"),
    ([16384, 2048, 512], "p128x128 p128x128n2"),
    ([16384, 4096, 4096], "p128x128 p128x128n2"),
];

#[test]
fn the_choice_is_among_the_fastest_measured() {
    for (size, fastest) in MEASURED {
        let tile = Tile::choose(&problem(DType::BF16, size), UNITS).unwrap();
        let Tile { schedule, m, n, cluster, .. } = tile;
        let exchanged = if tile.exchanged { "x" } else { "" };
        let letter = match schedule {
            Schedule::Single => "s",
            Schedule::Cooperative => "c",
            Schedule::PingPong => "p",
        };
        let cluster = match cluster {
            Cluster::None => String::new(),
            Cluster::M(blocks) => format!("m{blocks}"),
            Cluster::N(blocks) => format!("n{blocks}"),
        };
        let chosen = format!("{exchanged}{letter}{m}x{n}{cluster}");
        assert!(fastest.split(' ').any(|tile| tile == chosen), "{size:?}: {chosen}, not one of {fastest}");
    }
}

#[test]
fn long_products_hide_gelu_in_small_steps() {
    let small_steps_of = |tile, activation, size| {
        let p = Problem { activation, has_bias: true, ..problem(DType::BF16, size) };
        Config::of(&p, tile, UNITS).small_steps
    };
    let small_steps = |tile, activation, k| small_steps_of(tile, activation, [4096, 4096, k]);
    let (in_turn, together) = (TILES[0], TILES[1]);
    assert!(small_steps(in_turn, Some(Kind::Gelu), 1024) && !small_steps(in_turn, Some(Kind::Gelu), 512));
    assert!(!small_steps(in_turn, Some(Kind::Silu), 4096) && !small_steps(in_turn, None, 4096));
    assert!(!small_steps(together, Some(Kind::Gelu), 4096));
    // A tile for each consumer or none: the epilogue is not hidden.
    assert!(!small_steps_of(in_turn, Some(Kind::Gelu), [512, 4096, 1024]));
}

#[test]
fn tiles_follow_the_shape() {
    let choice = |size| {
        let p = problem(DType::BF16, size);
        Config::of(&p, Tile::choose(&p, UNITS).unwrap(), UNITS).describe()
    };
    assert_eq!(choice([4096, 4096, 4096]), "tiles of 128 x 256, two consumers, 4 stages");
    assert_eq!(choice([4096, 4096, 1024]), "tiles of 128 x 128, consumers in turn, 6 stages");
    assert_eq!(
        choice([1000, 3000, 2056]),
        "tiles of 128 x 192, two consumers, clusters of 2 along M, 4 stages"
    );
    assert_eq!(choice([512, 10240, 8192]), "tiles of 128 x 160, two consumers, 5 stages");
    assert_eq!(choice([3, 14336, 4096]), "tiles of 8 x 112, one consumer, 12 stages");
    assert_eq!(choice([1, 4096, 4096]), "tiles of 8 x 32, one consumer, 21 stages of 256 bytes of K");
    assert_eq!(choice([16, 1024, 3072]), "tiles of 16 x 16, one consumer, 13 stages of 512 bytes of K");
    assert_eq!(choice([64, 10240, 8192]), "tiles of 64 x 80, one consumer, 11 stages");
    // K is no whole number of larger stages.
    assert_eq!(choice([16, 1024, 3008]), "tiles of 16 x 16, one consumer, 24 stages");
    // It ends inside a piece, which is filled with zeros anyway.
    assert_eq!(choice([3, 440, 4632]), "tiles of 8 x 16, one consumer, 17 stages of 512 bytes of K");
    // There would be too many of them.
    assert!(choice([3, 440, 72]).ends_with("one consumer, 24 stages"));
}

#[test]
fn many_tiles_of_w_that_threads_load_are_two_to_a_multiprocessor() {
    let choice = |gate, size| {
        let p = Problem { direct_w: true, gate, ..problem(DType::BF16, size) };
        let tile = Tile::choose(&p, UNITS).unwrap();
        assert_compiles(&p, &Config::of(&p, tile, UNITS));
        [tile.n, tile.blocks_per_unit]
    };
    assert_eq!(choice(Gate::Halves, [1, 102_400, 1056]), [96, 2]);
    assert_eq!(choice(Gate::None, [8, 10_440, 1009]), [48, 2]);
    // Registers do not suffice for more rows of `x` and their sums, and a tile for each multiprocessor needs no second.
    assert_eq!(choice(Gate::None, [32, 23_808, 233])[1], 1);
    assert_eq!(choice(Gate::None, [5, 592, 1033])[1], 1);
}

#[test]
fn few_weights_come_ahead() {
    let bytes = |size| {
        let p = problem(DType::BF16, size);
        let tile = Tile::choose(&p, UNITS).unwrap();
        Config::of(&p, tile, UNITS).ahead(&p, UNITS) * tile.n * tile.pieces * STAGE_ROW / tile.cluster_m()
    };
    assert_eq!(bytes([1, 4096, 4096]), 64 << 10);
    // Half of a tile.
    assert_eq!(bytes([1, 4096, 1024]), 32 << 10);
    assert_eq!(bytes([32, 6144, 1024]), 48 << 10);
    // Not on idle multiprocessors, and not of weights that L2 keeps.
    assert_eq!(bytes([1, 1024, 6144]), 0);
    assert_eq!(bytes([1024, 1024, 1024]), 0);
    assert_eq!(bytes([512, 4096, 1024]), 32 << 10);
}

#[test]
fn divisors_divide() {
    for value in [1, 2, 3, 7, 16, 43, 128, 1000, 65_537, 1 << 30, (1 << 31) - 1] {
        let d = Divisor::new(value);
        let around = |n: usize| [n.saturating_sub(1), n, n + 1];
        let multiples = [1, 2, 3, 1000, (1usize << 31) / value].map(|times| around(times * value));
        let numbers = multiples.as_flattened().iter().copied().chain([0, 1, (1 << 31) - 1]);
        for n in numbers.filter(|&n| n < 1 << 31) {
            let upper = ((n as u64 * u64::from(d.factor)) >> 32) as u32;
            assert_eq!((upper + n as u32) >> d.shift, (n / value) as u32, "{n} / {value}");
        }
    }
}

#[test]
fn a_row_of_tiles_that_is_mostly_empty_comes_last() {
    let band = |m| TILES[0].band(&problem(DType::BF16, [m, 4096, 4096]));
    // Seven rows of tiles, the last with 9 rows of 128.
    assert_eq!(band(777), 6);
    assert_eq!(band(7 * 128), 7);
    assert_eq!(band(4097), 16);
    assert_eq!(band(128), 1);
}

#[test]
fn the_covering_set_has_every_value_of_every_define() {
    let all = variants();
    let values = |name: &str| {
        let mut found: Vec<&str> =
            all.iter().flat_map(|d| d.iter().filter(|d| d.0 == name).map(|d| d.1.as_str())).collect();
        found.sort_unstable();
        found.dedup();
        found
    };
    for name in [
        "PINGPONG",
        "EXCHANGED",
        "X_MAJOR_MN",
        "W_MAJOR_MN",
        "TMA_STORE",
        "LINE_STORE",
        "HAS_BIAS",
        "HAS_RESIDUAL",
        "HAS_SCALE",
        "SMALL_STEPS",
    ] {
        assert_eq!(values(name), ["0", "1"], "{name}");
    }
    assert_eq!(values("ACTIVATION"), ["0", "1", "2", "3", "4"]);
    assert_eq!(values("SCALING"), ["0", "1", "2"]);
    assert_eq!(values("GATE"), ["0", "1", "2"]);
    let mut rows: Vec<_> = [8, 16, 32, 64].into_iter().chain(TILES.map(|t| t.m)).collect();
    rows.extend(EXCHANGED.map(|t| t.m));
    let mut rows: Vec<_> = rows.iter().map(usize::to_string).collect();
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(values("X_ROWS"), rows);
    for (name, expected) in [
        ("CLUSTER_M", &["1", "2"][..]),
        ("CLUSTER_N", &["1", "2", "4"]),
        ("BLOCKS_PER_SM", &["1", "2"]),
        ("CONSUMERS", &["1", "2"]),
    ] {
        assert_eq!(values(name), expected, "{name}");
    }
}
