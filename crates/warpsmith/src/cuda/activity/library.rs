//! CUPTI: finding it, starting it, and the buffers it fills.

use super::super::context::lock;
use super::keep;
use super::record::{CUSTOM, DRIVER, EXTERNAL, KERNEL, MEMCPY, kind, prefix, read};
use crate::jit::search::{Place, Surroundings};
use crate::profile;
use cudarc::driver::sys::CUgraphNode;
use libloading::os::unix::{Library as Loaded, RTLD_LAZY, RTLD_LOCAL};
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Mutex;

/// Bytes of a buffer of records, and its alignment. The library asks for as many as it needs.
const BUFFER: Layout = match Layout::from_size_align(4 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("the alignment is a power of two"),
};
/// Somebody else has subscribed.
const MULTIPLE_SUBSCRIBERS: u32 = 39;
/// Delivers incomplete buffers, too.
const FORCED: u32 = 1;
/// `RTLD_NOLOAD`: only what is loaded already.
const NO_LOAD: i32 = libc::RTLD_NOLOAD;

type Requested = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The functions that are called. They return numbers, not enums that a newer library might not keep to.
#[derive(Clone, Copy)]
struct Functions {
    subscribe: unsafe extern "C" fn(
        *mut *mut c_void,
        extern "C" fn(*mut c_void, u32, u32, *const c_void),
        *mut c_void,
    ) -> u32,
    timestamps: unsafe extern "C" fn(extern "C" fn() -> u64) -> u32,
    callbacks: unsafe extern "C" fn(Requested, Completed) -> u32,
    enable: unsafe extern "C" fn(u32) -> u32,
    flush: unsafe extern "C" fn(u32) -> u32,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
    push: unsafe extern "C" fn(u32, u64) -> u32,
    pop: unsafe extern "C" fn(u32, *mut u64) -> u32,
    /// Not in every release.
    node: Option<unsafe extern "C" fn(CUgraphNode, *mut u64) -> u32>,
    text: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

/// The library at work.
pub struct Library {
    functions: Functions,
    /// Never unloaded: it calls back until the process ends.
    _loaded: Loaded,
}

impl Library {
    /// Finds and starts it, or says why it cannot be used.
    pub fn open() -> Result<Library, String> {
        let mut why =
            "CUPTI was not found: pip install nvidia-cuda-cupti, or the CUDA toolkit has it".to_owned();
        for loaded in candidates() {
            match Library::start(loaded) {
                Ok(library) => return Ok(library),
                // For another release of the driver than this one, perhaps.
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    fn start(loaded: Loaded) -> Result<Library, String> {
        let functions = Functions::of(&loaded)?;
        let mut subscriber = null_mut();
        // SAFETY: the library writes a handle; the callback does nothing and lives as long as the process.
        match unsafe { (functions.subscribe)(&mut subscriber, ignore, null_mut()) } {
            0 => {}
            MULTIPLE_SUBSCRIBERS => {
                return Err("another profiler holds CUPTI: Nsight, compute-sanitizer, or PyTorch's".into());
            }
            code => return Err(functions.refused("cuptiSubscribe", code)),
        }
        let check =
            |call: &str, code: u32| if code == 0 { Ok(()) } else { Err(functions.refused(call, code)) };
        // SAFETY: all callbacks live as long as the process. The clock must be set before any kind is enabled.
        unsafe {
            check("cuptiActivityRegisterTimestampCallback", (functions.timestamps)(clock))?;
            *lock(&FUNCTIONS) = Some(functions);
            check("cuptiActivityRegisterCallbacks", (functions.callbacks)(requested, completed))?;
            // Calls of the driver tie external numbers to kernels; their records are not read.
            for kind in [KERNEL, MEMCPY, DRIVER, EXTERNAL] {
                check("cuptiActivityEnable", (functions.enable)(kind))?;
            }
        }
        Ok(Library { functions, _loaded: loaded })
    }

    /// Has all records delivered.
    pub fn flush(&self) {
        // SAFETY: no lock of ours is held, so what is delivered meanwhile can be kept. Failing leaves fewer records.
        unsafe { (self.functions.flush)(FORCED) };
    }

    /// What this thread does from now on is done for a call.
    pub fn push(&self, call: u64) -> bool {
        // SAFETY: a number is kept for the thread.
        unsafe { (self.functions.push)(CUSTOM, call) == 0 }
    }

    /// The number of a node of a graph.
    pub fn node_number(&self, node: CUgraphNode) -> Option<u64> {
        let mut number = 0;
        // SAFETY: the node is one of a graph that is being made; the library writes one number.
        (unsafe { self.functions.node?(node, &mut number) } == 0).then_some(number)
    }

    /// Until here.
    pub fn pop(&self) {
        let mut last = 0;
        // SAFETY: the library writes one number.
        unsafe { (self.functions.pop)(CUSTOM, &mut last) };
    }
}

/// For the callbacks, which get no context.
static FUNCTIONS: Mutex<Option<Functions>> = Mutex::new(None);

impl Functions {
    fn of(loaded: &Loaded) -> Result<Functions, String> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the functions have these signatures in every release that has them.
                unsafe { loaded.get($name.as_bytes()) }
                    .map(|symbol| *symbol)
                    .map_err(|_| format!("CUPTI has no function {}: it is too old", $name))?
            };
        }
        Ok(Functions {
            subscribe: symbol!("cuptiSubscribe"),
            timestamps: symbol!("cuptiActivityRegisterTimestampCallback"),
            callbacks: symbol!("cuptiActivityRegisterCallbacks"),
            enable: symbol!("cuptiActivityEnable"),
            flush: symbol!("cuptiActivityFlushAll"),
            next: symbol!("cuptiActivityGetNextRecord"),
            push: symbol!("cuptiActivityPushExternalCorrelationId"),
            pop: symbol!("cuptiActivityPopExternalCorrelationId"),
            // SAFETY: the function has this signature in every release that has it.
            node: unsafe { loaded.get(b"cuptiGetGraphNodeId") }.map(|symbol| *symbol).ok(),
            text: symbol!("cuptiGetResultString"),
        })
    }

