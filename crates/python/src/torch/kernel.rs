//! The kernel that PyTorch calls: from its values to the library's arguments and back.
//!
//! PyTorch has released the interpreter's lock before it calls; nothing here needs it.

use super::cuda::{self, Place};
use super::recent;
use super::shim::{Handle, Shim, Value};
use super::tensor::{Owned, Seen, dtype_code};
use crate::errors;
use crate::signature::{Face, Signature};
use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use warpsmith::op::{AnyOp, Args, AttrKind, Attrs, Form, Select, Value as Setting};
use warpsmith::tensor::{Layout, Shape};
use warpsmith::{DType, Device, Error, Result, TensorView, TensorViewMut, cpu, env};

/// One op as it is registered.
pub struct Kernel {
    /// The op.
    pub op: &'static dyn AnyOp,
    /// The order of its arguments and results.
    pub signature: Signature,
    /// Whether choices are names.
    pub face: Face,
    /// How the library chooses among its kernels.
    pub select: Select,
}

thread_local! {
    /// The text of the exception that is being thrown: the frame that throws it may own nothing.
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Runs a kernel, and throws a C++ exception if it fails.
///
/// # Safety
/// `stack` must be the values of a call of the kernel's op, with room for its results.
pub unsafe fn enter(kernel: Option<&Kernel>, stack: *mut Value, inputs: usize, outputs: usize) {
    let (Some(kernel), Ok(shim)) = (kernel, Shim::get()) else { return };
    // SAFETY: passed on.
    let failed = unsafe { attempt(kernel, shim, stack, inputs, outputs) };
    if let Some(message) = failed {
        // SAFETY: the text lives in the thread. The exception passes through frames of this crate that have nothing left to
        // drop, by functions that allow it.
        unsafe { (shim.check)(false, c"".as_ptr(), c"warpsmith".as_ptr(), 0, message) }
    }
}

/// Runs a kernel; the text of its error if it fails.
///
/// # Safety
/// As [`enter`].
unsafe fn attempt(
    kernel: &Kernel,
    shim: &'static Shim,
    stack: *mut Value,
    inputs: usize,
    outputs: usize,
) -> Option<*const std::ffi::c_char> {
    // SAFETY: passed on.
    let stack = unsafe { std::slice::from_raw_parts_mut(stack, inputs.max(outputs)) };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: passed on.
        unsafe { run(kernel, shim, stack) }
    }));
    let text = match outcome {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => {
            let text = error.to_string();
            errors::remember(error);
            text
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            format!("{}: a mistake in warpsmith, please report it: {text}", kernel.signature.spec.name)
        }
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    Some(MESSAGE.with(|message| {
        *message.borrow_mut() = text;
        message.borrow().as_ptr()
    }))
}

