//! One source for each kernel.
//!
//! Elements: a thread takes `WIDTH` columns of a row at a time. Rows: part of a warp, a warp or a block takes a row; each
//! thread keeps its columns in registers from reduction to reduction, or, of long rows, reads them again. Sums over rows: a
//! block adds up its columns over its piece of the rows, and a second kernel the pieces. Loads of further rows come before
//! the stores of a row, because no load passes a store.

mod body;
mod kernels;

use super::expression::{memory_type, number, register_type, value};
use super::variant::Rows;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernel::{Role, Shape};
use crate::op::{Op, Reduce};
use crate::plan::{Class, Kernel, Kind};
use crate::shape::Dim;
use crate::text::show::definition;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Device code that all fused kernels share.
const SUPPORT: &str = include_str!("../support.cuh");
/// What a kernel may compute again rather than keep: this many additions' worth.
const CHEAP: u32 = 6;

pub(super) struct Writer<'a> {
    graph: &'a Graph,
    pub shape: Shape,
    kind: Kind,
    rows: Rows,
    /// The phase in which a node is known: the number of reductions that must be complete before.
    ready: HashMap<NodeId, usize>,
    pub phases: usize,
    /// Values of elements that a later phase takes from an earlier one.
    kept: HashSet<NodeId>,
    pub sizes: Vec<Dim>,
    text: String,
    barrier: usize,
    /// Sums over rows: the rows that a thread loads before it computes with the first of them.
    ahead: usize,
}

/// A value of the column that a thread is at, or of the column across, at the same place in the other half of the row.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Value {
    id: NodeId,
    across: bool,
}

impl Value {
    fn here(id: NodeId) -> Value {
        Value { id, across: false }
    }

    fn name(self) -> String {
        format!("v{}{}", self.id.index(), if self.across { "x" } else { "" })
    }

    /// What holds it as memory does.
    fn pack(self) -> String {
        format!("pack{}{}", self.id.index(), if self.across { "x" } else { "" })
    }
}

/// A reduction: its node, what it is, and what it reduces.
struct Reduction {
    id: NodeId,
    f: Reduce,
    arg: NodeId,
    whole: bool,
}

impl Reduction {
    /// Its C++ type, where it begins, and how two parts become one, over threads and over columns.
    fn code(&self) -> (&'static str, &'static str, &'static str) {
        match (self.f, self.whole) {
            (Reduce::Sum | Reduce::Mean, false) => ("float", "0.0f", "Sum"),
            (Reduce::Max, false) => ("float", "minus_infinity()", "Max"),
            (Reduce::Min, false) => ("float", "-minus_infinity()", "Min"),
            (Reduce::Sum | Reduce::Mean, true) => ("i64", "0", "SumWhole"),
            (Reduce::Max, true) => ("i64", "kSmallest", "MaxWhole"),
            (Reduce::Min, true) => ("i64", "kLargest", "MinWhole"),
        }
    }
}

impl<'a> Writer<'a> {
    pub fn new(graph: &'a Graph, kernel: &Kernel, rows: Rows) -> Writer<'a> {
        let shape = Shape::new(graph, kernel);
        let mut ready = HashMap::new();
        let mut phases = 1;
        for &id in &shape.nodes {
            let node = graph.node(id);
            let before = node.args.iter().filter_map(|arg| ready.get(arg)).max().copied().unwrap_or(0);
            let phase = before + usize::from(matches!(node.op, Op::Reduce(_)));
            ready.insert(id, phase);
            phases = phases.max(phase + 1);
        }
        let mut sizes: Vec<Dim> = vec![];
        for id in shape.nodes.iter().flat_map(|&id| graph.node(id).args.clone()) {
            if let Op::Size(dim) = &graph.node(id).op
                && !sizes.contains(dim)
            {
                sizes.push(dim.clone());
            }
        }
        let kept = HashSet::new();
        let kind = kernel.kind;
        let mut this = Writer {
            graph,
            shape,
            kind,
            rows,
            ready,
            phases,
            kept,
            sizes,
            text: SUPPORT.into(),
            barrier: 0,
            ahead: 1,
        };
        this.find_kept();
        this
    }

    /// With this many rows loaded ahead.
    pub fn ahead(self, ahead: usize) -> Writer<'a> {
        Writer { ahead, ..self }
    }

    /// Bytes of registers that a thread needs for what it loads of this many columns, with what all rows share and without.
    pub fn loaded_bytes(&self, columns: usize) -> (usize, usize) {
        let (mut all, mut own) = (0, 0);
        for value in self.all_needs().iter().filter(|value| self.comes_from_memory(value.id)) {
            let size = columns * self.graph.node(value.id).dtype.size();
            let shared = self.is_read(value.id) && self.shape.class(self.graph, value.id) == Class::Column;
            all += size;
            own += if shared { 0 } else { size };
        }
        (all, own)
    }

    /// Bytes of registers that a thread needs for what it holds of this many columns: what it loads, keeps and sums.
    pub fn held_bytes(&self, columns: usize) -> usize {
        let kept = self.kept.iter().map(|id| if self.is_whole(*id) { 8 } else { 4 });
        self.loaded_bytes(columns).0 + columns * (kept.sum::<usize>() + 4 * self.shape.sums.len())
    }

    fn is_whole(&self, id: NodeId) -> bool {
        register_type(self.graph.node(id).dtype) == "i64"
    }

    fn class(&self, id: NodeId) -> Class {
        match self.shape.class(self.graph, id) {
            // Also where rows have a single column.
            _ if matches!(self.graph.node(id).op, Op::Reduce(_)) && !self.is_read(id) => Class::Row,
            Class::Column => Class::Full,
            class => class,
        }
    }

