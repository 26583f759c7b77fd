//! cuBLASLt, NVIDIA's library of matrix products, if this machine has it. It is found as the compiler is, loaded by the
//! first call that asks for it, and never needed.

use super::context::lock;
use super::{Context, Stream};
use crate::error::{Error, Result};
use crate::jit::search::{Place, Surroundings};
use libloading::os::unix::Library;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

type Status = c_int;
type Handle = *mut c_void;
const SUCCESS: Status = 0;

/// Bytes of scratch memory that an algorithm may use: what NVIDIA advises for Hopper.
pub const WORKSPACE: usize = 32 << 20;

// Numbers of the library's interface, the same in all versions since 11.4.
const DESC_TRANS_A: c_int = 3;
const DESC_TRANS_B: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS: c_int = 8;
const LAYOUT_BATCH: c_int = 5;
const LAYOUT_BATCH_STRIDE: c_int = 6;
const PREFERENCE_WORKSPACE: c_int = 1;
const PREFERENCE_REDUCTION: c_int = 3;
const PREFERENCE_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];
/// Bytes that the addresses of matrices are multiples of.
pub const ALIGNMENT: u32 = 16;
/// Partial sums over parts of K are added in place or in the type of the sums, never in that of the result.
const REDUCTIONS: u32 = 1 | 2;
const R_32F: c_int = 0;

/// An algorithm, as the library describes it to itself.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm([u64; 8]);

/// One answer of the heuristic.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Answer {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The library's functions. Each field is the C prototype of the function it is named after, with enums as the integers
/// they are.
struct Functions {
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    version: unsafe extern "C" fn() -> usize,
    status_string: unsafe extern "C" fn(Status) -> *const c_char,
    desc_create: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    desc_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    layout_create: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    layout_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    preference_create: unsafe extern "C" fn(*mut Handle) -> Status,
    preference_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    preference_destroy: unsafe extern "C" fn(Handle) -> Status,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Answer,
        *mut c_int,
    ) -> Status,
    matmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const Algorithm,
        *mut c_void,
        usize,
        Handle,
    ) -> Status,
}

impl Functions {
    fn load(path: &Path) -> std::result::Result<Functions, String> {
        // SAFETY: loading runs the initialisers of NVIDIA's library, found where the user keeps such libraries.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        // Kept loaded for the life of the process: function pointers into it are stored in statics.
        let library: &'static Library = Box::leak(Box::new(library));
        fn symbol<F: Copy>(library: &Library, name: &str) -> std::result::Result<F, String> {
            // SAFETY: every `F` below is the prototype of the function of this name.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|found| *found).map_err(|_| format!("it has no function {name}"))
        }
        Ok(Functions {
            create: symbol(library, "cublasLtCreate")?,
            version: symbol(library, "cublasLtGetVersion")?,
            status_string: symbol(library, "cublasLtGetStatusString")?,
            desc_create: symbol(library, "cublasLtMatmulDescCreate")?,
            desc_set: symbol(library, "cublasLtMatmulDescSetAttribute")?,
            layout_create: symbol(library, "cublasLtMatrixLayoutCreate")?,
            layout_set: symbol(library, "cublasLtMatrixLayoutSetAttribute")?,
            preference_create: symbol(library, "cublasLtMatmulPreferenceCreate")?,
            preference_set: symbol(library, "cublasLtMatmulPreferenceSetAttribute")?,
            preference_destroy: symbol(library, "cublasLtMatmulPreferenceDestroy")?,
            heuristic: symbol(library, "cublasLtMatmulAlgoGetHeuristic")?,
            matmul: symbol(library, "cublasLtMatmul")?,
        })
    }
}

/// The loaded library.
pub struct CublasLt {
    functions: Functions,
    path: PathBuf,
}

/// The library, loaded by the first call. A failure is remembered and returned again.
pub fn find() -> Result<&'static CublasLt> {
    static FOUND: OnceLock<Result<CublasLt>> = OnceLock::new();
    FOUND.get_or_init(|| find_in(&Surroundings::of_process().library_places())).as_ref().map_err(Error::clone)
}

fn find_in(places: &[Place]) -> Result<CublasLt> {
    let mut failures = Vec::new();
    for place in places {
        for path in place.libraries("libcublasLt.so") {
            match Functions::load(&path) {
                Ok(functions) => return Ok(CublasLt { functions, path }),
                Err(why) if matches!(place, Place::Folder(_)) => {
                    failures.push(format!("{}: {why}", path.display()));
                }
                Err(_) => {}
            }
        }
    }
    let broken = if failures.is_empty() { String::new() } else { format!(" ({})", failures.join("; ")) };
    Err(Error::Unavailable {
        what: "cuBLASLt, NVIDIA's library of matrix products,".into(),
        why: format!(
            "libcublasLt is not in CUDA_HOME, the loader's path, Python environments or /usr/local/cuda*{broken}"
        ),
        fix: "Install it with `pip install nvidia-cublas`, or set CUDA_HOME to a CUDA toolkit".into(),
    })
}

