//! How the tensor-core kernel shares out the work of a call: blocks, launches and scratch memory, as pure functions of
//! the problem and the device.

use super::Problem;
use super::problem::Shared;
use crate::device::DeviceInfo;
use crate::tensor::DType;
use std::fmt;

/// Keys whose states are folded first, keys of a span, and keys a block takes in at once, as in the device code.
pub(super) const SEGMENT: usize = 128;
pub(super) const SPAN: usize = 1024;
pub(super) const SEGMENTS: usize = SPAN / SEGMENT;
pub(super) const ROUND: usize = 512;
/// Rows from which on a request's keys are not shared out over the warps of a block.
pub(in crate::ops) const FEW_ROWS: usize = 32;
/// Keys or values of a warp's unit.
pub(super) const UNIT_KEYS: usize = 16;
/// Rows of a tile of a warp, and rows that half a tile has.
pub(super) const TILE_ROWS: usize = 16;
const EIGHT: usize = 8;
/// Warps of a block that share the keys of few rows.
const WARPS: usize = 4;
/// Blocks for each that runs at once: more than one evens out their lengths, too many have nothing to do.
const WAVES: usize = 4;
/// Most spans of a piece that has not all: some of many requests may be shorter than they can be.
const MOST_SPANS: usize = 4;
/// Keys up to which the lengths of requests are taken not to differ by much.
const EVEN: usize = 4096;
/// Longest heads whose kernel may let the lengths decide whether requests stay whole, as in the device code.
const DECIDING_HEAD: usize = 128;
/// Shared memory that every block has besides: where pages are, and numbers of pieces; and how much more there is of it with
/// pages that are not multiples of 16 keys.
const STATIC_SHARED: usize = 6 << 10;
const PLACES_OF_KEYS: usize = 13 << 10;
/// More scratch memory than this is not asked for, without shared prefixes and with them.
pub(super) const MOST_WORKSPACE: usize = 256 << 20;
const MOST_SHARED_WORKSPACE: usize = 1 << 30;
/// Bytes of what the lengths decided, with which states stay at multiples of 16.
const DECISION: usize = 16;

/// What blocks are made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) enum Load {
    /// Few rows: four warps share the keys.
    Few,
    /// At most eight rows, the same.
    Eight,
    /// At most eight rows, and a block for each multiprocessor: eight warps share the keys.
    EightAlone,
    /// Few rows, and few keys of many requests: one warp a block, and many blocks.
    FewAndShort,
    /// Many rows: warps have different ones.
    Many,
}

impl Load {
    pub const ALL: [Load; 5] = [Load::Few, Load::Eight, Load::EightAlone, Load::FewAndShort, Load::Many];
}

/// How a block is made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) struct Shape {
    /// Rows of a warp.
    pub warp_rows: usize,
    /// Warps with different rows.
    pub row_warps: usize,
    /// Groups of warps with different keys.
    pub key_warps: usize,
    /// Units in a group's ring.
    pub ring: usize,
    /// Keys of a step.
    pub step: usize,
    /// Blocks a multiprocessor should hold.
    pub blocks: usize,
}

impl Shape {
    /// For blocks with at most so many bytes of shared memory.
    pub fn new(head_dim: usize, cache: DType, load: Load, shared: usize) -> Shape {
        let long = head_dim > 128;
        let blocks = if long { 1 } else { 2 };
        // Enough on the way to keep the memory busy.
        let narrow = cache.size() == 1;
        let rings: &[usize] = match (load, head_dim * cache.size()) {
            (Load::Many, _) => &[4, 2],
            (_, ..=128) if narrow => &[5],
            (_, ..=128) => &[8],
            (Load::FewAndShort, ..=256) => &[6],
            (_, ..=256) => &[if narrow && head_dim > 160 { 6 } else { 5 }, 4],
            _ => &[4, 3],
        };
        // Long heads leave few registers for scores.
        let step = match head_dim {
            161.. => 16,
            128 => 32,
            _ => 64,
        };
        let shape = |ring| {
            let few = Shape { warp_rows: TILE_ROWS, row_warps: 1, key_warps: WARPS, ring, step, blocks };
            match load {
                Load::Few => few,
                Load::Eight => Shape { warp_rows: EIGHT, ..few },
                Load::EightAlone => Shape { warp_rows: EIGHT, key_warps: 8, blocks: 1, ..few },
                Load::FewAndShort => Shape { key_warps: 1, blocks: 3 * blocks, ..few },
                Load::Many => Shape { row_warps: if long { 2 } else { 4 }, key_warps: 1, ..few },
            }
        };
        let fits = |ring: &&usize| shape(**ring).shared(head_dim, cache, 2) + STATIC_SHARED <= shared;
        shape(*rings.iter().find(fits).unwrap_or(&rings[rings.len() - 1]))
    }

