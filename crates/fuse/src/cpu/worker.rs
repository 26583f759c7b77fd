//! One thread's part of a call: registers, and the steps on them.

use super::moves;
use super::ops::{Block, MAX_OPERANDS, PAD};
use super::program::{Mode, Program, Slot, Space, Step};
use crate::geometry::{Geometry, Place};
use crate::kernel::Role;
use crate::op::Reduce;
use crate::shape::Sizes;
use std::sync::atomic::{AtomicI64, Ordering};
use warpsmith::DType;
use warpsmith::cpu::{Need, Region, Tier};

/// No index was out of range.
pub(super) const IN_RANGE: i64 = i64::MIN;

/// Floats by which registers are set apart, so that they do not compete for the same lines of the cache.
const APART: usize = 16;

/// What all threads of a call share.
pub(super) struct Job<'a> {
    pub tier: Tier,
    pub program: &'a Program,
    pub geometry: &'a Geometry,
    pub sizes: &'a Sizes,
    /// Rows of a tile.
    pub rows: usize,
    /// Columns of a chunk; all of a row unless tiles are chunks.
    pub chunk: usize,
    /// Whether results go past the caches.
    pub stream: bool,
    /// An index that was out of range, if there was one.
    pub astray: &'a AtomicI64,
}

impl Job<'_> {
    fn length(&self, space: Space) -> usize {
        let tile = match self.program.mode {
            Mode::Many => self.rows * self.geometry.columns,
            Mode::One => self.geometry.columns,
            Mode::Long => self.chunk,
        };
        let length = match space {
            Space::Tile => tile,
            Space::Line if self.program.mode == Mode::Long => self.geometry.columns,
            Space::Line => tile,
            Space::Row => self.rows,
            Space::Number => PAD,
        };
        // The last chunk of a line is padded too.
        length.next_multiple_of(PAD) + if space == Space::Line { PAD } else { 0 }
    }

    /// What the registers of a thread take.
    pub fn need(&self) -> Need {
        let registers = self.program.registers.iter();
        let sizes = registers.map(|register| (self.length(register.space), register.wide));
        sizes.fold(Need::of::<u8>(0), |need, (length, wide)| {
            need.and::<f32>(length.saturating_mul(1 + wide as usize) + APART)
        })
    }
}

/// A part of the domain.
#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
    /// Whether this is the first, or the last, chunk of its row.
    first: bool,
    last: bool,
}

pub(super) struct Worker<'a> {
    job: &'a Job<'a>,
    /// The registers.
    home: Vec<*mut u8>,
    /// Where the contents of registers of tiles are: there, or in a tensor.
    now: Vec<*const u8>,
    /// Sums over rows: where this worker adds.
    sums: Vec<*mut f32>,
}

impl<'a> Worker<'a> {
    pub fn new(job: &'a Job<'a>, mut region: Region<'_>, sums: Vec<*mut f32>) -> Worker<'a> {
        let mut home = vec![];
        for register in &job.program.registers {
            let length = job.length(register.space) * (1 + register.wide as usize) + APART;
            home.push(region.slice::<f32>(length).as_mut_ptr().cast::<u8>());
        }
        for &(slot, value) in &job.program.numbers {
            // SAFETY: registers of numbers have room for as many.
            unsafe { std::slice::from_raw_parts_mut(home[slot as usize].cast::<f32>(), PAD) }
                .fill(value as f32);
        }
        for &(slot, value) in &job.program.integers {
            // SAFETY: as above, and they are wide.
            unsafe { std::slice::from_raw_parts_mut(home[slot as usize].cast::<i64>(), PAD) }.fill(value);
        }
        for (slot, dim) in &job.program.sizes {
            let size = job.sizes.of(dim).unwrap_or(0) as f32;
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts_mut(home[*slot as usize].cast::<f32>(), PAD) }.fill(size);
        }
        let now = home.iter().map(|home| home.cast_const()).collect();
        let mut this = Worker { job, home, now, sums };
        this.columns();
        this
    }

    /// Where sums over rows go from now on.
    pub fn add_to(&mut self, sums: Vec<*mut f32>) {
        self.sums = sums;
    }

    /// What is the same for all rows.
    fn columns(&mut self) {
        let job = self.job;
        let columns = job.geometry.columns;
        let tile = Tile { row: 0, rows: job.rows, column: 0, columns, first: true, last: true };
        for step in &job.program.columns {
            match *step {
                Step::Load { tensor, to } => {
                    let place = &job.geometry.places[tensor];
                    let size = moves::register_size(place.dtype);
                    for row in 0..job.rows {
                        let to = self.home[to as usize].wrapping_add(row * columns * size);
                        // SAFETY: the tensor has this many columns, the register room for the rows.
                        unsafe { moves::load(job.tier, place.dtype, place.address, place.step, to, columns) };
                    }
                }
                _ => self.step(step, tile),
            }
        }
    }

