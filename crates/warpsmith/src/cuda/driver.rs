//! The driver library: loading it, the functions we call, and what their error codes mean.
//!
//! cudarc supplies the types and the signatures. Its own functions are never called, for two reasons: they panic
//! when a symbol is missing, and they return a Rust enum, so a code that a newer driver invented would be
//! undefined behaviour. Here every function is resolved once, returns a plain number, and can only be reached
//! through an [`Api`], which exists only if all of them were found.

use crate::error::{Error, Result};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUgraph, CUgraphExec, CUgraphNode, CUlaunchConfig, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUmodule, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap,
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, CUuuid,
};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: u32 = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_READY`: an answer to a query, not a failure.
pub(super) const NOT_READY: u32 = 600;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the legacy stream was asked about while another stream is captured.
pub(super) const CAPTURE_IMPLICIT: u32 = 906;

const STUB_LIBRARY: u32 = 34;
const NO_DEVICE: u32 = 100;
const SYSTEM_DRIVER_MISMATCH: u32 = 803;
const COMPAT_NOT_SUPPORTED: u32 = 804;

#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvcuda.dll"];
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];

/// Declares the table of driver functions. Each signature is compared with cudarc's when this file is compiled:
/// a wrong argument type does not build.
macro_rules! driver_functions {
    (
        required { $($name:ident($($arg:ty),*);)* }
        optional { $($opt:ident($($opt_arg:ty),*);)* }
    ) => {
        /// The loaded and initialised driver. To hold one is proof that every required function exists.
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            $(pub $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> u32>,)*
            error_name: DescribeError,
            error_string: DescribeError,
            /// Newest CUDA version the driver supports, as `1000 * major + 10 * minor`.
            pub version: u32,
        }

        impl Api {
            /// Resolves the table, or names the first required function that is missing.
            fn resolve(library: &libloading::Library) -> std::result::Result<Api, &'static str> {
                Ok(Api {
                    $($name: symbol(library, stringify!($name)).ok_or(stringify!($name))?,)*
                    $($opt: symbol(library, stringify!($opt)),)*
                    error_name: symbol(library, "cuGetErrorName").ok_or("cuGetErrorName")?,
                    error_string: symbol(library, "cuGetErrorString").ok_or("cuGetErrorString")?,
                    version: 0,
                })
            }
        }

        const _: () = {
            $(let _: unsafe fn($($arg),*) -> CUresult = sys::$name;)*
            $(let _: unsafe fn($($opt_arg),*) -> CUresult = sys::$opt;)*
        };
    };
}

/// `cuGetErrorName` and `cuGetErrorString`, declared with a number where the binding has an enum, because the
/// code to describe may be one the binding does not know.
type DescribeError = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

driver_functions! {
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxSetCurrent(CUcontext);
        cuCtxSynchronize();
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemPoolCreate(*mut CUmemoryPool, *const CUmemPoolProps);
        cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        cuMemPoolTrimTo(CUmemoryPool, usize);
        cuMemAllocFromPoolAsync(*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        cuMemFreeAsync(CUdeviceptr, CUstream);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamGetCaptureInfo_v2(
            CUstream, *mut CUstreamCaptureStatus, *mut u64, *mut CUgraph, *mut *const CUgraphNode, *mut usize
        );
        cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventSynchronize(CUevent);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        cuGraphUpload(CUgraphExec, CUstream);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphDestroy(CUgraph);
        cuGraphExecDestroy(CUgraphExec);
        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        cuTensorMapEncodeTiled(
            *mut CUtensorMap, CUtensorMapDataType, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32,
            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
        );
        cuTensorMapReplaceAddress(*mut CUtensorMap, *mut c_void);
        cuCtxRecordEvent(CUcontext, CUevent);
    }
}

/// One symbol of the driver as a function pointer of type `F`.
fn symbol<F: Copy>(library: &libloading::Library, name: &str) -> Option<F> {
    // SAFETY: `F` is the function's C signature, checked against cudarc's bindings in `driver_functions!` (the
    // two error functions differ only in taking a C enum as the integer it is). The library is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()).ok().map(|found| *found) }
}

/// The driver, loaded and initialised by the first call. A failure is remembered and returned again.
pub(super) fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(Error::clone)
}

fn load() -> Result<Api> {
    let library = open(LIBRARIES).map_err(|why| {
        unavailable(why, "Install the NVIDIA driver (in a container, pass the GPU through)")
    })?;
    // Kept loaded for the life of the process: function pointers into it are stored in statics.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    let mut api = Api::resolve(library).map_err(|missing| {
        unavailable(
            format!("the driver has no function `{missing}`"),
            "Update the driver to CUDA 12 or newer",
        )
    })?;
    // SAFETY: called before any other driver function, with the only flag value that is allowed.
    let code = unsafe { (api.cuInit)(0) };
    if code != SUCCESS {
        return Err(unavailable(format!("cuInit: {}", api.describe(code)), init_advice(code)));
    }
    let mut version: c_int = 0;
    // SAFETY: the driver writes one int.
    let code = unsafe { (api.cuDriverGetVersion)(&mut version) };
    if code != SUCCESS {
        return Err(unavailable(format!("cuDriverGetVersion: {}", api.describe(code)), init_advice(code)));
    }
    api.version = version.try_into().unwrap_or(0);
    Ok(api)
}

fn unavailable(why: impl Into<String>, fix: &str) -> Error {
    Error::Unavailable { what: "CUDA".into(), why: why.into(), fix: fix.into() }
}

/// What to do about an error of `cuInit`.
fn init_advice(code: u32) -> &'static str {
    match code {
        NO_DEVICE => "No GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        STUB_LIBRARY => {
            "The toolkit's stub of libcuda was loaded: remove its `stubs` folder from LD_LIBRARY_PATH"
        }
        SYSTEM_DRIVER_MISMATCH => "The kernel module and libcuda are of different versions: reboot",
        COMPAT_NOT_SUPPORTED => "Remove the CUDA compatibility libraries from LD_LIBRARY_PATH",
        _ => "Check that `nvidia-smi` works for this user",
    }
}

impl Api {
    /// The driver's name and description of an error code.
    pub fn names(&self, code: u32) -> (String, String) {
        let text = |describe: DescribeError| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the driver writes a pointer to a static string, or null for a code it does not know.
            let found = unsafe { describe(code, &mut text) } == SUCCESS && !text.is_null();
            // SAFETY: not null, hence one of the driver's static, null-terminated strings.
            found.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        (
            text(self.error_name).unwrap_or_else(|| "unknown error".into()),
            text(self.error_string).unwrap_or_else(|| "the driver has no description".into()),
        )
    }

    /// Name, code and description in one sentence.
    pub fn describe(&self, code: u32) -> String {
        let (name, detail) = self.names(code);
        format!("{name} ({code}): {detail}")
    }

    /// Turns the result of a call that concerns no context into an error.
    pub fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let (name, detail) = self.names(code);
        Err(Error::Cuda { call, code, name, detail })
    }
}

/// Whether an error code means that the context is lost: every later call in it fails, whatever it is.
pub(super) fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        4 // DEINITIALIZED: the process is ending
            | 214 // ECC_UNCORRECTABLE
            | 220 // NVLINK_UNCORRECTABLE
            | 226 // CONTAINED
            | 700 // ILLEGAL_ADDRESS
            | 702 // LAUNCH_TIMEOUT
            | 709 // CONTEXT_IS_DESTROYED
            | 710 // ASSERT
            | 714 // HARDWARE_STACK_ERROR
            | 715 // ILLEGAL_INSTRUCTION
            | 716 // MISALIGNED_ADDRESS
            | 717 // INVALID_ADDRESS_SPACE
            | 718 // INVALID_PC
            | 719 // LAUNCH_FAILED
            | 721 // TENSOR_MEMORY_LEAK
            | 810 // MPS_CLIENT_TERMINATED
    )
}

/// The first of `candidates` (file names or paths) that can be loaded, for reporting what a machine has.
/// The library is unloaded again.
pub fn probe_library(candidates: &[&str]) -> Option<String> {
    candidates.iter().find(|name| open(&[name]).is_ok()).map(|name| name.to_string())
}

/// Opens the first library that loads, or says why the first candidate, the most usual name, did not.
fn open(candidates: &[&str]) -> std::result::Result<libloading::Library, String> {
    let mut why = None;
    for name in candidates {
        // SAFETY: loading runs the library's initialisers; the names are those of NVIDIA's system libraries.
        match unsafe { libloading::Library::new(*name) } {
            Ok(library) => return Ok(library),
            Err(error) => {
                let system = std::error::Error::source(&error).map(|source| format!(": {source}"));
                why.get_or_insert_with(|| format!("{name}: {error}{}", system.unwrap_or_default()));
            }
        }
    }
    Err(why.unwrap_or_else(|| "no library was named".into()))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn fatal_codes_are_sticky_and_recoverable_ones_are_not() {
        for code in [214, 700, 702, 710, 714, 715, 716, 717, 718, 719] {
            assert!(is_sticky(code), "{code}");
        }
        // Invalid value, out of memory, no binary, not found, not ready, out of resources, capture errors.
        for code in [SUCCESS, 1, OUT_OF_MEMORY, 209, 500, NOT_READY, 701, 900, 901, CAPTURE_IMPLICIT] {
            assert!(!is_sticky(code), "{code}");
        }
    }

    /// cudarc's own functions panic when a symbol is missing, so none may be called: the table above names them
    /// through a macro variable, and nothing else may name one at all.
    #[test]
    fn no_source_calls_a_cudarc_function_directly() {
        // Types and constants begin with upper-case CU, functions with lower-case cu.
        let function = concat!("sys::", "cu");
        let mut scanned = 0;
        for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda")).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!text.contains(function), "{} calls a function of cudarc", path.display());
                scanned += 1;
            }
        }
        assert!(scanned >= 10, "only {scanned} files were found");
    }

    #[test]
    fn a_missing_library_is_a_typed_error_with_a_reason() {
        assert_eq!(probe_library(&["libwarpsmith-does-not-exist.so"]), None);
        assert!(open(&["libwarpsmith-does-not-exist.so"]).unwrap_err().contains("does-not-exist"));
        assert!(probe_library(&["libwarpsmith-does-not-exist.so", "libc.so.6"]).is_some());
    }
}
