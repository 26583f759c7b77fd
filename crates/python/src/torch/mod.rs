//! The ops as PyTorch's own: kernels registered through its stable C functions.

mod cuda;
mod kernel;
mod recent;
mod shim;
mod tensor;
mod trampolines;

pub use cuda::{Place, Workspace, refuse_after_fork};
pub use kernel::with_threads_of_torch;
pub use shim::{Library, Shim};

use crate::errors::OrRaise;
use crate::signature::{Face, Signature, Variant};
use kernel::Kernel;
use pyo3::prelude::*;
use shim::BoxedKernel;
use std::borrow::Cow;
use std::ffi::{CStr, CString};
use warpsmith::op::Select;
use warpsmith::{Error, Result, ops};

/// Whether kernels can be registered natively: PyTorch is imported, and has the functions.
#[pyfunction]
pub fn torch_is_native() -> bool {
    Shim::get().is_ok()
}

/// Registers a kernel for every op, CPU and CUDA, in the two namespaces. Returns the names of public ops that need a kernel
/// in Python, because this PyTorch cannot pass text to native ones.
#[pyfunction]
pub fn register_kernels(py: Python<'_>, public: &str, raw: &str) -> PyResult<Vec<String>> {
    register(public, raw).or_raise(py)
}

fn register(public: &str, raw: &str) -> Result<Vec<String>> {
    let shim = Shim::get()?;
    let mut left = Vec::new();
    for (namespace, face) in [(public, Face::Public), (raw, Face::Raw)] {
        let mut kernels: Vec<(CString, BoxedKernel)> = Vec::new();
        for op in ops::all() {
            for variant in [Variant::New, Variant::InPlace] {
                let Some(signature) = Signature::of(op.spec(), variant) else { continue };
                let name = Signature::name(op.spec(), variant);
                if face == Face::Public && shim.strings.is_none() && has_choices(&signature) {
                    left.push(name);
                    continue;
                }
                let function =
                    trampolines::assign(Kernel { op, signature, face, select: Select::default() })?;
                kernels.push((c_string(&name), function));
            }
        }
        let kernels: Vec<(&CStr, BoxedKernel)> =
            kernels.iter().map(|(name, function)| (name.as_c_str(), *function)).collect();
        for key in [c"CPU", c"CUDA"] {
            shim.implement(&c_string(namespace), key, &kernels)?;
        }
    }
    Ok(left)
}

/// Registers one kernel of an op, or with none named the library's choice, under a name of its own: CPU and CUDA, with the
/// schema of the raw op.
#[pyfunction]
pub fn register_kernel(
    py: Python<'_>,
    namespace: &str,
    name: &str,
    op: &str,
    kernel: Option<String>,
) -> PyResult<()> {
    let register = move || -> Result<()> {
        let found = ops::find(op).and_then(|op| Some((op, Signature::of(op.spec(), Variant::New)?)));
        let (op, signature) = found.ok_or_else(|| Error::parse("op", "one that returns tensors", op))?;
        let select = Select { kernel: kernel.map(Cow::Owned), ..Select::default() };
        let function = trampolines::assign(Kernel { op, signature, face: Face::Raw, select })?;
        for key in [c"CPU", c"CUDA"] {
            Shim::get()?.implement(&c_string(namespace), key, &[(&c_string(name), function)])?;
        }
        Ok(())
    };
    register().or_raise(py)
}

fn has_choices(signature: &Signature) -> bool {
    signature.spec.attrs.iter().any(|attr| matches!(attr.kind, warpsmith::op::AttrKind::Choice(_)))
}

/// Names of ops and namespaces have no zero in them.
fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}
