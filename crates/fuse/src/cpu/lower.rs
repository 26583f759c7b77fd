//! From a kernel of a plan to steps.

use super::ops::{BlockFn, Link, MAX_OPERANDS, link, operation};
use super::program::{Mode, Phase, Program, Register, Slot, Space, Step};
use super::registers;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernel::{Role, Shape};
use crate::op::{Binary, Op, Unary};
use crate::plan::Class;
use crate::shape::Dim;
use crate::types::{Scalar, is_int};
use std::collections::{HashMap, HashSet};

/// What may be computed again in a later phase rather than kept: this many additions' worth.
const CHEAP: u32 = 4;

pub(super) struct Lowering<'a> {
    graph: &'a Graph,
    shape: &'a Shape,
    mode: Mode,
    /// Values of columns that are computed once for many rows.
    hoisted: HashSet<NodeId>,
    registers: Vec<Register>,
    numbers: Vec<(Slot, f64)>,
    integers: Vec<(Slot, i64)>,
    sizes: Vec<(Slot, Dim)>,
    columns: Vec<Step>,
    phases: Vec<Phase>,
    /// Where each node's value is, by the phase that a tile's register belongs to; `usize::MAX` for those of every phase.
    places: HashMap<(NodeId, usize), Slot>,
    /// The phase from which on each node's value is there.
    ready: HashMap<NodeId, usize>,
    spread: HashMap<(Slot, usize), Slot>,
}

const ALWAYS: usize = usize::MAX;

impl<'a> Lowering<'a> {
    pub fn program(graph: &'a Graph, shape: &'a Shape, mode: Mode, hoist: bool) -> Result<Program> {
        let mut this = Lowering {
            graph,
            shape,
            mode,
            hoisted: if hoist { hoisted(graph, shape) } else { HashSet::new() },
            registers: vec![],
            numbers: vec![],
            integers: vec![],
            sizes: vec![],
            columns: vec![],
            phases: vec![],
            places: HashMap::new(),
            ready: HashMap::new(),
            spread: HashMap::new(),
        };
        this.find_phases();
        for phase in 0..this.phases.len() {
            this.lower_phase(phase)?;
        }
        Ok(registers::assign(this.finish()))
    }

    fn finish(self) -> Program {
        Program {
            mode: self.mode,
            registers: self.registers,
            numbers: self.numbers,
            integers: self.integers,
            sizes: self.sizes,
            columns: self.columns,
            phases: self.phases,
            direct: vec![],
        }
    }

    fn class(&self, id: NodeId) -> Class {
        match self.shape.class(self.graph, id) {
            Class::Column if !self.hoisted.contains(&id) => Class::Full,
            class => class,
        }
    }

