//! PyTorch's stable C functions, looked up in the libraries that the process has loaded. Nothing is linked: one binary runs
//! with every PyTorch since 2.9, and without one.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;
use warpsmith::{Error, Result};

/// A tensor of PyTorch's.
pub type Handle = *mut c_void;
/// An argument or result of a kernel: a number, or a pointer.
pub type Value = u64;
/// A kernel as PyTorch calls it: values, number of arguments, number of results.
pub type BoxedKernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);

type Code = i32;
type Get<T> = unsafe extern "C" fn(Handle, *mut T) -> Code;

/// The version whose conventions of kernels are followed: 2.10.0, as PyTorch packs versions.
const BUILD_VERSION: u64 = (2 << 56) | (10 << 48);

/// The functions.
pub struct Shim {
    pub data_ptr: Get<*mut c_void>,
    pub dim: Get<i64>,
    pub sizes: Get<*const i64>,
    pub strides: Get<*const i64>,
    pub dtype: Get<i32>,
    pub device_type: Get<i32>,
    pub device_index: Get<i32>,
    pub empty_strided: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code,
    pub delete: unsafe extern "C" fn(Handle) -> Code,
    /// Throws a C++ exception if its first argument is false.
    pub check: unsafe extern "C-unwind" fn(bool, *const c_char, *const c_char, u32, *const c_char),
    /// C++'s `operator new` and `operator delete`, which optional values are made and freed with.
    pub new_cell: unsafe extern "C" fn(usize) -> *mut Value,
    pub delete_cell: unsafe extern "C" fn(*mut Value),
    library_init:
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, u32, *mut *mut c_void) -> Code,
    library_impl: Implement,
    /// How many threads PyTorch's own kernels use on the CPU. Since 2.10.
    pub num_threads: Option<unsafe extern "C" fn(*mut u32) -> Code>,
    /// Since 2.10.
    pub strings: Option<Strings>,
    /// Where PyTorch has CUDA.
    pub cuda: Option<Cuda>,
}

enum Implement {
    Versioned(unsafe extern "C" fn(*mut c_void, *const c_char, BoxedKernel, u64) -> Code),
    Plain(unsafe extern "C" fn(*mut c_void, *const c_char, BoxedKernel) -> Code),
}

/// Functions for arguments that are text.
pub struct Strings {
    pub length: Get<usize>,
    pub text: Get<*const c_char>,
    pub delete: unsafe extern "C" fn(Handle) -> Code,
}

/// Functions of PyTorch's CUDA library.
pub struct Cuda {
    pub current_stream: unsafe extern "C" fn(i32, *mut *mut c_void) -> Code,
    pub create_guard: unsafe extern "C" fn(i32, *mut *mut c_void) -> Code,
    pub delete_guard: unsafe extern "C" fn(*mut c_void) -> Code,
}

