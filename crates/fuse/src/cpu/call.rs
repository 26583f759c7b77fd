//! A call: how the domain is cut into tiles, and who works on which.

use super::CpuKernel;
use super::program::{Mode, Program};
use super::sums;
use super::worker::{IN_RANGE, Job, Worker};
use crate::Memory;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::kernel::{Role, Shape};
use crate::op::{Op, Reduce};
use crate::shape::Sizes;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use warpsmith::cpu::{Tier, parallel_for_with_scratch};

/// Bytes of the L1 cache that registers may take.
const L1: usize = 26 << 10;
/// Elements of a tile, at least and at most.
const TILE: std::ops::RangeInclusive<usize> = 256..=2048;
/// Elements worth a thread's while.
const GRAIN: usize = 8192;
/// Longest row whose values of columns are kept from row to row.
const MAX_HOISTED: usize = 8192;
/// Bytes of outputs that go past the caches: what runs next finds smaller ones in the last of them.
const STREAM: usize = 16 << 20;

/// How a call is cut.
pub(super) struct Cut {
    pub program: Arc<Program>,
    pub rows: usize,
    pub chunk: usize,
}

/// Elements of a tile: as many as the L1 cache holds of all registers.
fn tile_elements(program: &Program) -> usize {
    let most = L1 / program.tile_bytes().max(4);
    (most / 64 * 64).clamp(*TILE.start(), *TILE.end())
}

fn cut(kernel: &CpuKernel, geometry: &Geometry) -> Result<Cut> {
    let (rows, columns) = (geometry.rows(), geometry.columns);
    // Whatever the number of rows: what is computed ahead is rounded ahead.
    let hoist = columns <= MAX_HOISTED;
    let program = kernel.program(Mode::One, hoist)?;
    let elements = tile_elements(&program);
    if rows > 1 && columns * 2 <= elements {
        let program = kernel.program(Mode::Many, hoist)?;
        let each = (tile_elements(&program) / columns.max(1)).clamp(1, rows);
        // Whole vectors, so that tensors can be worked on where they are.
        let each = if each >= 64 { each / 64 * 64 } else { each };
        return Ok(Cut { program, rows: each, chunk: columns });
    }
    if columns <= 2 * elements {
        return Ok(Cut { program, rows: 1, chunk: columns });
    }
    let program = kernel.program(Mode::Long, hoist)?;
    let chunk = tile_elements(&program);
    Ok(Cut { program, rows: 1, chunk })
}

impl CpuKernel {
    /// Runs the kernel on its tensors, in the order of [`CpuKernel::tensors`].
    ///
    /// # Safety
    /// Every tensor must lie where it says, nobody may write what is read or use what is written, and outputs must overlap
    /// nothing.
    pub unsafe fn run(&self, sizes: &Sizes, tensors: &[Memory<'_>]) -> Result<()> {
        let geometry = Geometry::new(&self.graph, &self.shape, sizes, tensors)?;
        self.refuse_empty(&geometry)?;
        let astray = AtomicI64::new(IN_RANGE);
        let done = catch_unwind(AssertUnwindSafe(|| self.work(&geometry, sizes, &astray)));
        match done {
            Ok(result) => result?,
            Err(payload) => return Err(out_of_memory(payload)),
        }
        match astray.load(Ordering::Relaxed) {
            IN_RANGE => Ok(()),
            wanted => {
                let rows = geometry.tables.iter().flatten().map(|table| table.rows).min().unwrap_or(0);
                Err(Error::argument("gather", format!("rows from 0 to below {rows}"), wanted.to_string()))
            }
        }
    }

    /// The largest of nothing is nothing.
    fn refuse_empty(&self, geometry: &Geometry) -> Result<()> {
        let largest = |op: &Op| matches!(op, Op::Reduce(Reduce::Max | Reduce::Min));
        let found = self.shape.nodes.iter().map(|&id| &self.graph.node(id).op).find(|op| largest(op));
        match found {
            Some(op) if geometry.columns == 0 && geometry.rows() > 0 => {
                Err(Error::node(op.name(), "has no elements"))
            }
            _ => Ok(()),
        }
    }

    fn work(&self, geometry: &Geometry, sizes: &Sizes, astray: &AtomicI64) -> Result<()> {
        let cut = cut(self, geometry)?;
        let Shape { reads, writes, sums, .. } = &self.shape;
        let (rows, columns) = (geometry.rows(), geometry.columns);
        let written: usize = writes.iter().map(|tensor| tensor.dtype.size()).sum();
        let stream = rows.saturating_mul(columns).saturating_mul(written) >= STREAM;
        let tier = Tier::best();
        let Cut { program, rows: tile, chunk } = &cut;
        let job = Job { tier, program, geometry, sizes, rows: *tile, chunk: *chunk, stream, astray };
        if !sums.is_empty() {
            return sums::run(&job, sums.len(), reads.len() + writes.len());
        }
        let per_row = writes.iter().any(|tensor| tensor.role == Role::PerRow);
        if program.mode == Mode::Long && !program.has_reductions() && !per_row {
            let chunks = columns.div_ceil(*chunk);
            let grain = (GRAIN / chunk).max(1);
            parallel_for_with_scratch(rows * chunks, grain, job.need(), |part, region| {
                let mut worker = Worker::new(&job, region, vec![]);
                part.for_each(|unit| worker.chunk(unit / chunks, unit % chunks));
            });
            return Ok(());
        }
        if columns == 0 && !per_row {
            return Ok(());
        }
        let grain = (GRAIN / (tile * columns).max(1)).max(1);
        parallel_for_with_scratch(rows.div_ceil(*tile), grain, job.need(), |part, region| {
            let mut worker = Worker::new(&job, region, vec![]);
            part.for_each(|unit| worker.rows(unit * tile, (*tile).min(rows - unit * tile)));
        });
        Ok(())
    }
}

/// What unwinds from a loop that could not have its scratch is not a panic's message.
fn out_of_memory(payload: Box<dyn Any + Send>) -> Error {
    if payload.is::<&str>() || payload.is::<String>() {
        resume_unwind(payload);
    }
    let memory = warpsmith::Device::Cpu.memory().ok();
    let (free, total) = memory.map_or((0, 0), |memory| (memory.free, memory.total));
    Error::Library(warpsmith::Error::OutOfMemory { device: "cpu".into(), requested: 0, free, total })
}
