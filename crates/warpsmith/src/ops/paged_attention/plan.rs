//! How the tensor-core kernel divides the work of a call: blocks, launches and scratch memory, as pure functions of the
//! problem and the device.

mod shape;
#[cfg(feature = "tests")]
pub(super) mod tests;

use super::Problem;
use super::problem::Shared;
use crate::device::DeviceInfo;
pub(super) use shape::UNIT_KEYS;
use shape::{EIGHT, STATIC_SHARED, WARPS};
pub(in crate::ops) use shape::{Load, Shape};
use std::fmt;

/// Keys whose states are folded first, keys of a span, and keys a block processes at once, as in the device code.
pub(super) const SEGMENT: usize = 128;
pub(super) const SPAN: usize = 1024;
pub(super) const SEGMENTS: usize = SPAN / SEGMENT;
pub(super) const ROUND: usize = 512;
/// Rows from which a request's keys are not divided among the warps of a block.
pub(in crate::ops) const FEW_ROWS: usize = 32;
/// Blocks per resident block: more than one balances their lengths, too many have no work.
const WAVES: usize = 4;
/// The most spans of a piece that is not a whole request: some of many requests may be short.
const MOST_SPANS: usize = 4;
/// Keys up to which requests are assumed to have similar lengths.
const EVEN: usize = 4096;
/// The longest heads whose kernel may let lengths decide whether requests stay whole, as in the device code.
const DECIDING_HEAD: usize = 128;
/// Further shared memory of a block with pages that are not multiples of 16 keys.
const PLACES_OF_KEYS: usize = 13 << 10;
/// The most scratch memory, without shared prefixes and with them.
pub(super) const MOST_WORKSPACE: usize = 256 << 20;
const MOST_SHARED_WORKSPACE: usize = 1 << 30;
/// Bytes of the decision about lengths, padded to keep states at multiples of 16.
const DECISION: usize = 16;

/// How keys are divided among blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) enum Extent {
    /// A block processes a round, and stores the states of its segments.
    Round,
    /// A block processes so many spans, and stores their states.
    Spans(usize),
    /// A block processes all keys of its rows.
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
    /// The most pieces of work there can be.
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
        // long enough not to need that, and similar lengths need no balancing. Half the blocks that run at once keep
        // the memory busy, but not with narrow caches, which are as much work for half the bytes.
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
            // So that blocks finish together, with the fewest blocks.
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
        // Only the device knows how long each request is.
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

    /// Blocks of the launch. If blocks have all keys of their rows, none is without work, and waiting blocks go to
    /// multiprocessors as these become free.
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
                // It is assumed to cover all requests; if it does not, its tiles are not full.
                let [few, many] = [Load::Few, Load::Many].map(|load| part(load, 0, p.num_tokens));
                return vec![if few.microseconds() < many.microseconds() { few } else { many }];
            }
            // The unshared part is assumed to be short.
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

    /// Whether to read prefixes once for each group. Their lengths are not known here: the estimate assumes full tables
    /// that are nearly all shared, and the gain must then be clear.
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
        // The mean size of groups decides which launch of a level has the work.
        let tokens = p.num_tokens / shared.groups;
        let level = |level: usize| {
            let part = self.parts.iter().find(|part| part.level == level && tokens <= part.max_queries);
            part.map_or(0.0, Part::microseconds)
        };
        // Keys are divided among levels; each group contains two or more groups of the next level.
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
