//! Kernels of users: CUDA source that the library's compiler service compiles, and that the driver launches.

use crate::errors::OrRaise;
use crate::torch::{Library, refuse_after_fork};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};
use warpsmith::cuda::Context;
use warpsmith::jit::{self, Arch, Request, Source};
use warpsmith::{Device, Error, Result};

/// A kernel of a user's. Its source is kept for the life of the process, like compiled code.
#[pyclass(module = "warpsmith", frozen)]
pub struct CudaKernel {
    source: &'static Source,
    function: String,
    /// The driver's handles, by device.
    loaded: Mutex<HashMap<u32, Handle>>,
}

/// A function or module of the driver's.
#[derive(Clone, Copy)]
struct Handle(*mut c_void);

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Handle {}

#[pymethods]
impl CudaKernel {
    /// A kernel: its name for messages, its source, and the name of its `extern "C" __global__` function.
    #[new]
    fn new(name: String, source: String, function: String) -> CudaKernel {
        let source = Source { name: name.leak(), code: source.leak() };
        CudaKernel { source: Box::leak(Box::new(source)), function, loaded: Mutex::default() }
    }

    /// Compiles it for an architecture such as "90a", without a GPU. Returns the bytes of code and the compiler's log.
    fn compile(&self, py: Python<'_>, arch: &str) -> PyResult<(usize, String)> {
        let compiled = py.detach(|| jit::get(&Request::new(self.source, arch.parse()?))).or_raise(py)?;
        Ok((compiled.cubin.len(), compiled.log.clone()))
    }

    /// Launches it. Each argument is its bits and its size in bytes.
    #[allow(clippy::too_many_arguments)]
    fn launch(
        &self,
        py: Python<'_>,
        device: u32,
        stream: u64,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: Vec<(u64, usize)>,
    ) -> PyResult<()> {
        py.detach(|| self.start(device, stream, grid, block, shared_bytes, &args)).or_raise(py)
    }
}

/// The driver's number for the most dynamic shared memory that launches may ask for.
const DYNAMIC_SHARED: i32 = 8;
/// Shared memory that is left to what kernels declare themselves.
const STATIC_SHARED: u32 = 49152;
/// Most parameters of a kernel.
const MOST_ARGS: usize = 64;
/// Most bytes of one parameter.
const MOST_BYTES: usize = 4096;

impl CudaKernel {
    fn start(
        &self,
        device: u32,
        stream: u64,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: &[(u64, usize)],
    ) -> Result<()> {
        refuse_after_fork(Device::Cuda(device))?;
        let context = Context::get(device)?;
        context.bind()?;
        let driver = Driver::get()?;
        let function = self.function_on(driver, device, context)?;
        self.check_args(driver, function, args)?;
        // The driver reads as many parameters as the kernel has, whether they are there or not.
        static NOTHING: [u64; MOST_BYTES / 8] = [0; MOST_BYTES / 8];
        let mut values = [[0u64; 2]; MOST_ARGS];
        let mut pointers = [NOTHING.as_ptr().cast_mut().cast::<c_void>(); MOST_ARGS];
        for ((value, pointer), &(bits, _)) in values.iter_mut().zip(&mut pointers).zip(args) {
            value[0] = bits;
            *pointer = value.as_mut_ptr().cast();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        // SAFETY: the function is loaded in the current context, the parameters were checked, and there are pointers for more
        // than it can have. What the kernel does with its arguments is its author's responsibility.
        let code = unsafe {
            let (stream, none) = (stream as usize as *mut c_void, std::ptr::null_mut());
            (driver.launch)(
                function.0,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared_bytes,
                stream,
                pointers.as_mut_ptr(),
                none,
            )
        };
        driver.succeeded(code, "cuLaunchKernel", self.source.name)
    }

    /// The function on a device, loaded by the first call.
    fn function_on(&self, driver: &Driver, device: u32, context: &Context) -> Result<Handle> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.get(&device) {
            return Ok(*function);
        }
        let props = context.info();
        let arch = Arch::for_device(props.major as u8, props.minor as u8);
        let compiled = jit::get(&Request::new(self.source, arch))?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        let name = CString::new(self.function.as_str())
            .map_err(|_| Error::parse("kernel name", "a C identifier", self.function.as_str()))?;
        // SAFETY: the code is a whole ELF file made by the compiler, the context is current, and the module is never unloaded.
        unsafe {
            let code = (driver.load)(&mut module, compiled.cubin.as_ptr().cast());
            driver.succeeded(code, "cuModuleLoadData", self.source.name)?;
            let code = (driver.function)(&mut function, module, name.as_ptr());
            driver.succeeded(code, "cuModuleGetFunction", self.source.name)?;
            let most = props.shared_per_block_optin.saturating_sub(STATIC_SHARED) as i32;
            let code = (driver.set_attribute)(function, DYNAMIC_SHARED, most);
            driver.succeeded(code, "cuFuncSetAttribute", self.source.name)?;
        }
        loaded.insert(device, Handle(function));
        Ok(Handle(function))
    }

