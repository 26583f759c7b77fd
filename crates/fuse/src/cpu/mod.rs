//! Fused kernels on the CPU: blocks of elements go through the operations of a kernel one by one, in the L1 cache.
//!
//! No compiler is needed. Results depend on the row or element alone, never on the batch or on the number of threads:
//! chunks and tiles follow from the shape of a row, and sums over rows are split by shape.

mod call;
mod lower;
mod moves;
mod ops;
mod program;
mod registers;
mod sums;
mod worker;

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::kernel::Shape;
use crate::plan::Kernel;
use lower::Lowering;
use program::{Mode, Program};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A kernel of a plan, ready to be called with tensors of any sizes and strides.
pub(crate) struct CpuKernel {
    graph: Arc<Graph>,
    shape: Shape,
    programs: Mutex<HashMap<(Mode, bool), Arc<Program>>>,
}

impl CpuKernel {
    pub fn new(graph: &Arc<Graph>, kernel: &Kernel) -> Result<CpuKernel> {
        let this =
            CpuKernel { graph: graph.clone(), shape: Shape::new(graph, kernel), programs: Mutex::default() };
        // Whatever cannot be lowered is known now.
        for mode in [Mode::Many, Mode::One, Mode::Long] {
            this.program(mode, false)?;
        }
        Ok(this)
    }

    fn program(&self, mode: Mode, hoist: bool) -> Result<Arc<Program>> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(&(mode, hoist)) {
            return Ok(program.clone());
        }
        let program = Arc::new(Lowering::program(&self.graph, &self.shape, mode, hoist)?);
        programs.insert((mode, hoist), program.clone());
        Ok(program)
    }

    /// How many of its tensors are read.
    pub fn reads(&self) -> usize {
        self.shape.reads.len()
    }

    /// The tensors of a call, in order: what is read, then what is written.
    pub fn tensors(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.shape.tensors()
    }
}