    /// All phases of some rows.
    pub fn rows(&mut self, row: usize, rows: usize) {
        for phase in &self.job.program.phases {
            let columns = self.job.geometry.columns;
            let whole = Tile { row, rows, column: 0, columns, first: true, last: true };
            phase.rows.iter().for_each(|step| self.step(step, whole));
            let mut column = 0;
            loop {
                let next = columns.min(column + self.job.chunk);
                let (first, last) = (column == 0, next == columns);
                self.tile(&phase.tiles, Tile { row, rows, column, columns: next - column, first, last });
                if last {
                    break;
                }
                column = next;
            }
        }
    }

    /// One chunk of a row, of a program with one phase.
    pub fn chunk(&mut self, row: usize, chunk: usize) {
        let columns = self.job.geometry.columns;
        let column = chunk * self.job.chunk;
        let count = (columns - column).min(self.job.chunk);
        let tile = Tile { row, rows: 1, column, columns: count, first: true, last: true };
        let phase = &self.job.program.phases[0];
        phase.rows.iter().for_each(|step| self.step(step, tile));
        self.tile(&phase.tiles, tile);
    }

    fn tile(&mut self, steps: &[Step], tile: Tile) {
        for &(slot, tensor) in &self.job.program.direct {
            let place = &self.job.geometry.places[tensor];
            let register = &self.job.program.registers[slot as usize];
            let fits = place.dtype == if register.wide { DType::I64 } else { DType::F32 };
            let target = match self.dense(place, tile) {
                Some(at) if fits && !self.job.stream && tile.elements().is_multiple_of(PAD) => at,
                _ => self.home[slot as usize],
            };
            self.now[slot as usize] = target;
        }
        steps.iter().for_each(|step| self.step(step, tile));
    }

    /// Where a tile begins in a tensor, if its elements lie there one after the other.
    fn dense(&self, place: &Place, tile: Tile) -> Option<*mut u8> {
        let size = place.dtype.size() as isize;
        let geometry = self.job.geometry;
        let row = geometry.columns as isize * size;
        let one = place.step == 1 && (tile.rows == 1 || geometry.row_stride(place) == Some(row));
        one.then(|| self.at(place, tile.row, tile.column))
    }

    fn at(&self, place: &Place, row: usize, column: usize) -> *mut u8 {
        let along = (column as isize).wrapping_mul(place.step).wrapping_mul(place.dtype.size() as isize);
        place.address.wrapping_offset(self.job.geometry.row_offset(place, row).wrapping_add(along))
    }

    /// Where a step on `space` finds or leaves the contents of a register.
    fn contents(&self, slot: Slot, column: usize) -> *const u8 {
        let register = &self.job.program.registers[slot as usize];
        match register.space {
            Space::Tile => self.now[slot as usize],
            Space::Line => {
                let size = if register.wide { 8 } else { 4 };
                self.home[slot as usize].wrapping_add(column * size)
            }
            _ => self.home[slot as usize],
        }
    }

    fn is_direct(&self, slot: Slot) -> bool {
        self.job.program.direct.iter().any(|(direct, _)| *direct == slot)
    }

    /// Where a step leaves its result.
    fn target(&mut self, slot: Slot, column: usize) -> *mut u8 {
        if self.job.program.registers[slot as usize].space == Space::Tile && !self.is_direct(slot) {
            self.now[slot as usize] = self.home[slot as usize];
        }
        self.contents(slot, column).cast_mut()
    }

