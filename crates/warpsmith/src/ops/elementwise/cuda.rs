//! The engine on CUDA devices: host half. The device half is `elementwise.cuh`.

use super::{Grid, MAX_STREAMS};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{RowKind, blocks_ahead, element, flag, is_large};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::tensor::MAX_RANK;

/// Threads of a block; the device half says the same.
const THREADS: usize = 256;
/// Bytes of a row from which unaligned pieces pay: those at its ends are moved element by element.
const LEAST_UNALIGNED: usize = 256;
/// The fewest blocks per multiprocessor before threads take several units.
const BLOCKS_PER_UNIT: usize = 5;

kernel_params! {
    /// Where rows start: the C twin of a merged space.
    pub(in crate::ops) struct ElementwiseRows {
        rank: i32,
        sizes: [i64; MAX_RANK],
        strides: [[i64; MAX_RANK]; MAX_STREAMS],
    }
}

kernel_params! {
    pub(in crate::ops) struct ElementwiseParams {
        streams: [u64; MAX_STREAMS],
        steps: [i64; MAX_STREAMS],
        columns: i64,
        num_rows: i64,
        column_tiles: u32,
        lanes_log2: u32,
        period: u32,
        blocks_ahead: i32,
        is_large: i32,
        rows: ElementwiseRows,
    }
}

impl ElementwiseRows {
    pub(in crate::ops) fn of(grid: &Grid) -> Self {
        ElementwiseRows {
            rank: grid.rows.rank as i32,
            sizes: grid.rows.sizes.map(|n| n as i64),
            strides: grid.rows.strides.map(|s| s.map(|n| n as i64)),
        }
    }
}

/// What an op's expression reads and writes.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Signature {
    pub inputs: usize,
    pub outputs: usize,
    /// The last input is a vector that is repeated.
    pub shared: bool,
    /// The op has tensors whose even and odd elements are different operands.
    pub pairs: bool,
}

impl Signature {
    /// Most units a thread loads before it computes. Many threads of one unit each are fastest, and of 32 bytes where units are
    /// pairs with one result; where a vector is shared by several rows, or rows of one input must be found first, four.
    const fn items(self, unit: Unit, paired: bool, flat: bool, shared: bool) -> usize {
        if self.outputs > 1 || matches!(unit, Unit::Unaligned) {
            1
        } else if paired {
            2
        } else if !flat && self.inputs - shared as usize == 1 {
            4
        } else {
            1
        }
    }

    /// Whether four units a thread are faster where that gives nearly every multiprocessor one block, so that all run
    /// at once: memory then has all requests from the start.
    const fn fills_one_round(self, unit: Unit, paired: bool, flat: bool, shared: bool) -> bool {
        let one_result = self.outputs == 1 && !matches!(unit, Unit::Unaligned);
        one_result && !paired && (shared || (flat && self.inputs == 3))
    }
}

/// What threads move at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    /// A column.
    Element,
    /// 16 bytes of columns, at aligned addresses.
    Aligned,
    /// 16 bytes of columns of dense rows that begin and end at any of them.
    Unaligned,
}

impl Unit {
    const ALL: [Unit; 3] = [Unit::Element, Unit::Aligned, Unit::Unaligned];

    /// A repeated vector may have any stride: it is small.
    fn new(grid: &Grid, signature: Signature) -> Unit {
        let vector = signature.shared.then_some(signature.inputs - 1);
        let dense = grid.steps.iter().enumerate().all(|(t, &step)| step == 1 || Some(t) == vector);
        match grid.columns * grid.dtype.size() >= LEAST_UNALIGNED {
            _ if grid.vector => Unit::Aligned,
            true if dense => Unit::Unaligned,
            _ => Unit::Element,
        }
    }

    /// `VECTOR` of the device code.
    fn vector_level(self) -> u8 {
        match self {
            Unit::Element => RowKind::Any,
            Unit::Aligned => RowKind::Aligned,
            Unit::Unaligned => RowKind::Dense,
        }
        .vector_level()
    }
}

/// The compile-time choices of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mode {
    items: usize,
    flat: bool,
    unit: Unit,
    paired: bool,
    /// The last input is the same in every row: a vector that is repeated if there is one run, and one whose neighbours
    /// are not adjacent with unaligned units.
    shared: bool,
}

impl Mode {
    fn defines(self) -> Defines {
        vec![
            ("ITEMS", self.items.to_string()),
            flag("FLAT", self.flat),
            ("VECTOR", self.unit.vector_level().to_string()),
            flag("PAIRED", self.paired),
            flag("SHARED", self.shared),
        ]
    }