    /// The same for rows that have two segments of keys at most: a warp for each, and only what so many keys need. No bit
    /// depends on it.
    pub fn of_few_keys(self, keys: usize) -> Shape {
        let step = self.step.min(keys.next_power_of_two().max(UNIT_KEYS));
        let units = 2 * keys.div_ceil(UNIT_KEYS).max(1);
        let (key_warps, blocks) = if keys <= SEGMENT { (1, 3 * self.blocks) } else { (2, 2 * self.blocks) };
        Shape { key_warps, ring: self.ring.min(units + 1), step, blocks, ..self }
    }

    fn rows(&self) -> usize {
        self.warp_rows * self.row_warps
    }

    pub fn threads(&self) -> usize {
        32 * self.row_warps * self.key_warps
    }

    /// Bytes of shared memory, with room for the sums of some levels.
    fn shared(&self, head_dim: usize, cache: DType, levels: usize) -> usize {
        let row = |bytes: usize| 16 * if bytes.is_multiple_of(128) { bytes / 16 } else { (bytes / 16) | 1 };
        let rows = TILE_ROWS * self.row_warps;
        let keys = if cache.size() == 1 { rows.max(32) } else { rows };
        let unit = keys.min(self.step) * row(head_dim * cache.size());
        let queries = if head_dim > 128 { rows * row(2 * head_dim) } else { 0 };
        // The sums of all rows, and of each, in four threads, the largest score and the sum of weights.
        let level = self.rows() * (head_dim + 8) * size_of::<f32>();
        queries + self.key_warps * self.ring * unit + levels * level
    }
}

/// How keys are shared out over blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) enum Extent {
    /// A block takes a round, and leaves the states of its segments.
    Round,
    /// A block takes so many spans, and leaves their states.
    Spans(usize),
    /// A block takes all keys of its rows.
    All,
}

impl Extent {
    /// Keys of a range whose state is kept; zero if none is.
    pub fn range_keys(self) -> usize {
        match self {
            Extent::Round => SEGMENT,
            Extent::Spans(_) => SPAN,
            Extent::All => 0,
        }
    }

    pub fn piece_keys(self) -> usize {
        match self {
            Extent::Round => ROUND,
            Extent::Spans(count) => count * SPAN,
            Extent::All => 0,
        }
    }
}

/// Shared memory of a block, without what it needs for small pages.
fn room(p: &Problem, info: &DeviceInfo) -> usize {
    let small_pages = !p.full && !p.page_size.is_multiple_of(UNIT_KEYS);
    info.shared_per_block.saturating_sub(if small_pages { PLACES_OF_KEYS } else { 0 })
}

/// Bytes of the states of all rows over so many ranges of keys.
pub(super) fn states(p: &Problem, ranges: usize) -> usize {
    ranges * p.num_tokens * p.num_heads * (p.head_dim + 2) * size_of::<f32>()
}

/// One launch, for the requests with some numbers of queries, or for the groups of a level of shared prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) struct Part {
    pub shape: Shape,
    pub extent: Extent,
    /// Most pieces of work there can be.
    pub pieces: usize,
    /// Groups of the level, or requests.
    pub requests: usize,
    pub min_queries: usize,
    pub max_queries: usize,
    pub level: usize,
    /// Blocks that run at once.
    pub slots: usize,
    /// Whether the kernel leaves requests whole if their lengths say that it is no slower.
    pub lengths_decide: bool,
}

