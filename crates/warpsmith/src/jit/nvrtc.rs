//! NVRTC, NVIDIA's run-time compiler, loaded when first needed. No GPU or driver is involved.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::search::{self, Place, Surroundings};
use super::{Arch, Compiler, Output, Profile, Request};
use crate::{Error, Result};

type Program = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const BUILTINS_MISSING: Status = 7;

/// The library's functions. Each field is the C prototype of the function it is named after.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    num_archs: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log: Getter,
    ptx: Getter,
    cubin: Getter,
}

/// The two functions that return a result of a program: its size, then its bytes.
struct Getter {
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    bytes: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// A loaded NVRTC library.
pub struct Nvrtc {
    functions: Functions,
    path: PathBuf,
    version: (i32, i32),
    archs: Vec<i32>,
    /// A second copy of the library, used only for debug builds. One debug build leaves NVRTC (12.9 and 13.0) in a
    /// state that makes all later builds of the process worse: `__grid_constant__` parameters are read through
    /// generic pointers. A release build must not depend on what was compiled before it.
    for_debug: OnceLock<Result<Functions>>,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVRTC {}.{} ({})", self.version.0, self.version.1, self.path.display())
    }
}

/// The NVRTC of this machine, searched for once per process.
///
/// Looked at in this order: `lib64` and `lib` of `CUDA_HOME` and `CUDA_PATH`; the dynamic loader's path; the NVIDIA
/// packages of Python environments (`VIRTUAL_ENV`, `CONDA_PREFIX`, that of the `python3` on `PATH`, the user's and
/// the system's); `/usr/local/cuda*`. Nothing in the current folder. The newest library of the first place that
/// has one is taken.
pub fn find() -> Result<&'static Nvrtc> {
    static FOUND: OnceLock<Result<Nvrtc>> = OnceLock::new();
    FOUND.get_or_init(|| find_in(&Surroundings::of_process().library_places())).as_ref().map_err(Error::clone)
}

/// The NVRTC of this machine for these architectures: that of [`find`], unless only another one compiles for all of them.
/// NVRTC 13 no longer knows GPUs before sm_75, and NVRTC 12 can be installed beside it.
pub fn find_for(archs: &[Arch]) -> Result<&'static Nvrtc> {
    static ALL: OnceLock<Vec<Nvrtc>> = OnceLock::new();
    let first = find()?;
    let suits = |nvrtc: &&Nvrtc| archs.iter().all(|arch| nvrtc.compiles_for(*arch));
    if suits(&first) {
        return Ok(first);
    }
    let all = ALL.get_or_init(|| {
        let places = Surroundings::of_process().library_places();
        let paths = places.iter().flat_map(|place| place.libraries("libnvrtc.so"));
        paths.filter_map(|path| open(&path).ok()).collect()
    });
    Ok(all.iter().find(suits).unwrap_or(first))
}

fn find_in(places: &[Place]) -> Result<Nvrtc> {
    let mut searched = Vec::new();
    for place in places {
        let mut failures = Vec::new();
        for path in place.libraries("libnvrtc.so") {
            match open(&path) {
                Ok(nvrtc) => return Ok(nvrtc),
                // The loader's "no such file" is expected. A file that exists and does not load is worth reporting.
                Err(error) if matches!(place, Place::Folder(_)) => failures.push(error.to_string()),
                Err(_) => {}
            }
        }
        searched.push(match place {
            Place::Loader => "the loader's library path".to_string(),
            Place::Folder(folder) if failures.is_empty() => folder.display().to_string(),
            Place::Folder(folder) => format!("{} ({})", folder.display(), failures.join("; ")),
        });
    }
    Err(Error::Unavailable {
        what: "NVRTC, the CUDA run-time compiler,".into(),
        why: format!(
            "libnvrtc is in none of: {}, Python environments, /usr/local/cuda*",
            searched.join(", ")
        ),
        fix: "Install it with `pip install nvidia-cuda-nvrtc`, or set CUDA_HOME to a CUDA toolkit".into(),
    })
}

