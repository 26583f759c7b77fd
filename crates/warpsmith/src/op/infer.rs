//! Shapes and dtypes of an op's outputs, from its inputs and the documentation of its arguments.
//!
//! Every [`ArgSpec::doc`](crate::op::ArgSpec::doc) begins with the argument's shape: `[..., hidden]`, `[hidden]`,
//! `[..., 2*hidden]`. The inputs' patterns are matched with their actual shapes, which gives each name a size, and
//! the outputs' patterns are evaluated with those sizes. Nothing is judged here: a call that makes no sense gets
//! its error from the op's own check.

use crate::error::{Error, Result};
use crate::op::{Args, AttrKind, Attrs, OpSpec};
use crate::tensor::DType;

/// The option by which an op lets the caller choose the dtype of its result.
const DTYPE_OPTION: &str = "to";

/// Shape and dtype of a tensor.
pub type Form = (Vec<usize>, DType);

/// What each output must be, by position in the spec: required outputs and the optional ones at positions in
/// `wanted`. `None` for outputs that are left out and for arguments that come with the call.
///
/// The dtype is that of the first input, unless the op has an option `to` that names one.
pub fn outputs(args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Vec<Option<Form>>> {
    let spec = args.spec();
    let inputs: Vec<(usize, &[usize])> = (0..spec.args.len())
        .filter(|&index| spec.args[index].is_input())
        .filter_map(|index| Some((index, args.get(index)?.shape())))
        .collect();
    let Some(&(first, first_shape)) = inputs.first() else {
        return Err(Error::argument(spec.name, spec.args[0].name, "a tensor", "nothing"));
    };
    let dtype = match chosen_dtype(spec, attrs) {
        Some(dtype) => dtype,
        None => args.at(first).dtype(),
    };
    let mut sizes = Sizes::default();
    for &(index, shape) in &inputs {
        if let Some(pattern) = Pattern::of(spec.args[index].doc) {
            sizes.bind(index, &pattern, shape);
        }
    }
    let describe = |(index, arg): (usize, &crate::op::ArgSpec)| {
        if arg.is_input() || (arg.optional && !wanted.contains(&index)) {
            return Ok(None);
        }
        let shape = match Pattern::of(arg.doc) {
            Some(pattern) => sizes.evaluate(spec, index, &pattern, &inputs)?,
            None => first_shape.to_vec(),
        };
        Ok(Some((shape, dtype)))
    };
    spec.args.iter().enumerate().map(describe).collect()
}

fn chosen_dtype(spec: &OpSpec, attrs: &Attrs) -> Option<DType> {
    let index = spec.attrs.iter().position(|attr| attr.name == DTYPE_OPTION)?;
    match spec.attrs[index].kind {
        AttrKind::Choice(names) => names.get(attrs.choice(index))?.parse().ok(),
        _ => None,
    }
}

/// One dimension of a documented shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dim<'a> {
    Number(usize),
    /// `name * times / over`.
    Named {
        name: &'a str,
        times: usize,
        over: usize,
    },
}

/// A documented shape.
#[derive(Debug, PartialEq, Eq)]
struct Pattern<'a> {
    /// Whether any dimensions may come before `dims`.
    leading: bool,
    dims: Vec<Dim<'a>>,
}