/// # Safety
/// `stack` must be the values of a call of the kernel's op.
unsafe fn run(kernel: &Kernel, shim: &'static Shim, stack: &mut [Value]) -> Result<()> {
    let (signature, spec) = (&kernel.signature, kernel.signature.spec);
    // SAFETY: passed on. Each value is taken once: from here on the handles are deleted whatever happens.
    let (handles, attrs, wanted) = unsafe { take(kernel, shim, stack) };
    let (attrs, wanted) = (attrs?, wanted);

    let mut args = Args::new(spec);
    let mut place = None;
    for (tensor, handle) in signature.tensors.iter().zip(&handles) {
        let Some(handle) = handle else { continue };
        let seen = Seen::new(shim, handle, spec, tensor.arg)?;
        place = place.or(Some(seen.device));
        let (address, dtype, layout, device) = (seen.address, seen.dtype, seen.layout, seen.device);
        // SAFETY: PyTorch keeps the memory while the kernel holds the handle, and on a GPU frees it in the order of the stream
        // that the call is given to. That outputs overlap nothing is checked by the call.
        unsafe {
            match tensor.written {
                None => args.set_input(tensor.arg, TensorView::from_raw(address, dtype, layout, device)),
                Some(output) => {
                    let view = TensorViewMut::from_raw(address, dtype, layout, device);
                    match output == tensor.arg {
                        true => args.set_output(output, view),
                        false => args.set_in_place(tensor.arg, output, view),
                    }
                }
            }
        }
    }
    let place = Place::enter(shim, place.unwrap_or(warpsmith::Device::Cpu))?;
    let (forms, known) = recent::outputs(kernel, &args, &attrs, &wanted)?;
    let mut made: [Option<Owned>; MOST_RETURNED] = Default::default();
    for (made, &output) in made.iter_mut().zip(&signature.returned) {
        let Some(form) = &forms[output] else { continue };
        let (handle, view) = allocate(shim, &place, form)?;
        if spec.args[output].zeroed_with.is_some_and(|input| args.get(input).is_some()) {
            place.clear(&view)?;
        }
        args.set_output(output, view);
        *made = Some(handle);
    }
    with_threads_of_torch(shim, place.device(), || {
        recent::run(known, kernel, &mut args, &attrs, place.stream())
    })?;

    for ((value, made), &output) in stack.iter_mut().zip(made).zip(&signature.returned) {
        let handle = made.map_or(0, |made| made.release() as Value);
        *value = match spec.args[output].optional && handle != 0 {
            // SAFETY: PyTorch deletes the cell with the function that belongs to this one.
            true => unsafe {
                let cell = (shim.new_cell)(size_of::<Value>());
                cell.write(handle);
                cell as Value
            },
            false => handle,
        };
    }
    Ok(())
}

/// Runs something on as many CPU threads as PyTorch was told to use, unless the library itself was told how many.
pub fn with_threads_of_torch<R>(shim: &Shim, device: Device, work: impl FnOnce() -> R) -> R {
    static OWN_SETTING: OnceLock<bool> = OnceLock::new();
    let Some(theirs) = shim.num_threads.filter(|_| device == Device::Cpu) else { return work() };
    if *OWN_SETTING.get_or_init(|| env::get(env::NUM_THREADS).is_some()) {
        return work();
    }
    let mut threads = 0;
    // SAFETY: the function writes one number.
    let known = unsafe { theirs(&mut threads) } == 0;
    match threads as usize {
        threads if known && threads != cpu::num_threads() => cpu::with_threads(threads, work),
        _ => work(),
    }
}

/// Most results of one op.
const MOST_RETURNED: usize = warpsmith::op::MAX_ARGS;

type Taken = ([Option<Owned>; warpsmith::op::MAX_ARGS], Result<Attrs>, Vec<usize>);

