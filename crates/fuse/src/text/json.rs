//! Graphs as JSON, for programs that make them.
//!
//! ```json
//! {"inputs": [{"name": "x", "dtype": "bf16", "shape": ["B", 4096]}],
//!  "nodes": [{"name": "y", "op": "rms_norm", "args": ["x"], "attrs": {"eps": 1e-6}},
//!            {"name": "z", "op": "mul", "args": ["y", 2.0]}],
//!  "outputs": ["z"]}
//! ```
//!
//! `op` is any function of formulas. An argument is the name of an input or an earlier node, a number, a bool, or
//! `{"number": "inf"}` (also `-inf`, `nan`). `attrs` are arguments by name; `dtype` is a type by its name, and `shape` a list.

use crate::error::{Error, Result};
use crate::functions::{self, Value as Argument};
use crate::graph::{Builder, Graph, NodeId};
use crate::op::Op;
use crate::shape::Dim;
use crate::types::Scalar;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use warpsmith::DType;

fn wrong(what: impl Into<String>) -> Error {
    Error::Json(what.into())
}

fn text<'a>(object: &'a Value, field: &str, place: &str) -> Result<&'a str> {
    let value = object.get(field).and_then(Value::as_str);
    value.ok_or_else(|| wrong(format!("{place} needs a `{field}`, which is a text")))
}

fn list<'a>(object: &'a Value, field: &str, place: &str) -> Result<&'a [Value]> {
    let value = object.get(field).and_then(Value::as_array);
    value.map(Vec::as_slice).ok_or_else(|| wrong(format!("{place} needs `{field}`, which is a list")))
}

fn dtype(text: &str) -> Result<DType> {
    Ok(text.parse()?)
}

fn shape(sizes: &[Value], place: &str) -> Result<Vec<Dim>> {
    let dim = |size: &Value| match size {
        Value::String(name) => Ok(Dim::named(name)),
        other => other
            .as_u64()
            .and_then(|size| usize::try_from(size).ok())
            .map(Dim::Fixed)
            .ok_or_else(|| wrong(format!("{place}: a size is a whole number or a name, not {other}"))),
    };
    sizes.iter().map(dim).collect()
}

/// Reads a graph.
///
/// # Errors
/// If the text is not JSON of this form, or a node does not fit its arguments.
pub fn read(source: &str) -> Result<Graph> {
    let root: Value = serde_json::from_str(source).map_err(|error| wrong(error.to_string()))?;
    let mut builder = Builder::new();
    let mut names: HashMap<&str, NodeId> = HashMap::new();
    for input in list(&root, "inputs", "a graph")? {
        let name = text(input, "name", "an input")?;
        let place = format!("input `{name}`");
        let sizes = shape(list(input, "shape", &place)?, &place)?;
        let id = builder.input(name, dtype(text(input, "dtype", &place)?)?, &sizes)?;
        names.insert(name, id);
    }
    for node in list(&root, "nodes", "a graph")? {
        let name = text(node, "name", "a node")?;
        let id = read_node(&mut builder, node, name, &names).map_err(|error| match error {
            Error::Node { node, what } => Error::Node { node: format!("{name} = {node}"), what },
            other => other,
        })?;
        if names.insert(name, id).is_some() {
            return Err(wrong(format!("two nodes or inputs are named `{name}`")));
        }
    }
    let mut outputs = vec![];
    for output in list(&root, "outputs", "a graph")? {
        let name = output.as_str().ok_or_else(|| wrong("an output is the name of a node"))?;
        let id = names.get(name).ok_or_else(|| wrong(format!("output `{name}` is no node and no input")))?;
        outputs.push((name, *id));
    }
    builder.finish(&outputs)
}

fn read_node(b: &mut Builder, node: &Value, name: &str, names: &HashMap<&str, NodeId>) -> Result<NodeId> {
    let place = format!("node `{name}`");
    let op = text(node, "op", &place)?;
    let mut values = vec![];
    for arg in list(node, "args", &place)? {
        values.push(argument(b, arg, &place, names)?);
    }
    let mut named = vec![];
    for (key, value) in node.get("attrs").and_then(Value::as_object).unwrap_or(&Map::new()) {
        let value = match (key.as_str(), value) {
            ("dtype", Value::String(name)) => Argument::Type(dtype(name)?),
            ("shape", Value::Array(sizes)) => Argument::Shape(shape(sizes, &place)?),
            _ => argument(b, value, &place, names)?,
        };
        named.push((key.clone(), value));
    }
    functions::call(b, op, &values, &named)
}