impl<'a> Pattern<'a> {
    /// The shape a doc begins with, if it does.
    fn of(doc: &'a str) -> Option<Pattern<'a>> {
        let (inside, _) = doc.strip_prefix('[')?.split_once(']')?;
        let mut items: Vec<&str> = inside.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
        let leading = items.first() == Some(&"...");
        if leading {
            items.remove(0);
        }
        let dims = items.into_iter().map(Dim::parse).collect::<Option<_>>()?;
        Some(Pattern { leading, dims })
    }
}

impl<'a> Dim<'a> {
    fn parse(text: &'a str) -> Option<Dim<'a>> {
        let (product, over) = match text.split_once('/') {
            Some((product, over)) => (product.trim(), over.trim().parse().ok().filter(|&n| n > 0)?),
            None => (text, 1),
        };
        let (name, times) = match product.split_once('*').map(|(a, b)| (a.trim(), b.trim())) {
            None => (product, 1),
            Some((a, b)) => match (a.parse(), b.parse()) {
                (Ok(times), _) => (b, times),
                (_, Ok(times)) => (a, times),
                _ => return None,
            },
        };
        if let (Ok(number), 1, 1) = (name.parse(), times, over) {
            return Some(Dim::Number(number));
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(word);
        (is_name && times > 0).then_some(Dim::Named { name, times, over })
    }
}

/// What names mean in one call.
#[derive(Default)]
struct Sizes<'a> {
    leading: Option<Vec<usize>>,
    names: Vec<(&'a str, usize)>,
    /// The first input that does not look as documented.
    unlike: Option<usize>,
}

impl<'a> Sizes<'a> {
    /// Takes from an input what is not known yet.
    fn bind(&mut self, input: usize, pattern: &Pattern<'a>, shape: &[usize]) {
        let (extra, rank) = (shape.len().checked_sub(pattern.dims.len()), shape.len());
        let Some(extra) = extra.filter(|&extra| extra == 0 || pattern.leading) else {
            self.unlike.get_or_insert(input);
            return;
        };
        if pattern.leading && self.leading.is_none() {
            self.leading = Some(shape[..extra].to_vec());
        }
        for (dim, &size) in pattern.dims.iter().zip(&shape[extra..rank]) {
            let Dim::Named { name, times, over } = *dim else { continue };
            match size.checked_mul(over) {
                Some(product) if product % times == 0 => {
                    if self.get(name).is_none() {
                        self.names.push((name, product / times));
                    }
                }
                _ => {
                    self.unlike.get_or_insert(input);
                }
            }
        }
    }

    fn get(&self, name: &str) -> Option<usize> {
        self.names.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    fn evaluate(
        &self,
        spec: &OpSpec,
        output: usize,
        pattern: &Pattern<'_>,
        inputs: &[(usize, &[usize])],
    ) -> Result<Vec<usize>> {
        let leading = if pattern.leading { self.leading.clone() } else { Some(Vec::new()) };
        let size = |dim: &Dim<'_>| match *dim {
            Dim::Number(number) => Some(number),
            Dim::Named { name, times, over } => Some(self.get(name)?.checked_mul(times)? / over),
        };
        let rest: Option<Vec<usize>> = pattern.dims.iter().map(size).collect();
        if let (Some(mut shape), Some(rest)) = (leading, rest) {
            shape.extend(rest);
            return Ok(shape);
        }
        // The input that has another form than documented is the cause, if there is one.
        match inputs.iter().find(|(index, _)| Some(*index) == self.unlike) {
            Some((index, shape)) => {
                let arg = &spec.args[*index];
                Err(Error::argument(spec.name, arg.name, arg.doc, format!("shape {shape:?}")))
            }
            None => Err(Error::argument(
                spec.name,
                spec.args[output].name,
                "inputs that determine its shape",
                format!("{}, which they do not", spec.args[output].doc),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{ArgSpec, AttrSpec, Value};
    use crate::{Device, Tensor, ops};

    static SPEC: OpSpec = OpSpec {
        name: "test_op",
        summary: "",
        args: &[
            ArgSpec::input("x", "[..., 2*hidden], gate and up"),
            ArgSpec::input("table", "[max_pos, half / 2]").optional(),
            ArgSpec::output("out", "[..., hidden]"),
            ArgSpec::output("wide", "[hidden*3, 4, half]").optional(),
            ArgSpec::output("same", "as x").optional(),
            ArgSpec::output("unknown", "[..., depth]").optional(),
        ],
        attrs: &[AttrSpec { name: "to", kind: AttrKind::Choice(&["f32", "f8e4m3"]), doc: "" }],
        sizes: &[],
    };

    fn tensor(shape: &[usize]) -> Tensor {
        Tensor::zeros(shape, DType::BF16, Device::Cpu).unwrap()
    }

    #[test]
    fn names_bound_by_inputs_give_the_outputs() {
        let (x, table) = (tensor(&[5, 7, 16]), tensor(&[100, 3]));
        let args = Args::new(&SPEC).input(0, x.view()).input(1, table.view());
        let found = outputs(&args, &Attrs::defaults(&SPEC), &[3, 4]).unwrap();
        assert_eq!(found[..2], [None, None]);
        assert_eq!(found[2], Some((vec![5, 7, 8], DType::F32)));
        assert_eq!(found[3], Some((vec![24, 4, 6], DType::F32)));
        assert_eq!(found[4], Some((vec![5, 7, 16], DType::F32)));
        assert_eq!(found[5], None);
        let attrs = Attrs::defaults(&SPEC).with(0, Value::Choice(1));
        assert_eq!(outputs(&args, &attrs, &[]).unwrap()[2], Some((vec![5, 7, 8], DType::F8E4M3)));
    }

    #[test]
    fn what_cannot_be_known_is_an_error_that_names_the_cause() {
        let attrs = Attrs::defaults(&SPEC);
        let message =
            |args: &Args<'_>, wanted: &[usize]| outputs(args, &attrs, wanted).unwrap_err().to_string();
        let (even, odd, scalar) = (tensor(&[4]), tensor(&[5]), tensor(&[]));
        assert!(message(&Args::new(&SPEC), &[]).contains("`x`: expected a tensor"));
        for x in [&odd, &scalar] {
            let error = message(&Args::new(&SPEC).input(0, x.view()), &[]);
            assert!(error.contains("`x`: expected [..., 2*hidden]"), "{error}");
        }
        let error = message(&Args::new(&SPEC).input(0, even.view()), &[5]);
        assert!(error.contains("`unknown`") && error.contains("depth"), "{error}");
    }

    #[test]
    fn the_dtype_is_the_first_inputs_and_rows_may_have_any_rank() {
        let op = crate::lab::find("rms_norm_backward").unwrap();
        let dweight = op.spec().args.iter().position(|arg| arg.name == "dweight").unwrap();
        for shape in [&[64][..], &[3, 64], &[2, 0, 64]] {
            let x = tensor(shape);
            let args = Args::new(op.spec()).input(0, x.view()).input(2, x.view());
            let found = outputs(&args, &Attrs::defaults(op.spec()), &[dweight]).unwrap();
            assert_eq!(found[4], Some((shape.to_vec(), DType::BF16)));
            assert_eq!(found[dweight], Some((vec![64], DType::BF16)));
        }
    }

    /// The plans of all cases say what outputs are; the docs must say the same.
    #[test]
    fn the_docs_of_every_op_agree_with_its_plans() {
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
                let found = op.outputs(&args, &case.attrs, &wanted).unwrap();
                for (index, arg) in spec.args.iter().enumerate().filter(|(_, arg)| !arg.is_input()) {
                    let planned = plan[index].as_ref().map(|a| (a.shape.clone(), a.dtype));
                    assert_eq!(found[index], planned, "{}: `{}`: {}", spec.name, arg.name, case.name(spec));
                }
            }
        }
    }

    #[test]
    fn patterns_are_read_as_written() {
        let named = |name, times, over| Dim::Named { name, times, over };
        let dims = |doc| Pattern::of(doc).map(|p| (p.leading, p.dims));
        assert_eq!(dims("[..., hidden], text, [more]"), Some((true, vec![named("hidden", 1, 1)])));
        assert_eq!(dims("[2 * a, b*3, c / 2, 7]"), {
            Some((false, vec![named("a", 2, 1), named("b", 3, 1), named("c", 1, 2), Dim::Number(7)]))
        });
        assert_eq!(dims("[]"), Some((false, vec![])));
        for doc in ["", "hidden", "[hidden", "[a+b]", "[a*b]", "[a/0]", "[0*a]", "[..., ...]", "[-1]"] {
            assert_eq!(dims(doc), None, "{doc}");
        }
    }
}