/// The type of a matrix, as the library numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
pub enum Type {
    /// f32.
    F32 = R_32F,
    /// f16.
    F16 = 2,
    /// bf16.
    BF16 = 14,
}

/// How f32 inputs are multiplied; others have one way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
pub enum Compute {
    /// As they are.
    Full = 68,
    /// As TF32.
    Tf32 = 77,
}

/// What follows the product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Last {
    /// Nothing.
    None = 1,
    /// `max(y, 0)`.
    Relu = 2,
    /// GELU by its tanh formula.
    Gelu = 32,
}

/// Added to [`Last`] where there is a bias.
const BIAS: u32 = 4;

/// A matrix whose elements lie densely along one of its dimensions, on a boundary of [`ALIGNMENT`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Matrix {
    /// Along rows (`true`) or columns.
    pub by_rows: bool,
    /// Elements from one row, or column, to the next.
    pub pitch: usize,
    /// Elements from one matrix of the batch to the next.
    pub batch: usize,
}

/// `out = last(scale x · wᵀ + bias)` for `x` `[m, k]`, `w` `[n, k]` and a dense-rowed `out` `[m, n]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Product {
    /// Of `x` and `w`.
    pub input: Type,
    /// Of `out` and the bias.
    pub output: Type,
    /// How inputs are multiplied.
    pub compute: Compute,
    /// What follows.
    pub last: Last,
    /// Whether there is a bias.
    pub bias: bool,
    /// Rows of `x`, rows of `w`, columns of both.
    pub sizes: [usize; 3],
    /// Matrices of the batch.
    pub batch: usize,
    /// `x`.
    pub x: Matrix,
    /// `w`.
    pub w: Matrix,
    /// `out`.
    pub out: Matrix,
}

/// Addresses of the tensors of a product, and its scratch memory of [`WORKSPACE`] bytes.
pub struct Addresses {
    /// `x`.
    pub x: usize,
    /// `w`.
    pub w: usize,
    /// The bias, if there is one.
    pub bias: usize,
    /// `out`.
    pub out: usize,
    /// The scratch memory.
    pub workspace: usize,
}

/// A product described to the library, with the algorithm its heuristic proposes. Kept for the life of the process.
struct Plan {
    desc: Handle,
    w: Handle,
    x: Handle,
    out: Handle,
    algorithm: Algorithm,
}

// SAFETY: the handles are to memory of the library that belongs to no thread; `Plan` is only used under its mutex.
unsafe impl Send for Plan {}

type Plans = HashMap<(u32, Product), Arc<Mutex<Plan>>>;
static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(Default::default);

