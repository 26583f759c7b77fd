//! Shapes and dtypes of an op's outputs, from its inputs, its options and its description.

use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher, OpSpec};
use crate::tensor::DType;

/// Shape and dtype of a tensor.
pub type Form = (Vec<usize>, DType);

/// What each output must be, by position in the spec: required outputs, the optional ones at positions in `wanted`, and
/// those that a given input implies. `None` for outputs that are left out and for arguments that come with the call.
///
/// `spec` is the op's own description, which must be compatible with that of the arguments.
pub fn outputs(
    spec: &'static OpSpec,
    args: &Args<'_>,
    attrs: &Attrs,
    wanted: &[usize],
) -> Result<Vec<Option<Form>>> {
    let mut sizes = Matcher::by(spec, args, attrs);
    let inputs = || spec.args.iter().enumerate().filter(|(_, arg)| arg.is_input());
    for (index, arg) in inputs() {
        if !arg.optional && args.get(index).is_none() {
            return Err(Error::argument(spec.name, arg.name, "a tensor", "nothing"));
        }
        // Deferred, because other arguments may determine its size first.
        if !arg.shape.depends_on_others() {
            sizes.arg(index)?;
        }
    }
    inputs().try_for_each(|(index, _)| sizes.arg(index))?;
    let is_made = |index: usize| {
        let arg = &spec.args[index];
        let implied = arg.with.is_some_and(|input| args.get(input).is_some());
        !arg.is_input() && (!arg.optional || implied || wanted.contains(&index))
    };
    (0..spec.args.len())
        .map(|index| match is_made(index) {
            true => Ok(Some((sizes.allocated_shape(index)?, sizes.allocated_dtype(index)?))),
            false => Ok(None),
        })
        .collect()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::op::{ArgSpec, AttrKind, AttrSpec, DTypeRule, Value, shape};
    use crate::{Device, Tensor, ops};

    static SPEC: OpSpec = OpSpec {
        name: "test_op",
        args: &[
            ArgSpec::input("x", shape![.., 2 * hidden], DTypeRule::ANY, "gate and up"),
            ArgSpec::input("table", shape![max_pos, half / 2], DTypeRule::ANY, "").optional(),
            ArgSpec::output(
                "out",
                shape![.., hidden],
                DTypeRule::Chosen { types: &[DType::F32, DType::F8E4M3], option: 0, like: 0 },
                "",
            ),
            ArgSpec::output("wide", shape![3 * hidden, 4, half], DTypeRule::Same(2), "").optional(),
            ArgSpec::output("implied", shape![.., 2 * hidden], DTypeRule::I32, "").with(1),
            ArgSpec::output("unknown", shape![.., depth], DTypeRule::Same(0), "").optional(),
        ],
        attrs: &[AttrSpec { name: "to", kind: AttrKind::Choice(&["auto", "f8e4m3"]), doc: "" }],
        ..OpSpec::EMPTY
    };

    fn tensor(shape: &[usize]) -> Tensor {
        Tensor::zeros(shape, DType::F16, Device::Cpu).unwrap()
    }

    #[test]
    fn names_bound_by_inputs_give_the_outputs() {
        let (x, table) = (tensor(&[5, 7, 16]), tensor(&[100, 3]));
        let args = Args::new(&SPEC).input(0, x.view()).input(1, table.view());
        let found = outputs(&SPEC, &args, &Attrs::defaults(&SPEC), &[3]).unwrap();
        assert_eq!(found[..2], [None, None]);
        assert_eq!(found[2], Some((vec![5, 7, 8], DType::BF16)), "f16 is none of its types");
        assert_eq!(found[3], Some((vec![24, 4, 6], DType::BF16)));
        assert_eq!(found[4], Some((vec![5, 7, 16], DType::I32)));
        assert_eq!(found[5], None);
        let attrs = Attrs::defaults(&SPEC).with(0, Value::Choice(1));
        assert_eq!(outputs(&SPEC, &args, &attrs, &[]).unwrap()[2], Some((vec![5, 7, 8], DType::F8E4M3)));
        let alone = outputs(&SPEC, &Args::new(&SPEC).input(0, x.view()), &attrs, &[]).unwrap();
        assert!(alone[2].is_some() && alone[4].is_none());
    }

    #[test]
    fn what_cannot_be_known_is_an_error_that_names_the_cause() {
        let attrs = Attrs::defaults(&SPEC);
        let message =
            |args: &Args<'_>, wanted: &[usize]| outputs(&SPEC, args, &attrs, wanted).unwrap_err().to_string();
        let (even, odd, scalar) = (tensor(&[4]), tensor(&[5]), tensor(&[]));
        assert!(message(&Args::new(&SPEC), &[]).contains("`x`: expected a tensor"));
        for x in [&odd, &scalar] {
            let error = message(&Args::new(&SPEC).input(0, x.view()), &[]);
            assert!(error.contains("`x`: expected shape [..., 2 * hidden]"), "{error}");
        }
        let error = message(&Args::new(&SPEC).input(0, even.view()), &[5]);
        assert!(error.contains("`unknown`") && error.contains("depth"), "{error}");
    }

    /// The plans of all cases and the descriptions must agree about the arguments.
    #[test]
    fn the_description_of_every_op_agrees_with_its_plans() {
        for op in ops::PROVABLE {
            let spec = op.spec();
            for case in op.cases() {
                let plan = op.plan(&case);
                let mut tensors: Vec<Option<Tensor>> = plan
                    .iter()
                    .map(|arg| arg.as_ref().map(|a| Tensor::empty(&a.shape, a.dtype, Device::Cpu).unwrap()))
                    .collect();
                let mut args = Args::new(spec);
                for (index, tensor) in tensors.iter_mut().enumerate() {
                    let Some(tensor) = tensor.as_mut().filter(|_| spec.args[index].is_input()) else {
                        continue;
                    };
                    args = match spec.args[index].is_output() {
                        true => args.output(index, tensor.view_mut()),
                        false => args.input(index, tensor.view()),
                    };
                }
                let wanted: Vec<usize> = (0..plan.len()).filter(|&index| plan[index].is_some()).collect();
                let found = op
                    .outputs(&args, &case.attrs, &wanted)
                    .unwrap_or_else(|error| panic!("{}: {error}", case.name(spec)));
                for (index, arg) in spec.args.iter().enumerate().filter(|(_, arg)| !arg.is_input()) {
                    let planned = plan[index].as_ref().map(|a| (a.shape.clone(), a.dtype));
                    assert_eq!(found[index], planned, "{}: `{}`: {}", spec.name, arg.name, case.name(spec));
                }
            }
        }
    }
}