    fn refused(&self, call: &str, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the library writes a pointer to a static text, or leaves it for a code it does not know.
        unsafe { (self.text)(code, &mut text) };
        let told = match text.is_null() {
            true => "an unknown error".into(),
            // SAFETY: not null, hence one of the library's static texts.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        format!("{call} of CUPTI failed: {told} ({code})")
    }
}

/// Libraries in turn: one that the process has loaded already, since two would not share; then those that are found.
fn candidates() -> impl Iterator<Item = Loaded> {
    const NAMES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
    // SAFETY: nothing is loaded by this; the system only looks.
    let present = |name| unsafe { Loaded::open(Some(name), RTLD_LAZY | NO_LOAD) }.ok();
    let mut paths: Vec<PathBuf> = Vec::new();
    for place in Surroundings::of_process().library_places() {
        paths.extend(place.libraries("libcupti.so"));
        let Place::Folder(folder) = place else { continue };
        if let Some(toolkit) = folder.parent() {
            let extras = toolkit.join("extras/CUPTI/lib64");
            paths.extend(NAMES.map(|name| extras.join(name)).into_iter().filter(|path| path.exists()));
        }
    }
    // SAFETY: loading runs the initialisers of NVIDIA's library.
    let found = |path: PathBuf| unsafe { Loaded::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.ok();
    NAMES.into_iter().filter_map(present).chain(paths.into_iter().filter_map(found))
}

extern "C" fn ignore(_: *mut c_void, _: u32, _: u32, _: *const c_void) {}

/// Times of records are then those of the host's records.
extern "C" fn clock() -> u64 {
    profile::now()
}

extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    // SAFETY: the layout is not empty. The library gave three places to write to, and takes null for no memory.
    unsafe {
        let memory = alloc(BUFFER);
        *buffer = memory;
        *size = if memory.is_null() { 0 } else { BUFFER.size() };
        // As many records as fit.
        *most = 0;
    }
}

extern "C" fn completed(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    let functions = *lock(&FUNCTIONS);
    if let Some(functions) = functions {
        let end = buffer as usize + valid;
        let mut record: *mut u8 = null_mut();
        // SAFETY: the library steps through the buffer that it filled, and stops at its end.
        while unsafe { (functions.next)(buffer, valid, &mut record) } == 0 && !record.is_null() {
            let left = end.saturating_sub(record as usize);
            if left < 4 {
                break;
            }
            // SAFETY: at least these bytes of the buffer are left from here on.
            let bytes = |len: usize| unsafe { std::slice::from_raw_parts(record, len) };
            let Some(len) = prefix(kind(bytes(4))).filter(|len| *len <= left) else { continue };
            // SAFETY: names are null, or texts that the library keeps.
            if let Some(record) = unsafe { read(bytes(len)) } {
                keep(record);
            }
        }
    }
    // SAFETY: `requested` allocated it with this layout, and the library is done with it.
    unsafe { dealloc(buffer, BUFFER) };
}
