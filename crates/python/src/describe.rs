//! The descriptions of all ops as JSON, from which the Python half makes schemas, fake kernels, gradients and functions.

use crate::signature::{Face, Signature, Variant};
use pyo3::prelude::*;
use serde_json::{Value as Json, json};
use warpsmith::op::gradient::{InputGradient, Source};
use warpsmith::op::{
    ArgSpec, AttrKind, AttrSpec, Autocast, DTypeRule, Dim, Dims, Gradient, Leading, OpSpec, Role, SizeRule,
    Value,
};
use warpsmith::{DType, ops};

/// Every op, described.
#[pyfunction]
pub fn describe_ops() -> String {
    let all: Vec<Json> = ops::all().into_iter().map(|op| describe(op.spec(), &kernels(op))).collect();
    Json::from(all).to_string()
}

fn kernels(op: &dyn warpsmith::op::AnyOp) -> Vec<&'static str> {
    op.kernels().iter().map(|kernel| kernel.name).collect()
}

fn describe(spec: &'static OpSpec, kernels: &[&str]) -> Json {
    let variants: Vec<Json> =
        [Variant::New, Variant::InPlace].into_iter().filter_map(|v| variant(spec, v)).collect();
    json!({
        "name": spec.name,
        "summary": spec.summary,
        "args": spec.args.iter().map(argument).collect::<Json>(),
        "attrs": spec.attrs.iter().map(attribute).collect::<Json>(),
        "derived": spec.derived.iter().map(|size| json!({"name": size.name, "rule": rule(&size.rule)}))
            .collect::<Json>(),
        "gradient": spec.gradient.as_ref().map(|found| gradient(spec, found)),
        "autocast": match spec.autocast {
            Autocast::Unchanged => "unchanged",
            Autocast::Low => "low",
            Autocast::F32 => "f32",
            Autocast::Widest => "widest",
            Autocast::Rows => "rows",
        },
        "across_rows": spec.is_across_rows(),
        "variants": variants,
        "kernels": kernels,
    })
}

fn variant(spec: &'static OpSpec, variant: Variant) -> Option<Json> {
    let signature = Signature::of(spec, variant)?;
    let name = Signature::name(spec, variant);
    let tensors = signature
        .tensors
        .iter()
        .map(|tensor| json!({"arg": tensor.arg, "optional": tensor.optional, "written": tensor.written}));
    Some(json!({
        "name": name,
        "in_place": variant == Variant::InPlace,
        "schema": signature.schema(&name, Face::Public),
        "raw_schema": signature.schema(&name, Face::Raw),
        "tensors": tensors.collect::<Json>(),
        "wanted": signature.wanted.iter()
            .map(|&output| json!({"arg": output, "switch": signature.switch(output)}))
            .collect::<Json>(),
        "returned": signature.returned,
    }))
}

fn argument(arg: &ArgSpec) -> Json {
    let (role, in_place_of) = match arg.role {
        Role::In => ("in", None),
        Role::Out { in_place_of } => ("out", in_place_of),
        Role::InOut => ("in_out", None),
    };
    json!({
        "name": arg.name,
        "role": role,
        "in_place_of": in_place_of,
        "optional": arg.optional,
        "with": arg.with,
        "shape": {"option": arg.shape.option, "forms": arg.shape.forms.iter().map(form).collect::<Json>()},
        "dtype": dtype(&arg.dtype),
        "help": arg.help(),
    })
}

fn form(form: &Dims) -> Json {
    let leading = match form.leading {
        Leading::None => "none",
        Leading::Rows => "rows",
        Leading::Matrices => "matrices",
    };
    let dims = form.dims.iter().map(|dim| match *dim {
        Dim::Number(size) => json!({"kind": "number", "size": size}),
        Dim::Named { name, times, over, plus } => {
            json!({"kind": "named", "name": name, "times": times, "over": over, "plus": plus})
        }
        Dim::Ceil { name, over } => json!({"kind": "ceil", "name": name, "over": over}),
        Dim::OneOr(name) => json!({"kind": "one_or", "name": name}),
    });
    json!({"leading": leading, "dims": dims.collect::<Json>(), "text": form.to_string()})
}

