//! What is known of a kernel before it is called, on any device.

use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::plan::{Class, Kernel, class, padded};
use crate::shape::Dim;
use warpsmith::DType;

/// What a tensor is to a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// It broadcasts to the domain.
    Elements,
    /// It has one element for each row, or only one.
    PerRow,
    /// Rows of it are gathered.
    Table,
    /// It says which.
    Index,
}

/// A tensor of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub node: NodeId,
    pub dtype: DType,
    pub role: Role,
}

/// What is known of a kernel before it is called.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub domain: Vec<Dim>,
    pub nodes: Vec<NodeId>,
    pub reads: Vec<Tensor>,
    /// Without sums over rows.
    pub writes: Vec<Tensor>,
    pub sums: Vec<NodeId>,
    /// The dimensions that sums go over.
    pub summed: Vec<bool>,
}

impl Shape {
    pub fn new(graph: &Graph, kernel: &Kernel) -> Shape {
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

    pub fn class(&self, graph: &Graph, id: NodeId) -> Class {
        class(&graph.node(id).shape, &self.domain)
    }

    /// The place of a tensor that is read in one of these roles.
    pub fn read(&self, id: NodeId, roles: &[Role]) -> Option<usize> {
        self.reads.iter().position(|tensor| tensor.node == id && roles.contains(&tensor.role))
    }

    pub fn has_reductions(&self, graph: &Graph) -> bool {
        self.nodes.iter().any(|&id| matches!(graph.node(id).op, Op::Reduce(_)))
    }

    /// Whether columns depend on others of their row.
    pub fn rotates(&self, graph: &Graph) -> bool {
        self.nodes.iter().any(|&id| graph.node(id).op == Op::Rotate)
    }

    pub fn gathers(&self) -> bool {
        self.reads.iter().any(|tensor| tensor.role == Role::Table)
    }

    /// All tensors of a call, in order: what is read, then what is written.
    pub fn tensors(&self) -> impl Iterator<Item = NodeId> + '_ {
        let own = self.reads.iter().chain(&self.writes).map(|tensor| tensor.node);
        own.chain(self.sums.iter().copied())
    }
}