impl Part {
    /// Of requests with numbers of queries from `queries[0]` to `queries[1]`, as their lengths may require.
    fn new(p: &Problem, info: &DeviceInfo, load: Load, queries: [usize; 2]) -> Part {
        // A warp takes long for sixteen rows of long heads: two with eight each, if all keys find warps at once.
        let segments = p.requests * p.num_kv_heads * p.max_keys().div_ceil(SEGMENT);
        let idle = |rows: usize| p.head_dim > 128 && rows.div_ceil(EIGHT) * segments <= WARPS * info.units;
        let eight = p.queries.map(|count| count * p.group()).is_some_and(|rows| rows <= EIGHT || idle(rows));
        let load = if eight && load == Load::Few { Load::Eight } else { load };
        let tiles = |rows: usize| match p.queries {
            Some(count) => p.requests * (count * p.group()).div_ceil(rows),
            None => (p.num_tokens * p.group()).div_ceil(rows) + p.requests,
        };
        let part = Part::spans(p, info, load, tiles);
        let whole = part.pieces / p.max_keys().div_ceil(SPAN).max(1);
        // Blocks with all keys of their rows are the best if there are enough to even out their lengths; many rows take
        // long enough to do without that, and lengths that differ by little have nothing to even out. Half the blocks that
        // run at once keep the memory busy, but not with narrow caches, which are as much work for half the bytes.
        let busy = |pieces: usize| pieces >= 3 * part.slots / 4;
        let few = if p.cache_dtype.size() == 1 { part.slots } else { part.slots / 2 };
        let enough = match load {
            Load::Many => part.slots,
            _ if p.max_keys() <= EVEN => 3 * few / 4,
            _ => WAVES * part.slots,
        };
        let alone = Shape::new(p.head_dim, p.cache_dtype, Load::EightAlone, room(p, info));
        let alone_fits = load == Load::Eight
            && p.head_dim <= 128
            && p.cache_dtype.size() == 2
            && alone.shared(p.head_dim, p.cache_dtype, 2) + STATIC_SHARED <= room(p, info);
        // Eight warps read a span about as fast as rounds are read, and no second launch merges.
        let alone_over_a_span = alone_fits && p.max_keys() <= SPAN && whole <= info.units;
        let pieces_of = |spans: usize| whole * p.max_keys().div_ceil(spans * SPAN);
        let (extent, pieces) = if whole >= enough || p.max_keys() <= ROUND {
            (Extent::All, whole)
        } else if !busy(part.pieces) && !alone_over_a_span {
            (Extent::Round, whole * p.max_keys().div_ceil(ROUND))
        } else if p.max_keys() <= SPAN {
            (Extent::All, whole)
        } else {
            // So that blocks end together, and of those numbers the one with fewest blocks.
            let most = if p.requests == 1 { 2 * MOST_SPANS } else { MOST_SPANS };
            let time = |&spans: &usize| pieces_of(spans).div_ceil(part.slots) * spans;
            let spans = (1..=most).rev().min_by_key(time).unwrap_or(1);
            let all = whole.div_ceil(part.slots) * p.max_keys().div_ceil(SPAN);
            match p.full && all <= time(&spans) {
                true => (Extent::All, whole),
                false => (Extent::Spans(spans), pieces_of(spans)),
            }
        };
        let [min_queries, max_queries] = queries;
        // How long requests are, and which of them, the device alone knows.
        let can_decide = p.head_dim <= DECIDING_HEAD && !p.full;
        let lengths_decide = can_decide && matches!(extent, Extent::Spans(_)) && 2 * whole >= part.slots;
        let part = Part { extent, pieces, min_queries, max_queries, lengths_decide, ..part };
        if part.workspace(p, 0) > MOST_WORKSPACE {
            return Part { extent: Extent::All, pieces: whole, lengths_decide: false, ..part };
        }
        // Twice the warps where no multiprocessor would have a second block.
        if extent == Extent::All && alone_fits && pieces <= info.units && p.max_keys() > ROUND {
            return Part { shape: alone, slots: info.units, ..part };
        }
        if extent == Extent::All && load != Load::Many && p.max_keys() <= 2 * SEGMENT {
            let shape = part.shape.of_few_keys(p.max_keys());
            return Part { shape, slots: info.units * shape.blocks, ..part };
        }
        part
    }

