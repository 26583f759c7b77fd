//! One source for each kernel.
//!
//! Elements: a thread takes `WIDTH` columns of a row at a time. Rows: a warp or a block takes a row; each thread keeps its
//! columns in registers from reduction to reduction, or, of long rows, reads them again. Sums over rows: a block adds up
//! its columns over its piece of the rows, and a second kernel the pieces.

use super::expression::{memory_type, number, register_type, value};
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
const SUPPORT: &str = include_str!("support.cuh");
/// What a kernel may compute again rather than keep: so many additions' worth.
const CHEAP: u32 = 6;

/// Whether rows fit into the registers of their threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rows {
    /// Every thread keeps its columns.
    Kept,
    /// Columns are read again after each reduction.
    ReadAgain,
}

pub(super) struct Writer<'a> {
    graph: &'a Graph,
    pub shape: Shape,
    kind: Kind,
    rows: Rows,
    ready: HashMap<NodeId, usize>,
    pub phases: usize,
    /// Values of elements that a later phase takes from an earlier one.
    kept: HashSet<NodeId>,
    pub sizes: Vec<Dim>,
    text: String,
    barrier: usize,
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
        let mut this =
            Writer { graph, shape, kind, rows, ready, phases, kept, sizes, text: SUPPORT.into(), barrier: 0 };
        this.find_kept();
        this
    }

    /// Tensors of elements that threads hold, and values they keep: registers for each column.
    pub fn held(&self) -> usize {
        let loads = self
            .shape
            .reads
            .iter()
            .filter(|tensor| tensor.role != Role::PerRow && tensor.role != Role::Index);
        loads.count() + self.kept.len() + self.shape.sums.len()
    }

    fn class(&self, id: NodeId) -> Class {
        match self.shape.class(self.graph, id) {
            Class::Column => Class::Full,
            class => class,
        }
    }

    fn is_read(&self, id: NodeId) -> bool {
        self.shape.read(id, &[Role::Elements, Role::PerRow]).is_some()
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
            if needed && self.class(id) == Class::Full && node.op.cost() > CHEAP {
                kept.insert(id);
            }
        }
        self.kept = kept;
    }

    fn name(id: NodeId) -> String {
        format!("v{}", id.index())
    }

    /// An element's name inside the loop over columns.
    fn element(&self, id: NodeId) -> String {
        let node = self.graph.node(id);
        match &node.op {
            Op::Scalar(value) => return number(*value, node.dtype),
            Op::Size(dim) => {
                let at = self.sizes.iter().position(|size| size == dim).unwrap_or(0);
                return format!("p.sizes[{at}]");
            }
            _ => {}
        }
        let loaded = self.is_read(id) || node.op == Op::Gather;
        match (self.class(id), loaded, self.rows, self.kind) {
            (Class::Full, true, Rows::Kept, Kind::Rows | Kind::Columns) => {
                format!("{}[i][j]", Self::name(id))
            }
            (Class::Full, true, ..) => format!("{}[j]", Self::name(id)),
            _ => Self::name(id),
        }
    }

    fn line(&mut self, indent: usize, text: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{:indent$}{text}", "");
    }

    /// Loads of what rows have one of, and the computations on it that are ready in a phase.
    fn row_values(&mut self, phase: usize) -> Result<()> {
        let reads = self.shape.reads.clone();
        for (t, tensor) in reads.iter().enumerate().filter(|_| phase == 0) {
            let (name, c_type) = (Self::name(tensor.node), memory_type(tensor.dtype));
            let held = register_type(tensor.dtype);
            match tensor.role {
                Role::PerRow => {
                    self.line(
                        4,
                        &format!(
                            "const {held} {name} = Held<{c_type}>::get(*row_of<{c_type}>(p, {t}, row));"
                        ),
                    );
                }
                Role::Index => {
                    self.line(
                        4,
                        &format!(
                            "const i64 at{} = Held<{c_type}>::get(*row_of<{c_type}>(p, {t}, row));",
                            tensor.node.index()
                        ),
                    );
                }
                _ => {}
            }
        }
        for id in self.shape.nodes.clone() {
            let node = self.graph.node(id);
            let row = matches!(self.class(id), Class::Row | Class::Number);
            if row && self.ready[&id] == phase && node.op.is_elementwise() {
                self.compute(4, id)?;
            }
        }
        for (i, tensor) in self.shape.writes.clone().iter().enumerate() {
            let at = self.ready.get(&tensor.node).copied().unwrap_or(0);
            if tensor.role == Role::PerRow && at == phase {
                let (t, c_type, from) =
                    (reads.len() + i, memory_type(tensor.dtype), self.element(tensor.node));
                self.line(
                    4,
                    &format!("if (lane == 0) *row_of<{c_type}>(p, {t}, row) = Held<{c_type}>::put({from});"),
                );
            }
        }
        Ok(())
    }

    fn compute(&mut self, indent: usize, id: NodeId) -> Result<()> {
        let node = self.graph.node(id);
        let args: Vec<String> = node.args.iter().map(|&arg| self.element(arg)).collect();
        let operand = node.args.first().map_or(node.dtype, |arg| self.graph.node(*arg).dtype);
        let code = value(&node.op, node.dtype, operand, &args)
            .ok_or_else(|| Error::node(definition(self.graph, id), "has no CUDA code"))?;
        let (held, name) = (register_type(node.dtype), Self::name(id));
        self.line(indent, &format!("const {held} {name} = {code};"));
        Ok(())
    }

    /// The loads that nodes of elements need, into arrays.
    fn loads(&mut self, indent: usize, wanted: &HashSet<NodeId>, index: &str) {
        let reads = self.shape.reads.clone();
        let pick = |table: bool| if table { Role::Table } else { Role::Elements };
        for (t, tensor) in reads.iter().enumerate().filter(|(_, tensor)| tensor.role == pick(false)) {
            if wanted.contains(&tensor.node) {
                let (name, c_type) = (Self::name(tensor.node), memory_type(tensor.dtype));
                let row = format!("row_of<{c_type}>(p, {t}, row)");
                let load = format!(
                    "load<{c_type}, WIDTH, DENSE_{t}>({name}{index}, {row}, p.step[{t}], column, count);"
                );
                self.line(indent, &load);
            }
        }
        for id in self.shape.nodes.clone() {
            let node = self.graph.node(id);
            if node.op != Op::Gather || !wanted.contains(&id) {
                continue;
            }
            let table = self.shape.read(node.args[0], &[Role::Table]).unwrap_or(0);
            let (name, c_type, at) = (Self::name(id), memory_type(node.dtype), node.args[1].index());
            let row = format!("table_row<{c_type}>(p, {table}, at{at})");
            let load = format!(
                "load<{c_type}, WIDTH, DENSE_{table}>({name}{index}, {row}, p.step[{table}], column, count);"
            );
            self.line(indent, &load);
        }
    }

    /// Declares the arrays of those that are loaded.
    fn declare(&mut self, indent: usize, wanted: &HashSet<NodeId>, extent: &str) {
        let mut wanted: Vec<NodeId> = wanted.iter().copied().collect();
        wanted.sort_unstable();
        for id in wanted {
            let node = self.graph.node(id);
            if self.class(id) == Class::Full && (self.is_read(id) || node.op == Op::Gather) {
                let (held, name) = (register_type(node.dtype), Self::name(id));
                self.line(indent, &format!("{held} {name}{extent}[WIDTH];"));
            }
        }
    }

    /// What steps of a phase on elements need, and the roots among them: reductions, stores and sums.
    fn needs(&self, phase: usize) -> HashSet<NodeId> {
        let at = |id: NodeId| self.ready.get(&id).copied().unwrap_or(0);
        let mut open: Vec<NodeId> = vec![];
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            if matches!(node.op, Op::Reduce(_)) && self.ready[&id] == phase + 1 {
                open.push(node.args[0]);
            }
        }
        let stores = self.shape.writes.iter().filter(|tensor| tensor.role == Role::Elements);
        open.extend(stores.map(|tensor| tensor.node).filter(|&id| at(id) == phase));
        let sums = self.shape.sums.iter().map(|&id| self.graph.node(id).args[0]);
        open.extend(sums.filter(|&id| at(id) == phase));
        open.extend(self.kept.iter().copied().filter(|&id| at(id) == phase));
        let mut needed = HashSet::new();
        while let Some(id) = open.pop() {
            if self.class(id) != Class::Full || !needed.insert(id) {
                continue;
            }
            let before = self.kept.contains(&id) && at(id) < phase;
            if !before && !self.is_read(id) && self.graph.node(id).op != Op::Gather {
                open.extend(&self.graph.node(id).args);
            }
        }
        needed
    }

    /// The values of one column, in order.
    fn elements(&mut self, indent: usize, phase: usize, needed: &HashSet<NodeId>) -> Result<()> {
        for id in self.shape.nodes.clone() {
            if !needed.contains(&id) || self.is_read(id) || self.graph.node(id).op == Op::Gather {
                continue;
            }
            let name = Self::name(id);
            if self.kept.contains(&id) && self.ready[&id] < phase {
                let held = register_type(self.graph.node(id).dtype);
                self.line(indent, &format!("const {held} {name} = kept{}[i][j];", id.index()));
                continue;
            }
            self.compute(indent, id)?;
            if self.kept.contains(&id) {
                self.line(indent, &format!("kept{}[i][j] = {name};", id.index()));
            }
        }
        Ok(())
    }

    fn stores(&self, phase: usize) -> Vec<(usize, NodeId, &'static str)> {
        let first = self.shape.reads.len();
        let at = |id: NodeId| self.ready.get(&id).copied().unwrap_or(0);
        let all = self.shape.writes.iter().enumerate();
        all.filter(|(_, tensor)| tensor.role == Role::Elements && at(tensor.node) == phase)
            .map(|(i, tensor)| (first + i, tensor.node, memory_type(tensor.dtype)))
            .collect()
    }

    /// The body of the loop over the columns of a chunk, `WIDTH` of them.
    fn chunk(&mut self, indent: usize, phase: usize, needed: &HashSet<NodeId>) -> Result<()> {
        let stores = self.stores(phase);
        for (t, id, _) in &stores {
            let held = register_type(self.graph.node(*id).dtype);
            self.line(indent, &format!("{held} out{t}[WIDTH];"));
        }
        self.line(0, "#pragma unroll");
        self.line(indent, "for (int j = 0; j < WIDTH; ++j) {");
        self.elements(indent + 2, phase, needed)?;
        for (t, id, _) in &stores {
            let from = self.element(*id);
            self.line(indent + 2, &format!("out{t}[j] = {from};"));
        }
        for (s, id) in self.shape.sums.clone().into_iter().enumerate() {
            let arg = self.graph.node(id).args[0];
            if self.ready.get(&arg).copied().unwrap_or(0) == phase {
                let from = self.element(arg);
                self.line(indent + 2, &format!("sum{s}[i][j] += {from};"));
            }
        }
        for (r, f, arg) in self.reductions(phase) {
            let from = self.element(arg);
            let step = match f {
                Reduce::Sum | Reduce::Mean => format!("if (j < count) part{} += {from};", r.index()),
                Reduce::Max => format!("if (j < count) part{0} = Max::join(part{0}, {from});", r.index()),
                Reduce::Min => format!("if (j < count) part{0} = Max::join(part{0}, -({from}));", r.index()),
            };
            self.line(indent + 2, &step);
        }
        self.line(indent, "}");
        for (t, _, c_type) in stores {
            let row = format!("row_of<{c_type}>(p, {t}, row)");
            self.line(
                indent,
                &format!("store<{c_type}, WIDTH, DENSE_{t}>({row}, p.step[{t}], column, count, out{t});"),
            );
        }
        Ok(())
    }

    fn reductions(&self, phase: usize) -> Vec<(NodeId, Reduce, NodeId)> {
        let mut found = vec![];
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            if let Op::Reduce(f) = node.op
                && self.ready[&id] == phase + 1
            {
                found.push((id, f, node.args[0]));
            }
        }
        found
    }

    pub fn write(mut self, name: &str) -> Result<String> {
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            if matches!(node.op, Op::Reduce(_)) && !node.dtype.is_float() {
                return Err(Error::node(definition(self.graph, id), "of whole numbers has no CUDA code"));
            }
        }
        match self.kind {
            Kind::Elements => self.write_elements(name)?,
            _ => self.write_rows(name)?,
        }
        if self.kind == Kind::Columns {
            self.write_totals(name);
        }
        Ok(self.text)
    }

    fn write_elements(&mut self, name: &str) -> Result<()> {
        let head = format!(
            "extern \"C\" __global__ void __launch_bounds__(256) {name}(const __grid_constant__ FuseParams p) {{"
        );
        self.line(0, &head);
        for text in [
            "  begin_kernel();",
            "  [[maybe_unused]] const int lane = 0;",
            "  const i64 in_row = (p.columns + WIDTH - 1) / WIDTH, units = p.num_rows * in_row;",
            "  for (i64 unit = (i64)blockIdx.x * 256 + threadIdx.x; unit < units; unit += (i64)gridDim.x * 256) {",
            "    const i64 row = unit / in_row, column = (unit - row * in_row) * WIDTH;",
            "    const int count = (int)min((i64)WIDTH, p.columns - column);",
        ] {
            self.line(0, text);
        }
        self.row_values(0)?;
        let needed = self.needs(0);
        self.declare(4, &needed, "");
        self.loads(4, &needed, "");
        self.chunk(4, 0, &needed)?;
        self.line(0, "  }\n}");
        Ok(())
    }

    fn write_rows(&mut self, name: &str) -> Result<()> {
        let kept_rows = self.rows == Rows::Kept;
        let columns = self.kind == Kind::Columns;
        let head = format!(
            "extern \"C\" __global__ void __launch_bounds__(LANES * ROWS) {name}(const __grid_constant__ FuseParams p) {{"
        );
        self.line(0, &head);
        self.line(2, "__shared__ float scratch[2][32];");
        self.line(2, "const int lane = threadIdx.x % LANES;");
        self.line(2, "begin_kernel();");
        if columns {
            for s in 0..self.shape.sums.len() {
                self.line(2, &format!("float sum{s}[ITEMS][WIDTH] = {{}};"));
            }
            for text in [
                "const i64 first_column = (i64)blockIdx.z * (ITEMS * LANES * WIDTH);",
                "const i64 summed = p.num_rows / p.kept, piece = blockIdx.x;",
                "const i64 begin = summed * piece / p.pieces, end = summed * (piece + 1) / p.pieces;",
                "for (i64 index = begin; index < end; ++index) {",
                "  const i64 row = index * p.kept + blockIdx.y;",
            ] {
                self.line(2, text);
            }
        } else {
            self.line(2, "const i64 first_column = 0;");
            self.line(2, "for (i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / LANES; row < p.num_rows; row += (i64)gridDim.x * ROWS) {");
        }
        if kept_rows {
            let all: HashSet<NodeId> = (0..self.phases).flat_map(|phase| self.needs(phase)).collect();
            self.declare(4, &all, "[ITEMS]");
            let mut kept: Vec<NodeId> = self.kept.iter().copied().collect();
            kept.sort_unstable();
            for id in kept {
                let held = register_type(self.graph.node(id).dtype);
                self.line(4, &format!("{held} kept{}[ITEMS][WIDTH];", id.index()));
            }
        }
        let mut loaded: HashSet<NodeId> = HashSet::new();
        for phase in 0..self.phases {
            self.row_values(phase)?;
            let needed = self.needs(phase);
            for (r, f, _) in self.reductions(phase) {
                let start = if matches!(f, Reduce::Sum | Reduce::Mean) { "0.0f" } else { "minus_infinity()" };
                self.line(4, &format!("float part{} = {start};", r.index()));
            }
            if !needed.is_empty() {
                self.columns(phase, &needed, &mut loaded)?;
            }
            for (r, f, _) in self.reductions(phase) {
                let join = if matches!(f, Reduce::Sum | Reduce::Mean) { "Sum" } else { "Max" };
                let over =
                    format!("over_row<{join}, LANES>(part{}, scratch[{}])", r.index(), self.barrier % 2);
                self.barrier += 1;
                let text = match f {
                    Reduce::Sum | Reduce::Max => over,
                    Reduce::Mean => format!("{over} / (float)p.columns"),
                    Reduce::Min => format!("-{over}"),
                };
                self.line(4, &format!("const float {} = {text};", Self::name(r)));
            }
        }
        if self.phases > 1 {
            self.line(4, "if (LANES > 32) __syncthreads();");
        }
        self.line(2, "}");
        if columns {
            self.write_partials();
        }
        self.line(0, "}");
        Ok(())
    }

    /// The loop over the columns of a row.
    fn columns(
        &mut self,
        phase: usize,
        needed: &HashSet<NodeId>,
        loaded: &mut HashSet<NodeId>,
    ) -> Result<()> {
        if self.rows == Rows::Kept {
            self.line(0, "#pragma unroll");
            self.line(4, "for (int i = 0; i < ITEMS; ++i) {");
            self.line(6, "const i64 column = first_column + ((i64)i * LANES + lane) * WIDTH;");
            self.line(6, "const int count = (int)max(min((i64)WIDTH, p.columns - column), 0ll);");
            let fresh: HashSet<NodeId> = needed.difference(loaded).copied().collect();
            self.loads(6, &fresh, "[i]");
            loaded.extend(fresh);
        } else {
            self.line(
                4,
                "for (i64 column = (i64)lane * WIDTH; column < p.columns; column += LANES * WIDTH) {",
            );
            self.line(6, "const int count = (int)min((i64)WIDTH, p.columns - column);");
            self.declare(6, needed, "");
            self.loads(6, needed, "");
        }
        self.chunk(6, phase, needed)?;
        self.line(4, "}");
        Ok(())
    }

    fn write_partials(&mut self) {
        let sums = self.shape.sums.len();
        self.line(0, "#pragma unroll");
        self.line(2, "for (int i = 0; i < ITEMS; ++i) {");
        self.line(4, "const i64 column = first_column + ((i64)i * LANES + lane) * WIDTH;");
        for s in 0..sums {
            self.line(4, &format!("float* to{s} = (float*)p.partials + ((piece * {sums} + {s}) * p.kept + blockIdx.y) * p.columns + column;"));
            self.line(0, "#pragma unroll");
            self.line(
                4,
                &format!(
                    "for (int j = 0; j < WIDTH; ++j) if (column + j < p.columns) to{s}[j] = sum{s}[i][j];"
                ),
            );
        }
        self.line(2, "}");
    }

    /// The second stage: pieces are added in order.
    fn write_totals(&mut self, name: &str) {
        let head = format!(
            "extern \"C\" __global__ void __launch_bounds__(256) {name}_total(const __grid_constant__ FuseParams p) {{"
        );
        self.line(0, &head);
        for text in [
            "begin_kernel();",
            "const i64 width = p.kept * p.columns;",
            "const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;",
            "if (at >= width) return;",
            "const i64 row = at / p.columns, column = at - row * p.columns;",
        ] {
            self.line(2, text);
        }
        let first = self.shape.reads.len() + self.shape.writes.len();
        let sums = self.shape.sums.clone();
        for (s, &id) in sums.iter().enumerate() {
            let c_type = memory_type(self.graph.node(id).dtype);
            let (t, count) = (first + s, sums.len());
            self.line(2, &format!("float total{s} = 0.0f;"));
            let partial = format!("((const float*)p.partials)[(piece * {count} + {s}) * width + at]");
            self.line(2, &format!("for (i64 piece = 0; piece < p.pieces; ++piece) total{s} += {partial};"));
            self.line(
                2,
                &format!(
                    "row_of<{c_type}>(p, {t}, row)[column * p.step[{t}]] = Held<{c_type}>::put(total{s});"
                ),
            );
        }
        self.line(0, "}");
    }
}
