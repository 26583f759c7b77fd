//! Ranges for Nsight and other tools that listen to NVTX, with the names of spans and calls.
//!
//! A tool that starts a program names its library in `NVTX_INJECTION64_PATH`. The library is loaded once, asks for a table of
//! functions, and puts its own in. Without a tool nothing is loaded. Two functions are enough: ranges nest on each thread.

use crate::env;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Tables and functions by their numbers in `nvtxTypes.h`.
const CALLBACKS: u32 = 1;
const CORE: c_uint = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;
const FUNCTIONS: usize = 16;

type Slot = AtomicPtr<c_void>;
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;
type GetTable = extern "C" fn(c_uint, *mut *const *const Slot, *mut c_uint) -> c_int;
type GetExport = extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExport) -> c_int;

/// What the tool puts its functions into.
static SLOTS: [Slot; FUNCTIONS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; FUNCTIONS];

/// Addresses of the slots, as the tool gets them: none for number zero, which is no function, and none at the end.
struct Table([*const Slot; FUNCTIONS + 1]);

// SAFETY: the addresses are those of statics that threads share.
unsafe impl Sync for Table {}

static TABLE: Table = {
    let mut table = [std::ptr::null(); FUNCTIONS + 1];
    let mut at = 1;
    while at < FUNCTIONS {
        table[at] = &raw const SLOTS[at];
        at += 1;
    }
    Table(table)
};

/// The table of functions that give tables away.
#[repr(C)]
struct Callbacks {
    size: usize,
    get_table: GetTable,
}

static EXPORTED: Callbacks = Callbacks { size: size_of::<Callbacks>(), get_table };

extern "C" fn get_export(id: u32) -> *const c_void {
    if id == CALLBACKS { (&raw const EXPORTED).cast() } else { std::ptr::null() }
}

extern "C" fn get_table(module: c_uint, table: *mut *const *const Slot, size: *mut c_uint) -> c_int {
    if module != CORE {
        return 0;
    }
    // SAFETY: the tool gives places to write to, or null.
    unsafe {
        if !table.is_null() {
            *table = TABLE.0.as_ptr();
        }
        if !size.is_null() {
            *size = FUNCTIONS as c_uint;
        }
    }
    1
}

/// Starts the tool if ranges are asked for and there is one. Whether it listens.
pub fn start() -> bool {
    static LISTENS: OnceLock<bool> = OnceLock::new();
    *LISTENS.get_or_init(|| env::flag(env::NVTX) && load().is_some_and(listens))
}

/// The function that the tool begins with. Its library stays loaded.
fn load() -> Option<Initialize> {
    let path = env::path(env::system::NVTX_INJECTION)?;
    // SAFETY: whoever started the program named the library, which the process is meant to load.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
    // SAFETY: tools export it with this signature.
    let initialize = *unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2") }.ok()?;
    std::mem::forget(library);
    Some(initialize)
}

fn listens(initialize: Initialize) -> bool {
    // SAFETY: the tool asks for tables that live as long as the process, and writes functions of its own into them.
    let started = unsafe { initialize(get_export) } != 0;
    let is_there = |number: usize| !SLOTS[number].load(Ordering::Acquire).is_null();
    started && is_there(RANGE_PUSH) && is_there(RANGE_POP)
}

/// Begins a range on this thread.
pub fn push(name: &str) {
    let function = SLOTS[RANGE_PUSH].load(Ordering::Acquire);
    if function.is_null() {
        return;
    }
    let name = CString::new(name.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the tool put a function of this signature in, and copies the name.
    unsafe { std::mem::transmute::<*mut c_void, Push>(function)(name.as_ptr()) };
}

/// Ends the innermost range of this thread.
pub fn pop() {
    let function = SLOTS[RANGE_POP].load(Ordering::Acquire);
    if !function.is_null() {
        // SAFETY: the tool put a function of this signature in.
        unsafe { std::mem::transmute::<*mut c_void, Pop>(function)() };
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::ffi::CStr;

    thread_local! {
        static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// What tools do when they are started.
    unsafe extern "C" fn initialize(export: GetExport) -> c_int {
        assert!(export(3).is_null());
        let callbacks = export(CALLBACKS).cast::<Callbacks>();
        // SAFETY: the exported table, and the one that it gives away.
        unsafe {
            assert!((*callbacks).size >= 16);
            let (mut table, mut size) = (std::ptr::null(), 0);
            assert_eq!(((*callbacks).get_table)(2, &mut table, &mut size), 0);
            assert_eq!(((*callbacks).get_table)(CORE, &mut table, &mut size), 1);
            assert!(size as usize > RANGE_POP && (*table).is_null());
            (**table.add(RANGE_PUSH)).store(told as *mut c_void, Ordering::Release);
            (**table.add(RANGE_POP)).store(ended as *mut c_void, Ordering::Release);
        }
        1
    }

    unsafe extern "C" fn told(name: *const c_char) -> c_int {
        // SAFETY: a text that ends with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        SEEN.with_borrow_mut(|seen| seen.push(name));
        0
    }

    unsafe extern "C" fn ended() -> c_int {
        SEEN.with_borrow_mut(|seen| seen.push("end".into()));
        0
    }

    #[test]
    fn a_tool_puts_its_functions_in_and_gets_the_names() {
        push("before there is a tool");
        pop();
        assert!(listens(initialize));
        push("step");
        push("rms\0norm");
        pop();
        pop();
        assert_eq!(SEEN.with_borrow(Clone::clone), ["step", "rms norm", "end", "end"]);
    }
}