/// Loads the NVRTC library at `path`; a bare file name is left to the dynamic loader. Several versions can be
/// loaded side by side.
pub fn open(path: &Path) -> Result<Nvrtc> {
    let functions = Functions::load(path)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers.
    let status = unsafe { (functions.version)(&mut major, &mut minor) };
    if status != SUCCESS {
        return Err(unusable(path, format!("nvrtcVersion returned {status}")));
    }
    let path = functions.file().unwrap_or_else(|| path.to_path_buf());
    // NVRTC opens its builtins by bare name, and not every release looks in its own folder. Once loaded by full path
    // they are found by that name. If they are not there, the loader may still find them elsewhere.
    if let Some(builtins) = search::builtins_beside(&path, (major, minor)) {
        std::mem::forget(load_library(&builtins)?);
    }
    let archs = functions.supported_archs();
    Ok(Nvrtc { functions, path, version: (major, minor), archs, for_debug: OnceLock::new() })
}

fn unusable(path: &Path, why: String) -> Error {
    Error::Unavailable {
        what: format!("NVRTC at {}", path.display()),
        why,
        fix: "Install it with `pip install nvidia-cuda-nvrtc`".into(),
    }
}

/// Loads a library with local symbols, so that two versions do not see each other's.
fn load_library(path: &Path) -> Result<Library> {
    // SAFETY: loading runs the library's initialisers; the caller chose the file, or it lies where CUDA is installed.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| unusable(path, error.to_string()))
}

impl Nvrtc {
    /// Major and minor version, such as `(13, 0)`.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The architectures it compiles for, as numbers (90 for `sm_90` and `sm_90a`), ascending. Empty if the library
    /// is too old to say.
    pub fn supported_archs(&self) -> &[i32] {
        &self.archs
    }

    /// Whether it knows an architecture. One that is too old to say may.
    pub fn compiles_for(&self, arch: Arch) -> bool {
        self.archs.is_empty() || self.archs.contains(&arch.number())
    }

    /// Compiles straight to a cubin.
    pub fn compile_with(&self, request: &Request) -> Result<Output> {
        let program = self.build(request, request.arch.to_string())?;
        let cubin = program.get(&program.functions.cubin)?;
        if cubin.is_empty() {
            return Err(program.failure("no cubin was produced"));
        }
        Ok(Output { cubin, log: program.log() })
    }

    /// Compiles to PTX, for reading.
    pub fn ptx_with(&self, request: &Request) -> Result<String> {
        let program = self.build(request, request.arch.virtual_name())?;
        let mut ptx = program.get(&program.functions.ptx)?;
        ptx.truncate(ptx.iter().position(|&byte| byte == 0).unwrap_or(ptx.len()));
        String::from_utf8(ptx).map_err(|_| program.failure("the PTX is not text"))
    }