    /// Compares arguments with what the compiled function takes, where the driver can tell.
    fn check_args(&self, driver: &Driver, function: Handle, args: &[(u64, usize)]) -> Result<()> {
        let wrong = |expected: String, got: String| {
            Err(Error::parse(format!("arguments of `{}`", self.source.name), expected, got))
        };
        if args.len() > MOST_ARGS {
            return wrong(format!("at most {MOST_ARGS}"), args.len().to_string());
        }
        let Some(info) = driver.param_info else { return Ok(()) };
        let size_of_param = |index: usize| {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function is alive, and the driver writes two numbers.
            let code = unsafe { info(function.0, index, &mut offset, &mut size) };
            (code == 0).then_some(size)
        };
        for (index, &(_, size)) in args.iter().enumerate() {
            match size_of_param(index) {
                Some(declared) if declared == size => {}
                Some(declared) => {
                    return wrong(format!("{declared} bytes for number {index}"), format!("{size} bytes"));
                }
                None => return wrong(format!("{index}, as the kernel declares"), args.len().to_string()),
            }
        }
        match size_of_param(args.len()) {
            Some(_) => wrong("one for each parameter of the kernel".into(), format!("only {}", args.len())),
            None => Ok(()),
        }
    }
}

type Code = i32;
type Launch = unsafe extern "C" fn(
    *mut c_void,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;

/// The driver's functions.
struct Driver {
    load: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> Code,
    function: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> Code,
    launch: Launch,
    set_attribute: unsafe extern "C" fn(*mut c_void, i32, i32) -> Code,
    error_name: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    /// Since CUDA 12.4.
    param_info: Option<unsafe extern "C" fn(*mut c_void, usize, *mut usize, *mut usize) -> Code>,
}

impl Driver {
    fn get() -> Result<&'static Driver> {
        static FOUND: OnceLock<Result<Driver>> = OnceLock::new();
        FOUND.get_or_init(Driver::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Driver> {
        // The library loads the driver for its own context.
        let library = Library::loaded(c"libcuda.so.1").ok_or_else(|| missing("libcuda.so.1"))?;
        // SAFETY: each symbol is used with the signature that the driver's header declares.
        unsafe {
            Ok(Driver {
                load: library.find(c"cuModuleLoadData").ok_or_else(|| missing("cuModuleLoadData"))?,
                function: library
                    .find(c"cuModuleGetFunction")
                    .ok_or_else(|| missing("cuModuleGetFunction"))?,
                launch: library.find(c"cuLaunchKernel").ok_or_else(|| missing("cuLaunchKernel"))?,
                set_attribute: library
                    .find(c"cuFuncSetAttribute")
                    .ok_or_else(|| missing("cuFuncSetAttribute"))?,
                error_name: library.find(c"cuGetErrorName").ok_or_else(|| missing("cuGetErrorName"))?,
                param_info: library.find(c"cuFuncGetParamInfo"),
            })
        }
    }

    fn succeeded(&self, code: Code, call: &'static str, kernel: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the driver writes the address of a text that it keeps, or nothing.
        let name = unsafe {
            (self.error_name)(code, &mut name);
            if name.is_null() { "an unknown error".into() } else { CStr::from_ptr(name).to_string_lossy() }
        };
        let (name, detail) = (name.into_owned(), format!("kernel `{kernel}`"));
        Err(Error::Cuda { call, code: code.unsigned_abs(), name, detail })
    }
}

fn missing(what: &str) -> Error {
    Error::Unavailable {
        what: "the CUDA driver".into(),
        why: format!("{what} was not found"),
        fix: "Install NVIDIA's driver".into(),
    }
}