    /// Every mode [`Plan::new`] can choose.
    fn all(signature: Signature) -> Vec<Mode> {
        let mut all = Vec::new();
        for (bits, unit) in (0..8).flat_map(|bits| Unit::ALL.map(|unit| (bits, unit))) {
            let [flat, paired, shared] = [1, 2, 4].map(|bit| bits & bit != 0);
            let most = signature.items(unit, paired, flat, shared);
            let round = signature.fills_one_round(unit, paired, flat, shared);
            let choices = [4, 2, 1].into_iter().filter(|&items| items <= most || (round && items == 4));
            for items in choices {
                // Pairs that cannot be moved in aligned pieces are two strided tensors like any others.
                let pairs = !paired || (signature.pairs && unit == Unit::Aligned);
                let shares = !shared || (signature.shared && (!flat || unit != Unit::Element));
                if pairs && shares {
                    all.push(Mode { items, flat, unit, paired, shared });
                }
            }
        }
        all
    }
}

/// How a call is divided.
#[derive(Clone, Copy, Debug)]
struct Plan {
    mode: Mode,
    /// Units of columns of a block are a power of two.
    lanes_log2: u32,
    column_tiles: usize,
    blocks: usize,
    /// Of every stream.
    block_columns: usize,
    /// Of the rows, or of the one run that they are.
    columns: usize,
}

impl Plan {
    fn new(grid: &Grid, signature: Signature, info: &DeviceInfo) -> Plan {
        // Rows that no vector divides, with a bias: one run, in which it is repeated. Positions have 32 bits there.
        let repeats = signature.shared && grid.repeats && !grid.vector && u32::try_from(grid.len()).is_ok();
        let unit = if repeats { Unit::Aligned } else { Unit::new(grid, signature) };
        let columns = if repeats { grid.len() } else { grid.columns };
        let paired = grid.paired && unit == Unit::Aligned;
        // A unit of pairs is 16 bytes of them, so half as many columns.
        let per_unit = if unit == Unit::Element { 1 } else { 16 / grid.dtype.size() / (1 + paired as usize) };
        // Those of an unaligned row begin before it.
        let ahead = if unit == Unit::Unaligned { per_unit - 1 } else { 0 };
        let units = (ahead + columns).div_ceil(per_unit);
        let flat = repeats || grid.num_rows == 1;
        let lanes = if flat { THREADS } else { units.next_power_of_two().min(THREADS) };
        let column_tiles = units.div_ceil(lanes);
        let blocks = |items: usize| match flat {
            true => units.div_ceil(THREADS * items),
            false => column_tiles * grid.num_rows.div_ceil(THREADS / lanes * items),
        };
        // A repeated vector runs along the rows instead if the other tensors are transposed.
        let same =
            grid.rows.strides[signature.inputs - 1][..grid.rows.rank].iter().all(|&stride| stride == 0);
        let shared = signature.shared
            && match unit {
                Unit::Unaligned => grid.steps[signature.inputs - 1] != 1,
                _ => repeats || (!flat && same),
            };
        let mut items = signature.items(unit, paired, flat, shared);
        let round = (info.units / 2 + 1..=info.units).contains(&blocks(4));
        if round && signature.fills_one_round(unit, paired, flat, shared) {
            items = 4;
        } else {
            while items > 1 && blocks(items) < info.units * BLOCKS_PER_UNIT {
                items /= 2;
            }
        }
        let mode = Mode { items, flat, unit, paired, shared };
        Plan {
            mode,
            lanes_log2: lanes.ilog2(),
            column_tiles,
            blocks: blocks(items),
            block_columns: THREADS * items * per_unit,
            columns,
        }
    }
}

/// The configuration of a call, as text.
pub(in crate::ops) fn describe(grid: &Grid, signature: Signature, info: &DeviceInfo) -> String {
    let Plan { mode, column_tiles, blocks, .. } = Plan::new(grid, signature, info);
    let run = match mode {
        Mode { flat: true, shared: true, unit: Unit::Aligned, .. } => "one run with a repeated vector",
        Mode { flat: true, .. } => "one run",
        _ => "rows",
    };
    let unit = match mode.unit {
        Unit::Element => "elements",
        Unit::Aligned => "16-byte pieces",
        Unit::Unaligned => "unaligned 16-byte pieces",
    };
    format!("{run} of {unit}, {} a thread, {blocks} blocks ({column_tiles} a row)", mode.items)
}

/// Every set of defines a launch can ask for, times the op's own.
pub(in crate::ops) fn variants(signature: Signature, own: &[Defines]) -> Vec<Defines> {
    let mut all = Vec::new();
    for mode in Mode::all(signature) {
        for dtype in FLOATS {
            for own in own {
                all.push([mode.defines(), vec![element(dtype)], own.clone()].concat());
            }
        }
    }
    all
}

/// The device half of an op.
pub(in crate::ops) const fn device(
    source: Source,
    function: &'static str,
    variants: fn() -> Vec<Defines>,
) -> CudaKernel {
    let min_arch = Arch::new(6, 0, false);
    CudaKernel {
        source,
        prelude: ElementwiseParams::prelude,
        function,
        min_arch,
        fast_math: false,
        overlaps: true,
        variants,
    }
}