/// Takes the arguments of a call: tensors by the signature's order, options, and outputs that are wanted.
///
/// # Safety
/// `stack` must be the values of a call of the kernel's op that nobody has taken yet.
unsafe fn take(kernel: &Kernel, shim: &'static Shim, stack: &[Value]) -> Taken {
    let signature = &kernel.signature;
    let mut handles: [Option<Owned>; warpsmith::op::MAX_ARGS] = Default::default();
    let (tensors, rest) = stack.split_at(signature.tensors.len());
    for ((handle, &value), tensor) in handles.iter_mut().zip(tensors).zip(&signature.tensors) {
        let value = match tensor.optional {
            false => value,
            true if value == 0 => continue,
            // SAFETY: an optional value that is there is a cell of C++'s, ours to free.
            true => unsafe {
                let cell = value as *mut Value;
                let value = cell.read();
                (shim.delete_cell)(cell);
                value
            },
        };
        // SAFETY: a kernel owns its arguments.
        *handle = Some(unsafe { Owned::new(shim, value as Handle) });
    }
    let (options, switches) = rest.split_at(signature.spec.attrs.len());
    let mut attrs = Attrs::defaults(signature.spec);
    let mut wrong = None;
    for (index, (attr, &value)) in signature.spec.attrs.iter().zip(options).enumerate() {
        let setting = match (attr.kind, kernel.face) {
            (AttrKind::Float(_), _) => Some(Setting::Float(f64::from_bits(value))),
            (AttrKind::OptionalFloat, _) if value == 0 => Some(Setting::Unset),
            // SAFETY: as with tensors, a number that is there is in a cell that is ours to free.
            (AttrKind::OptionalFloat, _) => unsafe {
                let cell = value as *mut Value;
                let number = f64::from_bits(cell.read());
                (shim.delete_cell)(cell);
                Some(Setting::Float(number))
            },
            (AttrKind::Int(_), _) => Some(Setting::Int(value as i64)),
            (AttrKind::Bool(_), _) => Some(Setting::Bool(value & 0xff != 0)),
            (AttrKind::Choice(_), Face::Raw) => Some(Setting::Choice(value.min(255) as u8)),
            // SAFETY: the value is a string that the kernel owns.
            (AttrKind::Choice(_), Face::Public) => unsafe {
                let parsed =
                    parse(shim, value as Handle, |text| attrs.parse(signature.spec, attr.name, text));
                wrong = wrong.or(parsed.err());
                None
            },
        };
        if let Some(setting) = setting {
            attrs = attrs.with(index, setting);
        }
    }
    let switched = signature.wanted.iter().zip(switches).filter(|(_, value)| **value & 0xff != 0);
    (handles, wrong.map_or(Ok(attrs), Err), switched.map(|(output, _)| *output).collect())
}

/// Reads a string of PyTorch's, and deletes it.
///
/// # Safety
/// `handle` must be a string that the caller owns.
unsafe fn parse(shim: &Shim, handle: Handle, read: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let Some(strings) = &shim.strings else {
        return Err(Error::parse("PyTorch", "2.10 or later for arguments that are text", "an older one"));
    };
    let (mut text, mut length) = (std::ptr::null(), 0);
    // SAFETY: the string lives until it is deleted below, and is followed by a zero.
    unsafe {
        (strings.length)(handle, &mut length);
        (strings.text)(handle, &mut text);
        let result = match text.is_null() {
            true => read(""),
            false => read(&CStr::from_ptr(text).to_string_lossy()),
        };
        (strings.delete)(handle);
        result
    }
}

/// A new tensor in PyTorch's own memory.
fn allocate<'a>(shim: &'static Shim, place: &Place, form: &Form) -> Result<(Owned, TensorViewMut<'a>)> {
    let (sizes, dtype): (&[usize], DType) = (&form.0, form.1);
    let layout = Layout::contiguous(Shape::new(sizes)?);
    let mut shape = [0i64; warpsmith::tensor::MAX_RANK];
    let mut strides = shape;
    for (d, (&size, &stride)) in layout.shape().iter().zip(layout.strides()).enumerate() {
        (shape[d], strides[d]) = (size as i64, stride as i64);
    }
    let (device_type, device_index) = cuda::codes(place.device());
    let mut handle = std::ptr::null_mut();
    // SAFETY: the arrays hold as many numbers as there are dimensions.
    let code = unsafe {
        (shim.empty_strided)(
            sizes.len() as i64,
            shape.as_ptr(),
            strides.as_ptr(),
            dtype_code(dtype),
            device_type,
            device_index,
            &mut handle,
        )
    };
    if code != 0 {
        let bytes = (layout.numel() * dtype.size()) as u64;
        return Err(place.device().memory()?.exceeded(place.device().to_string(), bytes));
    }
    // SAFETY: a new reference.
    let handle = unsafe { Owned::new(shim, handle) };
    let address = handle.address()?;
    // SAFETY: the memory is new, of this layout, and lives as long as the handle, which outlives the call.
    let view = unsafe { TensorViewMut::from_raw(address, dtype, layout, place.device()) };
    Ok((handle, view))
}
