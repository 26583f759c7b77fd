//! Graphs of operations: typed, immutable, made by a [`Builder`].

use crate::error::{Error, Result};
use crate::op::{Binary, Domain, Op, Reduce, Unary};
use crate::shape::{Dim, MAX_RANK, broadcast, show};
use crate::types::{DTYPES, Scalar, Weight, is_int, result_type};
use std::collections::HashMap;
use std::sync::Arc;
use warpsmith::DType;

/// Most nodes of a graph: plans take time that grows with the square.
pub const MAX_NODES: usize = 4096;
/// Most columns of what [`Builder::rotate_half`] takes: whole rows lie in the L1 cache of the CPU.
const MAX_ROTATED: usize = 512;

/// A node of the graph that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// Its place in [`Graph::nodes`]; arguments come before those that use them.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation and what it applies to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Of what.
    pub args: Vec<NodeId>,
    /// Type of its elements.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<Dim>,
}

/// A graph of operations from inputs to outputs.
#[derive(Clone, Debug)]
pub struct Graph {
    nodes: Vec<Node>,
    inputs: Vec<NodeId>,
    outputs: Vec<(Arc<str>, NodeId)>,
}

impl Graph {
    /// All nodes; arguments before those that use them.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The inputs, in the order of a call.
    pub fn inputs(&self) -> &[NodeId] {
        &self.inputs
    }

    /// The name of an input.
    pub fn input_name(&self, id: NodeId) -> &str {
        self.node(id).op.name()
    }

    /// The outputs and their names, in the order of a call.
    pub fn outputs(&self) -> &[(Arc<str>, NodeId)] {
        &self.outputs
    }

    /// All node ids in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// A builder that has these nodes and can add more.
    pub(crate) fn reopen(&self) -> Builder {
        let made = self.ids().map(|id| (self.node(id).clone(), id)).collect();
        Builder { nodes: self.nodes.clone(), inputs: self.inputs.clone(), made }
    }
}

/// Makes graphs. Every method checks its arguments, converts types as PyTorch does, and gives equal nodes one id.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    nodes: Vec<Node>,
    inputs: Vec<NodeId>,
    made: HashMap<Node, NodeId>,
}