/// Launches the call's kernel; `addresses` are those of the inputs, then of the outputs.
///
/// # Safety
/// The tensors must lie at the addresses as `grid` describes until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(
    launch: &Launch<'_, P>,
    device: &'static CudaKernel,
    grid: &Grid,
    signature: Signature,
    addresses: &[usize],
    own: Defines,
) -> Result<()> {
    assert_eq!(addresses.len(), signature.inputs + signature.outputs);
    let plan = Plan::new(grid, signature, launch.info);
    let too_many = |_| Error::Launch {
        kernel: device.function.into(),
        what: "number of blocks",
        got: plan.blocks as u64,
        limit: i32::MAX as u64,
    };
    let blocks = i32::try_from(plan.blocks).map_err(too_many)? as u32;
    let large = is_large(launch.info, grid.num_rows * grid.columns, grid.dtype);
    let params = ElementwiseParams {
        streams: std::array::from_fn(|t| addresses.get(t).map_or(0, |&a| a as u64)),
        steps: grid.steps.map(|s| s as i64),
        columns: plan.columns as i64,
        num_rows: grid.num_rows as i64,
        column_tiles: plan.column_tiles as u32,
        lanes_log2: plan.lanes_log2,
        period: grid.columns as u32,
        is_large: large,
        blocks_ahead: blocks_ahead(
            launch.info,
            large,
            plan.block_columns * grid.dtype.size() * signature.inputs,
        ),
        rows: ElementwiseRows::of(grid),
    };
    let defines = [plan.mode.defines(), vec![element(grid.dtype)], own].concat();
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: passed on; the plan covers every element once.
    unsafe { launch.record_part(device, &defines, &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::Stream;
    use super::*;
    use crate::device::Device;
    use crate::tensor::{DType, Layout, Shape};

    fn plan(shape: &[usize], strides: [&[isize]; 3]) -> Plan {
        let shape = Shape::new(shape).unwrap();
        let stream = |s: &[isize]| Stream { layout: Layout::strided(shape, s).unwrap(), address: 256 };
        let grid = Grid::new(DType::BF16, strides.map(stream), &[]);
        let info = DeviceInfo { units: 132, ..Device::Cpu.info().unwrap() };
        let signature = Signature { inputs: 2, outputs: 1, shared: true, pairs: false };
        let plan = Plan::new(&grid, signature, &info);
        assert!(Mode::all(signature).contains(&plan.mode), "{plan:?} is listed");
        plan
    }

    #[test]
    fn plans_cover_every_element_once() {
        let bias: &[isize] = &[0, 1];
        let large = plan(&[32768, 4096], [&[4096, 1], bias, &[4096, 1]]);
        assert_eq!(
            large.mode,
            Mode { items: 4, flat: false, unit: Unit::Aligned, paired: false, shared: true }
        );
        assert_eq!((large.column_tiles, large.blocks), (2, 2 * 32768 / 4));
        let small = plan(&[128, 4096], [&[4096, 1], bias, &[4096, 1]]);
        assert_eq!((small.mode.items, small.blocks), (1, 256));
        let one_round = plan(&[256, 4096], [&[4096, 1], bias, &[4096, 1]]);
        assert_eq!((one_round.mode.items, one_round.blocks), (4, 128));
        let between = plan(&[1024, 4096], [&[4096, 1], bias, &[4096, 1]]);
        assert_eq!((between.mode.items, between.blocks), (2, 2 * 1024 / 2));
        let narrow = plan(&[1000, 24], [&[24, 1], bias, &[24, 1]]);
        assert_eq!(
            (1 << narrow.lanes_log2, narrow.column_tiles, narrow.blocks),
            (4, 1, 1000usize.div_ceil(64))
        );
        let transposed = plan(&[300, 24], [&[1, 300], bias, &[1, 300]]);
        assert_eq!((transposed.mode.unit, transposed.mode.shared), (Unit::Unaligned, true));
        assert_eq!((1 << transposed.lanes_log2, transposed.column_tiles), (64, 1));
        let odd = plan(&[1000, 131], [&[133, 1], bias, &[131, 1]]);
        assert_eq!((odd.mode.unit, 1 << odd.lanes_log2, odd.column_tiles), (Unit::Unaligned, 32, 1));
        assert!(!odd.mode.shared, "rows begin in different places of their first pieces");
        let run = plan(&[1000, 131], [&[131, 1], bias, &[131, 1]]);
        assert_eq!((run.mode.unit, run.mode.flat, run.mode.shared), (Unit::Aligned, true, true));
        assert_eq!((run.columns, run.blocks), (131000, 131000usize.div_ceil(8 * 256)));
        let strided = plan(&[1000, 131], [&[133, 1], &[0, 2], &[131, 1]]);
        assert_eq!((strided.mode.unit, strided.mode.shared), (Unit::Unaligned, true));
        let short = plan(&[1000, 127], [&[133, 1], bias, &[131, 1]]);
        assert_eq!((short.mode.unit, 1 << short.lanes_log2), (Unit::Element, 128));
    }
}
