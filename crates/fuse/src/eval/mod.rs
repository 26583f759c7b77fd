//! The meaning of a graph: every node in f64, with a bound on what an honest computation in f32 may differ by.
//!
//! The bound is propagated beside the value: what the arguments' errors can do to the result, plus the rounding of the
//! operation itself. Where a bound says nothing, because a comparison could go either way or a divisor could be zero, the
//! element is *unknown* and any result is right. Tensors that are given, and casts, are rounded to their types; results in
//! between are not.

mod functions;

use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::op::{Op, Reduce};
use crate::shape::Sizes;
use crate::types::is_int;
use functions::{binary, overflowed, unary};
use warpsmith::DType;

/// The relative error of one rounding in f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;
/// The spacing of the smallest numbers in f32.
pub(crate) const TINY: f64 = 1.401_298_464_324_817e-45;

/// A value and how far from it a result may be; infinite if anything is right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Approx {
    /// The value in f64.
    pub value: f64,
    /// The bound.
    pub error: f64,
}

impl Approx {
    pub(crate) fn exact(value: f64) -> Approx {
        Approx { value, error: 0.0 }
    }

    pub(crate) fn unknown() -> Approx {
        Approx { value: f64::NAN, error: f64::INFINITY }
    }

    /// Whether any result is right.
    pub fn is_unknown(self) -> bool {
        self.error == f64::INFINITY
    }

    /// Whether `got`, of type `dtype`, is right.
    pub fn allows(self, got: f64, dtype: DType) -> bool {
        let Approx { value, error } = self;
        if self.is_unknown() {
            return true;
        }
        if value.is_nan() {
            return got.is_nan();
        }
        if !dtype.is_float() {
            return (got - value).abs() <= error;
        }
        let reach = value.abs() + error;
        // Rounded to the type, whichever way.
        let bound = error + dtype.unit_roundoff() * reach * 1.01 + dtype.smallest_subnormal() * 0.51;
        let largest = dtype.max_finite();
        if got.is_infinite() && got.signum() == value.signum() && reach >= largest * (1.0 - 1e-7) {
            return true;
        }
        if value.is_infinite() {
            return got == value;
        }
        (got - value).abs() <= bound
    }
}

/// The elements of a node.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Floats, and bools as 0 and 1.
    Floats(Vec<Approx>),
    /// Whole numbers; `None` where any is right.
    Ints(Vec<Option<i64>>),
}

impl Elements {
    fn floats(&self) -> &[Approx] {
        match self {
            Elements::Floats(all) => all,
            Elements::Ints(_) => &[],
        }
    }