impl Builder {
    /// A builder without nodes.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// The node behind an id of this builder.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    fn add(&mut self, op: Op, args: Vec<NodeId>, dtype: DType, shape: Vec<Dim>) -> Result<NodeId> {
        let node = Node { op, args, dtype, shape };
        if let Some(&id) = self.made.get(&node) {
            return Ok(id);
        }
        if self.nodes.len() >= MAX_NODES {
            return Err(Error::node(node.op.name(), format!("a graph has at most {MAX_NODES} nodes")));
        }
        let id = NodeId(self.nodes.len() as u32);
        self.made.insert(node.clone(), id);
        self.nodes.push(node);
        Ok(id)
    }

    /// Number of nodes so far.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// A node of another graph, whose arguments are of this one.
    pub(crate) fn copy(&mut self, node: Node) -> Result<NodeId> {
        self.add(node.op, node.args, node.dtype, node.shape)
    }

    /// A tensor that is given to the call. Calls take inputs in the order in which they are made.
    ///
    /// # Errors
    /// If the name was used before, or type or rank are not supported.
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[Dim]) -> Result<NodeId> {
        if !DTYPES.contains(&dtype) {
            let known = DTYPES.map(DType::name).join(", ");
            return Err(Error::node(name, format!("has type {dtype}; fusion knows {known}")));
        }
        if shape.len() > MAX_RANK {
            return Err(Error::node(name, format!("has {} dimensions, at most {MAX_RANK} fit", shape.len())));
        }
        if self.inputs.iter().any(|&id| self.node(id).op.name() == name) {
            return Err(Error::node(name, "is an input already"));
        }
        let id = self.add(Op::Input(name.into()), vec![], dtype, shape.to_vec())?;
        self.inputs.push(id);
        Ok(id)
    }

    /// A number. It takes the type of what it meets.
    ///
    /// # Errors
    /// If the graph is full.
    pub fn scalar(&mut self, value: Scalar) -> Result<NodeId> {
        self.add(Op::Scalar(value), vec![], value.dtype(), vec![])
    }

    /// A size, as a float; a number if it is known.
    ///
    /// # Errors
    /// If the graph is full.
    pub fn size(&mut self, dim: &Dim) -> Result<NodeId> {
        match dim {
            Dim::Fixed(size) => self.number(*size as f64),
            named => self.add(Op::Size(named.clone()), vec![], DType::F32, vec![]),
        }
    }

    /// [`Builder::scalar`] of any number.
    ///
    /// # Errors
    /// If the graph is full.
    pub fn number(&mut self, value: f64) -> Result<NodeId> {
        self.scalar(Scalar::Float(value))
    }

    fn weight(&self, id: NodeId) -> Weight {
        match self.node(id) {
            Node { op, .. } if op.is_number() => Weight::Number,
            node if node.shape.is_empty() => Weight::ZeroDim,
            _ => Weight::Tensor,
        }
    }

    fn common_type(&self, args: &[NodeId]) -> DType {
        let operands: Vec<_> = args.iter().map(|&id| (self.node(id).dtype, self.weight(id))).collect();
        result_type(&operands)
    }

    /// Makes an operand computable as `dtype`: floats and bools as they are, because all are computed in f32; whole numbers
    /// by a cast where that is needed.
    fn operand(&mut self, id: NodeId, dtype: DType) -> Result<NodeId> {
        let Node { op, dtype: from, .. } = self.node(id).clone();
        if let Op::Scalar(value) = op {
            return match (is_int(dtype), value) {
                (true, Scalar::Bool(b)) => self.scalar(Scalar::Int(b.into())),
                (false, Scalar::Int(i)) => self.scalar(Scalar::Float(i as f64)),
                _ => Ok(id),
            };
        }
        match (is_int(from), is_int(dtype)) {
            (false, false) => Ok(id),
            (true, false) => self.cast(id, DType::F32),
            _ if from == dtype => Ok(id),
            _ => self.cast(id, dtype),
        }
    }

    /// An operation as it would be written, for errors.
    fn written(&self, name: &str, args: &[NodeId]) -> String {
        let arg = |id: &NodeId| {
            let Node { op, dtype, shape, .. } = self.node(*id);
            match op {
                Op::Scalar(value) => format!("{}", value.value()),
                Op::Size(dim) => format!("size({dim})"),
                Op::Input(name) => format!("{name}: {dtype} {}", show(shape)),
                _ => format!("{}: {dtype} {}", op.name(), show(shape)),
            }
        };
        let args: Vec<String> = args.iter().map(arg).collect();
        format!("{name}({})", args.join(", "))
    }

    fn joined_shape(&self, name: &str, args: &[NodeId]) -> Result<Vec<Dim>> {
        let mut shape = vec![];
        for &id in args {
            shape = broadcast(&shape, &self.node(id).shape).ok_or_else(|| {
                Error::node(self.written(name, args), "the shapes do not broadcast to a common one")
            })?;
        }
        Ok(shape)
    }

    /// A function of each element.
    ///
    /// # Errors
    /// If the function is not defined for bools.
    pub fn unary(&mut self, f: Unary, x: NodeId) -> Result<NodeId> {
        let Node { dtype, shape, .. } = self.node(x).clone();
        let whole = is_int(dtype);
        match f.domain() {
            Domain::Test if f == Unary::IsNan && whole => {
                let x = self.cast(x, DType::F32)?;
                self.unary(f, x)
            }
            Domain::Test => self.add(Op::Unary(f), vec![x], DType::Bool, shape),
            Domain::Number if dtype == DType::Bool => {
                Err(Error::node(self.written(f.name(), &[x]), "is not defined for bools"))
            }
            Domain::Number => match f {
                Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc if whole => Ok(x),
                _ => self.add(Op::Unary(f), vec![x], dtype, shape),
            },
            Domain::Float => {
                let dtype = if whole || dtype == DType::Bool { DType::F32 } else { dtype };
                let x = self.operand(x, dtype)?;
                self.add(Op::Unary(f), vec![x], dtype, shape)
            }
        }
    }

    /// A function of the elements of two tensors or numbers.
    ///
    /// # Errors
    /// If shapes do not broadcast, or the function is not defined for the types.
    pub fn binary(&mut self, f: Binary, a: NodeId, b: NodeId) -> Result<NodeId> {
        let args = [a, b];
        let shape = self.joined_shape(f.name(), &args)?;
        let mut meet = self.common_type(&args);
        let refuse = |this: &Builder, what: &str| Err(Error::node(this.written(f.name(), &args), what));
        if f.is_logical() && meet != DType::Bool {
            return refuse(self, "is defined for bools only");
        }
        if f == Binary::Sub && meet == DType::Bool {
            return refuse(self, "is not defined for bools");
        }
        if f == Binary::Pow {
            return self.power(a, b, meet);
        }
        if f == Binary::Div && !meet.is_float() {
            meet = DType::F32;
        }
        let (a, b) = (self.operand(a, meet)?, self.operand(b, meet)?);
        let bools = meet == DType::Bool;
        let f = match f {
            Binary::Add | Binary::Max if bools => Binary::Or,
            Binary::Mul | Binary::Min if bools => Binary::And,
            f => f,
        };
        let dtype = if f.is_comparison() { DType::Bool } else { meet };
        if let (Binary::Add | Binary::Sub, Some((a, b))) = (f, self.summed_alike(a, b)) {
            // One sum of what is added, rather than two sums and a kernel that waits for both.
            let terms = self.add(Op::Binary(f), vec![a, b], dtype, self.node(a).shape.clone())?;
            return self.add(Op::SumTo, vec![terms], dtype, shape);
        }
        self.add(Op::Binary(f), vec![a, b], dtype, shape)
    }

    /// What two nodes are sums of, if both are sums over the same rows of one shape.
    fn summed_alike(&self, a: NodeId, b: NodeId) -> Option<(NodeId, NodeId)> {
        let (a, b) = (self.node(a), self.node(b));
        if a.op != Op::SumTo || b.op != Op::SumTo || a.shape != b.shape {
            return None;
        }
        let (a, b) = (a.args[0], b.args[0]);
        (self.node(a).shape == self.node(b).shape).then_some((a, b))
    }

    /// Powers that have a shorter way take it.
    fn power(&mut self, a: NodeId, b: NodeId, meet: DType) -> Result<NodeId> {
        if let Op::Scalar(exponent) = self.node(b).op {
            let exponent = exponent.value();
            if exponent == 1.0 && !matches!(self.node(a).op, Op::Scalar(_)) && self.node(a).dtype == meet {
                return Ok(a);
            }
            let a = self.operand(a, meet)?;
            if exponent == 2.0 {
                return self.binary(Binary::Mul, a, a);
            }
            if exponent == 3.0 {
                let square = self.binary(Binary::Mul, a, a)?;
                return self.binary(Binary::Mul, square, a);
            }
            if exponent == 4.0 {
                let square = self.binary(Binary::Mul, a, a)?;
                return self.binary(Binary::Mul, square, square);
            }
            if exponent == -1.0 && meet.is_float() {
                return self.unary(Unary::Reciprocal, a);
            }
            // Not 0.5 and -0.5: (-inf)^0.5 is inf and (-0)^-0.5 is inf, where the roots say otherwise.
        }
        if !meet.is_float() {
            return Err(Error::node(
                self.written("pow", &[a, b]),
                "powers of whole numbers are defined for exponents 1 to 4; cast to a float type for others",
            ));
        }
        let shape = self.joined_shape("pow", &[a, b])?;
        let (a, b) = (self.operand(a, meet)?, self.operand(b, meet)?);
        self.add(Op::Binary(Binary::Pow), vec![a, b], meet, shape)
    }

    /// `a` where `condition` holds, `b` elsewhere.
    ///
    /// # Errors
    /// If shapes do not broadcast or the condition is not a bool.
    pub fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Result<NodeId> {
        let args = [condition, a, b];
        if self.node(condition).dtype != DType::Bool {
            return Err(Error::node(self.written("where", &args), "the condition must be a bool"));
        }
        let shape = self.joined_shape("where", &args)?;
        let dtype = self.common_type(&[a, b]);
        let (a, b) = (self.operand(a, dtype)?, self.operand(b, dtype)?);
        self.add(Op::Where, vec![condition, a, b], dtype, shape)
    }

    /// The same values in another type, rounded to it.
    ///
    /// # Errors
    /// If the type is not supported.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        let Node { op, dtype: from, shape, .. } = self.node(x).clone();
        if !DTYPES.contains(&dtype) {
            let known = DTYPES.map(DType::name).join(", ");
            return Err(Error::node(self.written("cast", &[x]), format!("to {dtype}; fusion knows {known}")));
        }
        if from == dtype && !op.is_number() {
            return Ok(x);
        }
        self.add(Op::Cast(dtype), vec![x], dtype, shape)
    }

    /// A reduction over the last dimension, of which one element stays.
    ///
    /// # Errors
    /// Without dimensions, for types it is not defined for, and for the largest of no elements.
    pub fn reduce(&mut self, f: Reduce, x: NodeId) -> Result<NodeId> {
        let Node { dtype, shape, .. } = self.node(x).clone();
        let refuse =
            |this: &Builder, what: &str| Err(Error::node(this.written(f.name(), &[x]), what.to_string()));
        let Some((last, outer)) = shape.split_last() else {
            return refuse(self, "needs a dimension to reduce");
        };
        let mut dtype = dtype;
        match f {
            Reduce::Sum if !dtype.is_float() => dtype = DType::I64,
            Reduce::Mean if !dtype.is_float() => return refuse(self, "is defined for floats only"),
            Reduce::Max | Reduce::Min if dtype == DType::Bool => {
                return refuse(self, "is not defined for bools");
            }
            Reduce::Max | Reduce::Min if *last == Dim::Fixed(0) => return refuse(self, "has no elements"),
            _ => {}
        }
        let x = if is_int(dtype) { self.cast(x, dtype)? } else { x };
        let mut shape = outer.to_vec();
        shape.push(Dim::Fixed(1));
        self.add(Op::Reduce(f), vec![x], dtype, shape)
    }

    /// Sums `x` to a shape that would broadcast to its own.
    ///
    /// # Errors
    /// If it would not, or `x` is not a float.
    pub fn sum_to(&mut self, x: NodeId, shape: &[Dim]) -> Result<NodeId> {
        let from = self.node(x).shape.clone();
        if from == shape {
            return Ok(x);
        }
        let fits = broadcast(shape, &from).as_deref() == Some(&from[..]);
        if !fits || !self.node(x).dtype.is_float() {
            let what = format!("cannot be summed to {}", show(shape));
            return Err(Error::node(self.written("sum_to", &[x]), what));
        }
        // A sum of a sum, or one without its dimensions of size 1, is one sum.
        let Node { op, args, .. } = self.node(x);
        if *op == Op::SumTo {
            return self.sum_to(args[0], shape);
        }
        let mut x = x;
        let one = |last: Option<&Dim>| last.is_none_or(Dim::is_one);
        if one(shape.last()) && !one(from.last()) {
            x = self.reduce(Reduce::Sum, x)?;
        }
        let Node { dtype, shape: from, .. } = self.node(x).clone();
        if from == shape { Ok(x) } else { self.add(Op::SumTo, vec![x], dtype, shape.to_vec()) }
    }

    /// Repeats `x` along dimensions of size 1 and new ones.
    ///
    /// # Errors
    /// If it does not broadcast to the shape.
    pub fn expand(&mut self, x: NodeId, shape: &[Dim]) -> Result<NodeId> {
        let Node { dtype, shape: from, .. } = self.node(x).clone();
        if broadcast(&from, shape).as_deref() != Some(shape) || shape.len() > MAX_RANK {
            let what = format!("does not broadcast to {}", show(shape));
            return Err(Error::node(self.written("expand", &[x]), what));
        }
        if from == shape { Ok(x) } else { self.add(Op::Expand, vec![x], dtype, shape.to_vec()) }
    }

    /// The rows of a matrix that the elements of `index` name.
    ///
    /// # Errors
    /// If `table` is no matrix or `index` not whole.
    pub fn gather(&mut self, table: NodeId, index: NodeId) -> Result<NodeId> {
        let (Node { dtype, shape: matrix, .. }, at) = (self.node(table).clone(), self.node(index).clone());
        let what = match () {
            _ if matrix.len() != 2 => "the table must have two dimensions",
            _ if !is_int(at.dtype) => "the index must be i32 or i64",
            _ if at.shape.len() == MAX_RANK => "the result would have too many dimensions",
            _ => {
                let shape = [&at.shape[..], &matrix[1..]].concat();
                return self.add(Op::Gather, vec![table, index], dtype, shape);
            }
        };
        Err(Error::node(self.written("gather", &[table, index]), what))
    }

    /// The halves of the last dimension, exchanged, the first of the result negated.
    ///
    /// # Errors
    /// Unless `x` is of floats, and of an even number of columns that the graph fixes, up to 512.
    pub fn rotate_half(&mut self, x: NodeId) -> Result<NodeId> {
        let Node { dtype, shape, .. } = self.node(x).clone();
        let fits = |size: usize| size.is_multiple_of(2) && (2..=MAX_ROTATED).contains(&size);
        match shape.last() {
            Some(Dim::Fixed(size)) if fits(*size) && dtype.is_float() => {
                self.add(Op::Rotate, vec![x], dtype, shape)
            }
            _ => {
                let what = format!("takes floats with an even number of columns, fixed, up to {MAX_ROTATED}");
                Err(Error::node(self.written("rotate_half", &[x]), what))
            }
        }
    }

    /// The graph of what the outputs need. Inputs stay, needed or not.
    ///
    /// # Errors
    /// Without outputs, or if two have one name.
    pub fn finish(mut self, outputs: &[(&str, NodeId)]) -> Result<Graph> {
        if outputs.is_empty() {
            return Err(Error::node("graph", "has no outputs"));
        }
        // A number alone has no type until something takes it.
        let mut settled = vec![];
        for &(name, id) in outputs {
            let number = self.node(id).op.is_number();
            let dtype = self.node(id).dtype;
            settled.push((name, if number { self.cast(id, dtype)? } else { id }));
        }
        let outputs = &settled[..];
        let mut needed = vec![false; self.nodes.len()];
        for (i, (name, id)) in outputs.iter().enumerate() {
            if outputs[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::node(*name, "is an output already"));
            }
            needed[id.index()] = true;
        }
        for id in &self.inputs {
            needed[id.index()] = true;
        }
        for at in (0..self.nodes.len()).rev() {
            if needed[at] {
                self.nodes[at].args.iter().for_each(|arg| needed[arg.index()] = true);
            }
        }
        let mut places = vec![NodeId(0); self.nodes.len()];
        let mut nodes = vec![];
        for (at, node) in self.nodes.into_iter().enumerate().filter(|(at, _)| needed[*at]) {
            places[at] = NodeId(nodes.len() as u32);
            let args = node.args.iter().map(|arg| places[arg.index()]).collect();
            nodes.push(Node { args, ..node });
        }
        Ok(Graph {
            nodes,
            inputs: self.inputs.iter().map(|id| places[id.index()]).collect(),
            outputs: outputs.iter().map(|(name, id)| ((*name).into(), places[id.index()])).collect(),
        })
    }
}
