//! The library's errors as Python exceptions. The conversion happens only here.
//!
//! The classes are Python's own (`warpsmith/errors.py`), so that they can have two parents: an [`ArgumentError`] of ours is
//! a `ValueError` too.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use std::cell::RefCell;
use warpsmith::Error;

thread_local! {
    /// The error of this thread's last failed kernel. PyTorch passes on no more of it than its text.
    static LAST: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// Remembers the error of a kernel for [`take_last_error`].
pub fn remember(error: Error) {
    LAST.with(|last| *last.borrow_mut() = Some(error));
}

/// Forgets the last error and returns it as an exception.
#[pyfunction]
pub fn take_last_error(py: Python<'_>) -> Option<PyErr> {
    let error = LAST.with(|last| last.borrow_mut().take())?;
    Some(to_python(py, &error))
}

/// The exception for an error.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).unwrap_or_else(|failure| failure)
}

/// `?` for results of the library.
pub trait OrRaise<T> {
    /// The value, or the exception for the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for warpsmith::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_python(py, &error))
    }
}

impl<T> OrRaise<T> for warpsmith_fuse::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| fusion(py, &error).unwrap_or_else(|failure| failure))
    }
}

/// The exception for an error of a fused graph.
fn fusion(py: Python<'_>, error: &warpsmith_fuse::Error) -> PyResult<PyErr> {
    let details = PyDict::new(py);
    details.set_item("op", "fuse")?;
    match error {
        warpsmith_fuse::Error::Library(error) => return exception(py, error),
        warpsmith_fuse::Error::Argument { argument, expected, got } => {
            details.set_item("argument", argument)?;
            details.set_item("expected", expected)?;
            details.set_item("got", got)?;
        }
        warpsmith_fuse::Error::Node { node, .. } => details.set_item("argument", node)?,
        _ => {}
    }
    instance(py, "ArgumentError", &error.to_string(), &details)
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let details = PyDict::new(py);
    let class = match error {
        Error::Argument { op, arg, expected, got } => {
            details.set_item("op", op)?;
            details.set_item("argument", arg)?;
            details.set_item("expected", expected)?;
            details.set_item("got", got)?;
            "ArgumentError"
        }
        Error::Parse { what, expected, got } => {
            details.set_item("argument", what)?;
            details.set_item("expected", expected)?;
            details.set_item("got", got)?;
            "ArgumentError"
        }
        Error::Unsupported { op, .. } => {
            details.set_item("op", op)?;
            "UnsupportedError"
        }
        Error::UnknownKernel { op, kernel, .. } => {
            details.set_item("op", op)?;
            details.set_item("got", kernel)?;
            "ArgumentError"
        }
        Error::OutOfMemory { requested, free, total, .. } => {
            details.set_item("requested", requested)?;
            details.set_item("free", free)?;
            details.set_item("total", total)?;
            "OutOfMemoryError"
        }
        Error::Cuda { .. } | Error::Poisoned { .. } | Error::Launch { .. } => "CudaError",
        Error::Unavailable { .. } => "UnavailableError",
        Error::Compile { .. } => "CompileError",
        Error::Io { path, .. } => {
            details.set_item("path", path)?;
            "FileError"
        }
        _ => "WarpsmithError",
    };
    instance(py, class, &error.to_string(), &details)
}

/// An exception of one of the package's classes.
fn instance(py: Python<'_>, class: &str, message: &str, details: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("warpsmith.errors").map(Bound::unbind))?;
    let class = module.bind(py).getattr(class)?.cast_into::<PyType>()?;
    Ok(PyErr::from_value(class.call((message,), Some(details))?))
}