fn names(types: &[DType]) -> Vec<&'static str> {
    types.iter().map(|dtype| dtype.name()).collect()
}

fn dtype(rule: &DTypeRule) -> Json {
    match *rule {
        DTypeRule::OneOf(types) => json!({"kind": "one_of", "types": names(types)}),
        DTypeRule::Same(like) => json!({"kind": "same", "like": like, "types": []}),
        DTypeRule::SameOr(like, types) => json!({"kind": "same_or", "like": like, "types": names(types)}),
        DTypeRule::With(like, listed) => {
            let listed: Vec<Json> =
                listed.iter().map(|(of, types)| json!([of.name(), names(types)])).collect();
            json!({"kind": "with", "like": like, "types": [], "listed": listed})
        }
        DTypeRule::Chosen { types, option, like } => {
            json!({"kind": "chosen", "like": like, "types": names(types), "option": option})
        }
    }
}

fn attribute(attr: &AttrSpec) -> Json {
    let (kind, default, choices) = match attr.kind {
        AttrKind::Float(value) => ("float", json!(value), None),
        AttrKind::OptionalFloat => ("float", Json::Null, None),
        AttrKind::Int(value) => ("int", json!(value), None),
        AttrKind::Bool(value) => ("bool", json!(value), None),
        AttrKind::Choice(names) => ("choice", json!(names[0]), Some(names)),
    };
    json!({"name": attr.name, "kind": kind, "default": default, "choices": choices, "doc": attr.doc})
}

fn rule(rule: &SizeRule) -> Json {
    match *rule {
        SizeRule::Option { option, most } => json!({"kind": "option", "option": option, "most": most}),
        SizeRule::OptionOr { option, size } => json!({"kind": "option_or", "option": option, "size": size}),
        SizeRule::Divided { size, option, by } => {
            json!({"kind": "divided", "size": size, "option": option, "by": by})
        }
        SizeRule::Else { size, or } => json!({"kind": "else", "size": size, "or": or}),
    }
}

/// The value of an option as Python has it.
fn value(spec: &OpSpec, option: usize, value: Value) -> Json {
    match value {
        Value::Float(value) => json!(value),
        Value::Unset => Json::Null,
        Value::Int(value) => json!(value),
        Value::Bool(value) => json!(value),
        Value::Choice(_) => json!(value.text(spec.attrs[option].kind)),
    }
}

fn gradient(spec: &OpSpec, gradient: &Gradient) -> Json {
    let values = |options: &[(usize, Value)]| -> Vec<Json> {
        options.iter().map(|&(option, at)| json!([option, value(spec, option, at)])).collect()
    };
    let inputs = gradient.inputs.iter().map(|&(to, source)| {
        let source = match source {
            Source::Input(arg) => json!({"kind": "input", "arg": arg}),
            Source::Output(arg) => json!({"kind": "output", "arg": arg}),
            Source::OutputOrInput(arg, input) => {
                json!({"kind": "output_or_input", "arg": arg, "input": input})
            }
            Source::Incoming(arg) => json!({"kind": "incoming", "arg": arg}),
            Source::Recomputed { output, options, without } => {
                json!({"kind": "recomputed", "arg": output, "options": values(options), "without": without})
            }
        };
        json!([to, source])
    });
    let results = gradient.results.iter().map(|&(input, result)| match result {
        InputGradient::Output(arg) => json!([input, {"kind": "output", "arg": arg}]),
        InputGradient::Incoming(arg) => json!([input, {"kind": "incoming", "arg": arg}]),
    });
    json!({
        "op": gradient.op,
        "inputs": inputs.collect::<Json>(),
        "results": results.collect::<Json>(),
        "only_if": values(gradient.only_if),
        "without": gradient.without,
    })
}
