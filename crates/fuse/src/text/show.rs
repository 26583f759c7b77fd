//! Graphs as formulas that [`parse`](super::parse) reads.

use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::shape::show;
use crate::types::Scalar;
use std::fmt;

/// A number as formulas write it.
pub(crate) fn number(value: Scalar) -> String {
    match value {
        Scalar::Bool(b) => b.to_string(),
        Scalar::Int(i) => i.to_string(),
        Scalar::Float(x) if x.is_infinite() => (if x > 0.0 { "inf" } else { "-inf" }).into(),
        Scalar::Float(x) if x.is_nan() => "nan".into(),
        Scalar::Float(x) => format!("{x:?}"),
    }
}

/// The name of each node in [`Graph`]'s text: those of inputs, and `t` with a number.
pub(crate) fn node_name(graph: &Graph, id: NodeId) -> String {
    match &graph.node(id).op {
        Op::Input(name) => name.to_string(),
        Op::Scalar(value) => number(*value),
        Op::Size(dim) => format!("size({})", show(std::slice::from_ref(dim))),
        _ => format!("t{}", id.index()),
    }
}

/// What one node computes, in terms of the names of its arguments.
pub(crate) fn definition(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    let args: Vec<String> = node.args.iter().map(|&arg| node_name(graph, arg)).collect();
    match &node.op {
        Op::Cast(dtype) => format!("cast({}, {dtype})", args[0]),
        Op::SumTo | Op::Expand => format!("{}({}, {})", node.op.name(), args[0], show(&node.shape)),
        Op::Binary(f) if !f.symbol().is_empty() => {
            // A negative number before `**` would be read as the negative of a power.
            let wrap = |text: &String| if text.starts_with('-') { format!("({text})") } else { text.clone() };
            format!("{} {} {}", wrap(&args[0]), f.symbol(), wrap(&args[1]))
        }
        op => format!("{}({})", op.name(), args.join(", ")),
    }
}

impl fmt::Display for Graph {
    /// As one formula; inputs with their types first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &id in self.inputs() {
            let node = self.node(id);
            writeln!(f, "# {}: {} {}", node.op.name(), node.dtype, show(&node.shape))?;
        }
        for id in self.ids().filter(|id| !self.node(*id).op.is_leaf()) {
            writeln!(f, "{} = {};", node_name(self, id), definition(self, id))?;
        }
        let outputs: Vec<String> = self.outputs().iter().map(|(_, id)| node_name(self, *id)).collect();
        f.write_str(&outputs.join(", "))
    }
}
