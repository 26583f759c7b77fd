use super::*;
use crate::layout::{Layout, Shape, Space};
use crate::ops::elementwise::function::Kind;

const UNITS: usize = 132;

/// Rows of `x`, `w` and `out` without gaps.
fn problem(dtype: DType, [m, n, k]: [usize; 3]) -> Problem {
    let dense = |cols: usize| Strides { batch: 0, row: cols as isize, col: 1 };
    let scalar = Layout::contiguous(Shape::new(&[]).unwrap());
    Problem {
        x_dtype: dtype,
        w_dtype: dtype,
        out_dtype: if dtype.size() == 1 { DType::BF16 } else { dtype },
        batch: 1,
        m,
        n,
        k,
        x: dense(k),
        w: dense(k),
        out: dense(n),
        residual: Strides::default(),
        x_scale: Strides::default(),
        w_scale: Strides::default(),
        bias_step: 1,
        outer: Space::new(0, [&scalar; 6]),
        x_order: Order::Rows,
        w_order: Order::Rows,
        out_order: Order::Rows,
        residual_order: Order::Any,
        activation: None,
        gate: Gate::None,
        dequant: Dequant::None,
        tf32: dtype == DType::F32,
        full: false,
        has_bias: false,
        has_residual: false,
        scale_bits: 1f32.to_bits(),
    }
}

/// What the device code asserts when it is compiled.
fn assert_compiles(p: &Problem, config: &Config) {
    let Tile { schedule, m, n, x_rows, blocks_per_unit, .. } = config.tile;
    let (tile, size) = (config.tile, p.x_dtype.size());
    let (cluster_m, cluster_n) = (tile.cluster_m(), tile.cluster_n());
    let shares = if schedule == Schedule::Cooperative { 2 } else { 1 };
    let row_blocks = m / 64 / shares;
    let columns = tile.columns(p.gate);
    assert!(m == row_blocks * 64 * shares && row_blocks >= 1 && row_blocks * n <= 256);
    assert!(n.is_multiple_of(16) && n <= 256 && columns.is_multiple_of(16));
    assert!(x_rows == m || (x_rows < 64 && m == 64 && x_rows.is_multiple_of(8) && !config.x_columns));
    assert!(p.m <= x_rows || x_rows == m, "every row of x is loaded");
    assert!(cluster_m == 1 || cluster_n == 1);
    assert!([1, 2, 4, 8].contains(&tile.cluster_blocks()));
    assert!(x_rows.is_multiple_of(8 * cluster_n));
    assert!(n.is_multiple_of(if p.gate == Gate::None { 8 } else { 16 } * cluster_m));
    assert!(!config.x_columns || size == 2);
    assert!(!config.w_columns || (size == 2 && n.is_multiple_of(64) && p.gate == Gate::None));
    if p.dequant == Dequant::Blocks {
        assert!(row_blocks * n <= 128);
        assert_eq!(128 % if p.gate == Gate::Interleaved { n } else { columns }, 0);
    }
    let shared = config.shared_bytes();
    assert!(config.stages() >= 2 && shared <= if blocks_per_unit == 1 { 232_448 } else { 115_712 });
    assert!((config.stages() - 1) * x_rows * 128 + m * 128 <= shared);
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
                    for p in all {
                        match Tile::choose(&p, UNITS) {
                            Some(tile) => assert_compiles(&p, &Config::of(&p, tile)),
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

#[test]
fn tiles_follow_the_shape() {
    let choice = |size| {
        let p = problem(DType::BF16, size);
        Config::of(&p, Tile::choose(&p, UNITS).unwrap()).describe()
    };
    assert_eq!(choice([4096, 4096, 4096]), "tiles of 128 x 128, consumers in turn, 6 stages");
    assert_eq!(
        choice([1000, 3000, 2056]),
        "tiles of 128 x 192, two consumers, clusters of 2 along M, 4 stages"
    );
    assert_eq!(choice([512, 10240, 8192]), "tiles of 128 x 160, two consumers, 5 stages");
    assert_eq!(choice([3, 14336, 4096]), "tiles of 8 x 112, one consumer, 12 stages");
    assert_eq!(
        choice([1, 4096, 4096]),
        "tiles of 8 x 32, one consumer, 2 blocks per multiprocessor, 19 stages"
    );
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
    for name in ["PINGPONG", "X_MAJOR_MN", "W_MAJOR_MN", "TMA_STORE", "HAS_BIAS", "HAS_RESIDUAL", "HAS_SCALE"]
    {
        assert_eq!(values(name), ["0", "1"], "{name}");
    }
    assert_eq!(values("ACTIVATION"), ["0", "1", "2", "3", "4"]);
    assert_eq!(values("SCALING"), ["0", "1", "2"]);
    assert_eq!(values("GATE"), ["0", "1", "2"]);
    assert_eq!(values("X_ROWS"), ["128", "16", "256", "32", "64", "8"]);
    for name in ["CLUSTER_M", "CLUSTER_N", "BLOCKS_PER_SM", "CONSUMERS"] {
        assert_eq!(values(name), ["1", "2"], "{name}");
    }
}