impl Shim {
    /// The functions, if PyTorch is loaded and has them.
    pub fn get() -> Result<&'static Shim> {
        static FOUND: OnceLock<Result<Shim>> = OnceLock::new();
        FOUND.get_or_init(Shim::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Shim> {
        let torch = Library::loaded(c"libtorch_cpu.so").ok_or_else(|| missing("libtorch_cpu.so"))?;
        // SAFETY: each symbol is used with the signature that PyTorch's headers declare; its stable functions keep theirs.
        unsafe {
            Ok(Shim {
                data_ptr: torch.need(c"aoti_torch_get_data_ptr")?,
                dim: torch.need(c"aoti_torch_get_dim")?,
                sizes: torch.need(c"aoti_torch_get_sizes")?,
                strides: torch.need(c"aoti_torch_get_strides")?,
                dtype: torch.need(c"aoti_torch_get_dtype")?,
                device_type: torch.need(c"aoti_torch_get_device_type")?,
                device_index: torch.need(c"aoti_torch_get_device_index")?,
                empty_strided: torch.need(c"aoti_torch_empty_strided")?,
                delete: torch.need(c"aoti_torch_delete_tensor_object")?,
                check: torch.need(c"aoti_torch_check")?,
                new_cell: torch.need_as_linked(c"_Znwm")?,
                delete_cell: torch.need_as_linked(c"_ZdlPv")?,
                library_init: torch.need(c"aoti_torch_library_init_impl")?,
                library_impl: match torch.find(c"torch_library_impl") {
                    Some(function) => Implement::Versioned(function),
                    None => Implement::Plain(torch.need(c"aoti_torch_library_impl")?),
                },
                num_threads: torch.find(c"torch_get_num_threads"),
                strings: Strings::find(&torch),
                cuda: Library::loaded(c"libtorch_cuda.so").and_then(|cuda| Cuda::find(&cuda)),
            })
        }
    }

    /// Registers kernels for a dispatch key of a namespace, for good.
    pub fn implement(&self, namespace: &CStr, key: &CStr, kernels: &[(&CStr, BoxedKernel)]) -> Result<()> {
        let mut library = std::ptr::null_mut();
        let file = c"warpsmith";
        // SAFETY: the strings are alive, and PyTorch copies them.
        let code =
            unsafe { (self.library_init)(namespace.as_ptr(), key.as_ptr(), file.as_ptr(), 0, &mut library) };
        succeeded("opening a library of ops", code)?;
        for (name, kernel) in kernels {
            // SAFETY: as above; the kernels are functions of this binary, which is never unloaded.
            let code = unsafe {
                match self.library_impl {
                    Implement::Versioned(add) => add(library, name.as_ptr(), *kernel, BUILD_VERSION),
                    Implement::Plain(add) => add(library, name.as_ptr(), *kernel),
                }
            };
            succeeded("registering an op", code)?;
        }
        // The library object is kept: deleting it would take the kernels away again.
        Ok(())
    }
}

impl Strings {
    unsafe fn find(torch: &Library) -> Option<Strings> {
        // SAFETY: as in `Shim::find`.
        unsafe {
            Some(Strings {
                length: torch.find(c"torch_string_length")?,
                text: torch.find(c"torch_string_c_str")?,
                delete: torch.find(c"torch_delete_string")?,
            })
        }
    }
}

impl Cuda {
    fn find(library: &Library) -> Option<Cuda> {
        // SAFETY: as in `Shim::find`.
        unsafe {
            Some(Cuda {
                current_stream: library.find(c"aoti_torch_get_current_cuda_stream")?,
                create_guard: library.find(c"aoti_torch_create_cuda_guard")?,
                delete_guard: library.find(c"aoti_torch_delete_cuda_guard")?,
            })
        }
    }
}

/// An error of one of the functions. PyTorch itself prints the reason.
pub fn succeeded(doing: &str, code: Code) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::Unavailable {
        what: format!("PyTorch's help with {doing}"),
        why: format!("it returned error {code}"),
        fix: "Its own message is on the standard error output".into(),
    })
}

fn missing(what: &str) -> Error {
    Error::Unavailable {
        what: format!("PyTorch's stable interface ({what})"),
        why: "it is not loaded in this process, or is older than PyTorch 2.9".into(),
        fix: "Import torch first, or install a newer one".into(),
    }
}

/// A library that the process has loaded already.
pub struct Library(*mut c_void);

impl Library {
    /// The library of that name, if it is loaded.
    pub fn loaded(name: &CStr) -> Option<Library> {
        // SAFETY: nothing is loaded that is not, so no code runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(Library(handle))
    }

    /// The function of that name, if there is one.
    ///
    /// # Safety
    /// `F` must be a pointer to a function of the symbol's signature.
    pub unsafe fn find<F: Copy>(&self, symbol: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is loaded and the symbol is text; the caller vouches for the signature.
        unsafe {
            let address = libc::dlsym(self.0, symbol.as_ptr());
            (!address.is_null()).then(|| std::mem::transmute_copy(&address))
        }
    }

    /// # Safety
    /// As [`Library::find`].
    unsafe fn need<F: Copy>(&self, symbol: &CStr) -> Result<F> {
        // SAFETY: passed on.
        unsafe { self.find(symbol) }.ok_or_else(|| missing(&symbol.to_string_lossy()))
    }

    /// The symbol that the library itself is linked to: the whole process's, where something replaced it, else that of the
    /// libraries it brings.
    ///
    /// # Safety
    /// As [`Library::find`].
    unsafe fn need_as_linked<F: Copy>(&self, symbol: &CStr) -> Result<F> {
        let process = Library(libc::RTLD_DEFAULT);
        // SAFETY: passed on.
        unsafe { process.find(symbol).map_or_else(|| self.need(symbol), Ok) }
    }
}