    fn build<'a>(&'a self, request: &'a Request<'a>, target: String) -> Result<Build<'a>> {
        request.check()?;
        let (major, minor) = self.version;
        if !self.compiles_for(request.arch) {
            let known: Vec<String> = self.archs.iter().map(i32::to_string).collect();
            return Err(Error::Unavailable {
                what: format!("a compiler for {}", request.arch),
                why: format!(
                    "NVRTC {major}.{minor} ({}) compiles for sm_{}",
                    self.path.display(),
                    known.join(", ")
                ),
                fix: "Install another release: NVRTC 12 for GPUs before sm_75, the newest for new GPUs"
                    .into(),
            });
        }
        let text = |what: &str, text: &str| {
            CString::new(text).map_err(|_| {
                Error::parse(
                    format!("{what} of {}", request.source.name),
                    "text without NUL bytes",
                    "one with",
                )
            })
        };
        let headers = request.headers();
        let code = text("code", &request.program())?;
        let name = text("name", &format!("{}.cu", request.source.name))?;
        let header_names =
            headers.iter().map(|header| text("header", header.name)).collect::<Result<Vec<_>>>()?;
        let header_codes =
            headers.iter().map(|header| text("header", header.code)).collect::<Result<Vec<_>>>()?;
        let mut options = vec![text("options", &format!("--gpu-architecture={target}"))?];
        for option in request.options() {
            options.push(text("options", &option)?);
        }
        let [header_names, header_codes, options] = [&header_names, &header_codes, &options]
            .map(|list| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>());

        let functions = match request.profile {
            Profile::Release | Profile::LineInfo => &self.functions,
            Profile::Debug => self
                .for_debug
                .get_or_init(|| Functions::load_copy(&self.path))
                .as_ref()
                .map_err(Error::clone)?,
        };
        let mut build = Build { functions, program: ptr::null_mut(), request };
        // SAFETY: all strings are NUL-terminated and outlive the call, which copies them; both header arrays have
        // the length given.
        let status = unsafe {
            (functions.create)(
                &mut build.program,
                code.as_ptr(),
                name.as_ptr(),
                header_names.len() as c_int,
                header_codes.as_ptr(),
                header_names.as_ptr(),
            )
        };
        if status != SUCCESS {
            return Err(build.failure(&functions.describe(status)));
        }
        // SAFETY: the program is live, and `options` points to that many NUL-terminated strings.
        let status = unsafe { (functions.compile)(build.program, options.len() as c_int, options.as_ptr()) };
        match status {
            SUCCESS => Ok(build),
            BUILTINS_MISSING => Err(Error::Unavailable {
                what: format!("libnvrtc-builtins.so.{major}.{minor}"),
                why: format!("it is not beside {}", self.path.display()),
                fix: "Reinstall NVRTC: `pip install --force-reinstall nvidia-cuda-nvrtc`".into(),
            }),
            _ => Err(build.failure(&functions.describe(status))),
        }
    }
}

impl Compiler for Nvrtc {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, request: &Request) -> Result<Output> {
        self.compile_with(request)
    }
}

/// A program inside NVRTC, destroyed on drop.
struct Build<'a> {
    functions: &'a Functions,
    program: Program,
    request: &'a Request<'a>,
}

impl Build<'_> {
    fn get(&self, getter: &Getter) -> Result<Vec<u8>> {
        self.fetch(getter).map_err(|status| self.failure(&self.functions.describe(status)))
    }

    fn fetch(&self, getter: &Getter) -> Result<Vec<u8>, Status> {
        let mut size = 0;
        // SAFETY: the program is live and `size` is a live integer.
        let status = unsafe { (getter.size)(self.program, &mut size) };
        if status != SUCCESS || size == 0 {
            return if status == SUCCESS { Ok(Vec::new()) } else { Err(status) };
        }
        let mut bytes = vec![0u8; size];
        // SAFETY: the library writes the `size` bytes it asked for, and the buffer has them.
        let status = unsafe { (getter.bytes)(self.program, bytes.as_mut_ptr().cast()) };
        if status == SUCCESS { Ok(bytes) } else { Err(status) }
    }

    /// The compiler's log without the lines that differ from run to run.
    fn log(&self) -> String {
        if self.program.is_null() {
            return String::new();
        }
        let bytes = self.fetch(&self.functions.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.trim_end_matches('\0').lines().filter(|line| !line.contains(": Compile time = "));
        lines.map(|line| format!("{line}\n")).collect()
    }

    fn failure(&self, why: &str) -> Error {
        let log = match self.log() {
            log if log.trim().is_empty() => why.to_string(),
            log => log,
        };
        Error::Compile { kernel: self.request.source.name.into(), arch: self.request.arch.to_string(), log }
    }
}

impl Drop for Build<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created by this library and is not used after.
            unsafe { (self.functions.destroy)(&mut self.program) };
        }
    }
}

impl Functions {
    /// Loads the library and keeps it for good: the compiler has thread-local state whose destructors would
    /// otherwise run from unmapped code.
    fn load(path: &Path) -> Result<Functions> {
        let library = load_library(path)?;
        let functions =
            Functions::of(&library).map_err(|name| unusable(path, format!("it has no function `{name}`")))?;
        std::mem::forget(library);
        Ok(functions)
    }

