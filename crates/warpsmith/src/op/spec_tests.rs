//! That the descriptions of all ops are consistent.

use crate::op::gradient::{InputGradient, Source};
use crate::op::{Args, Attrs, Leading, OpSpec, check_description, infer};
use crate::{DType, Device, Tensor, ops};

fn specs() -> impl Iterator<Item = &'static OpSpec> {
    ops::ALL.iter().map(|op| op.spec())
}

#[test]
fn names_are_unique_and_positions_are_there() {
    for spec in specs() {
        check_description(spec).unwrap();
    }
}

/// Every name that an output or a rounded dimension needs is known from an input or an option. An output that can be left out
/// may need an input that can: the gradient of a bias has its shape.
#[test]
fn outputs_follow_from_inputs() {
    for spec in specs() {
        let told = |optional: bool| -> Vec<&str> {
            let inputs = spec.args.iter().filter(|arg| arg.is_input() && (optional || !arg.optional));
            inputs
                .flat_map(|arg| arg.shape.forms.iter().flat_map(|form| form.dims))
                .filter(|dim| dim.solve(1 << 20).is_some())
                .filter_map(|dim| dim.name())
                .chain(spec.derived.iter().map(|derived| derived.name))
                .collect()
        };
        for arg in spec.args.iter().filter(|arg| !arg.is_input()) {
            let known = told(arg.optional);
            for dim in arg.shape.forms.iter().flat_map(|form| form.dims) {
                let told = dim.name().is_none_or(|name| known.contains(&name));
                assert!(told, "{}: nothing tells `{dim}` of `{}`", spec.name, arg.name);
            }
            let leads = arg.shape.forms.iter().any(|form| form.leading != Leading::None);
            let led =
                |arg: &crate::op::ArgSpec| arg.shape.forms.iter().any(|form| form.leading == Leading::Rows);
            assert!(!leads || spec.args.iter().any(|arg| arg.is_input() && led(arg)), "{}", spec.name);
        }
    }
}

#[test]
fn every_backward_op_is_the_gradient_of_another() {
    for spec in specs() {
        if let Some(forward) = spec.name.strip_suffix("_backward") {
            let of = ops::find(forward).and_then(|op| op.spec().gradient).map(|gradient| gradient.op);
            assert_eq!(of, Some(spec.name));
        }
        let Some(gradient) = &spec.gradient else { continue };
        let Some(back) = ops::find(gradient.op).map(|op| op.spec()) else { panic!("no {}", gradient.op) };
        for (index, arg) in back.args.iter().enumerate().filter(|(_, arg)| arg.is_input()) {
            let sources = gradient.inputs.iter().filter(|(input, _)| *input == index).count();
            assert_eq!(sources, 1, "{}: `{}`", back.name, arg.name);
        }
        for (index, arg) in back.args.iter().enumerate().filter(|(_, arg)| arg.is_output()) {
            let result = InputGradient::Output(index);
            assert!(gradient.results.iter().any(|(_, of)| *of == result), "{}: `{}`", back.name, arg.name);
        }
        for &(input, source) in gradient.inputs {
            let (kept, is_output) = match source {
                Source::Input(index) => (index, false),
                Source::Output(index) | Source::Incoming(index) | Source::OutputOrInput(index, _) => {
                    (index, true)
                }
                Source::Recomputed { output, options, without } => {
                    assert!(without.iter().all(|&index| spec.args[index].optional), "{}", spec.name);
                    let mut attrs = Attrs::defaults(spec);
                    options.iter().for_each(|&(option, value)| attrs.set(spec, option, value).unwrap());
                    (output, true)
                }
            };
            assert_eq!(spec.args[kept].is_output(), is_output, "{}: {source:?}", spec.name);
            let required = !back.args[input].optional;
            // An output that can be left out is asked for where the gradient needs it.
            let there = is_output || !spec.args[kept].optional;
            assert!(!required || there, "{}: {source:?}", spec.name);
        }
        for &(option, value) in gradient.only_if {
            Attrs::defaults(spec).set(spec, option, value).unwrap();
        }
        for attr in back.attrs {
            let same = spec.attrs.iter().find(|other| other.name == attr.name);
            let sizes = || spec.args.iter().flat_map(|arg| arg.shape.forms).flat_map(|form| form.dims);
            match same {
                Some(other) => assert_eq!(other.kind, attr.kind, "{}: {}", back.name, attr.name),
                None => {
                    assert!(sizes().any(|dim| dim.name() == Some(attr.name)), "{}: {}", back.name, attr.name)
                }
            }
        }
    }
}

