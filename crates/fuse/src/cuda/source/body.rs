//! What threads do with the columns of a row: load, compute, reduce, store.

use super::super::variant::Rows;
use super::{Reduction, Value, Writer, memory_type, register_type};
use crate::error::Result;
use crate::kernel::Role;
use crate::op::{Op, Reduce};
use crate::plan::{Class, Kind};
use std::collections::HashSet;

/// How a thread loads the rows that it goes through one after the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pipeline {
    /// Not here: there is one row, or it is read again after each reduction.
    None,
    /// Each when it comes.
    Each,
    /// Some at once, and then it computes with them.
    Ahead,
    /// The next before it computes with one.
    Next,
}

impl Writer<'_> {
    /// Loads of what rows have one of, and the computations on it that are ready in a phase.
    pub(super) fn row_values(&mut self, phase: usize) -> Result<()> {
        let reads = self.shape.reads.clone();
        for (t, tensor) in reads.iter().enumerate().filter(|_| phase == 0) {
            let name = Value::here(tensor.node).name();
            match tensor.role {
                Role::PerRow => {
                    let held = register_type(tensor.dtype);
                    let from = match self.pipeline() {
                        Pipeline::None => self.row_read(t),
                        Pipeline::Ahead => format!("own{t}[u]"),
                        Pipeline::Each | Pipeline::Next => format!("own{t}"),
                    };
                    self.line(4, &format!("const {held} {name} = {from};"));
                }
                Role::Index if self.pipeline() == Pipeline::None => self.index(4, t),
                _ => {}
            }
        }
        for id in self.shape.nodes.clone() {
            let node = self.graph.node(id);
            let row = matches!(self.class(id), Class::Row | Class::Number);
            if row && self.ready[&id] == phase && node.op.is_elementwise() {
                self.compute(4, Value::here(id))?;
            }
        }
        let first = reads.len();
        for (i, tensor) in self.shape.writes.clone().iter().enumerate() {
            if tensor.role == Role::PerRow && self.ready(tensor.node) == phase {
                let (t, c_type) = (first + i, memory_type(tensor.dtype));
                let from = self.operand(Value::here(tensor.node));
                self.line(
                    4,
                    &format!("if (lane == 0 && exists) write(row_of<{c_type}>(p, {t}, row), {from});"),
                );
            }
        }
        Ok(())
    }

    /// The one value that a row has of a tensor.
    fn row_read(&self, t: usize) -> String {
        format!("read(row_of<{}>(p, {t}, row))", memory_type(self.shape.reads[t].dtype))
    }

    fn index(&mut self, indent: usize, t: usize) {
        let (at, from) = (self.shape.reads[t].node.index(), self.row_read(t));
        self.line(indent, &format!("const i64 at{at} = {from};"));
    }

    /// Declares what [`Writer::fetch`] loads: `extent` is that of the rows, and `prefix` what the names begin with.
    pub(super) fn declare_row(&mut self, wanted: &HashSet<Value>, prefix: &str, extent: &str) {
        for (value, c_type, _, _) in self.loaded(wanted) {
            if self.is_same(value) {
                continue;
            }
            self.line(4, &format!("Pack<{c_type}> {prefix}{}{extent}[ITEMS];", value.pack()));
        }
        for t in self.own_reads() {
            let held = register_type(self.shape.reads[t].dtype);
            self.line(4, &format!("{held} {prefix}own{t}{extent};"));
        }
    }

    /// Whether all rows that a thread sums have the same columns of what is loaded for this value.
    fn is_same(&self, value: Value) -> bool {
        let pipelined = self.pipeline() != Pipeline::None;
        pipelined && self.is_read(value.id) && self.shape.class(self.graph, value.id) == Class::Column
    }

    /// Loads what is the same for all rows.
    pub(super) fn fetch_same(&mut self, wanted: &HashSet<Value>) {
        let same: HashSet<Value> = wanted.iter().copied().filter(|value| self.is_same(*value)).collect();
        if self.loaded(&same).is_empty() {
            return;
        }
        self.declare(2, &same, "[ITEMS]");
        self.unroll();
        self.line(2, "for (int i = 0; i < ITEMS; ++i) {");
        self.line(4, "constexpr Index row = 0;");
        self.columns_of_item(4);
        self.loads(4, &same, "", "[i]");
        self.line(2, "}");
    }

    /// Loads the rest of row `row`.
    pub(super) fn fetch(&mut self, wanted: &HashSet<Value>, prefix: &str, extent: &str) {
        for t in 0..self.shape.reads.len() {
            if self.shape.reads[t].role == Role::Index {
                self.index(6, t);
            }
        }
        for t in self.own_reads() {
            let from = self.row_read(t);
            self.line(6, &format!("{prefix}own{t}{extent} = {from};"));
        }
        self.unroll();
        self.line(6, "for (int i = 0; i < ITEMS; ++i) {");
        self.columns_of_item(8);
        let own: HashSet<Value> = wanted.iter().copied().filter(|value| !self.is_same(*value)).collect();
        self.loads(8, &own, prefix, &format!("{extent}[i]"));
        self.line(6, "}");
    }

    /// The row that was loaded ahead becomes the row to compute with.
    pub(super) fn advance(&mut self, wanted: &HashSet<Value>) {
        self.unroll();
        self.line(4, "for (int i = 0; i < ITEMS; ++i) {");
        for (value, _, _, _) in self.loaded(wanted) {
            if !self.is_same(value) {
                let pack = value.pack();
                self.line(6, &format!("{pack}[i] = next_{pack}[i];"));
            }
        }
        self.line(4, "}");
        for t in self.own_reads() {
            self.line(4, &format!("own{t} = next_own{t};"));
        }
    }

    /// The tensors of which rows have one value each.
    fn own_reads(&self) -> Vec<usize> {
        let reads = self.shape.reads.iter().enumerate();
        reads.filter(|(_, tensor)| tensor.role == Role::PerRow).map(|(t, _)| t).collect()
    }

    /// What is loaded for these values: of each the value, the type in memory, the row and the tensor.
    fn loaded(&self, wanted: &HashSet<Value>) -> Vec<(Value, &'static str, String, usize)> {
        let mut found = vec![];
        for across in [false, true] {
            for (t, tensor) in self.shape.reads.iter().enumerate() {
                let value = Value { id: tensor.node, across };
                if tensor.role == Role::Elements && wanted.contains(&value) {
                    let c_type = memory_type(tensor.dtype);
                    found.push((value, c_type, format!("row_of<{c_type}>(p, {t}, row)"), t));
                }
            }
            for &id in &self.shape.nodes {
                let (node, value) = (self.graph.node(id), Value { id, across });
                if node.op == Op::Gather && wanted.contains(&value) {
                    let t = self.shape.read(node.args[0], &[Role::Table]).unwrap_or(0);
                    let (c_type, at) = (memory_type(node.dtype), node.args[1].index());
                    found.push((value, c_type, format!("table_row<{c_type}>(p, {t}, at{at})"), t));
                }
            }
        }
        found
    }

    /// Declares what the loads of values go to.
    pub(super) fn declare(&mut self, indent: usize, wanted: &HashSet<Value>, extent: &str) {
        for (value, c_type, _, _) in self.loaded(wanted) {
            self.line(indent, &format!("Pack<{c_type}> {}{extent};", value.pack()));
        }
    }

    /// The loads that values need.
    pub(super) fn loads(&mut self, indent: usize, wanted: &HashSet<Value>, prefix: &str, index: &str) {
        for (value, c_type, row, t) in self.loaded(wanted) {
            let (to, load) = (value.pack(), if value.across { "load_across" } else { "load" });
            let more = if value.across { ", columns" } else { "" };
            self.line(
                indent,
                &format!(
                    "{load}<{c_type}, DENSE_{t}>({prefix}{to}{index}, {row}, p.step[{t}], column, count{more});"
                ),
            );
        }
    }

    /// The values of one column, in order.
    fn elements(&mut self, indent: usize, phase: usize, needed: &HashSet<Value>) -> Result<()> {
        for (value, _, _, _) in self.loaded(needed) {
            let index = match self.pipeline() {
                Pipeline::Ahead if !self.is_same(value) => "[u][i]",
                _ if self.holds_items() => "[i]",
                _ => "",
            };
            let held = register_type(self.graph.node(value.id).dtype);
            let (name, pack) = (value.name(), value.pack());
            self.line(indent, &format!("const {held} {name} = {pack}{index}.get(j);"));
        }
        if needed.iter().any(|value| self.graph.node(value.id).op == Op::Rotate) {
            self.line(indent, "const bool first_half = column + j * JUMP < columns / 2;");
        }
        for id in self.shape.nodes.clone() {
            for value in [Value::here(id), Value { id, across: true }] {
                if !needed.contains(&value) || self.comes_from_memory(id) {
                    continue;
                }
                let (name, at) = (value.name(), id.index());
                if self.is_kept(value, phase) {
                    let held = register_type(self.graph.node(id).dtype);
                    self.line(indent, &format!("const {held} {name} = kept{at}[i][j];"));
                    continue;
                }
                self.compute(indent, value)?;
                if self.kept.contains(&id) && !value.across {
                    self.line(indent, &format!("kept{at}[i][j] = {name};"));
                }
            }
        }
        Ok(())
    }

    /// How rows are loaded that are summed.
    pub(super) fn pipeline(&self) -> Pipeline {
        match (self.kind, self.rows) {
            (Kind::Columns, Rows::Kept) if self.phases == 1 => Pipeline::Ahead,
            (Kind::Columns, Rows::Kept) if self.ahead > 1 => Pipeline::Next,
            (Kind::Columns, Rows::Kept) => Pipeline::Each,
            _ => Pipeline::None,
        }
    }

    /// Whether threads have arrays of items.
    fn holds_items(&self) -> bool {
        self.rows == Rows::Kept && self.kind != Kind::Elements
    }

    /// The body of the loop over the columns of a thread, `WIDTH` of them.
    pub(super) fn chunk(&mut self, indent: usize, phase: usize, needed: &HashSet<Value>) -> Result<()> {
        let stores = self.stores(phase);
        for (t, id, _) in &stores {
            let held = register_type(self.graph.node(*id).dtype);
            self.line(indent, &format!("{held} out{t}[WIDTH];"));
        }
        self.unroll();
        self.line(indent, "for (int j = 0; j < WIDTH; ++j) {");
        self.elements(indent + 2, phase, needed)?;
        for (t, id, _) in &stores {
            let from = self.operand(Value::here(*id));
            self.line(indent + 2, &format!("out{t}[j] = {from};"));
        }
        for (s, arg) in self.sums(phase) {
            let from = self.operand(Value::here(arg));
            let text = match self.rows {
                Rows::Kept => format!("sum{s}[i][j] += {from};"),
                Rows::ReadAgain => format!("added{s}[j] = {from};"),
            };
            self.line(indent + 2, &text);
        }
        for reduction in self.reductions(phase) {
            self.reduce(indent + 2, &reduction);
        }
        self.line(indent, "}");
        for (t, _, c_type) in stores {
            let row = format!("row_of<{c_type}>(p, {t}, row)");
            let count = if self.kind == Kind::Rows { "exists ? count : 0" } else { "count" };
            self.line(
                indent,
                &format!("store<{c_type}, DENSE_{t}>({row}, p.step[{t}], column, {count}, out{t});"),
            );
        }
        Ok(())
    }

    /// Adds one column to a thread's part of a reduction.
    fn reduce(&mut self, indent: usize, reduction: &Reduction) {
        let (from, part) =
            (self.operand(Value::here(reduction.arg)), format!("part{}", reduction.id.index()));
        let (_, _, join) = reduction.code();
        let step = match reduction.f {
            Reduce::Sum | Reduce::Mean if !reduction.whole => format!("{part} += {from};"),
            _ => format!("{part} = {join}::join({part}, {from});"),
        };
        self.line(indent, &format!("if (EXACT || j < count) {step}"));
    }
}
