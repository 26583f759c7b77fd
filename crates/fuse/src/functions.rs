//! Functions by name: what formulas and graphs in JSON can call. Some are single nodes, others are made of several.

use crate::error::{Error, Result};
use crate::graph::{Builder, NodeId};
use crate::op::{Binary, Reduce, Unary};
use crate::shape::Dim;
use crate::types::Scalar;
use warpsmith::DType;

/// What a call gives for one parameter.
#[derive(Clone, Debug)]
pub enum Value {
    /// A node.
    Node(NodeId),
    /// A type.
    Type(DType),
    /// A shape.
    Shape(Vec<Dim>),
}

/// How a parameter may be left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Presence {
    /// It may not.
    Required,
    /// It counts as this number.
    Number(f64),
    /// Its step is left out.
    Nothing,
}

/// A function that is made of several nodes, or takes more than tensors.
pub struct Function {
    /// Its name.
    pub name: &'static str,
    /// Its parameters.
    pub parameters: &'static [(&'static str, Presence)],
    /// What it computes.
    pub doc: &'static str,
    build: fn(&mut Builder, &Given) -> Result<NodeId>,
}

/// The arguments of a call, in the order of the parameters.
struct Given {
    name: &'static str,
    values: Vec<Option<Value>>,
}

impl Given {
    fn node(&self, b: &mut Builder, at: usize) -> Result<NodeId> {
        match self.optional(b, at)? {
            Some(node) => Ok(node),
            None => Err(Error::node(self.name, format!("argument {} is missing", at + 1))),
        }
    }

    fn optional(&self, _: &mut Builder, at: usize) -> Result<Option<NodeId>> {
        match &self.values[at] {
            None => Ok(None),
            Some(Value::Node(node)) => Ok(Some(*node)),
            Some(_) => {
                Err(Error::node(self.name, format!("argument {} must be a tensor or a number", at + 1)))
            }
        }
    }
}

use Presence::{Nothing, Number, Required};

const X: (&str, Presence) = ("x", Required);
const EPS: (&str, Presence) = ("eps", Number(1e-5));