/// Forward and gradient on the cases of the forward op: what the description connects has one shape and type.
#[test]
fn gradients_have_the_shapes_of_what_they_are_gradients_of() {
    for op in ops::PROVABLE {
        let spec = op.spec();
        let Some(gradient) = &spec.gradient else { continue };
        let back = ops::find(gradient.op).expect("checked above").spec();
        let mut judged = 0;
        let kept = gradient.inputs.iter().filter_map(|&(_, source)| match source {
            Source::Output(index) if spec.args[index].optional => Some(index),
            _ => None,
        });
        let kept: Vec<usize> = kept.collect();
        for case in op.cases() {
            let case = kept.iter().fold(case, |case, &output| case.give(output));
            let plan = op.plan(&case);
            let form = |index: usize| plan[index].as_ref().map(|arg| (arg.shape.clone(), arg.dtype));
            let fits = gradient.only_if.iter().all(|&(option, value)| case.attrs.value(option) == value)
                && gradient.without.iter().all(|&index| plan[index].is_none());
            let inputs = gradient.inputs.iter().map(|&(input, source)| {
                let form = match source {
                    Source::Input(index) | Source::Output(index) | Source::Incoming(index) => form(index),
                    Source::OutputOrInput(output, index) => form(output).or_else(|| form(index)),
                    Source::Recomputed { output, options, .. } => {
                        form(output).filter(|_| case.attrs.value(options[0].0) != options[0].1)
                    }
                };
                (input, form)
            });
            let mut tensors: Vec<(usize, Tensor)> = inputs
                .filter_map(|(input, form)| Some((input, form?)))
                .map(|(input, (shape, dtype))| (input, Tensor::empty(&shape, dtype, Device::Cpu).unwrap()))
                .collect();
            let mut args = Args::new(back);
            for (input, tensor) in &mut tensors {
                args = args.input(*input, tensor.view());
            }
            let mut attrs = Attrs::defaults(back);
            for (index, attr) in back.attrs.iter().enumerate() {
                let same = spec.attrs.iter().position(|other| other.name == attr.name);
                let value = match same {
                    Some(option) => case.attrs.value(option),
                    None => crate::op::Value::Int(size_named(spec, attr.name, &form) as i64),
                };
                attrs.set(back, index, value).unwrap();
            }
            // The gradient of what is not given cannot be asked for.
            let of_given = gradient.results.iter().filter(|(input, _)| plan[*input].is_some());
            let wanted: Vec<usize> = of_given
                .filter_map(|(_, of)| match of {
                    InputGradient::Output(output) => Some(*output),
                    InputGradient::Incoming(_) => None,
                })
                .collect();
            let found = infer::outputs(back, &args, &attrs, &wanted);
            if !fits || found.is_err() {
                // A gate's gradient does not exist, nor does that of several matrices, of 8-bit inputs or of gathered rows.
                let without = ["linear", "grouped_linear"];
                assert!(without.contains(&spec.name), "{}: {:?}", case.name(spec), found.err());
                continue;
            }
            let found = found.unwrap();
            judged += 1;
            for &(input, of) in gradient.results {
                let of = match of {
                    InputGradient::Output(output) => found[output].clone(),
                    InputGradient::Incoming(output) => form(output),
                };
                let about = format!("{}: `{}`: {}", spec.name, spec.args[input].name, case.name(spec));
                let Some((shape, dtype)) = form(input) else { continue };
                // Gradients in f32 of inputs with 16 bits are rounded by whoever asked for them.
                let fits = of.as_ref().is_some_and(|of| of.0 == shape && [dtype, DType::F32].contains(&of.1));
                assert!(fits, "{about}: {of:?}");
            }
        }
        assert!(judged > 0, "{}: no case has a gradient", spec.name);
    }
}

/// The size of this name in a case of an op.
fn size_named(
    spec: &OpSpec,
    name: &str,
    form: &impl Fn(usize) -> Option<(Vec<usize>, crate::DType)>,
) -> usize {
    let mut sizes = spec.args.iter().enumerate().filter_map(|(index, arg)| {
        let (shape, dims) = (form(index)?.0, arg.shape.forms[0].dims);
        let at = dims.iter().position(|dim| dim.name() == Some(name))?;
        dims[at].solve(shape[shape.len() - dims.len() + at])
    });
    sizes.next().unwrap_or_else(|| panic!("{}: no {name}", spec.name))
}