    fn is_read(&self, id: NodeId) -> bool {
        self.shape.read(id, &[Role::Elements, Role::PerRow]).is_some()
    }

    /// Whether a value comes from memory.
    fn comes_from_memory(&self, id: NodeId) -> bool {
        self.is_read(id) || self.graph.node(id).op == Op::Gather
    }

    fn ready(&self, id: NodeId) -> usize {
        self.ready.get(&id).copied().unwrap_or(0)
    }

    fn find_kept(&mut self) {
        if self.rows == Rows::ReadAgain {
            return;
        }
        let later = |user: &NodeId, at: usize| match self.graph.node(*user).op {
            Op::Reduce(_) => self.ready[user] > at + 1,
            _ => self.ready[user] > at,
        };
        let mut kept = HashSet::new();
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            let at = self.ready[&id];
            let users = self.shape.nodes.iter().filter(|user| self.graph.node(**user).args.contains(&id));
            let needed = users.into_iter().any(|user| later(user, at));
            let full = self.class(id) == Class::Full && node.op != Op::Gather;
            if needed && full && node.op.cost() > CHEAP {
                kept.insert(id);
            }
        }
        self.kept = kept;
    }

    /// A value's name, or a number.
    fn operand(&self, value: Value) -> String {
        let node = self.graph.node(value.id);
        match &node.op {
            Op::Scalar(value) => number(*value, node.dtype),
            Op::Size(dim) => {
                let at = self.sizes.iter().position(|size| size == dim).unwrap_or(0);
                format!("p.sizes[{at}]")
            }
            _ if self.class(value.id) == Class::Full => value.name(),
            // What rows have one of is the same across.
            _ => Value::here(value.id).name(),
        }
    }

    fn line(&mut self, indent: usize, text: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{:indent$}{text}", "");
    }

    fn unroll(&mut self) {
        self.line(0, "#pragma unroll");
    }

    /// The values that a value is computed from.
    fn arguments(&self, value: Value) -> Vec<Value> {
        let node = self.graph.node(value.id);
        let across = value.across != (node.op == Op::Rotate);
        node.args.iter().map(|&id| Value { id, across }).collect()
    }

    fn compute(&mut self, indent: usize, made: Value) -> Result<()> {
        let node = self.graph.node(made.id);
        let args: Vec<String> = self.arguments(made).into_iter().map(|arg| self.operand(arg)).collect();
        let from = node.args.first().map_or(node.dtype, |arg| self.graph.node(*arg).dtype);
        let code = match node.op {
            Op::Rotate => {
                let first = if made.across { "!first_half" } else { "first_half" };
                Some(format!("({first} ? -{0} : {0})", args[0]))
            }
            _ => value(&node.op, node.dtype, from, &args),
        };
        let code = code.ok_or_else(|| Error::node(definition(self.graph, made.id), "has no CUDA code"))?;
        let (held, name) = (register_type(node.dtype), made.name());
        self.line(indent, &format!("const {held} {name} = {code};"));
        Ok(())
    }

    /// The reductions that are complete after a phase.
    fn reductions(&self, phase: usize) -> Vec<Reduction> {
        let mut found = vec![];
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            if let Op::Reduce(f) = node.op
                && self.ready[&id] == phase + 1
            {
                found.push(Reduction { id, f, arg: node.args[0], whole: self.is_whole(id) });
            }
        }
        found
    }

    /// The stores of elements in a phase: the tensor's place, its node and its type in memory.
    fn stores(&self, phase: usize) -> Vec<(usize, NodeId, &'static str)> {
        let first = self.shape.reads.len();
        let all = self.shape.writes.iter().enumerate();
        all.filter(|(_, tensor)| tensor.role == Role::Elements && self.ready(tensor.node) == phase)
            .map(|(i, tensor)| (first + i, tensor.node, memory_type(tensor.dtype)))
            .collect()
    }

    /// The sums over rows whose elements are known in a phase: which, and of what.
    fn sums(&self, phase: usize) -> Vec<(usize, NodeId)> {
        let all = self.shape.sums.iter().map(|&id| self.graph.node(id).args[0]).enumerate();
        all.filter(|(_, arg)| self.ready(*arg) == phase).collect()
    }

    /// The values of elements that the steps of a phase need: reductions, stores, sums and what is kept.
    fn needs(&self, phase: usize) -> HashSet<Value> {
        let mut roots: Vec<NodeId> = self.reductions(phase).iter().map(|reduction| reduction.arg).collect();
        roots.extend(self.stores(phase).iter().map(|(_, id, _)| *id));
        roots.extend(self.sums(phase).iter().map(|(_, id)| *id));
        roots.extend(self.kept.iter().copied().filter(|&id| self.ready(id) == phase));
        let mut open: Vec<Value> = roots.into_iter().map(Value::here).collect();
        let mut needed = HashSet::new();
        while let Some(value) = open.pop() {
            if self.class(value.id) != Class::Full || !needed.insert(value) {
                continue;
            }
            if !self.is_kept(value, phase) && !self.comes_from_memory(value.id) {
                open.extend(self.arguments(value));
            }
        }
        needed
    }

    fn all_needs(&self) -> HashSet<Value> {
        (0..self.phases).flat_map(|phase| self.needs(phase)).collect()
    }

    /// Whether a value was kept by an earlier phase.
    fn is_kept(&self, value: Value, phase: usize) -> bool {
        !value.across && self.kept.contains(&value.id) && self.ready(value.id) < phase
    }

    pub fn write(mut self, name: &str) -> Result<String> {
        match self.kind {
            Kind::Elements => self.write_elements(name)?,
            _ => self.write_rows(name)?,
        }
        if self.kind == Kind::Columns {
            self.write_totals(name);
        }
        Ok(self.text)
    }
}
