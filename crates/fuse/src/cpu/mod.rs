//! Fused kernels on the CPU: blocks of elements go through the operations of a kernel one by one, in the L1 cache.
//!
//! No compiler is needed. Results depend on the row or element alone, never on the batch or on the number of threads:
//! chunks and tiles follow from the shape of a row, and sums over rows are split by shape.

mod call;
mod geometry;
mod lower;
mod moves;
mod ops;
mod program;
mod registers;
mod sums;
mod worker;

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::plan::{Class, Kernel, class, padded};
use crate::shape::Dim;
use lower::Lowering;
use program::{Mode, Program, Role, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What is known of a kernel before it is called.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    domain: Vec<Dim>,
    nodes: Vec<NodeId>,
    reads: Vec<Tensor>,
    /// Without sums over rows.
    writes: Vec<Tensor>,
    sums: Vec<NodeId>,
    /// The dimensions that sums go over.
    summed: Vec<bool>,
}

impl Shape {
    fn new(graph: &Graph, kernel: &Kernel) -> Shape {
        let domain = kernel.domain.clone();
        let role = |id: NodeId| match class(&graph.node(id).shape, &domain) {
            Class::Row | Class::Number => Role::PerRow,
            _ => Role::Elements,
        };
        let tensor = |id: NodeId, role| Tensor { node: id, dtype: graph.node(id).dtype, role };
        let gathers: Vec<&[NodeId]> = kernel
            .nodes
            .iter()
            .map(|&id| graph.node(id))
            .filter(|node| node.op == Op::Gather)
            .map(|node| &node.args[..])
            .collect();
        let mut reads = vec![];
        for &id in &kernel.reads {
            let users = kernel.nodes.iter().map(|&user| graph.node(user));
            let plain = users.filter(|node| node.op != Op::Gather).any(|node| node.args.contains(&id));
            if plain || kernel.nodes.is_empty() {
                reads.push(tensor(id, role(id)));
            }
            if gathers.iter().any(|args| args[0] == id) {
                reads.push(tensor(id, Role::Table));
            }
            if gathers.iter().any(|args| args[1] == id) {
                reads.push(tensor(id, Role::Index));
            }
        }
        let (sums, writes): (Vec<NodeId>, Vec<NodeId>) =
            kernel.writes.iter().copied().partition(|&id| graph.node(id).op == Op::SumTo);
        let summed = match sums.first() {
            Some(&id) => {
                let shape = padded(&graph.node(id).shape, domain.len());
                shape.iter().zip(&domain).map(|(kept, all)| kept != all).collect()
            }
            None => vec![false; domain.len()],
        };
        let writes = writes.into_iter().map(|id| tensor(id, role(id))).collect();
        Shape { domain, nodes: kernel.nodes.clone(), reads, writes, sums, summed }
    }

    fn class(&self, graph: &Graph, id: NodeId) -> Class {
        class(&graph.node(id).shape, &self.domain)
    }

    /// The place of a tensor that is read in one of these roles.
    fn read(&self, id: NodeId, roles: &[Role]) -> Option<usize> {
        self.reads.iter().position(|tensor| tensor.node == id && roles.contains(&tensor.role))
    }

    fn has_reductions(&self, graph: &Graph) -> bool {
        self.nodes.iter().any(|&id| matches!(graph.node(id).op, Op::Reduce(_)))
    }

    fn gathers(&self) -> bool {
        self.reads.iter().any(|tensor| tensor.role == Role::Table)
    }
}

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
        let (reads, writes) = (self.shape.reads.iter(), self.shape.writes.iter());
        reads.chain(writes).map(|tensor| tensor.node).chain(self.shape.sums.iter().copied())
    }
}