    fn step(&mut self, step: &Step, tile: Tile) {
        let program = self.job.program;
        match *step {
            Step::Load { tensor, to } => self.load(tensor, to, tile),
            Step::Gather { table, index, to } => self.gather(table, index, to, tile),
            Step::Apply { f, to, from, count, .. } => {
                let space = program.registers[to as usize].space;
                let mut block = Block {
                    to: std::ptr::null_mut(),
                    from: [std::ptr::null(); MAX_OPERANDS],
                    moving: [0; MAX_OPERANDS],
                    n: 0,
                };
                for (i, &slot) in from[..count].iter().enumerate() {
                    let own = program.registers[slot as usize].space;
                    let single = own == Space::Number || (own == Space::Row && space != Space::Row);
                    block.from[i] = self.contents(slot, tile.column);
                    block.moving[i] = if single { 0 } else { usize::MAX };
                }
                block.to = self.target(to, tile.column);
                block.n = match space {
                    Space::Row => tile.rows.next_multiple_of(PAD),
                    _ => tile.elements().next_multiple_of(PAD),
                };
                // SAFETY: registers are padded, and so are tiles that lie in tensors.
                unsafe { f(self.job.tier, &block) };
            }
            Step::Spread { from, to } => {
                let wide = program.registers[to as usize].wide;
                let source = self.home[from as usize];
                let single =
                    program.mode != Mode::Many || program.registers[from as usize].space == Space::Number;
                let target = self.target(to, tile.column);
                let columns = tile.columns;
                for row in 0..tile.rows {
                    let at = if single { 0 } else { row };
                    // SAFETY: the register has room for the tile, and rows for an element each.
                    unsafe {
                        if wide {
                            let value = source.cast::<i64>().add(at).read();
                            std::slice::from_raw_parts_mut(target.cast::<i64>().add(row * columns), columns)
                                .fill(value);
                        } else {
                            let value = source.cast::<f32>().add(at).read();
                            std::slice::from_raw_parts_mut(target.cast::<f32>().add(row * columns), columns)
                                .fill(value);
                        }
                    }
                }
            }
            Step::Rotate { from, to } => {
                let source = self.contents(from, tile.column).cast::<f32>();
                let target = self.target(to, tile.column).cast::<f32>();
                let (columns, half) = (tile.columns, tile.columns / 2);
                for row in 0..tile.rows {
                    // SAFETY: both registers hold the tile, and are not the same.
                    unsafe {
                        let (from, to) = (source.add(row * columns), target.add(row * columns));
                        (0..half).for_each(|i| to.add(i).write(-from.add(half + i).read()));
                        std::ptr::copy_nonoverlapping(from, to.add(half), half);
                    }
                }
            }
            Step::Reduce { f, from, count, to } => self.reduce(f, &from[..count], to, tile),
            Step::Store { tensor, from } => self.store(tensor, from, tile),
            Step::Accumulate { sum, from } => self.accumulate(sum, from, tile),
        }
    }

    fn load(&mut self, tensor: usize, to: Slot, tile: Tile) {
        let job = self.job;
        let place = &job.geometry.places[tensor];
        let size = moves::register_size(place.dtype);
        if place.role == Role::PerRow {
            let target = self.home[to as usize];
            // SAFETY: the tensor has an element for each row, the register room for them, or for copies of one.
            unsafe {
                self.rows_of(place, tile, |at, step, row, count| {
                    moves::load(job.tier, place.dtype, at, step, target.wrapping_add(row * size), count);
                })
            };
            return;
        }
        let as_is = matches!(place.dtype, DType::F32 | DType::I64) && tile.elements().is_multiple_of(PAD);
        if let Some(at) = self.dense(place, tile) {
            if as_is && program_tile(job.program, to) {
                self.now[to as usize] = at;
                return;
            }
            let target = self.target(to, tile.column);
            // SAFETY: the tile lies in the tensor, and the register has room for it.
            unsafe { moves::load(job.tier, place.dtype, at, 1, target, tile.elements()) };
            return;
        }
        let target = self.target(to, tile.column);
        for row in 0..tile.rows {
            let (at, to) =
                (self.at(place, tile.row + row, tile.column), target.wrapping_add(row * tile.columns * size));
            // SAFETY: as above, row by row.
            unsafe { moves::load(job.tier, place.dtype, at, place.step, to, tile.columns) };
        }
    }

    /// Calls `f(address, step, first, count)` for runs of the elements that rows of a tile have in a tensor. One row counts
    /// as [`PAD`] copies of it when tiles have one row.
    unsafe fn rows_of(&self, place: &Place, tile: Tile, f: impl Fn(*mut u8, isize, usize, usize)) {
        let size = place.dtype.size() as isize;
        if self.job.program.mode != Mode::Many {
            return f(self.at(place, tile.row, 0), 0, 0, PAD);
        }
        match self.job.geometry.row_stride(place) {
            Some(stride) => f(self.at(place, tile.row, 0), stride / size, 0, tile.rows),
            None => (0..tile.rows).for_each(|row| f(self.at(place, tile.row + row, 0), 1, row, 1)),
        }
    }

