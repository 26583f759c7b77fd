//! Plans as text, with what they cost.

use super::{Kernel, Kind, Plan};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::shape::{Sizes, show};
use crate::text::show::{definition, node_name};
use std::fmt::Write;

/// What a plan costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Kernels.
    pub launches: usize,
    /// Bytes read and written, each tensor once for each kernel that reads or writes it.
    pub bytes: u128,
}

impl Plan {
    /// What the plan costs with these sizes.
    ///
    /// # Errors
    /// If a name has no size.
    pub fn traffic(&self, graph: &Graph, sizes: &Sizes) -> Result<Traffic> {
        let mut bytes = 0;
        for kernel in &self.kernels {
            for &id in kernel.reads.iter().chain(&kernel.writes) {
                let gathered = |user: &NodeId| {
                    let node = graph.node(*user);
                    node.op == Op::Gather && node.args[0] == id
                };
                // Of a table, as much as is gathered.
                let shape = match kernel.nodes.iter().find(|user| gathered(user)) {
                    Some(user) => &graph.node(*user).shape,
                    None => &graph.node(id).shape,
                };
                let count: u128 = sizes.shape(shape)?.iter().map(|&size| size as u128).product();
                bytes += count * graph.node(id).dtype.size() as u128;
            }
        }
        Ok(Traffic { launches: self.kernels.len(), bytes })
    }

    /// The plan as text, for people.
    pub fn show(&self, graph: &Graph) -> String {
        let mut text = String::new();
        for (i, kernel) in self.kernels.iter().enumerate() {
            show_kernel(&mut text, graph, i, kernel);
        }
        for split in &self.splits {
            let (a, b) = (node_name(graph, split.producer), node_name(graph, split.consumer));
            let _ = writeln!(text, "apart: {a} and {b}: {}", split.why);
        }
        text
    }
}

fn show_kernel(text: &mut String, graph: &Graph, index: usize, kernel: &Kernel) {
    let kind = match kernel.kind {
        Kind::Elements => "elements",
        Kind::Rows => "rows",
        Kind::Columns => "sums over rows",
    };
    let tensors = |ids: &[NodeId]| -> String {
        let one = |id: &NodeId| {
            let node = graph.node(*id);
            format!("{}: {} {}", node_name(graph, *id), node.dtype, show(&node.shape))
        };
        ids.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "kernel {index}: {kind} of {}", show(&kernel.domain));
    let _ = writeln!(text, "  reads  {}", tensors(&kernel.reads));
    let _ = writeln!(text, "  writes {}", tensors(&kernel.writes));
    for &id in &kernel.nodes {
        let _ = writeln!(text, "    {} = {}", node_name(graph, id), definition(graph, id));
    }
}