/// The functions beside those of [`Unary`], [`Binary`] and [`Reduce`].
pub const FUNCTIONS: &[Function] = &[
    Function {
        name: "where",
        parameters: &[("condition", Required), ("a", Required), ("b", Required)],
        doc: "`a` where the condition holds, else `b`",
        build: |b, given| {
            let (condition, x, y) = (given.node(b, 0)?, given.node(b, 1)?, given.node(b, 2)?);
            b.select(condition, x, y)
        },
    },
    Function {
        name: "clamp",
        parameters: &[X, ("min", Nothing), ("max", Nothing)],
        doc: "`x` held between two bounds; NaN stays",
        build: |b, given| {
            let mut x = given.node(b, 0)?;
            if let Some(low) = given.optional(b, 1)? {
                x = b.binary(Binary::Max, x, low)?;
            }
            if let Some(high) = given.optional(b, 2)? {
                x = b.binary(Binary::Min, x, high)?;
            }
            Ok(x)
        },
    },
    Function {
        name: "cast",
        parameters: &[X, ("dtype", Required)],
        doc: "the nearest values of another type",
        build: |b, given| match &given.values[1] {
            Some(Value::Type(dtype)) => {
                let x = given.node(b, 0)?;
                b.cast(x, *dtype)
            }
            _ => Err(Error::node("cast", "the second argument must be a type, such as f32")),
        },
    },
    Function {
        name: "expand",
        parameters: &[X, ("shape", Required)],
        doc: "`x` repeated to a shape",
        build: |b, given| match &given.values[1] {
            Some(Value::Shape(shape)) => {
                let x = given.node(b, 0)?;
                b.expand(x, shape)
            }
            _ => Err(Error::node("expand", "the second argument must be a shape, such as [B, 4]")),
        },
    },
    Function {
        name: "rotate_half",
        parameters: &[X],
        doc: "the halves of the last dimension, exchanged, the first of the result negated",
        build: |b, given| {
            let x = given.node(b, 0)?;
            b.rotate_half(x)
        },
    },
    Function {
        name: "sum_to",
        parameters: &[X, ("shape", Required)],
        doc: "`x` summed to a shape that would broadcast to its own",
        build: |b, given| match &given.values[1] {
            Some(Value::Shape(shape)) => {
                let x = given.node(b, 0)?;
                b.sum_to(x, shape)
            }
            _ => Err(Error::node("sum_to", "the second argument must be a shape, such as [4]")),
        },
    },
    Function {
        name: "size",
        parameters: &[("shape", Required)],
        doc: "how many elements a shape has, as a float",
        build: |b, given| match &given.values[0] {
            Some(Value::Shape(shape)) => {
                let mut product = b.number(1.0)?;
                for (i, dim) in shape.iter().enumerate() {
                    let size = b.size(dim)?;
                    product = if i == 0 { size } else { b.binary(Binary::Mul, product, size)? };
                }
                Ok(product)
            }
            _ => Err(Error::node("size", "the argument must be a shape, such as [B]")),
        },
    },
    Function {
        name: "gather",
        parameters: &[("table", Required), ("index", Required)],
        doc: "the rows of a matrix that whole numbers name",
        build: |b, given| {
            let (table, index) = (given.node(b, 0)?, given.node(b, 1)?);
            b.gather(table, index)
        },
    },
    Function {
        name: "softmax",
        parameters: &[X],
        doc: "`e^x` over its sum, along the last dimension",
        build: |b, given| {
            let x = given.node(b, 0)?;
            softmax(b, x)
        },
    },
    Function {
        name: "log_softmax",
        parameters: &[X],
        doc: "the logarithm of `softmax(x)`",
        build: |b, given| {
            let x = given.node(b, 0)?;
            let (shifted, sum) = shifted_sum(b, x)?;
            let log = b.unary(Unary::Log, sum)?;
            b.binary(Binary::Sub, shifted, log)
        },
    },
    Function {
        name: "logsumexp",
        parameters: &[X],
        doc: "the logarithm of the sum of `e^x`, along the last dimension",
        build: |b, given| {
            let x = given.node(b, 0)?;
            let x = float(b, x)?;
            let largest = b.reduce(Reduce::Max, x)?;
            let largest = b.unary(Unary::Detach, largest)?;
            // A row that is all -inf, or has inf, is shifted by 0 rather than become NaN.
            let size = b.unary(Unary::Abs, largest)?;
            let (infinity, zero) = (b.number(f64::INFINITY)?, b.number(0.0)?);
            let infinite = b.binary(Binary::Eq, size, infinity)?;
            let shift = b.select(infinite, zero, largest)?;
            let x = b.binary(Binary::Sub, x, shift)?;
            let x = b.unary(Unary::Exp, x)?;
            let sum = b.reduce(Reduce::Sum, x)?;
            let log = b.unary(Unary::Log, sum)?;
            b.binary(Binary::Add, log, shift)
        },
    },
    Function {
        name: "var",
        parameters: &[X],
        doc: "the mean square distance from the mean, along the last dimension",
        build: |b, given| {
            let x = given.node(b, 0)?;
            let centred = centred(b, x)?;
            let square = b.unary(Unary::Square, centred)?;
            b.reduce(Reduce::Mean, square)
        },
    },
    Function {
        name: "rms_norm",
        parameters: &[X, ("weight", Nothing), EPS],
        doc: "`x` over the root of its mean square, along the last dimension, times the weight",
        build: |b, given| {
            let x = given.node(b, 0)?;
            let x = float(b, x)?;
            let square = b.unary(Unary::Square, x)?;
            normalised(b, given, x, square, 2, None)
        },
    },
    Function {
        name: "layer_norm",
        parameters: &[X, ("weight", Nothing), ("bias", Nothing), EPS],
        doc: "`x` less its mean over its standard deviation, along the last dimension, times the weight, plus the bias",
        build: |b, given| {
            let x = given.node(b, 0)?;
            let centred = centred(b, x)?;
            let square = b.unary(Unary::Square, centred)?;
            normalised(b, given, centred, square, 3, Some(2))
        },
    },
];

/// Whole numbers and bools as f32.
fn float(b: &mut Builder, x: NodeId) -> Result<NodeId> {
    if b.node(x).dtype.is_float() { Ok(x) } else { b.cast(x, DType::F32) }
}

fn centred(b: &mut Builder, x: NodeId) -> Result<NodeId> {
    let x = float(b, x)?;
    let mean = b.reduce(Reduce::Mean, x)?;
    b.binary(Binary::Sub, x, mean)
}

/// `x / sqrt(mean(square) + eps) * weight + bias`.
fn normalised(
    b: &mut Builder,
    given: &Given,
    x: NodeId,
    square: NodeId,
    eps: usize,
    bias: Option<usize>,
) -> Result<NodeId> {
    let mean = b.reduce(Reduce::Mean, square)?;
    let eps = given.node(b, eps)?;
    let mean = b.binary(Binary::Add, mean, eps)?;
    let scale = b.unary(Unary::Rsqrt, mean)?;
    let mut y = b.binary(Binary::Mul, x, scale)?;
    if let Some(weight) = given.optional(b, 1)? {
        y = b.binary(Binary::Mul, y, weight)?;
    }
    if let Some(bias) = bias
        && let Some(bias) = given.optional(b, bias)?
    {
        y = b.binary(Binary::Add, y, bias)?;
    }
    Ok(y)
}

/// `x` less its largest, and the sum of that one's powers.
fn shifted_sum(b: &mut Builder, x: NodeId) -> Result<(NodeId, NodeId)> {
    let x = float(b, x)?;
    // Whatever is subtracted changes nothing, so no derivative goes through it.
    let largest = b.reduce(Reduce::Max, x)?;
    let largest = b.unary(Unary::Detach, largest)?;
    let shifted = b.binary(Binary::Sub, x, largest)?;
    let power = b.unary(Unary::Exp, shifted)?;
    Ok((shifted, b.reduce(Reduce::Sum, power)?))
}

