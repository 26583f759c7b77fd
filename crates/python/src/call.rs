//! Calls of ops on the library's own tensors.

use crate::errors::{OrRaise, to_python};
use crate::signature::{Signature, Variant};
use crate::tensor::Tensor;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::borrow::Cow;
use warpsmith::op::{AnyOp, Args, AttrKind, Attrs, Select, Value};
use warpsmith::{Device, Error, Result, TensorViewMut, ops};

/// The arguments of a call, in the order of the op's signature.
struct Call<'py> {
    op: &'static dyn AnyOp,
    signature: Signature,
    attrs: Attrs,
    wanted: Vec<usize>,
    read: Vec<Option<PyRef<'py, Tensor>>>,
    written: Vec<Option<PyRefMut<'py, Tensor>>>,
    select: Select,
}

/// Calls an op and returns its results.
#[pyfunction]
#[pyo3(signature = (name, in_place, tensors, options, wanted, kernel=None))]
pub fn call(
    py: Python<'_>,
    name: &str,
    in_place: bool,
    tensors: Vec<Option<Bound<'_, Tensor>>>,
    options: Vec<Bound<'_, PyAny>>,
    wanted: Vec<bool>,
    kernel: Option<String>,
) -> PyResult<Vec<Option<Tensor>>> {
    let mut call = Call::new(py, name, in_place, &tensors, &options, &wanted, kernel)?;
    let made = call
        .with(py, |op, args, attrs, select, device| op.run(args, attrs, &device.default_stream()?, select));
    Ok(made?.0.into_iter().map(|made| made.map(|tensor| Tensor::new(tensor, false))).collect())
}

/// Which kernel a call would run: its name, the reason, its configuration, and each other kernel with why not.
#[pyfunction]
#[pyo3(signature = (name, in_place, tensors, options, wanted, kernel=None))]
#[allow(clippy::type_complexity)]
pub fn explain(
    py: Python<'_>,
    name: &str,
    in_place: bool,
    tensors: Vec<Option<Bound<'_, Tensor>>>,
    options: Vec<Bound<'_, PyAny>>,
    wanted: Vec<bool>,
    kernel: Option<String>,
) -> PyResult<(String, String, String, Vec<(String, String)>)> {
    let mut call = Call::new(py, name, in_place, &tensors, &options, &wanted, kernel)?;
    let (_, found) =
        call.with(py, |op, args, attrs, select, device| op.explain(args, attrs, &device.info()?, select))?;
    let others = found.others.into_iter().map(|(kernel, why)| (kernel.to_string(), why.to_string()));
    Ok((found.kernel.into(), found.reason, found.config, others.collect()))
}

type Made = Vec<Option<warpsmith::Tensor>>;