impl CublasLt {
    /// Where it was found, for people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, as `10000 * major + 100 * minor + patch`.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments, no preconditions.
        unsafe { (self.functions.version)() }
    }

    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a static string for every number.
        let text = unsafe { (self.functions.status_string)(status) };
        // SAFETY: not null, hence one of the library's null-terminated strings.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy());
        let why = text.unwrap_or_else(|| "unknown".into());
        Err(Error::Unavailable {
            what: "this product in cuBLASLt".into(),
            why: format!("{call}: {why} ({status})"),
            fix: "Name another kernel, or tune again".into(),
        })
    }

    /// The handle of a device, which must be the current one.
    fn handle(&self, context: &Context) -> Result<Handle> {
        static HANDLES: LazyLock<Mutex<HashMap<u32, usize>>> = LazyLock::new(Default::default);
        let mut handles = lock(&HANDLES);
        if let Some(&handle) = handles.get(&context.ordinal()) {
            return Ok(handle as Handle);
        }
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the library writes one handle.
        self.check("cublasLtCreate", unsafe { (self.functions.create)(&mut handle) })?;
        handles.insert(context.ordinal(), handle as usize);
        Ok(handle)
    }

    /// A matrix as the library sees it: `rows` x `cols` stored by columns, so the transpose of one stored by rows.
    fn layout(&self, dtype: Type, [rows, cols]: [usize; 2], matrix: &Matrix, batch: usize) -> Result<Handle> {
        let mut layout: Handle = std::ptr::null_mut();
        let (inner, outer) = if matrix.by_rows { (cols, rows) } else { (rows, cols) };
        let pitch = matrix.pitch as i64;
        // SAFETY: the library writes one handle.
        let status = unsafe {
            (self.functions.layout_create)(&mut layout, dtype as c_int, inner as u64, outer as u64, pitch)
        };
        self.check("cublasLtMatrixLayoutCreate", status)?;
        if batch > 1 {
            let (count, stride) = (batch as i32, matrix.batch as i64);
            // SAFETY: the attributes have these types.
            unsafe {
                self.set(self.functions.layout_set, layout, LAYOUT_BATCH, &count)?;
                self.set(self.functions.layout_set, layout, LAYOUT_BATCH_STRIDE, &stride)?;
            }
        }
        Ok(layout)
    }

    /// Sets an attribute.
    ///
    /// # Safety
    /// `T` must be the attribute's type, and `set` the function of the handle's kind.
    unsafe fn set<T>(
        &self,
        set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
        handle: Handle,
        attribute: c_int,
        value: &T,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the types; the library copies the value.
        let status = unsafe { set(handle, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) };
        self.check("setting an attribute", status)
    }

    fn plan(&self, handle: Handle, p: &Product) -> Result<Plan> {
        let f = &self.functions;
        let [m, n, k] = p.sizes;
        let mut desc: Handle = std::ptr::null_mut();
        // SAFETY: the library writes one handle.
        let status = unsafe { (f.desc_create)(&mut desc, p.compute as c_int, R_32F) };
        self.check("cublasLtMatmulDescCreate", status)?;
        // The library stores by columns: it computes outᵀ = w · xᵀ.
        let epilogue = if p.bias { BIAS | (p.last as u32 & !1) } else { p.last as u32 };
        // SAFETY: the attributes are 32-bit.
        unsafe {
            self.set(f.desc_set, desc, DESC_TRANS_A, &i32::from(p.w.by_rows))?;
            self.set(f.desc_set, desc, DESC_TRANS_B, &i32::from(!p.x.by_rows))?;
            self.set(f.desc_set, desc, DESC_EPILOGUE, &epilogue)?;
        }
        let w = self.layout(p.input, [n, k], &p.w, p.batch)?;
        let x = self.layout(p.input, [m, k], &p.x, p.batch)?;
        let out = self.layout(p.output, [m, n], &p.out, p.batch)?;
        let mut preference: Handle = std::ptr::null_mut();
        // SAFETY: the library writes one handle.
        self.check("cublasLtMatmulPreferenceCreate", unsafe { (f.preference_create)(&mut preference) })?;
        // SAFETY: the workspace is a size, the others are 32-bit.
        unsafe {
            self.set(f.preference_set, preference, PREFERENCE_WORKSPACE, &WORKSPACE)?;
            self.set(f.preference_set, preference, PREFERENCE_REDUCTION, &REDUCTIONS)?;
            for attribute in PREFERENCE_ALIGNMENT {
                self.set(f.preference_set, preference, attribute, &ALIGNMENT)?;
            }
        }
        let (mut answer, mut count) = (Answer::default(), 0);
        // SAFETY: all handles are live, and there is room for the one answer asked for.
        let status = unsafe {
            let status = (f.heuristic)(handle, desc, w, x, out, out, preference, 1, &mut answer, &mut count);
            (f.preference_destroy)(preference);
            status
        };
        self.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        if count == 0 {
            return Err(Error::Unavailable {
                what: "this product in cuBLASLt".into(),
                why: "its heuristic proposes no algorithm".into(),
                fix: "Name another kernel".into(),
            });
        }
        Ok(Plan { desc, w, x, out, algorithm: answer.algorithm })
    }

    /// Puts a product on a stream.
    ///
    /// # Safety
    /// The addresses must be those of tensors as `p` describes them, valid until the work on the stream is done.
    pub unsafe fn run(&self, stream: &Stream, p: &Product, scale: f32, at: &Addresses) -> Result<()> {
        let context = stream.context();
        context.check_poison()?;
        context.bind()?;
        let handle = self.handle(context)?;
        let known = lock(&PLANS).get(&(context.ordinal(), *p)).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = Arc::new(Mutex::new(self.plan(handle, p)?));
                lock(&PLANS).entry((context.ordinal(), *p)).or_insert(plan).clone()
            }
        };
        let plan = lock(&plan);
        if p.bias {
            // SAFETY: the attribute is an address. The plan is ours alone until the product is on the stream.
            unsafe { self.set(self.functions.desc_set, plan.desc, DESC_BIAS, &at.bias)? };
        }
        let zero = 0f32;
        let pointer = |address: usize| address as *const c_void;
        // SAFETY: the caller vouches for the addresses; scale and zero are read before the call returns.
        let status = unsafe {
            (self.functions.matmul)(
                handle,
                plan.desc,
                std::ptr::from_ref(&scale).cast(),
                pointer(at.w),
                plan.w,
                pointer(at.x),
                plan.x,
                std::ptr::from_ref(&zero).cast(),
                pointer(at.out),
                plan.out,
                at.out as *mut c_void,
                plan.out,
                &plan.algorithm,
                at.workspace as *mut c_void,
                WORKSPACE,
                stream.raw() as Handle,
            )
        };
        self.check("cublasLtMatmul", status)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_size_the_library_writes() {
        assert_eq!((size_of::<Algorithm>(), size_of::<Answer>()), (64, 96));
    }

    #[test]
    fn a_missing_or_broken_library_is_an_error_that_helps() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join("libcublasLt.so.13"), "not a library").unwrap();
        let error = find_in(&[Place::Folder(temp.path().into())]).err().unwrap().to_string();
        assert!(
            error.contains("pip install nvidia-cublas") && error.contains("libcublasLt.so.13"),
            "{error}"
        );
        assert!(Functions::load(Path::new("libc.so.6")).err().unwrap().contains("cublasLtCreate"));
    }
}