fn argument(b: &mut Builder, value: &Value, place: &str, names: &HashMap<&str, NodeId>) -> Result<Argument> {
    let scalar = match value {
        Value::String(name) => {
            let id = names.get(name.as_str()).copied();
            return id.map(Argument::Node).ok_or_else(|| {
                let hint = functions::suggestion(name, names.keys().copied());
                let hint = hint.map_or(String::new(), |other| format!("; did you mean `{other}`?"));
                wrong(format!("{place}: `{name}` is no input and no earlier node{hint}"))
            });
        }
        Value::Bool(value) => Scalar::Bool(*value),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => Scalar::Int(whole),
            None => Scalar::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Object(fields) => match fields.get("number").and_then(Value::as_str) {
            Some("inf") => Scalar::Float(f64::INFINITY),
            Some("-inf") => Scalar::Float(f64::NEG_INFINITY),
            Some("nan") => Scalar::Float(f64::NAN),
            _ => return Err(wrong(format!("{place}: a number is inf, -inf or nan, not {value}"))),
        },
        other => return Err(wrong(format!("{place}: {other} is no argument"))),
    };
    Ok(Argument::Node(b.scalar(scalar)?))
}

/// Writes a graph, such that [`read`] gives an equal one.
pub fn write(graph: &Graph) -> String {
    let sizes = |shape: &[Dim]| -> Vec<Value> {
        let size = |dim: &Dim| match dim {
            Dim::Fixed(size) => json!(size),
            Dim::Named(name) => json!(&**name),
        };
        shape.iter().map(size).collect()
    };
    // Names of nodes must not be those of inputs.
    let taken = |name: &str| graph.inputs().iter().any(|&id| graph.input_name(id) == name);
    let mut prefix = String::from("t");
    while graph.ids().any(|id| taken(&format!("{prefix}{}", id.index()))) {
        prefix.push('_');
    }
    let mut names: Vec<String> = graph.ids().map(|id| format!("{prefix}{}", id.index())).collect();
    graph.inputs().iter().for_each(|&id| names[id.index()] = graph.input_name(id).into());
    let argument = |id: &NodeId| match graph.node(*id).op {
        Op::Scalar(Scalar::Bool(value)) => json!(value),
        Op::Scalar(Scalar::Int(value)) => json!(value),
        Op::Scalar(Scalar::Float(value)) if value.is_nan() => json!({"number": "nan"}),
        Op::Scalar(Scalar::Float(value)) if value.is_infinite() => {
            json!({"number": if value > 0.0 { "inf" } else { "-inf" }})
        }
        Op::Scalar(Scalar::Float(value)) => json!(value),
        _ => json!(names[id.index()]),
    };
    let input = |id: &NodeId| {
        let node = graph.node(*id);
        json!({"name": node.op.name(), "dtype": node.dtype.name(), "shape": sizes(&node.shape)})
    };
    let node = |id: NodeId| {
        let node = graph.node(id);
        let mut attrs = Map::new();
        match &node.op {
            Op::Cast(dtype) => drop(attrs.insert("dtype".into(), json!(dtype.name()))),
            Op::SumTo | Op::Expand => drop(attrs.insert("shape".into(), json!(sizes(&node.shape)))),
            Op::Size(dim) => drop(attrs.insert("shape".into(), json!(sizes(std::slice::from_ref(dim))))),
            _ => {}
        }
        let args: Vec<Value> = node.args.iter().map(argument).collect();
        json!({"name": names[id.index()], "op": node.op.name(), "args": args, "attrs": attrs})
    };
    let given = |id: NodeId| matches!(graph.node(id).op, Op::Input(_) | Op::Scalar(_));
    let computed = graph.ids().filter(|id| !given(*id));
    json!({
        "inputs": graph.inputs().iter().map(input).collect::<Vec<_>>(),
        "nodes": computed.map(node).collect::<Vec<_>>(),
        "outputs": graph.outputs().iter().map(|(_, id)| json!(names[id.index()])).collect::<Vec<_>>(),
    })
    .to_string()
}