    fn gather(&mut self, table: usize, index: usize, to: Slot, tile: Tile) {
        let job = self.job;
        let (place, numbers) = (&job.geometry.places[table], &job.geometry.places[index]);
        let Some(shape) = job.geometry.tables[table] else { return };
        let target = self.target(to, tile.column);
        let size = moves::register_size(place.dtype);
        for row in 0..tile.rows {
            let at = self.at(numbers, tile.row + row, 0);
            // SAFETY: the index has an element for each row.
            let wanted = unsafe {
                if numbers.dtype == DType::I32 {
                    i64::from(at.cast::<i32>().read())
                } else {
                    at.cast::<i64>().read()
                }
            };
            let to = target.wrapping_add(row * tile.columns * size);
            let Some(found) = usize::try_from(wanted).ok().filter(|found| *found < shape.rows) else {
                job.astray.store(wanted.max(IN_RANGE + 1), Ordering::Relaxed);
                continue;
            };
            let along =
                (tile.column as isize).wrapping_mul(place.step).wrapping_mul(place.dtype.size() as isize);
            let at = place
                .address
                .wrapping_offset((found as isize).wrapping_mul(shape.stride).wrapping_add(along));
            // SAFETY: the table has this row, and the register room for the tile.
            unsafe { moves::load(job.tier, place.dtype, at, place.step, to, tile.columns) };
        }
    }

    fn reduce(&mut self, f: Reduce, from: &[Slot], to: Slot, tile: Tile) {
        let job = self.job;
        let wide = job.program.registers[to as usize].wide;
        let source = self.contents(from[0], tile.column);
        let factor = from.get(1).map(|slot| self.contents(*slot, tile.column).cast::<f32>());
        let target = self.home[to as usize];
        let all = job.geometry.columns as f32;
        for row in 0..tile.rows {
            let at = row * tile.columns;
            // SAFETY: the registers hold the tile, and an element for each row or copies of one.
            unsafe {
                if wide {
                    let before =
                        if tile.first { moves::start_int(f) } else { target.cast::<i64>().add(row).read() };
                    let value = moves::reduce_int(f, source.cast::<i64>().add(at), tile.columns);
                    fill(target.cast::<i64>(), moves::join_int(f, before, value), row, job.program.mode);
                } else {
                    let elements = source.cast::<f32>().add(at);
                    let value = match factor {
                        Some(factor) => moves::dot(job.tier, elements, factor.add(at), tile.columns),
                        None => moves::reduce(job.tier, f, elements, tile.columns),
                    };
                    let mut value = match tile.first {
                        true => value,
                        false => moves::join(f, target.cast::<f32>().add(row).read(), value),
                    };
                    if f == Reduce::Mean && tile.last {
                        value /= all;
                    }
                    fill(target.cast::<f32>(), value, row, job.program.mode);
                }
            }
        }
    }

    fn store(&mut self, tensor: usize, from: Slot, tile: Tile) {
        let job = self.job;
        let place = &job.geometry.places[tensor];
        let size = moves::register_size(place.dtype);
        let source = self.contents(from, tile.column);
        if place.role == Role::PerRow {
            for row in 0..tile.rows {
                let at = self.at(place, tile.row + row, 0);
                let from = source.wrapping_add(row * size);
                // SAFETY: the output has an element for each row, and so has the register.
                unsafe { moves::store(job.tier, place.dtype, from, at, 1, 1, false) };
            }
            return;
        }
        if let Some(at) = self.dense(place, tile) {
            if at.cast_const() != source {
                // SAFETY: the tile lies in the output, and the register holds it.
                unsafe { moves::store(job.tier, place.dtype, source, at, 1, tile.elements(), job.stream) };
            }
            return;
        }
        for row in 0..tile.rows {
            let (at, from) =
                (self.at(place, tile.row + row, tile.column), source.wrapping_add(row * tile.columns * size));
            // SAFETY: as above, row by row.
            unsafe { moves::store(job.tier, place.dtype, from, at, place.step, tile.columns, job.stream) };
        }
    }

    fn accumulate(&mut self, sum: usize, from: Slot, tile: Tile) {
        let geometry = self.job.geometry;
        let kept: usize = geometry.outer[geometry.summed..].iter().product();
        let source = self.contents(from, tile.column).cast::<f32>();
        for row in 0..tile.rows {
            let at = ((tile.row + row) % kept) * geometry.columns + tile.column;
            // SAFETY: the register holds the tile, and this worker's sums have room for all that is kept.
            unsafe {
                let from = source.add(row * tile.columns);
                moves::add_to(self.job.tier, from, self.sums[sum].add(at), tile.columns);
            }
        }
    }
}

fn program_tile(program: &Program, slot: Slot) -> bool {
    program.registers[slot as usize].space == Space::Tile
}

/// Writes the element of a row, or all copies of it.
unsafe fn fill<T: Copy>(target: *mut T, value: T, row: usize, mode: Mode) {
    let count = if mode == Mode::Many { 1 } else { PAD };
    // SAFETY: the register has room for every row, or for the copies.
    unsafe { std::slice::from_raw_parts_mut(target.add(row), count) }.fill(value);
}

impl Tile {
    fn elements(&self) -> usize {
        self.rows * self.columns
    }
}