    fn ints(&self) -> &[Option<i64>] {
        match self {
            Elements::Ints(all) => all,
            Elements::Floats(_) => &[],
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Elements::Floats(all) => all.len(),
            Elements::Ints(all) => all.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The value of a node in a call.
#[derive(Clone, Debug)]
pub struct Value {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements, the last dimension's first.
    pub elements: Elements,
}

/// A tensor given to [`evaluate`]: whole numbers, or floats and bools.
#[derive(Clone, Debug)]
pub enum Given {
    /// Floats; bools as 0 and 1. Taken as they are, so they should be numbers of the type.
    Floats(Vec<f64>),
    /// Whole numbers.
    Ints(Vec<i64>),
}

/// How element `index` of a shape is found in an argument of another shape that broadcasts to it.
struct Walk {
    sizes: Vec<usize>,
    strides: Vec<usize>,
}

impl Walk {
    fn new(from: &[usize], to: &[usize]) -> Walk {
        let mut strides = vec![0; to.len()];
        let mut step = 1;
        for (i, &size) in from.iter().enumerate().rev() {
            strides[to.len() - from.len() + i] = if size == 1 { 0 } else { step };
            step *= size;
        }
        Walk { sizes: to.to_vec(), strides }
    }

    fn at(&self, mut index: usize) -> usize {
        let mut place = 0;
        for (size, stride) in self.sizes.iter().zip(&self.strides).rev() {
            place += index % size * stride;
            index /= size;
        }
        place
    }
}

/// Evaluates every node, given the inputs in order.
///
/// # Errors
/// If the inputs do not fit the graph, or an index lies outside its table.
pub fn evaluate(graph: &Graph, inputs: &[(Vec<usize>, Given)]) -> Result<Vec<Value>> {
    evaluate_stored(graph, inputs, &|_| false)
}

/// [`evaluate`], where these nodes are rounded to their types before others use them, because they go through memory.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_stored(
    graph: &Graph,
    inputs: &[(Vec<usize>, Given)],
    is_stored: &dyn Fn(NodeId) -> bool,
) -> Result<Vec<Value>> {
    let mut sizes = Sizes::default();
    if inputs.len() != graph.inputs().len() {
        let expected = format!("{} inputs", graph.inputs().len());
        return Err(Error::argument("inputs", expected, inputs.len().to_string()));
    }
    for (&id, (shape, _)) in graph.inputs().iter().zip(inputs) {
        sizes.bind(graph.input_name(id), &graph.node(id).shape, shape)?;
    }
    let mut values: Vec<Value> = Vec::with_capacity(graph.nodes().len());
    for id in graph.ids() {
        let node = graph.node(id);
        let shape = sizes.shape(&node.shape)?;
        let elements = match graph.inputs().iter().position(|&input| input == id) {
            Some(at) => given(graph, id, &shape, &inputs[at].1)?,
            None => compute(graph, node, &shape, &values, &sizes)?,
        };
        let elements = if is_stored(id) { stored(elements, node.dtype) } else { elements };
        values.push(Value { shape, elements });
    }
    Ok(values)
}

/// What may have been rounded once more.
fn stored(elements: Elements, dtype: DType) -> Elements {
    match elements {
        Elements::Floats(all) if dtype.is_float() && dtype != DType::F32 => {
            let widen = |x: Approx| {
                let reach = x.value.abs() + x.error;
                let rounding = dtype.unit_roundoff() * reach + dtype.smallest_subnormal();
                match reach < dtype.max_finite() * 0.99 || !x.value.is_finite() {
                    true if x.value.is_finite() => Approx { error: x.error + rounding, ..x },
                    true => x,
                    false => Approx::unknown(),
                }
            };
            Elements::Floats(all.into_iter().map(widen).collect())
        }
        other => other,
    }
}

fn given(graph: &Graph, id: NodeId, shape: &[usize], given: &Given) -> Result<Elements> {
    let dtype = graph.node(id).dtype;
    let count: usize = shape.iter().product();
    let elements = match given {
        Given::Floats(all) if !is_int(dtype) => {
            Elements::Floats(all.iter().map(|&x| Approx::exact(x)).collect())
        }
        Given::Ints(all) if is_int(dtype) => Elements::Ints(all.iter().copied().map(Some).collect()),
        _ => return Err(Error::argument(graph.input_name(id), dtype.name(), "elements of another kind")),
    };
    match elements.len() == count {
        true => Ok(elements),
        false => {
            let got = elements.len().to_string();
            Err(Error::argument(graph.input_name(id), format!("{count} elements"), got))
        }
    }
}

fn compute(graph: &Graph, node: &Node, shape: &[usize], values: &[Value], sizes: &Sizes) -> Result<Elements> {
    let count: usize = shape.iter().product();
    let arg = |at: usize| &values[node.args[at].index()];
    let walk = |at: usize| Walk::new(&arg(at).shape, shape);
    let whole = |at: usize| is_int(graph.node(node.args[at]).dtype);
    Ok(match &node.op {
        Op::Input(name) => return Err(Error::node(&**name, "has no value")),
        Op::Scalar(value) if is_int(node.dtype) => Elements::Ints(vec![Some(value.value() as i64)]),
        Op::Size(dim) => Elements::Floats(vec![Approx::exact(sizes.of(dim)? as f64)]),
        // Computed in f32.
        Op::Scalar(value) => {
            let rounded = f64::from(value.value() as f32);
            let error = if rounded == value.value() || rounded.is_nan() { 0.0 } else { U * rounded.abs() };
            Elements::Floats(vec![Approx { value: rounded, error }])
        }
        Op::Unary(f) if whole(0) => {
            let x = arg(0).elements.ints();
            match node.dtype {
                DType::Bool => Elements::Floats(
                    x.iter().map(|x| functions::known(x.map(|x| f64::from(x == 0)))).collect(),
                ),
                dtype => {
                    Elements::Ints(x.iter().map(|x| x.map(|x| functions::unary_int(*f, x, dtype))).collect())
                }
            }
        }
        Op::Unary(f) => Elements::Floats(arg(0).elements.floats().iter().map(|&x| unary(*f, x)).collect()),
        Op::Binary(f) => {
            let (a, b) = (walk(0), walk(1));
            if whole(0) {
                let (x, y) = (arg(0).elements.ints(), arg(1).elements.ints());
                let pairs = (0..count).map(|i| x[a.at(i)].zip(y[b.at(i)]));
                if f.is_comparison() {
                    let compare = |(x, y)| functions::compare(*f, x, y).into();
                    Elements::Floats(pairs.map(|pair| functions::known(pair.map(compare))).collect())
                } else {
                    Elements::Ints(
                        pairs
                            .map(|pair| pair.map(|(x, y)| functions::binary_int(*f, x, y, node.dtype)))
                            .collect(),
                    )
                }
            } else {
                let (x, y) = (arg(0).elements.floats(), arg(1).elements.floats());
                Elements::Floats((0..count).map(|i| binary(*f, x[a.at(i)], y[b.at(i)])).collect())
            }
        }
        Op::Where => {
            let (c, a, b) = (walk(0), walk(1), walk(2));
            let condition = arg(0).elements.floats();
            if is_int(node.dtype) {
                let (x, y) = (arg(1).elements.ints(), arg(2).elements.ints());
                let choose = |i: usize| {
                    let (c, x, y) = (condition[c.at(i)], x[a.at(i)], y[b.at(i)]);
                    if c.error > 0.0 && x != y {
                        None
                    } else if c.value != 0.0 {
                        x
                    } else {
                        y
                    }
                };
                Elements::Ints((0..count).map(choose).collect())
            } else {
                let (x, y) = (arg(1).elements.floats(), arg(2).elements.floats());
                let choose = |i| functions::select(condition[c.at(i)], x[a.at(i)], y[b.at(i)]);
                Elements::Floats((0..count).map(choose).collect())
            }
        }
        Op::Cast(to) => cast(arg(0), *to),
        Op::Expand => {
            let x = walk(0);
            match &arg(0).elements {
                Elements::Floats(all) => Elements::Floats((0..count).map(|i| all[x.at(i)]).collect()),
                Elements::Ints(all) => Elements::Ints((0..count).map(|i| all[x.at(i)]).collect()),
            }
        }
        Op::Reduce(f) => {
            let columns = arg(0).shape.last().copied().unwrap_or(1);
            match &arg(0).elements {
                Elements::Floats(all) => {
                    let rows = (0..count).map(|row| &all[row * columns..(row + 1) * columns]);
                    if is_int(node.dtype) {
                        let count = |row: &[Approx]| {
                            let known = row.iter().all(|x| x.error == 0.0);
                            known.then(|| row.iter().map(|x| x.value as i64).sum())
                        };
                        Elements::Ints(rows.map(count).collect())
                    } else {
                        Elements::Floats(rows.map(|row| reduce(*f, row)).collect())
                    }
                }
                Elements::Ints(all) => {
                    let rows = (0..count).map(|row| &all[row * columns..(row + 1) * columns]);
                    Elements::Ints(rows.map(|row| functions::reduce_int(*f, row)).collect())
                }
            }
        }
        Op::SumTo => {
            let x = arg(0);
            let to = Walk::new(shape, &x.shape);
            let mut parts: Vec<Vec<Approx>> = vec![vec![]; count];
            for (i, &element) in x.elements.floats().iter().enumerate() {
                parts[to.at(i)].push(element);
            }
            Elements::Floats(parts.iter().map(|part| reduce(Reduce::Sum, part)).collect())
        }
        Op::Rotate => {
            let (x, columns) = (arg(0).elements.floats(), shape.last().copied().unwrap_or(1));
            let turned = |i: usize| match i % columns < columns / 2 {
                true => Approx { value: -x[i + columns / 2].value, ..x[i + columns / 2] },
                false => x[i - columns / 2],
            };
            Elements::Floats((0..count).map(turned).collect())
        }
        Op::Gather => {
            let (table, index) = (arg(0), arg(1));
            let (rows, columns) = (table.shape[0], table.shape[1]);
            let mut places = vec![];
            for &at in index.elements.ints() {
                let row = at.and_then(|at| usize::try_from(at).ok()).filter(|row| *row < rows);
                let row = row.ok_or_else(|| {
                    Error::argument("gather", format!("rows from 0 to below {rows}"), format!("{at:?}"))
                })?;
                places.extend(row * columns..(row + 1) * columns);
            }
            match &table.elements {
                Elements::Floats(all) => Elements::Floats(places.iter().map(|&i| all[i]).collect()),
                Elements::Ints(all) => Elements::Ints(places.iter().map(|&i| all[i]).collect()),
            }
        }
    })
}

fn cast(x: &Value, to: DType) -> Elements {
    match (&x.elements, to) {
        (Elements::Ints(all), DType::I64) => Elements::Ints(all.clone()),
        (Elements::Ints(all), DType::I32) => {
            Elements::Ints(all.iter().map(|x| x.map(|x| i64::from(x as i32))).collect())
        }
        (Elements::Ints(all), DType::Bool) => {
            Elements::Floats(all.iter().map(|x| functions::known(x.map(|x| f64::from(x != 0)))).collect())
        }
        (Elements::Ints(all), to) => {
            let convert = |x: &Option<i64>| match x {
                Some(x) => round(Approx { value: *x as f64, error: U * (*x as f64).abs() }, to),
                None => Approx::unknown(),
            };
            Elements::Floats(all.iter().map(convert).collect())
        }
        (Elements::Floats(all), DType::I32 | DType::I64) => {
            let limit = if to == DType::I32 { 2f64.powi(31) } else { 2f64.powi(63) };
            let lowest = if to == DType::I32 { i64::from(i32::MIN) } else { i64::MIN };
            let whole = |value: f64| {
                let inside = value.trunc() >= -limit && value.trunc() < limit;
                if inside { value.trunc() as i64 } else { lowest }
            };
            let convert = |x: &Approx| {
                let [low, value, high] = [x.value - x.error, x.value, x.value + x.error].map(whole);
                (!x.is_unknown() && low == value && value == high).then_some(value)
            };
            Elements::Ints(all.iter().map(convert).collect())
        }
        (Elements::Floats(all), DType::Bool) => {
            Elements::Floats(all.iter().map(|&x| functions::truth(x, false)).collect())
        }
        (Elements::Floats(all), to) => Elements::Floats(all.iter().map(|&x| round(x, to)).collect()),
    }
}

/// Rounded to a type: a result that is a little off may round to a neighbour.
fn round(x: Approx, to: DType) -> Approx {
    if x.is_unknown() || x.value.is_nan() || x.value.is_infinite() || to == DType::F32 {
        return overflowed(x);
    }
    let (low, high) = (to.round(x.value - x.error), to.round(x.value + x.error));
    let value = to.round(x.value);
    if low.is_infinite() || high.is_infinite() {
        return if low == high { Approx::exact(low) } else { Approx::unknown() };
    }
    Approx { value, error: (value - low).max(high - value) }
}

fn reduce(f: Reduce, row: &[Approx]) -> Approx {
    if row.iter().any(|x| x.is_unknown()) {
        let guess: Vec<Approx> = row.iter().map(|x| Approx::exact(x.value)).collect();
        return Approx { error: f64::INFINITY, ..reduce(f, &guess) };
    }
    let count = row.len() as f64;
    match f {
        Reduce::Sum | Reduce::Mean => {
            let value: f64 = row.iter().map(|x| x.value).sum();
            let size: f64 = row.iter().map(|x| x.value.abs()).sum();
            let error: f64 = row.iter().map(|x| x.error).sum();
            // An infinity decides the sum whatever the others are, but finite ones may overflow on the way.
            if !value.is_finite() {
                let given = row.iter().any(|x| !x.value.is_finite());
                return if given { Approx::exact(value) } else { Approx::unknown() };
            }
            if size + error > f64::from(f32::MAX) {
                return Approx::unknown();
            }
            let scale = if f == Reduce::Mean { 1.0 / count } else { 1.0 };
            // Any order of summation errs less.
            let rounding = U * (size + error) * (count + 2.0);
            Approx { value: value * scale, error: (error + rounding) * scale + TINY }
        }
        Reduce::Max | Reduce::Min => {
            if row.iter().any(|x| x.value.is_nan()) {
                return Approx::exact(f64::NAN);
            }
            let value = row.iter().map(|x| x.value);
            let value = match f {
                Reduce::Max => value.fold(f64::NEG_INFINITY, f64::max),
                _ => value.fold(f64::INFINITY, f64::min),
            };
            Approx { value, error: row.iter().map(|x| x.error).fold(0.0, f64::max) }
        }
    }
}
