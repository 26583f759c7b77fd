//! Gradients: reverse mode on graphs.
//!
//! The result is two graphs that are fused like any other: the *forward* one gives the outputs and what is kept, the
//! *backward* one takes inputs, what was kept and the gradients of the outputs, and gives those of the inputs. Kept are
//! results of reductions, which are small and cost a pass over their rows; everything else is computed again inside the
//! backward kernels, where its arguments are read anyway.

use crate::error::{Error, Result};
use crate::graph::{Builder, Graph, Node, NodeId};
use crate::op::{Binary, Op, Reduce, Unary};
use crate::shape::Dim;
use crate::text::show::definition;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use warpsmith::DType;

/// A graph with its derivative.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// From the inputs to the outputs, then what is kept, named `kept0` and so on.
    pub forward: Graph,
    /// To the gradients, named `grad_` and the input, in the order asked for. Its inputs are those of the graph that it
    /// needs, what was kept that it needs, and the gradients of the outputs, named `grad_` and the output; all in this order.
    pub backward: Graph,
}

/// The derivative with respect to these inputs.
///
/// # Errors
/// If there is no such input, or it is no float, or there is no derivative of an operation on the way.
pub fn gradient(graph: &Graph, wrt: &[&str]) -> Result<Gradient> {
    let mut wanted = vec![];
    for name in wrt {
        let found = graph.inputs().iter().copied().find(|&id| graph.input_name(id) == *name);
        let id = found.ok_or_else(|| Error::node(*name, "is no input, so nothing can be derived by it"))?;
        if !graph.node(id).dtype.is_float() {
            return Err(Error::node(*name, "is no float, so nothing can be derived by it"));
        }
        wanted.push(id);
    }
    let mut reverse = Reverse {
        graph,
        builder: graph.reopen(),
        adjoints: HashMap::new(),
        needed: needed(graph, &wanted),
        compared: vec![],
    };
    let mut given = vec![];
    for (name, id) in graph.outputs() {
        let Node { dtype, shape, .. } = graph.node(*id).clone();
        if dtype.is_float() {
            let input = reverse.builder.input(&format!("grad_{name}"), dtype, &shape)?;
            given.push(input);
            reverse.add(*id, input)?;
        }
    }
    for id in graph.ids().rev() {
        if let Some(&adjoint) = reverse.adjoints.get(&id) {
            reverse.propagate(id, adjoint)?;
        }
    }
    let mut results = vec![];
    for (&id, name) in wanted.iter().zip(wrt) {
        let Node { dtype, shape, .. } = graph.node(id).clone();
        let adjoint = match reverse.adjoints.get(&id) {
            Some(adjoint) => *adjoint,
            None => reverse.builder.number(0.0)?,
        };
        let adjoint = reverse.builder.cast(adjoint, dtype)?;
        results.push((format!("grad_{name}"), reverse.builder.expand(adjoint, &shape)?));
    }
    split(graph, &reverse.builder, &results, &given, &reverse.compared)
}

/// Which nodes depend on these.
fn needed(graph: &Graph, wanted: &[NodeId]) -> Vec<bool> {
    let mut needed = vec![false; graph.nodes().len()];
    for id in graph.ids() {
        let node = graph.node(id);
        let float = node.dtype.is_float() && node.op != Op::Unary(Unary::Detach);
        needed[id.index()] =
            wanted.contains(&id) || (float && node.args.iter().any(|arg| needed[arg.index()]));
    }
    needed
}

struct Reverse<'a> {
    graph: &'a Graph,
    builder: Builder,
    adjoints: HashMap<NodeId, NodeId>,
    needed: Vec<bool>,
    /// Results of reductions that elements are compared with. What they are compared with must be computed as they are.
    compared: Vec<NodeId>,
}