    /// A result of a reduction is there in the phase after the one that has what it reduces.
    fn find_phases(&mut self) {
        let mut last = 0;
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            let before = node.args.iter().filter_map(|arg| self.ready.get(arg)).max().copied().unwrap_or(0);
            let phase = if matches!(node.op, Op::Reduce(_)) { before + 1 } else { before };
            self.ready.insert(id, phase);
            last = last.max(phase);
        }
        self.phases = vec![Phase::default(); last + 1];
    }

    fn lower_phase(&mut self, phase: usize) -> Result<()> {
        for &id in &self.shape.nodes {
            let node = self.graph.node(id);
            if let Op::Reduce(f) = node.op
                && self.ready[&id] == phase + 1
            {
                let from = self.value(node.args[0], phase)?;
                let from = self.tile(from, phase);
                let to = self.register(Space::Row, is_int(node.dtype));
                self.phases[phase].tiles.push(Step::Reduce { f, from: [from; 2], count: 1, to });
                self.places.insert((id, ALWAYS), to);
            }
        }
        for (i, tensor) in self.shape.writes.iter().enumerate() {
            let id = tensor.node;
            let at = self.ready.get(&id).copied().unwrap_or(0);
            if at != phase {
                continue;
            }
            let value = self.value(id, phase)?;
            let per_row = tensor.role == Role::PerRow;
            let tensor = self.shape.reads.len() + i;
            if per_row {
                self.phases[phase].rows.push(Step::Store { tensor, from: value });
            } else {
                let from = self.tile(value, phase);
                self.phases[phase].tiles.push(Step::Store { tensor, from });
            }
        }
        for (sum, &id) in self.shape.sums.iter().enumerate() {
            let arg = self.graph.node(id).args[0];
            if self.ready.get(&arg).copied().unwrap_or(0) == phase {
                let value = self.value(arg, phase)?;
                let from = self.tile(value, phase);
                self.phases[phase].tiles.push(Step::Accumulate { sum, from });
            }
        }
        Ok(())
    }

    fn register(&mut self, space: Space, wide: bool) -> Slot {
        self.registers.push(Register { space, wide });
        (self.registers.len() - 1) as Slot
    }

    fn space(&self, slot: Slot) -> Space {
        self.registers[slot as usize].space
    }

    /// The value in registers of a tile.
    fn tile(&mut self, slot: Slot, phase: usize) -> Slot {
        if !matches!(self.space(slot), Space::Row | Space::Number) {
            return slot;
        }
        if let Some(&done) = self.spread.get(&(slot, phase)) {
            return done;
        }
        let to = self.register(Space::Tile, self.registers[slot as usize].wide);
        self.phases[phase].tiles.push(Step::Spread { from: slot, to });
        self.spread.insert((slot, phase), to);
        to
    }

    /// Adds an operation; where it goes follows from the space of its result.
    fn apply(
        &mut self,
        f: Option<BlockFn>,
        link: Option<Link>,
        operands: &[Slot],
        space: Space,
        wide: bool,
        phase: Option<usize>,
    ) -> Result<Slot> {
        let Some(f) = f else { return Ok(operands[0]) };
        let mut from = [0; MAX_OPERANDS];
        for (to, &operand) in from.iter_mut().zip(operands) {
            // Rows of a tile of several have to be spread before they meet elements.
            let meets = space == Space::Tile && self.space(operand) == Space::Row && self.mode == Mode::Many;
            *to = if meets { self.tile(operand, phase.unwrap_or(0)) } else { operand };
        }
        let to = self.register(space, wide);
        let step = Step::Apply { f, link, to, from, count: operands.len() };
        match (space, phase) {
            (Space::Line, None) => self.columns.push(step),
            (Space::Row, Some(phase)) => self.phases[phase].rows.push(step),
            (_, Some(phase)) => self.phases[phase].tiles.push(step),
            (_, None) => return Err(Error::node("fusion", "a step without a place")),
        }
        Ok(to)
    }

    /// The register with the value of a node, for steps of this phase.
    fn value(&mut self, id: NodeId, phase: usize) -> Result<Slot> {
        for key in [(id, ALWAYS), (id, phase)] {
            if let Some(&slot) = self.places.get(&key) {
                return Ok(slot);
            }
        }
        let node = self.graph.node(id);
        if let Op::Scalar(value) = node.op {
            return Ok(self.number(id, value));
        }
        if let Op::Size(dim) = &node.op {
            let slot = self.register(Space::Number, false);
            self.sizes.push((slot, dim.clone()));
            self.places.insert((id, ALWAYS), slot);
            return Ok(slot);
        }
        let class = self.class(id);
        let at = self.ready.get(&id).copied().unwrap_or(0);
        // Where every chunk of a row is a tile of its own, a phase has only what it computes itself.
        let own = self.mode == Mode::Long && class == Class::Full;
        if own && at < phase && !self.is_cheap(id) {
            return self.keep(id, at);
        }
        let phase_of = if own { phase } else { at };
        let slot = match class {
            Class::Full => self.compute(id, Space::Tile, Some(phase_of))?,
            Class::Row | Class::Number => self.compute(id, Space::Row, Some(phase_of))?,
            Class::Column => self.compute(id, Space::Line, None)?,
        };
        let key = if class == Class::Full && own { phase_of } else { ALWAYS };
        self.places.insert((id, key), slot);
        Ok(slot)
    }

    fn number(&mut self, id: NodeId, value: Scalar) -> Slot {
        let wide = is_int(self.graph.node(id).dtype);
        let slot = self.register(Space::Number, wide);
        match value {
            Scalar::Int(value) => self.integers.push((slot, value)),
            value => self.numbers.push((slot, value.value())),
        }
        self.places.insert((id, ALWAYS), slot);
        slot
    }

    /// A value of an earlier phase, in a register that holds the whole row.
    fn keep(&mut self, id: NodeId, phase: usize) -> Result<Slot> {
        let slot = self.value(id, phase)?;
        // Nothing else is there yet: values are kept in the order of their first later use.
        if self.space(slot) == Space::Tile {
            self.registers[slot as usize].space = Space::Line;
        }
        self.places.insert((id, ALWAYS), slot);
        Ok(slot)
    }

    fn is_cheap(&self, id: NodeId) -> bool {
        let mut open = vec![id];
        let mut cost = 0;
        while let Some(id) = open.pop() {
            let node = self.graph.node(id);
            cost += node.op.cost();
            if self.class(id) != Class::Full
                || self.shape.read(id, &[Role::Elements, Role::PerRow]).is_some()
                || node.op.is_leaf()
            {
                cost += 1;
            } else if matches!(node.op, Op::Gather | Op::Rotate) {
                return false;
            } else {
                open.extend(&node.args);
            }
            if cost > CHEAP {
                return false;
            }
        }
        true
    }

    fn push(&mut self, space: Space, phase: Option<usize>, step: Step) {
        match (space, phase) {
            (Space::Row, Some(phase)) => self.phases[phase].rows.push(step),
            (_, Some(phase)) => self.phases[phase].tiles.push(step),
            (_, None) => self.columns.push(step),
        }
    }

    fn compute(&mut self, id: NodeId, space: Space, phase: Option<usize>) -> Result<Slot> {
        let node = self.graph.node(id);
        let wide = is_int(node.dtype);
        if let Some(tensor) = self.shape.read(id, &[Role::Elements, Role::PerRow]) {
            let to = self.register(space, wide);
            self.push(space, phase, Step::Load { tensor, to });
            return Ok(to);
        }
        if node.op == Op::Gather {
            let table = self.shape.read(node.args[0], &[Role::Table]);
            let index = self.shape.read(node.args[1], &[Role::Index]);
            let (Some(table), Some(index)) = (table, index) else {
                return Err(Error::node("gather", "its table and its index must be in memory"));
            };
            let to = self.register(space, wide);
            self.push(space, phase, Step::Gather { table, index, to });
            return Ok(to);
        }
        if node.op == Op::Rotate {
            // Rows are never so long that their halves are in different tiles.
            let phase = phase.unwrap_or(0);
            let from = self.value(node.args[0], phase)?;
            let from = self.tile(from, phase);
            let to = self.register(space, wide);
            self.phases[phase].tiles.push(Step::Rotate { from, to });
            return Ok(to);
        }
        let mut operands = vec![];
        for &arg in &node.args {
            let at = phase.unwrap_or_else(|| self.ready.get(&arg).copied().unwrap_or(0));
            operands.push(self.value(arg, at)?);
        }
        let first = node.args.first().map_or(node.dtype, |arg| self.graph.node(*arg).dtype);
        // A square is a product, which chains know.
        let op = if node.op == Op::Unary(Unary::Square) && !wide {
            operands.push(operands[0]);
            &Op::Binary(Binary::Mul)
        } else {
            &node.op
        };
        let f = operation(op, node.dtype, first);
        if f.is_none() && !matches!(node.op, Op::Cast(_) | Op::Expand | Op::Unary(Unary::Detach)) {
            return Err(Error::node(node.op.name(), "has no CPU code"));
        }
        // What stays as it is may still have to be repeated.
        let from = operands[0];
        if f.is_none() && space == Space::Tile && self.space(from) == Space::Row {
            return Ok(self.tile(from, phase.unwrap_or(0)));
        }
        self.apply(f, link(op, first), &operands, space, wide, phase)
    }
}

/// The values of columns that depend on nothing but others of them and on numbers.
fn hoisted(graph: &Graph, shape: &Shape) -> HashSet<NodeId> {
    let mut found = HashSet::new();
    let reads = shape.reads.iter().filter(|tensor| tensor.role == Role::Elements).map(|tensor| tensor.node);
    for id in reads.chain(shape.nodes.iter().copied()) {
        let node = graph.node(id);
        let is_read = shape.read(id, &[Role::Elements]).is_some();
        let known = |arg: &NodeId| found.contains(arg) || graph.node(*arg).op.is_number();
        let plain = node.op.is_elementwise() && node.args.iter().all(known);
        if shape.class(graph, id) == Class::Column && (is_read || plain) {
            found.insert(id);
        }
    }
    found
}
