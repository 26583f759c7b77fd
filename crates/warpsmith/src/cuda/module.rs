//! Loaded kernels.

use super::context::{Context, cu, lock};
use super::stream::RelaxedCapture;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute, CUfunction_attribute_enum as Attribute, CUmodule,
};
use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::Mutex;

/// A cubin loaded into a context, for the life of the process.
pub struct Module {
    ctx: &'static Context,
    raw: CUmodule,
    key: String,
    functions: Mutex<HashMap<String, &'static Function>>,
}

// SAFETY: a module handle may be used from any thread; the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// The module named `key` (a hash of what it was compiled from), loaded from `cubin` by the first call.
    pub fn get(ctx: &'static Context, key: &str, cubin: &[u8]) -> Result<&'static Module> {
        let mut modules = lock(&ctx.modules);
        if let Some(module) = modules.get(key) {
            return Ok(module);
        }
        check_elf(key, cubin)?;
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let mut raw: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is a whole ELF file, whose header says how long it is; the driver copies it.
        unsafe { cu!(ctx, cuModuleLoadData(&mut raw, cubin.as_ptr().cast())) }?;
        let module = Module { ctx, raw, key: key.into(), functions: Mutex::default() };
        let module: &'static Module = Box::leak(Box::new(module));
        modules.insert(key.into(), module);
        Ok(module)
    }

    /// The module `key`, if it is loaded: spares finding the cubin again.
    pub fn loaded(ctx: &'static Context, key: &str) -> Option<&'static Module> {
        lock(&ctx.modules).get(key).copied()
    }

    /// The kernel `name`, as it is mangled in the cubin.
    pub fn function(&self, name: &str) -> Result<&'static Function> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function);
        }
        let expected = || format!("a kernel of module `{}`", self.key);
        let symbol = CString::new(name).map_err(|_| Error::parse("kernel name", expected(), name))?;
        let _relaxed = RelaxedCapture::enter(self.ctx)?;
        let mut raw: CUfunction = std::ptr::null_mut();
        // SAFETY: the name is null-terminated and the driver writes one handle.
        unsafe { cu!(self.ctx, cuModuleGetFunction(&mut raw, self.raw, symbol.as_ptr())) }.map_err(
            |error| match error {
                Error::Cuda { code: 500, .. } => Error::parse("kernel name", expected(), name),
                other => other,
            },
        )?;
        let function: &'static Function = Box::leak(Box::new(Function::new(self.ctx, raw, name)?));
        functions.insert(name.into(), function);
        Ok(function)
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Module({} on {})", self.key, self.ctx.name())
    }
}

/// The driver reads an image without knowing its length, so a truncated file must not reach it: checks that the
/// section and program header tables, which a linker writes last, lie inside.
fn check_elf(key: &str, image: &[u8]) -> Result<()> {
    let number = |at: usize, bytes: usize| {
        let field = image.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte)))
    };
    let inside = || -> Option<bool> {
        let table_end = |offset: usize, entry_size: usize, entries: usize| {
            number(offset, 8)?.checked_add(number(entry_size, 2)? * number(entries, 2)?)
        };
        let sections = table_end(0x28, 0x3a, 0x3c)?;
        let segments = table_end(0x20, 0x36, 0x38)?;
        let is_elf64 = image.starts_with(b"\x7fELF\x02\x01");
        Some(is_elf64 && sections.max(segments) <= image.len() as u64)
    };
    if inside() == Some(true) {
        return Ok(());
    }
    let what = format!("image of module `{key}`");
    Err(Error::parse(what, "a whole cubin (64-bit ELF)", format!("{} other bytes", image.len())))
}

/// What the compiler and the driver say about a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers per thread.
    pub regs: u32,
    /// Local memory per thread in bytes: spilled registers and the stack.
    pub local_bytes: u32,
    /// Shared memory per block that the kernel declares, in bytes.
    pub static_shared: u32,
    /// Constant memory in bytes.
    pub const_bytes: u32,
    /// Threads per block, at most, given the registers.
    pub max_threads_per_block: u32,
    /// Architecture it was compiled for: 90 for sm_90.
    pub binary_version: u32,
    /// Size of its one parameter in bytes, where the driver can tell.
    pub param_bytes: Option<usize>,
}

/// A kernel.
pub struct Function {
    ctx: &'static Context,
    raw: CUfunction,
    name: String,
    attributes: FunctionAttributes,
    limits: Mutex<Limits>,
}