    /// Of all requests, a span a block; `tiles` is the most there can be of tiles with so many rows.
    fn spans(p: &Problem, info: &DeviceInfo, load: Load, tiles: impl Fn(usize) -> usize) -> Part {
        let shape = Shape::new(p.head_dim, p.cache_dtype, load, room(p, info));
        Part {
            shape,
            extent: Extent::Spans(1),
            pieces: tiles(shape.rows()) * p.num_kv_heads * p.max_keys().div_ceil(SPAN).max(1),
            requests: p.requests,
            min_queries: 0,
            max_queries: p.num_tokens,
            level: 0,
            slots: info.units * shape.blocks,
            lengths_decide: false,
        }
    }

    /// States of a row: those of its ranges, and for each level those of the segments of a span that it shares with the
    /// level before.
    pub fn ranges(&self, p: &Problem, levels: usize) -> usize {
        match self.extent.range_keys() {
            0 => 0,
            keys => p.max_keys().div_ceil(keys) + levels * SEGMENTS,
        }
    }

    /// About how long a launch takes if all pieces are spans of keys in the cache.
    fn microseconds(&self) -> f64 {
        let each = if self.shape.row_warps > 1 { 56.0 } else { 20.0 };
        (self.pieces as f64 / self.slots as f64).max(1.0) * each
    }

    /// Bytes: the states of the rows, and what the lengths decided.
    pub fn workspace(&self, p: &Problem, levels: usize) -> usize {
        states(p, self.ranges(p, levels)) + if self.lengths_decide { DECISION } else { 0 }
    }

    /// Blocks of the launch. With all keys of their rows there are none without work, and those that wait are given to
    /// multiprocessors as they become free.
    pub fn blocks(&self) -> usize {
        let waves = if self.extent == Extent::All { 4 * WAVES } else { WAVES };
        self.pieces.min(waves * self.slots)
    }

    pub fn shared(&self, p: &Problem) -> usize {
        let levels = match self.extent {
            Extent::Round => 0,
            Extent::Spans(_) if !self.lengths_decide => 1,
            Extent::Spans(_) | Extent::All => 2,
        };
        self.shape.shared(p.head_dim, p.cache_dtype, levels)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = match self.extent.piece_keys() {
            0 => "all".into(),
            keys => keys.to_string(),
        };
        let Shape { row_warps, key_warps, ring, .. } = self.shape;
        let rows = self.shape.rows();
        write!(f, "tiles of {rows} rows, {keys} keys a block of {row_warps} x {key_warps} warps, ")?;
        write!(f, "rings of {ring}, {} pieces", self.pieces)?;
        if self.lengths_decide {
            write!(f, " unless the lengths let requests stay whole")?;
        }
        Ok(())
    }
}

