//! Which nodes become one kernel.
//!
//! A kernel works through a *domain*, the shape that all its values broadcast to: elementwise operations, numbers and
//! broadcasts at every element, reductions along the last dimension of the whole domain, and at its end sums over the other
//! dimensions. Nodes are taken in order, each into the kernels of its arguments if the rules of [`rules`] allow.

mod group;
pub mod rules;
mod show;

use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::shape::{Dim, broadcast};
use std::collections::BTreeSet;

pub use show::Traffic;

/// What a kernel is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Each element by itself.
    Elements,
    /// Each row by itself: there are reductions, or values that a row has one of.
    Rows,
    /// Sums over rows.
    Columns,
}

/// One kernel of a plan.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What it is like.
    pub kind: Kind,
    /// The shape it works through.
    pub domain: Vec<Dim>,
    /// What it computes, in order, without inputs and numbers.
    pub nodes: Vec<NodeId>,
    /// What it reads: inputs, and results of other kernels.
    pub reads: Vec<NodeId>,
    /// What it writes.
    pub writes: Vec<NodeId>,
}

/// Two nodes that could have been one kernel, and why they are not.
#[derive(Clone, Debug)]
pub struct Split {
    /// The node that was computed first.
    pub producer: NodeId,
    /// The one that uses it.
    pub consumer: NodeId,
    /// The reason.
    pub why: String,
}

/// The kernels of a graph, in an order in which they can run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The kernels.
    pub kernels: Vec<Kernel>,
    /// What was kept apart.
    pub splits: Vec<Split>,
}

/// A shape with leading ones, as long as `rank`.
pub(crate) fn padded(shape: &[Dim], rank: usize) -> Vec<Dim> {
    let mut all = vec![Dim::Fixed(1); rank.saturating_sub(shape.len())];
    all.extend_from_slice(shape);
    all
}

/// How often a value exists in a domain. The one row of a domain that has only one is a row like others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// Once: it has no dimensions, or only ones.
    Number,
    /// Once for each row.
    Row,
    /// Once for each column.
    Column,
    /// For each element, or whatever else.
    Full,
}

/// The class of a shape in a domain.
pub(crate) fn class(shape: &[Dim], domain: &[Dim]) -> Class {
    let shape = padded(shape, domain.len());
    let (Some((last, outer)), Some(columns)) = (shape.split_last(), domain.last()) else {
        return Class::Number;
    };
    let one_row = outer.iter().all(Dim::is_one);
    let several_rows = domain[..outer.len()].iter().any(|dim| !dim.is_one());
    let repeats = last.is_one() && !columns.is_one();
    match (one_row && several_rows, repeats) {
        (true, true) => Class::Number,
        (true, false) if !last.is_one() => Class::Column,
        (false, true) => Class::Row,
        _ => Class::Full,
    }
}

/// The shape a node is computed over.
pub(crate) fn domain_of(graph: &Graph, id: NodeId) -> &[Dim] {
    let node = graph.node(id);
    match node.op {
        Op::Reduce(_) | Op::SumTo => &graph.node(node.args[0]).shape,
        _ => &node.shape,
    }
}

impl Plan {
    /// Plans a graph.
    pub fn new(graph: &Graph) -> Plan {
        group::plan(graph)
    }

    /// Whether a node goes from one kernel to another through memory.
    pub fn passes(&self, id: NodeId) -> bool {
        let written = self.kernels.iter().any(|kernel| kernel.writes.contains(&id));
        written && self.kernels.iter().any(|kernel| kernel.reads.contains(&id))
    }

    /// A plan of one kernel for each node: what running the nodes one by one would be.
    pub fn unfused(graph: &Graph) -> Plan {
        let written: BTreeSet<NodeId> = graph.ids().filter(|id| !graph.node(*id).op.is_leaf()).collect();
        let groups: Vec<Vec<NodeId>> = written.iter().map(|&id| vec![id]).collect();
        let mut plan = assemble(graph, &groups, &written);
        plan.kernels.extend(copies(graph));
        plan
    }
}

/// Outputs that are inputs are copied.
fn copies(graph: &Graph) -> impl Iterator<Item = Kernel> + '_ {
    let mut copied = BTreeSet::new();
    let outputs = graph.outputs().iter().map(|(_, id)| *id);
    outputs.filter(move |id| graph.node(*id).op.is_leaf() && copied.insert(*id)).map(|id| Kernel {
        kind: Kind::Elements,
        domain: graph.node(id).shape.clone(),
        nodes: vec![],
        reads: vec![id],
        writes: vec![id],
    })
}

/// Kernels that write these groups of nodes and compute again whatever else they need.
fn assemble(graph: &Graph, groups: &[Vec<NodeId>], written: &BTreeSet<NodeId>) -> Plan {
    let mut kernels = vec![];
    for writes in groups {
        let (mut nodes, mut reads) = (BTreeSet::new(), BTreeSet::new());
        let mut open: Vec<NodeId> = writes.clone();
        while let Some(id) = open.pop() {
            if !nodes.insert(id) {
                continue;
            }
            for &arg in &graph.node(id).args {
                match &graph.node(arg).op {
                    op if op.is_number() => {}
                    Op::Input(_) => drop(reads.insert(arg)),
                    _ if written.contains(&arg) && !writes.contains(&arg) => drop(reads.insert(arg)),
                    _ => open.push(arg),
                }
            }
        }
        let domain = nodes
            .iter()
            .fold(vec![], |domain: Vec<Dim>, &id| broadcast(&domain, domain_of(graph, id)).unwrap_or(domain));
        let of = |id: &NodeId| &graph.node(*id).op;
        let per_row = |id: &&NodeId| class(&graph.node(**id).shape, &domain) == Class::Row;
        let kind = if nodes.iter().any(|id| *of(id) == Op::SumTo) {
            Kind::Columns
        } else if nodes.iter().any(|id| matches!(of(id), Op::Reduce(_)))
            || nodes.iter().any(|id| per_row(&id))
        {
            Kind::Rows
        } else {
            Kind::Elements
        };
        let nodes: Vec<NodeId> = nodes.into_iter().collect();
        kernels.push(Kernel {
            kind,
            domain,
            nodes,
            reads: reads.into_iter().collect(),
            writes: writes.clone(),
        });
    }
    Plan { kernels: ordered(kernels), splits: vec![] }
}

/// Each kernel after those whose results it reads.
fn ordered(mut left: Vec<Kernel>) -> Vec<Kernel> {
    let mut missing: BTreeSet<NodeId> = left.iter().flat_map(|kernel| kernel.writes.clone()).collect();
    let mut done = vec![];
    while !left.is_empty() {
        let ready = left.iter().position(|kernel| kernel.reads.iter().all(|read| !missing.contains(read)));
        // There is always one: groups are merged only where that makes no circle.
        let kernel = left.remove(ready.unwrap_or(0));
        missing.retain(|id| !kernel.writes.contains(id));
        done.push(kernel);
    }
    done
}
