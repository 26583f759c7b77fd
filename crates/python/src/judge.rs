//! Judges results of other code by the op's own reference.

use crate::call::described;
use crate::errors::{OrRaise, to_python};
use crate::tensor::Tensor;
use pyo3::prelude::*;
use warpsmith::lab::proof::{Expectation, compare};
use warpsmith::lab::{self, Array};
use warpsmith::op::Args;
use warpsmith::{DType, Error, Result};

/// What is wrong: the position of the output among the op's arguments, the first wrong element in row-major order with what it
/// should be and is, and how far off that is, in words.
type Wrong = (usize, Option<(usize, f64, f64)>, String);

/// Compares outputs with the op's reference: in f64 for the truth, in the arithmetic of the type for the tolerance. Inputs and
/// outputs are dense and on the CPU; `outputs` are in the order that the op returns them.
#[pyfunction]
pub fn judge(
    py: Python<'_>,
    name: &str,
    tensors: Vec<Option<Bound<'_, Tensor>>>,
    options: Vec<Bound<'_, PyAny>>,
    wanted: Vec<bool>,
    outputs: Vec<Option<PyRef<'_, Tensor>>>,
) -> PyResult<Option<Wrong>> {
    let op =
        lab::find(name).ok_or_else(|| to_python(py, &Error::parse("op", "one with a reference", name)))?;
    let spec = op.spec();
    let (_, signature, attrs) = described(py, name, false, (tensors.len(), wanted.len()), &options)?;
    if signature.tensors.iter().any(|tensor| tensor.written.is_some()) {
        return Err(to_python(py, &Error::parse("op", "one that returns new tensors", name)));
    }
    let mut inputs: Vec<Option<Array<f64>>> = spec.args.iter().map(|_| None).collect();
    let mut args = Args::new(spec);
    let read: Vec<Option<PyRef<'_, Tensor>>> = tensors
        .iter()
        .map(|tensor| tensor.as_ref().map(|tensor| tensor.try_borrow()).transpose())
        .collect::<std::result::Result<_, _>>()?;
    let mut present = 0;
    let mut dtype = None;
    for (given, tensor) in signature.tensors.iter().zip(&read) {
        let Some(tensor) = tensor else { continue };
        inputs[given.arg] = Some(elements(tensor.get()).or_raise(py)?);
        args = args.input(given.arg, tensor.get().view());
        present |= 1 << given.arg;
        dtype = dtype.or(Some(tensor.get().dtype()).filter(|dtype| dtype.is_float()));
    }
    // What each output must be, which also judges the inputs' shapes and types.
    let asked: Vec<usize> = signature
        .wanted
        .iter()
        .zip(wanted)
        .filter(|(_, wanted)| *wanted)
        .map(|(output, _)| *output)
        .collect();
    let forms = op.outputs(&args, &attrs, &asked).or_raise(py)?;
    let mut found = Vec::new();
    for (&output, tensor) in signature.returned.iter().zip(&outputs) {
        let (Some((shape, dtype)), Some(tensor)) = (&forms[output], tensor) else { continue };
        present |= 1 << output;
        let got = tensor.get();
        if got.shape() != shape.as_slice() || got.dtype() != *dtype {
            let expected = format!("{dtype} {shape:?}");
            let got = format!("{} {:?}", got.dtype(), got.shape());
            return Err(to_python(py, &Error::argument(spec.name, spec.args[output].name, expected, got)));
        }
        found.push((output, *dtype, elements(got).or_raise(py)?));
    }
    let outcome = py.detach(|| -> Result<Option<Wrong>> {
        let main = dtype.unwrap_or(DType::F32);
        let expected = op.expected(main, &inputs, present, &attrs);
        for (output, dtype, out) in &found {
            let [Some(truth), Some(naive), Some(deviation)] =
                [&expected.truth, &expected.naive, &expected.deviation].map(|found| found[*output].as_ref())
            else {
                let expected = "an output that the reference gives";
                return Err(Error::argument(spec.name, spec.args[*output].name, expected, "another"));
            };
            let (truth, naive, deviation) = (&truth.data, &naive.data, &deviation.data);
            let expectation = Expectation { truth, naive, deviation, dtype: *dtype };
            if let Err(wrong) = compare(expectation, &out.data) {
                let element = wrong.element.map(|at| (at, truth[at], out.data[at]));
                return Ok(Some((*output, element, wrong.to_string())));
            }
        }
        Ok(None)
    });
    outcome.or_raise(py)
}

/// The elements of a dense tensor.
fn elements(tensor: &warpsmith::Tensor) -> Result<Array<f64>> {
    Ok(Array { shape: tensor.shape().to_vec(), data: tensor.to_f64()? })
}