impl Reverse<'_> {
    /// Adds to the adjoint of a node, summed over what was broadcast.
    fn add(&mut self, id: NodeId, adjoint: NodeId) -> Result<()> {
        if !self.needed[id.index()] {
            return Ok(());
        }
        let shape = self.graph.node(id).shape.clone();
        let adjoint = self.builder.sum_to(adjoint, &shape)?;
        let sum = match self.adjoints.get(&id) {
            Some(&before) => self.builder.binary(Binary::Add, before, adjoint)?,
            None => adjoint,
        };
        self.adjoints.insert(id, sum);
        Ok(())
    }

    fn mul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.builder.binary(Binary::Mul, a, b)
    }

    fn scaled(&mut self, a: NodeId, factor: f64) -> Result<NodeId> {
        let factor = self.builder.number(factor)?;
        self.mul(a, factor)
    }

    fn propagate(&mut self, y: NodeId, g: NodeId) -> Result<()> {
        let graph = self.graph;
        let node = graph.node(y);
        let args = &node.args;
        match &node.op {
            Op::Input(_) | Op::Scalar(_) | Op::Size(_) => Ok(()),
            Op::Unary(f) => match self.unary(*f, args[0], y, g)? {
                Some(adjoint) => self.add(args[0], adjoint),
                None => Ok(()),
            },
            Op::Binary(f) => self.binary(*f, args[0], args[1], y, g),
            Op::Where => {
                let zero = self.builder.number(0.0)?;
                let a = self.builder.select(args[0], g, zero)?;
                let b = self.builder.select(args[0], zero, g)?;
                self.add(args[1], a)?;
                self.add(args[2], b)
            }
            // Not rounded on the way back: it would be rounded again at the end.
            Op::Cast(_) | Op::Expand => self.add(args[0], g),
            Op::SumTo => {
                let shape = graph.node(args[0]).shape.clone();
                let g = self.builder.expand(g, &shape)?;
                self.add(args[0], g)
            }
            Op::Reduce(f) => self.reduce(*f, args[0], y, g),
            // Turned back.
            Op::Rotate => {
                let turned = self.builder.rotate_half(g)?;
                let back = self.builder.unary(Unary::Neg, turned)?;
                self.add(args[0], back)
            }
            Op::Gather if self.needed[args[0].index()] => Err(Error::node(
                definition(graph, y),
                "has no derivative by its table here: it adds to rows in an order that is not fixed",
            )),
            Op::Gather => Ok(()),
        }
    }

    fn reduce(&mut self, f: Reduce, x: NodeId, y: NodeId, g: NodeId) -> Result<()> {
        let shape = self.graph.node(x).shape.clone();
        let last = shape.last().cloned().unwrap_or(Dim::Fixed(1));
        let g = match f {
            Reduce::Sum => g,
            Reduce::Mean => {
                let size = self.builder.size(&last)?;
                self.builder.binary(Binary::Div, g, size)?
            }
            // Elements that are equally large share.
            Reduce::Max | Reduce::Min => {
                let hits = self.builder.binary(Binary::Eq, x, y)?;
                let hits_as_floats = self.builder.cast(hits, DType::F32)?;
                let count = self.builder.reduce(Reduce::Sum, hits_as_floats)?;
                let one = self.builder.number(1.0)?;
                let count = self.builder.binary(Binary::Max, count, one)?;
                let share = self.builder.binary(Binary::Div, g, count)?;
                self.compared.push(y);
                let zero = self.builder.number(0.0)?;
                self.builder.select(hits, share, zero)?
            }
        };
        let g = self.builder.expand(g, &shape)?;
        self.add(x, g)
    }

    fn unary(&mut self, f: Unary, x: NodeId, y: NodeId, g: NodeId) -> Result<Option<NodeId>> {
        let b = &mut self.builder;
        let slope = match f {
            Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc => return Ok(None),
            Unary::Not | Unary::IsNan | Unary::Detach => return Ok(None),
            Unary::Neg => return Ok(Some(b.unary(Unary::Neg, g)?)),
            Unary::Abs => b.unary(Unary::Sign, x)?,
            Unary::Square => {
                let two = b.number(2.0)?;
                b.binary(Binary::Mul, x, two)?
            }
            Unary::Relu => {
                let zero = b.number(0.0)?;
                let off = b.binary(Binary::Le, x, zero)?;
                return Ok(Some(b.select(off, zero, g)?));
            }
            Unary::Exp => y,
            Unary::Log => return Ok(Some(b.binary(Binary::Div, g, x)?)),
            Unary::Log1p => {
                let one = b.number(1.0)?;
                let sum = b.binary(Binary::Add, x, one)?;
                return Ok(Some(b.binary(Binary::Div, g, sum)?));
            }
            Unary::Sqrt => {
                let half = b.number(0.5)?;
                let half = b.binary(Binary::Mul, g, half)?;
                return Ok(Some(b.binary(Binary::Div, half, y)?));
            }
            Unary::Rsqrt => {
                let cube = b.binary(Binary::Mul, y, y)?;
                let cube = b.binary(Binary::Mul, cube, y)?;
                let factor = b.number(-0.5)?;
                b.binary(Binary::Mul, cube, factor)?
            }
            Unary::Reciprocal => {
                let square = b.binary(Binary::Mul, y, y)?;
                b.unary(Unary::Neg, square)?
            }
            Unary::Tanh => {
                let square = b.binary(Binary::Mul, y, y)?;
                let one = b.number(1.0)?;
                b.binary(Binary::Sub, one, square)?
            }
            Unary::Sigmoid => {
                // sigmoid(-x) rather than 1 - y, which loses everything where y is nearly 1.
                let negative = b.unary(Unary::Neg, x)?;
                let other = b.unary(Unary::Sigmoid, negative)?;
                b.binary(Binary::Mul, y, other)?
            }
            Unary::Softplus => b.unary(Unary::Sigmoid, x)?,
            Unary::Silu => b.unary(Unary::DSilu, x)?,
            Unary::Gelu => b.unary(Unary::DGelu, x)?,
            Unary::GeluTanh => b.unary(Unary::DGeluTanh, x)?,
            Unary::Mish => b.unary(Unary::DMish, x)?,
            Unary::Erf | Unary::Erfc => {
                let square = b.binary(Binary::Mul, x, x)?;
                let square = b.unary(Unary::Neg, square)?;
                let density = b.unary(Unary::Exp, square)?;
                let sign = if f == Unary::Erf { 1.0 } else { -1.0 };
                let factor = b.number(sign * std::f64::consts::FRAC_2_SQRT_PI)?;
                b.binary(Binary::Mul, density, factor)?
            }
            Unary::Sin => b.unary(Unary::Cos, x)?,
            Unary::Cos => {
                let sine = b.unary(Unary::Sin, x)?;
                b.unary(Unary::Neg, sine)?
            }
            Unary::DSilu | Unary::DGelu | Unary::DGeluTanh | Unary::DMish => {
                let what = "is a derivative already; it has none of its own here";
                return Err(Error::node(definition(self.graph, y), what));
            }
        };
        Ok(Some(self.mul(g, slope)?))
    }

    fn binary(&mut self, f: Binary, a: NodeId, b: NodeId, y: NodeId, g: NodeId) -> Result<()> {
        let needs = |this: &Self, id: NodeId| this.needed[id.index()];
        match f {
            Binary::Add => {
                self.add(a, g)?;
                self.add(b, g)
            }
            Binary::Sub => {
                self.add(a, g)?;
                if needs(self, b) {
                    let negative = self.builder.unary(Unary::Neg, g)?;
                    self.add(b, negative)?;
                }
                Ok(())
            }
            Binary::Mul => {
                for (to, other) in [(a, b), (b, a)] {
                    if needs(self, to) {
                        let product = self.mul(g, other)?;
                        self.add(to, product)?;
                    }
                }
                Ok(())
            }
            Binary::Div => {
                let share = self.builder.binary(Binary::Div, g, b)?;
                self.add(a, share)?;
                if needs(self, b) {
                    let product = self.mul(share, y)?;
                    let negative = self.builder.unary(Unary::Neg, product)?;
                    self.add(b, negative)?;
                }
                Ok(())
            }
            Binary::Pow => self.power(a, b, y, g),
            Binary::Max | Binary::Min => {
                // Equal operands share; a bound that is a number takes nothing.
                let bound = [a, b].iter().any(|&id| self.graph.node(id).op.is_number());
                let loses = if f == Binary::Max { Binary::Lt } else { Binary::Gt };
                for (to, other) in [(a, b), (b, a)] {
                    if !needs(self, to) {
                        continue;
                    }
                    let zero = self.builder.number(0.0)?;
                    let lost = self.builder.binary(loses, to, other)?;
                    let won = if bound {
                        g
                    } else {
                        let half = self.scaled(g, 0.5)?;
                        let tie = self.builder.binary(Binary::Eq, to, other)?;
                        self.builder.select(tie, half, g)?
                    };
                    let adjoint = self.builder.select(lost, zero, won)?;
                    self.add(to, adjoint)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn power(&mut self, a: NodeId, b: NodeId, y: NodeId, g: NodeId) -> Result<()> {
        if self.needed[a.index()] {
            let one = self.builder.number(1.0)?;
            let less = self.builder.binary(Binary::Sub, b, one)?;
            let power = self.builder.binary(Binary::Pow, a, less)?;
            let slope = self.mul(b, power)?;
            let adjoint = self.mul(g, slope)?;
            // `a^0` is 1 everywhere.
            let zero = self.builder.number(0.0)?;
            let flat = self.builder.binary(Binary::Eq, b, zero)?;
            let adjoint = self.builder.select(flat, zero, adjoint)?;
            self.add(a, adjoint)?;
        }
        if self.needed[b.index()] {
            let log = self.builder.unary(Unary::Log, a)?;
            let slope = self.mul(y, log)?;
            let zero = self.builder.number(0.0)?;
            let flat = self.builder.binary(Binary::Eq, y, zero)?;
            let slope = self.builder.select(flat, zero, slope)?;
            let adjoint = self.mul(g, slope)?;
            self.add(b, adjoint)?;
        }
        Ok(())
    }
}

/// Cuts the joint graph in two. What the backward part needs of the forward part is kept if it is a reduction's result, given
/// if it is an input, and else computed again.
fn split(
    graph: &Graph,
    joint: &Builder,
    results: &[(String, NodeId)],
    given: &[NodeId],
    compared: &[NodeId],
) -> Result<Gradient> {
    let forward_nodes = graph.nodes().len();
    let is_kept = |id: NodeId| {
        id.index() < forward_nodes
            && !compared.contains(&id)
            && matches!(joint.node(id).op, Op::Reduce(_) | Op::SumTo)
    };
    let mut used = vec![];
    let mut seen = vec![false; joint.len()];
    let mut open: Vec<NodeId> = results.iter().map(|(_, id)| *id).collect();
    while let Some(id) = open.pop() {
        if std::mem::replace(&mut seen[id.index()], true) {
            continue;
        }
        used.push(id);
        if !is_kept(id) {
            open.extend(&joint.node(id).args);
        }
    }
    used.sort_unstable();
    let kept: Vec<NodeId> = used.iter().copied().filter(|&id| is_kept(id)).collect();
    add_sizes(graph, joint, &mut used, &kept, given);
    let mut backward = Builder::new();
    let mut places: HashMap<NodeId, NodeId> = HashMap::new();
    let give = |backward: &mut Builder, id: NodeId, name: &str| {
        let node = joint.node(id);
        backward.input(name, node.dtype, &node.shape)
    };
    for &id in graph.inputs().iter().filter(|id| used.contains(id)) {
        places.insert(id, give(&mut backward, id, graph.input_name(id))?);
    }
    for (i, &id) in kept.iter().enumerate() {
        let node = joint.node(id);
        let dtype = if node.dtype.is_float() { DType::F32 } else { node.dtype };
        places.insert(id, backward.input(&format!("kept{i}"), dtype, &node.shape)?);
    }
    for &id in given {
        places.insert(id, give(&mut backward, id, joint.node(id).op.name())?);
    }
    for &id in &used {
        if !places.contains_key(&id) {
            let node = joint.node(id).clone();
            let args = node.args.iter().map(|arg| places[arg]).collect();
            places.insert(id, backward.copy(Node { args, ..node })?);
        }
    }
    let outputs: Vec<(&str, NodeId)> = results.iter().map(|(name, id)| (name.as_str(), places[id])).collect();
    let backward = backward.finish(&outputs)?;
    let names: Vec<String> = (0..kept.len()).map(|i| format!("kept{i}")).collect();
    let own = graph.outputs().iter().map(|(name, id): &(Arc<str>, NodeId)| (&**name, *id));
    let mut forward = graph.reopen();
    // Not rounded to 16 bits: they decide about whole rows.
    let mut exact = vec![];
    for &id in &kept {
        exact.push(if graph.node(id).dtype.is_float() { forward.cast(id, DType::F32)? } else { id });
    }
    let outputs: Vec<(&str, NodeId)> = own.chain(names.iter().map(String::as_str).zip(exact)).collect();
    let forward = forward.finish(&outputs)?;
    Ok(Gradient { forward, backward })
}

/// Adds inputs that are needed for nothing but their sizes: a sum's derivative has its argument's shape.
fn add_sizes(graph: &Graph, joint: &Builder, used: &mut Vec<NodeId>, kept: &[NodeId], given: &[NodeId]) {
    let shape = |id: &NodeId| match &joint.node(*id).op {
        Op::Size(dim) => vec![dim.clone()],
        _ => joint.node(*id).shape.clone(),
    };
    let needed: BTreeSet<Dim> =
        used.iter().flat_map(shape).filter(|dim| matches!(dim, Dim::Named(_))).collect();
    let inputs = used.iter().filter(|id| graph.inputs().contains(id));
    let mut known: BTreeSet<Dim> = inputs.chain(kept).chain(given).flat_map(shape).collect();
    for id in graph.inputs() {
        if !used.contains(id) && shape(id).iter().any(|dim| needed.contains(dim) && !known.contains(dim)) {
            used.push(*id);
            known.extend(shape(id));
        }
    }
    used.sort_unstable();
}