impl<'py> Call<'py> {
    fn new(
        py: Python<'py>,
        name: &str,
        in_place: bool,
        tensors: &[Option<Bound<'py, Tensor>>],
        options: &[Bound<'_, PyAny>],
        wanted: &[bool],
        kernel: Option<String>,
    ) -> PyResult<Call<'py>> {
        let (op, signature, attrs) = described(py, name, in_place, (tensors.len(), wanted.len()), options)?;
        let spec = op.spec();
        let (mut read, mut written) = (Vec::new(), Vec::new());
        for (tensor, described) in tensors.iter().zip(&signature.tensors) {
            let argument = |expected: &str, got: &str| {
                to_python(py, &Error::argument(spec.name, spec.args[described.arg].name, expected, got))
            };
            if tensor.is_none() && !described.optional {
                return Err(argument("a tensor", "nothing"));
            }
            let (mut reader, mut writer) = (None, None);
            if let Some(tensor) = tensor {
                if tensor.try_borrow().is_ok_and(|tensor| tensor.get().device() != Device::Cpu) {
                    crate::torch::refuse_after_fork(tensor.borrow().get().device()).or_raise(py)?;
                }
                match described.written {
                    None => {
                        reader = Some(tensor.try_borrow().map_err(|_| {
                            argument("memory that no other argument uses", "a tensor that is being written")
                        })?)
                    }
                    Some(_) => {
                        writer = Some(tensor.try_borrow_mut().map_err(|_| {
                            argument("memory that no other argument uses", "a tensor that is in use")
                        })?)
                    }
                }
            }
            read.push(reader);
            written.push(writer);
        }
        let select = Select { kernel: kernel.map(Cow::Owned), ..Select::default() };
        let wanted = signature.wanted.iter().zip(wanted).filter(|(_, wanted)| **wanted);
        let wanted = wanted.map(|(output, _)| *output).collect();
        Ok(Call { op, signature, attrs, wanted, read, written, select })
    }

    /// Makes the outputs and hands the complete arguments to `work`, without the interpreter's lock.
    fn with<R: Send>(
        &mut self,
        py: Python<'_>,
        work: impl FnOnce(&'static dyn AnyOp, &mut Args<'_>, &Attrs, &Select, Device) -> Result<R> + Send,
    ) -> PyResult<(Made, R)> {
        let mut args = Args::new(self.op.spec());
        let read: Vec<_> =
            self.read.iter().map(|tensor| tensor.as_ref().map(|tensor| tensor.get().view())).collect();
        let tensors = self.signature.tensors.iter().zip(read).zip(&mut self.written);
        for ((described, read), written) in tensors {
            if let Some(view) = read {
                args = args.input(described.arg, view);
            }
            if let (Some(tensor), Some(output)) = (written, described.written) {
                let view: TensorViewMut<'_> = tensor.get_mut().view_mut();
                args = match output == described.arg {
                    true => args.output(output, view),
                    false => args.in_place(described.arg, output, view),
                };
            }
        }
        let (op, attrs, select) = (self.op, &self.attrs, &self.select);
        let (wanted, returned) = (&self.wanted, &self.signature.returned);
        let outcome = py.detach(|| -> Result<(Made, R)> {
            let device = args.device();
            let stream = device.default_stream()?;
            let forms = op.outputs(&args, attrs, wanted)?;
            let mut made: Made = Vec::new();
            for &output in returned {
                let form = forms[output].as_ref();
                let tensor = form.map(|(shape, dtype)| match op.spec().args[output].zeroed_with {
                    Some(_) => warpsmith::Tensor::zeros(shape, *dtype, device),
                    None => warpsmith::Tensor::empty_on(shape, *dtype, &stream),
                });
                made.push(tensor.transpose()?);
            }
            let mut args = args;
            for (tensor, &output) in made.iter_mut().zip(returned) {
                if let Some(tensor) = tensor {
                    args = args.output(output, tensor.view_mut());
                }
            }
            let result = work(op, &mut args, attrs, select, device)?;
            Ok((made, result))
        });
        outcome.or_raise(py)
    }
}

/// An op, how it is called, and its options; refused if the numbers of tensors and switches are not the op's.
pub fn described(
    py: Python<'_>,
    name: &str,
    in_place: bool,
    (tensors, wanted): (usize, usize),
    options: &[Bound<'_, PyAny>],
) -> PyResult<(&'static dyn AnyOp, Signature, Attrs)> {
    let variant = if in_place { Variant::InPlace } else { Variant::New };
    let found = ops::find(name).and_then(|op| Some((op, Signature::of(op.spec(), variant)?)));
    let Some((op, signature)) = found else {
        return Err(PyTypeError::new_err(format!("no op is called `{name}`")));
    };
    let spec = op.spec();
    if (tensors, options.len(), wanted) != (signature.tensors.len(), spec.attrs.len(), signature.wanted.len())
    {
        return Err(PyTypeError::new_err(format!("{name}: a call of another op's form")));
    }
    let mut attrs = Attrs::defaults(spec);
    for (index, (attr, value)) in spec.attrs.iter().zip(options).enumerate() {
        let value = read(value, attr.kind, spec.name, attr.name)?;
        match value {
            Setting::Value(value) => attrs.set(spec, index, value).or_raise(py)?,
            Setting::Name(text) => attrs.parse(spec, attr.name, &text).or_raise(py)?,
        }
    }
    Ok((op, signature, attrs))
}

enum Setting {
    Value(Value),
    Name(String),
}

/// The value of an option.
fn read(value: &Bound<'_, PyAny>, kind: AttrKind, op: &'static str, name: &'static str) -> PyResult<Setting> {
    let read = match kind {
        AttrKind::Float(_) => value.extract().map(|value| Setting::Value(Value::Float(value))),
        AttrKind::OptionalFloat if value.is_none() => Ok(Setting::Value(Value::Unset)),
        AttrKind::OptionalFloat => value.extract().map(|value| Setting::Value(Value::Float(value))),
        AttrKind::Int(_) => value.extract().map(|value| Setting::Value(Value::Int(value))),
        AttrKind::Bool(_) => value.extract().map(|value| Setting::Value(Value::Bool(value))),
        AttrKind::Choice(_) => value.extract().map(Setting::Name),
    };
    read.or_else(|_| {
        let got = value.repr()?;
        Err(to_python(value.py(), &Error::argument(op, name, kind.to_string(), got.to_string())))
    })
}