/// The launches of a call.
pub(in crate::ops) struct Plan {
    pub parts: Vec<Part>,
    /// Levels of shared prefixes that are read once for all requests of a group.
    pub levels: usize,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.levels > 0 {
            write!(f, "cascade of {} levels and the requests' own keys: ", self.levels)?;
        }
        for (i, part) in self.parts.iter().enumerate() {
            write!(f, "{}{part}", if i > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl Plan {
    /// For the requests with few rows alone: the others are another kernel's.
    pub fn few(p: &Problem, info: &DeviceInfo) -> Plan {
        let few = FEW_ROWS / p.group().max(1);
        let part = p.queries.is_none().then(|| Part::new(p, info, Load::Few, [0, few]));
        Plan { parts: part.into_iter().collect(), levels: 0 }
    }

    pub fn new(p: &Problem, info: &DeviceInfo) -> Plan {
        let few = FEW_ROWS / p.group().max(1);
        let most = p.queries.unwrap_or(p.num_tokens);
        if let Some(plan) = p.shared.and_then(|shared| Plan::cascade(p, &shared, info)) {
            return plan;
        }
        // One launch for requests with few rows, one for those with many, as far as there can be such.
        let parts = match p.queries {
            Some(count) if count > few => vec![Part::new(p, info, Load::Many, [0, most])],
            None if most > few => {
                vec![Part::new(p, info, Load::Few, [0, few]), Part::new(p, info, Load::Many, [few + 1, most])]
            }
            _ => vec![Part::new(p, info, Load::Few, [0, most])],
        };
        Plan { parts, levels: 0 }
    }

    /// The groups of each level, as if they were requests, and then the requests: launches for those with few rows and
    /// for those with many, as far as there can be such. None if it does not pay.
    fn cascade(p: &Problem, shared: &Shared, info: &DeviceInfo) -> Option<Plan> {
        if shared.levels == 0 || shared.groups == 0 {
            return None;
        }
        let few = FEW_ROWS / p.group().max(1);
        let parts = (0..=shared.levels).flat_map(|level| {
            let own = level == shared.levels;
            let requests = if own { p.requests } else { shared.groups };
            let rows = p.num_tokens * p.group();
            let tiles = move |tile: usize| rows.div_ceil(tile) + requests.max(1) - 1;
            let part = move |load, min_queries, max_queries| {
                let part = Part::spans(p, info, load, tiles);
                Part { requests, level, min_queries, max_queries, ..part }
            };
            if requests == 1 && !own {
                // It is taken to have all requests; if it has not, its tiles are not full.
                let [few, many] = [Load::Few, Load::Many].map(|load| part(load, 0, p.num_tokens));
                return vec![if few.microseconds() < many.microseconds() { few } else { many }];
            }
            // What is not shared is short, it is hoped.
            let short = own && requests * p.num_kv_heads >= 2 * info.units;
            let of_few = if short { Load::FewAndShort } else { Load::Few };
            match if own { p.queries } else { None } {
                Some(count) => vec![part(if count > few { Load::Many } else { of_few }, 0, count)],
                None if p.num_tokens <= few => vec![part(of_few, 0, few)],
                None => vec![part(of_few, 0, few), part(Load::Many, few + 1, p.num_tokens)],
            }
        });
        let plan = Plan { parts: parts.collect(), levels: shared.levels };
        let pays = p.always_share || plan.pays(p, shared, info);
        (pays && plan.workspace(p) <= MOST_SHARED_WORKSPACE).then_some(plan)
    }

    /// Whether to read prefixes once for each group. Their lengths are not known here: it is judged as if tables were full
    /// and nearly all of them shared, and must be well worth it then.
    fn pays(&self, p: &Problem, shared: &Shared, info: &DeviceInfo) -> bool {
        // Of a multiprocessor, in a microsecond: bytes from memory, and from the cache, where a prefix is if requests read
        // it each for itself; and operations of the best kernel there is for many rows.
        const MEMORY: f64 = 32e3;
        const CACHE: f64 = 42e3;
        const OPERATIONS: f64 = 3e6;
        // Microseconds: of the requests' own keys and the merge, and of the launches of a level.
        const OWN: f64 = 20.0;
        const LEVEL: f64 = 8.0;
        let units = info.units as f64;
        let table = (2 * p.max_keys() * p.num_kv_heads * p.head_dim * p.cache_dtype.size()) as f64;
        let read = |tables: usize, rate: f64| tables as f64 * table / (units * rate);
        let products = 4.0 * (p.num_tokens * p.num_heads * p.head_dim) as f64 * p.max_keys() as f64;
        let apart = read(p.requests, CACHE).max(products / (units * OPERATIONS));
        // Groups of the mean size decide which of a level's launches has the work.
        let tokens = p.num_tokens / shared.groups;
        let level = |level: usize| {
            let part = self.parts.iter().find(|part| part.level == level && tokens <= part.max_queries);
            part.map_or(0.0, Part::microseconds)
        };
        // Levels share the keys out among them; groups of a level lie two or more in one of that before.
        let longest = (0..shared.levels).map(level).fold(0.0, f64::max);
        let groups = (shared.groups >> (shared.levels - 1)).max(1);
        let together = longest.max(read(groups, MEMORY)) + shared.levels as f64 * LEVEL + OWN;
        apart > 1.25 * together
    }

    /// Whether blocks have the shared memory that they need.
    pub fn fits(&self, p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
        let needs = self.parts.iter().map(|part| part.shared(p) + STATIC_SHARED).max().unwrap_or(0);
        match needs > room(p, info) {
            true => Err(format!("needs {needs} bytes of shared memory, the device has {}", room(p, info))),
            false => Ok(()),
        }
    }

    /// With shared prefixes, the parts leave their states side by side, for one merge.
    pub fn workspace(&self, p: &Problem) -> usize {
        match self.levels {
            0 => self.parts.iter().map(|part| part.workspace(p, 0)).sum(),
            levels => self.parts[0].workspace(p, levels),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::problem::check;
    use super::super::{
        ALWAYS_SHARE, GROUP_STARTS, K_PAGES, KV_LENS, OUT, PAGE_TABLE, PREFIX_LENS, Q, SPEC, V_PAGES,
    };
    use super::*;
    use crate::cpu::Tier;
    use crate::device::Device;
    use crate::op::{Args, Attrs, Value};
    use crate::tensor::Tensor;

    /// Requests of `queries` tokens with room for `keys`, 32 heads and 8 KV heads.
    pub(in super::super) fn problem(
        [requests, queries, keys]: [usize; 3],
        [levels, groups]: [usize; 2],
        always_share: bool,
    ) -> Problem {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
        let q = zeros(&[requests * queries, 32, 128], DType::BF16);
        let mut out = zeros(&[requests * queries, 32, 128], DType::BF16);
        let pages = zeros(&[1, 16, 8, 128], DType::BF16);
        let ints = |shape: &[usize]| zeros(shape, DType::I32);
        let (table, lens) = (ints(&[requests, keys.div_ceil(16)]), ints(&[requests]));
        let (starts, prefixes) = (ints(&[levels, groups + 1]), ints(&[levels, groups]));
        let args = Args::new(const { &SPEC }).input(Q, q.view()).input(K_PAGES, pages.view());
        let args = args.input(V_PAGES, pages.view()).input(PAGE_TABLE, table.view());
        let args = args.input(KV_LENS, lens.view()).input(GROUP_STARTS, starts.view());
        let args = args.input(PREFIX_LENS, prefixes.view()).output(OUT, out.view_mut());
        let attrs = Attrs::defaults(&SPEC).with(ALWAYS_SHARE, Value::Bool(always_share));
        check(&args, &attrs).unwrap()
    }

    /// The plan for 132 multiprocessors.
    fn plan(sizes: [usize; 3], groups: [usize; 2], always_share: bool) -> Plan {
        let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
        Plan::new(&problem(sizes, groups, always_share), &info)
    }

    #[test]
    fn prefixes_are_shared_where_it_pays() {
        let levels = |sizes, groups| plan(sizes, groups, false).levels;
        assert_eq!(levels([64, 1, 8320], [1, 1]), 1, "much is read again and again");
        assert_eq!(levels([16, 1, 8192], [1, 1]), 1);
        assert_eq!(levels([64, 1, 8320], [2, 16]), 2);
        assert_eq!(levels([4, 1, 131_072], [1, 1]), 1);
        assert_eq!(levels([16, 1, 2176], [1, 1]), 0, "launches take longer than reading");
        assert_eq!(levels([64, 1, 8320], [1, 64]), 0, "every request is a group");
        assert_eq!(levels([32, 20, 8320], [1, 1]), 0, "products take longer than reading");
        assert_eq!(levels([1 << 14, 1, 8192], [1, 1]), 0, "the states would take gigabytes");
        for none in [[0, 1], [1, 0]] {
            assert_eq!(plan([64, 1, 8320], none, true).levels, 0);
        }
    }

    #[test]
    fn keys_are_shared_out_where_blocks_are_few() {
        let extent = |sizes| plan(sizes, [0, 1], false).parts[0].extent;
        assert_eq!(extent([1, 1, 8192]), Extent::Round);
        assert_eq!(extent([4, 1, 8192]), Extent::Spans(1));
        assert_eq!(extent([1, 1, 98_304]), Extent::Spans(3), "one wave of blocks");
        assert_eq!(extent([1, 1, 131_072]), Extent::Spans(4));
        assert_eq!(extent([1, 1, 147_456]), Extent::Spans(5));
        assert_eq!(extent([16, 1, 4096]), Extent::All, "short enough to do without a merge");
        assert_eq!(extent([16, 1, 16_384]), Extent::Spans(4), "lengths may differ");
        assert_eq!(extent([256, 1, 131_072]), Extent::All, "enough to even out lengths");
    }

    #[test]
    fn lengths_decide_where_blocks_with_all_keys_could_be_as_fast() {
        let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
        let part = |sizes, full| {
            let part = Plan::new(&Problem { full, ..problem(sizes, [0, 1], false) }, &info).parts[0];
            (part.extent, part.lengths_decide)
        };
        assert_eq!(part([64, 1, 8320], false), (Extent::Spans(3), true));
        assert_eq!(
            part([64, 1, 8320], true),
            (Extent::All, false),
            "two waves of nine spans, or six of three"
        );
        assert_eq!(part([40, 1, 8320], false), (Extent::Spans(1), true));
        assert_eq!(part([40, 1, 8320], true), (Extent::Spans(1), false), "the second wave is short");
        assert_eq!(part([4, 1, 8192], false), (Extent::Spans(1), false), "too few blocks");
        assert_eq!(part([16, 1, 4096], false), (Extent::All, false));
        let long = Problem { head_dim: 256, ..problem([64, 1, 8320], [0, 1], false) };
        assert!(!Plan::new(&long, &info).parts[0].lengths_decide, "long heads have no room for it");
    }

    #[test]
    fn warps_follow_from_rows_and_blocks() {
        let shape = |sizes| {
            let Shape { warp_rows, key_warps, .. } = plan(sizes, [0, 1], false).parts[0].shape;
            [warp_rows, key_warps]
        };
        assert_eq!(shape([64, 1, 4096]), [8, 4]);
        assert_eq!(shape([16, 1, 4096]), [8, 8], "a block a multiprocessor");
        assert_eq!(shape([32, 1, 4096]), [8, 4], "more than that");
        assert_eq!(shape([16, 1, 512]), [8, 4], "few keys");
        assert_eq!(shape([64, 2, 4096]), [8, 4]);
        assert_eq!(shape([64, 3, 4096]), [16, 4], "twelve rows");
    }

    #[test]
    fn few_keys_take_a_warp_for_each_segment_and_what_they_need() {
        let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
        for full in [false, true] {
            let shape = |keys| {
                let p = Problem { full, ..problem([2, 1, keys], [0, 1], false) };
                let shape = Plan::new(&p, &info).parts[0].shape;
                [shape.key_warps, shape.step, shape.ring]
            };
            assert_eq!(shape(16), [1, 16, 3], "a unit of keys and one of values");
            assert_eq!(shape(32), [1, 32, 5]);
            assert_eq!(shape(128), [1, 32, 5], "what longer requests have");
            assert_eq!(shape(144), [2, 32, 5]);
            assert_eq!(shape(272), [4, 32, 5]);
        }
    }

    #[test]
    fn sixteen_rows_of_long_heads_are_halved_where_warps_are_idle() {
        let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
        let rows = |head_dim, queries, keys| {
            let p = Problem { head_dim, ..problem([1, queries, keys], [0, 1], false) };
            Plan::new(&p, &info).parts[0].shape.warp_rows
        };
        assert_eq!(rows(256, 4, 2048), 8);
        assert_eq!(rows(128, 4, 2048), 16, "not so long");
        assert_eq!(rows(256, 4, 8192), 16, "all warps have keys");
        assert_eq!(rows(256, 5, 2048), 8, "three warps");
    }

    #[test]
    fn every_number_of_queries_has_one_launch() {
        for (sizes, groups) in [
            ([64, 1, 8320], [1, 1]),
            ([64, 3, 8320], [2, 16]),
            ([32, 20, 8320], [3, 4]),
            ([2, 1, 100], [1, 1]),
            ([3, 1, 100], [1, 2]),
        ] {
            let plan = plan(sizes, groups, true);
            assert_eq!(plan.levels, groups[0]);
            for level in 0..=plan.levels {
                let all = 1..=sizes[0] * sizes[1];
                for queries in if level < plan.levels { all } else { sizes[1]..=sizes[1] } {
                    let takes = |part: &&Part| {
                        part.level == level && (part.min_queries..=part.max_queries).contains(&queries)
                    };
                    assert_eq!(
                        plan.parts.iter().filter(takes).count(),
                        1,
                        "{queries} at level {level}: {plan}"
                    );
                }
            }
        }
    }
}