/// What the driver presently lets the kernel be launched with; raised when a launch needs it.
struct Limits {
    dynamic_shared: u32,
    large_clusters: bool,
}

// SAFETY: a function handle may be used from any thread; the driver locks.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    fn new(ctx: &'static Context, raw: CUfunction, name: &str) -> Result<Function> {
        let read = |attribute: CUfunction_attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the driver writes one int.
            unsafe { cu!(ctx, cuFuncGetAttribute(&mut value, attribute, raw)) }?;
            Ok(value.try_into().unwrap_or(0))
        };
        let attributes = FunctionAttributes {
            regs: read(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: read(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared: read(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            const_bytes: read(Attribute::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)?,
            max_threads_per_block: read(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            binary_version: read(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
            param_bytes: param_bytes(ctx, raw),
        };
        let dynamic_shared = read(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        let limits = Mutex::new(Limits { dynamic_shared, large_clusters: false });
        Ok(Function { ctx, raw, name: name.into(), attributes, limits })
    }

    /// Its name in the module.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The context it is loaded in.
    pub fn context(&self) -> &'static Context {
        self.ctx
    }

    /// What the compiler and the driver say about it.
    pub fn attributes(&self) -> &FunctionAttributes {
        &self.attributes
    }

    /// How many blocks of `threads` threads and `shared_bytes` of dynamic shared memory fit on a multiprocessor.
    pub fn occupancy(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        self.allow_shared(shared_bytes)?;
        let mut blocks: c_int = 0;
        // SAFETY: the driver writes one int.
        unsafe {
            cu!(
                self.ctx,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut blocks,
                    self.raw,
                    threads as c_int,
                    shared_bytes as usize
                )
            )
        }?;
        Ok(blocks.try_into().unwrap_or(0))
    }

    pub(super) fn handle(&self) -> CUfunction {
        self.raw
    }

    /// Raises the limit on dynamic shared memory if need be. Above 48 KiB a kernel must be allowed to.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let mut limits = lock(&self.limits);
        if bytes > limits.dynamic_shared {
            self.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
            limits.dynamic_shared = bytes;
        }
        Ok(())
    }

    /// Allows clusters of more than 8 blocks, which not every device of an architecture must support.
    pub(super) fn allow_large_clusters(&self) -> Result<()> {
        let mut limits = lock(&self.limits);
        if !limits.large_clusters {
            self.set(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
            limits.large_clusters = true;
        }
        Ok(())
    }

    fn set(&self, attribute: CUfunction_attribute, value: u32) -> Result<()> {
        // SAFETY: changes a launch limit; launches in progress have read theirs.
        unsafe { cu!(self.ctx, cuFuncSetAttribute(self.raw, attribute, value as c_int)) }
    }
}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Function").field("name", &self.name).field("attributes", &self.attributes).finish()
    }
}

/// The size of a kernel's first parameter, if it has one and the driver can tell (CUDA 12.4). All of ours have just
/// one; a second is not asked for, because a failing call would show as an error under compute-sanitizer.
fn param_bytes(ctx: &Context, raw: CUfunction) -> Option<usize> {
    let info = ctx.api().cuFuncGetParamInfo?;
    let (mut offset, mut size) = (0usize, 0usize);
    // SAFETY: the driver writes two sizes, or fails if there is no such parameter.
    (unsafe { info(raw, 0, &mut offset, &mut size) } == 0).then_some(size)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    /// An ELF header with its section table at `sections`, of `count` entries of 64 bytes.
    fn header(sections: u64, count: u16) -> Vec<u8> {
        let mut image = vec![0u8; 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[0x28..0x30].copy_from_slice(&sections.to_le_bytes());
        image[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        image[0x3c..0x3e].copy_from_slice(&count.to_le_bytes());
        image
    }

    #[test]
    fn truncated_and_foreign_images_never_reach_the_driver() {
        let mut whole = header(64, 2);
        whole.resize(64 + 128, 0);
        assert!(check_elf("k", &whole).is_ok());
        assert!(check_elf("k", &whole[..whole.len() - 1]).is_err(), "section table cut off");
        assert!(check_elf("k", &header(u64::MAX, 1)).is_err(), "offset wraps");
        for image in
            [&b""[..], b"\x7fELF", b"// PTX text, which is not what we load, of more than 64 bytes ........"]
        {
            let error = check_elf("k", image).unwrap_err();
            assert!(error.to_string().contains("module `k`"), "{error}");
        }
    }
}