    /// Loads a copy of the library, with state of its own.
    fn load_copy(path: &Path) -> Result<Functions> {
        // SAFETY: the name is a NUL-terminated constant.
        let descriptor = unsafe { libc::memfd_create(c"nvrtc-for-debug".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(Error::io(path, "make a copy in memory", &io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was just made and is owned by nothing else.
        let mut copy = unsafe { File::from_raw_fd(descriptor) };
        File::open(path)
            .and_then(|mut library| io::copy(&mut library, &mut copy))
            .map_err(|error| Error::io(path, "make a copy in memory", &error))?;
        let functions = Functions::load(Path::new(&format!("/proc/self/fd/{descriptor}")))?;
        // Left open: the loader identifies the copy by this descriptor's path, and would mistake another file with
        // the same number for it.
        std::mem::forget(copy);
        Ok(functions)
    }

    /// Looks all functions up; the error is the name of one that is missing.
    fn of(library: &Library) -> Result<Functions, &'static str> {
        /// # Safety
        /// `T` must be the C prototype of the function `name`.
        unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, &'static str> {
            // SAFETY: the caller vouches for the type.
            unsafe { library.get::<T>(name) }.map(|symbol| *symbol).map_err(|_| name)
        }
        // SAFETY: each field has the prototype NVRTC's header gives the function it is loaded from; these have not
        // changed since CUDA 11.
        unsafe {
            Ok(Functions {
                version: symbol(library, "nvrtcVersion")?,
                error_string: symbol(library, "nvrtcGetErrorString")?,
                num_archs: symbol(library, "nvrtcGetNumSupportedArchs")?,
                archs: symbol(library, "nvrtcGetSupportedArchs")?,
                create: symbol(library, "nvrtcCreateProgram")?,
                destroy: symbol(library, "nvrtcDestroyProgram")?,
                compile: symbol(library, "nvrtcCompileProgram")?,
                log: Getter {
                    size: symbol(library, "nvrtcGetProgramLogSize")?,
                    bytes: symbol(library, "nvrtcGetProgramLog")?,
                },
                ptx: Getter {
                    size: symbol(library, "nvrtcGetPTXSize")?,
                    bytes: symbol(library, "nvrtcGetPTX")?,
                },
                cubin: Getter {
                    size: symbol(library, "nvrtcGetCUBINSize")?,
                    bytes: symbol(library, "nvrtcGetCUBIN")?,
                },
            })
        }
    }

    /// The file the functions were loaded from.
    fn file(&self) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        let mut info = libc::Dl_info {
            dli_fname: ptr::null(),
            dli_fbase: ptr::null_mut(),
            dli_sname: ptr::null(),
            dli_saddr: ptr::null_mut(),
        };
        // SAFETY: any address may be asked about, and `info` is live.
        let found = unsafe { libc::dladdr(self.version as *const c_void, &mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: dladdr gave a NUL-terminated name that lives as long as the library, which is loaded.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
    }

    fn supported_archs(&self) -> Vec<i32> {
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        if unsafe { (self.num_archs)(&mut count) } != SUCCESS || count <= 0 {
            return Vec::new();
        }
        let mut archs = vec![0; count as usize];
        // SAFETY: the library writes the `count` integers it announced, and the buffer has them.
        if unsafe { (self.archs)(archs.as_mut_ptr()) } != SUCCESS {
            return Vec::new();
        }
        archs.sort_unstable();
        archs
    }

    fn describe(&self, status: Status) -> String {
        // SAFETY: any status may be asked about; the answer is a constant of the library.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("NVRTC status {status}");
        }
        // SAFETY: not null, and NVRTC's messages are NUL-terminated constants.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn says_where_it_looked_and_what_to_do() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join("libnvrtc.so.13"), "not a library").unwrap();
        let error = find_in(&[Place::Folder(temp.path().into())]).unwrap_err().to_string();
        assert!(error.contains(temp.path().to_str().unwrap()), "{error}");
        assert!(error.contains("pip install nvidia-cuda-nvrtc"), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        let error = open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("nvrtcVersion"), "{error}");
        assert!(open(Path::new("/nonexistent/libnvrtc.so.13")).is_err());
    }
}