fn softmax(b: &mut Builder, x: NodeId) -> Result<NodeId> {
    let (shifted, sum) = shifted_sum(b, x)?;
    let power = b.unary(Unary::Exp, shifted)?;
    b.binary(Binary::Div, power, sum)
}

/// Every name that can be called.
pub fn names() -> Vec<&'static str> {
    let unary = Unary::ALL.iter().map(|f| f.name());
    let binary = Binary::ALL.iter().map(|f| f.name());
    let reduce = Reduce::ALL.iter().map(|f| f.name());
    unary.chain(binary).chain(reduce).chain(FUNCTIONS.iter().map(|f| f.name)).collect()
}

/// What could have been meant by `name`.
pub(crate) fn suggestion<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const ALIKE: f64 = 0.75;
    let scored = known.into_iter().map(|other| (strsim::jaro_winkler(name, other), other));
    scored.filter(|(alike, _)| *alike >= ALIKE).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other)
}

/// Names of other libraries.
fn canonical(name: &str) -> &str {
    match name {
        "logical_not" => "not",
        "amax" => "max",
        "amin" => "min",
        "sign" | "sgn" => "sign",
        "truediv" | "true_divide" => "div",
        "subtract" => "sub",
        "multiply" => "mul",
        "logical_and" | "bitwise_and" => "and",
        "logical_or" | "bitwise_or" => "or",
        "logical_xor" | "bitwise_xor" => "xor",
        "to" => "cast",
        "embedding" => "gather",
        other => other,
    }
}

/// Calls a function: values by position, then by name.
///
/// # Errors
/// If there is none of the name, or the arguments do not fit it.
pub fn call(b: &mut Builder, name: &str, values: &[Value], named: &[(String, Value)]) -> Result<NodeId> {
    let name = canonical(name);
    if name == "pow" || named.is_empty() {
        let nodes: Option<Vec<NodeId>> = values
            .iter()
            .map(|value| if let Value::Node(node) = value { Some(*node) } else { None })
            .collect();
        if let Some(nodes) = nodes
            && let Some(result) = call_simple(b, name, &nodes)
        {
            return result;
        }
    }
    let Some(function) = FUNCTIONS.iter().find(|function| function.name == name) else {
        if let Some(expected) = arity(name) {
            let what = match named.first() {
                Some((keyword, _)) => format!("has no argument `{keyword}`"),
                None => format!("takes {expected} tensors or numbers, got {} arguments", values.len()),
            };
            return Err(Error::node(name, what));
        }
        let hint =
            suggestion(name, names()).map_or(String::new(), |other| format!("; did you mean `{other}`?"));
        return Err(Error::node(name, format!("there is no such function{hint}")));
    };
    let parameters = function.parameters;
    if values.len() > parameters.len() {
        let what = format!("takes at most {} arguments, got {}", parameters.len(), values.len());
        return Err(Error::node(name, what));
    }
    let mut given: Vec<Option<Value>> = values.iter().cloned().map(Some).collect();
    given.resize(parameters.len(), None);
    for (keyword, value) in named {
        let Some(at) = parameters.iter().position(|(parameter, _)| parameter == keyword) else {
            let known: Vec<&str> = parameters.iter().map(|(parameter, _)| *parameter).collect();
            let what = format!("has no argument `{keyword}`; it has {}", known.join(", "));
            return Err(Error::node(name, what));
        };
        if given[at].replace(value.clone()).is_some() {
            return Err(Error::node(name, format!("argument `{keyword}` is given twice")));
        }
    }
    for (value, (parameter, default)) in given.iter_mut().zip(parameters) {
        match (&value, default) {
            (None, Required) => return Err(Error::node(name, format!("argument `{parameter}` is missing"))),
            (None, Number(number)) => *value = Some(Value::Node(b.scalar(Scalar::Float(*number))?)),
            _ => {}
        }
    }
    (function.build)(b, &Given { name: function.name, values: given })
}

/// How many arguments the functions that are one node take.
fn arity(name: &str) -> Option<usize> {
    let unary = Unary::ALL.iter().any(|f| f.name() == name) || Reduce::ALL.iter().any(|f| f.name() == name);
    let binary = Binary::ALL.iter().any(|f| f.name() == name);
    if unary { Some(1) } else { binary.then_some(2) }
}

/// Calls a function that is one node, if there is one for this many arguments.
fn call_simple(b: &mut Builder, name: &str, args: &[NodeId]) -> Option<Result<NodeId>> {
    match *args {
        [x] => {
            if let Some(f) = Reduce::ALL.into_iter().find(|f| f.name() == name) {
                return Some(b.reduce(f, x));
            }
            let f = *Unary::ALL.iter().find(|f| f.name() == name)?;
            Some(b.unary(f, x))
        }
        [x, y] => {
            // `max(a, b)` and `min(a, b)` mean the elementwise ones.
            let name = match name {
                "max" => "maximum",
                "min" => "minimum",
                other => other,
            };
            let f = *Binary::ALL.iter().find(|f| f.name() == name)?;
            Some(b.binary(f, x, y))
        }
        _ => None,
    }
}
