//! Devices and their contexts.

use super::arena::Arena;
use super::driver::{self, Api};
use super::graph::Captures;
use super::memory::Parked;
use super::module::Module;
use super::pinned::PinnedPool;
use super::stream::Stream;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdevice_attribute_enum as Attribute, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemPool_attribute_enum as PoolAttribute, CUmemPoolProps, CUmemoryPool, CUuuid,
};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Calls a driver function in a context: makes the context current, refuses if it is poisoned, and turns the
/// result into an [`Error`]. Expands to an unsafe call, so it stands inside an `unsafe` block that says why.
macro_rules! cu {
    ($ctx:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        let ctx: &$crate::cuda::Context = $ctx;
        match ctx.bind() {
            Ok(()) => ctx.check_code(stringify!($function), (ctx.api().$function)($($arg),*)),
            Err(error) => Err(error),
        }
    }};
}
pub(super) use cu;

/// Number of CUDA devices this process can use; 0 where CUDA is missing ([`status`] says why).
pub fn device_count() -> usize {
    count().unwrap_or(0)
}

/// Whether CUDA can be used, and if not, why and what to do.
pub fn status() -> Result<()> {
    match count()? {
        0 => Err(Error::Unavailable {
            what: "CUDA".into(),
            why: "the driver sees no device".into(),
            fix: "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES".into(),
        }),
        _ => Ok(()),
    }
}

fn count() -> Result<usize> {
    let api = driver::api()?;
    let mut count: c_int = 0;
    // SAFETY: the driver writes one int.
    api.check("cuDeviceGetCount", unsafe { (api.cuDeviceGetCount)(&mut count) })?;
    Ok(count.try_into().unwrap_or(0))
}

/// What a device is and what it allows.
#[derive(Clone, Debug)]
pub struct DeviceProps {
    /// Marketing name, such as `NVIDIA H200`.
    pub name: String,
    /// `GPU-` and the UUID, as `nvidia-smi -L` prints it.
    pub uuid: String,
    /// Compute capability, major.
    pub major: u32,
    /// Compute capability, minor.
    pub minor: u32,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Threads of one block, at most.
    pub max_threads_per_block: u32,
    /// Threads resident on one multiprocessor, at most.
    pub max_threads_per_sm: u32,
    /// Blocks resident on one multiprocessor, at most.
    pub max_blocks_per_sm: u32,
    /// Block extent per dimension, at most.
    pub max_block: [u32; 3],
    /// Grid extent per dimension, at most.
    pub max_grid: [u32; 3],
    /// Shared memory a block gets without asking, in bytes.
    pub shared_per_block: u32,
    /// Shared memory a block can ask for, in bytes.
    pub shared_per_block_optin: u32,
    /// Shared memory of one multiprocessor, in bytes.
    pub shared_per_sm: u32,
    /// 32-bit registers of one block, at most.
    pub regs_per_block: u32,
    /// 32-bit registers of one multiprocessor.
    pub regs_per_sm: u32,
    /// Size of the L2 cache in bytes.
    pub l2_bytes: u64,
    /// Device memory in bytes.
    pub total_memory: u64,
    /// Highest clock of the multiprocessors.
    pub clock_khz: u32,
    /// Highest clock of the memory.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub bus_width: u32,
    /// Whether thread block clusters can be launched.
    pub cluster_launch: bool,
    /// Newest CUDA version the driver supports, as `1000 * major + 10 * minor`.
    pub driver_version: u32,
}

impl DeviceProps {
    /// Compute capability as one number: 90 for 9.0.
    pub fn arch(&self) -> u32 {
        self.major * 10 + self.minor
    }

    fn query(api: &Api, device: CUdevice) -> Result<DeviceProps> {
        let read = |attribute: CUdevice_attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the driver writes one int; the device handle came from cuDeviceGet.
            let code = unsafe { (api.cuDeviceGetAttribute)(&mut value, attribute, device) };
            api.check("cuDeviceGetAttribute", code)?;
            Ok(value.try_into().unwrap_or(0))
        };
        let mut name = [0u8; 256];
        // SAFETY: the buffer is as long as stated, and the driver terminates what it writes.
        let code = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
        api.check("cuDeviceGetName", code)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes 16 bytes.
        api.check("cuDeviceGetUuid", unsafe { (api.cuDeviceGetUuid_v2)(&mut uuid, device) })?;
        let mut total = 0usize;
        // SAFETY: the driver writes one size.
        api.check("cuDeviceTotalMem", unsafe { (api.cuDeviceTotalMem_v2)(&mut total, device) })?;
        if read(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
            return Err(Error::Unavailable {
                what: "CUDA".into(),
                why: "the device does not support memory pools".into(),
                fix: "Use a device and a driver that support cuMemAllocAsync".into(),
            });
        }
        Ok(DeviceProps {
            name: text_before_nul(&name),
            uuid: format_uuid(uuid.bytes.map(|byte| byte as u8)),
            major: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            sm_count: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            max_threads_per_block: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            max_threads_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            max_blocks_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
            max_block: [
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?,
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?,
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?,
            ],
            max_grid: [
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
            shared_per_block: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
            shared_per_block_optin: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            regs_per_block: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK)?,
            regs_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            l2_bytes: read(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            total_memory: total as u64,
            clock_khz: read(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_clock_khz: read(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
            bus_width: read(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            // Drivers before 11.8 do not know this attribute.
            cluster_launch: read(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH).unwrap_or(0) != 0,
            driver_version: api.version,
        })
    }
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Free on the device, for every process.
    pub free: u64,
    /// All of the device's memory.
    pub total: u64,
    /// Held by our pool, in use or cached.
    pub pool_reserved: u64,
    /// In use by buffers.
    pub pool_used: u64,
    /// The most that was in use by buffers at once, since the last [`Context::reset_pool_high`].
    pub pool_high: u64,
}

/// One device: its primary context (shared with other users of CUDA in this process, such as PyTorch), our
/// memory pool, the loaded modules and the cached pinned memory. Lives as long as the process.
pub struct Context {
    api: &'static Api,
    ordinal: u32,
    raw: CUcontext,
    props: DeviceProps,
    pool: CUmemoryPool,
    streams: OnceLock<[Stream; 2]>,
    poisoned: AtomicBool,
    cause: Mutex<Option<String>>,
    deferred: Mutex<Option<Error>>,
    pub(super) parked: Mutex<Vec<Parked>>,
    pub(super) captures: Captures,
    pub(super) pinned: PinnedPool,
    pub(super) modules: Mutex<HashMap<String, &'static Module>>,
    /// Foreign streams by handle, so that what is known about one outlives the value that names it.
    borrowed: Mutex<HashMap<u64, Stream>>,
    /// Workspaces of captures that others began, by the capture: their graphs may replay at any time.
    pub(super) lent: Mutex<HashMap<u64, Arena>>,
}

// SAFETY: the raw members are driver handles, which any thread may use; everything mutable is locked or atomic.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of device `ordinal`, created by the first call.
    pub fn get(ordinal: u32) -> Result<&'static Context> {
        static TABLE: OnceLock<Box<[OnceLock<&'static Context>]>> = OnceLock::new();
        static CREATING: Mutex<()> = Mutex::new(());
        let table = match TABLE.get() {
            Some(table) => table,
            None => {
                let count = count()?;
                TABLE.get_or_init(|| (0..count).map(|_| OnceLock::new()).collect())
            }
        };
        let slot = table.get(ordinal as usize).ok_or_else(|| Error::Unavailable {
            what: format!("cuda:{ordinal}"),
            why: format!("this process sees {} CUDA devices", table.len()),
            fix: "Use a device below that number, or check CUDA_VISIBLE_DEVICES".into(),
        })?;
        if let Some(context) = slot.get() {
            return Ok(context);
        }
        // A failure is not cached: it may be a temporary lack of memory.
        let _creating = lock(&CREATING);
        if let Some(context) = slot.get() {
            return Ok(context);
        }
        let context = Context::create(ordinal)?;
        Ok(slot.get_or_init(|| context))
    }

    fn create(ordinal: u32) -> Result<&'static Context> {
        let api = driver::api()?;
        let mut device: CUdevice = 0;
        // SAFETY: the driver writes one handle.
        api.check("cuDeviceGet", unsafe { (api.cuDeviceGet)(&mut device, ordinal as c_int) })?;
        let props = DeviceProps::query(api, device)?;
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: the driver writes one handle; it is never released, as this value lives until the process ends.
        api.check("cuDevicePrimaryCtxRetain", unsafe { (api.cuDevicePrimaryCtxRetain)(&mut raw, device) })?;
        let pool = create_pool(api, ordinal)?;
        let context: &'static Context = Box::leak(Box::new(Context {
            api,
            ordinal,
            raw,
            props,
            pool,
            streams: OnceLock::new(),
            poisoned: AtomicBool::new(false),
            cause: Mutex::new(None),
            deferred: Mutex::new(None),
            parked: Mutex::default(),
            captures: Captures::default(),
            pinned: PinnedPool::default(),
            modules: Mutex::default(),
            borrowed: Mutex::default(),
            lent: Mutex::default(),
        }));
        let streams = [Stream::new(context)?, Stream::new(context)?];
        context.streams.get_or_init(|| streams);
        super::activity::register(context);
        crate::profile::listen_to_tools();
        Ok(context)
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the device is and allows.
    pub fn info(&self) -> &DeviceProps {
        &self.props
    }

    /// Makes this context current on the calling thread and leaves it current. Asks the driver each time instead of
    /// remembering, because other users of CUDA switch contexts too; both calls take nanoseconds.
    pub fn bind(&self) -> Result<()> {
        self.check_poison()?;
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        self.check_code("cuCtxGetCurrent", unsafe { (self.api.cuCtxGetCurrent)(&mut current) })?;
        if current == self.raw {
            return Ok(());
        }
        // SAFETY: `raw` is the retained primary context, which is never released.
        self.check_code("cuCtxSetCurrent", unsafe { (self.api.cuCtxSetCurrent)(self.raw) })
    }

    /// Waits for everything that was given to the device in this context, on any stream.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: takes no pointers.
        unsafe { cu!(self, cuCtxSynchronize()) }?;
        self.check()
    }

    /// The driver's handle.
    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// The stream used where the caller names none: one of ours, not ordered with the legacy default stream.
    pub fn default_stream(&self) -> &Stream {
        &self.streams.get().expect("set before the context is handed out")[0]
    }

    /// The stream for allocations that must not touch the caller's stream, because that is being captured.
    pub(super) fn side_stream(&self) -> &Stream {
        &self.streams.get().expect("set before the context is handed out")[1]
    }

    /// The stream known by a foreign handle, made by the first call.
    pub(super) fn borrowed_stream(&self, raw: u64, make: impl FnOnce() -> Stream) -> Stream {
        // A handle of ours, which somebody hands back, is our stream.
        let own = self.streams.get().into_iter().flatten().find(|stream| stream.raw() == raw);
        own.cloned().unwrap_or_else(|| lock(&self.borrowed).entry(raw).or_insert_with(make).clone())
    }

    /// Memory of the device and of our pool.
    pub fn memory(&self) -> Result<MemoryStats> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the driver writes two sizes.
        unsafe { cu!(self, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemoryStats {
            free: free as u64,
            total: total as u64,
            pool_reserved: self.pool_value(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            pool_used: self.pool_value(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            pool_high: self.pool_value(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        })
    }

    /// Starts [`MemoryStats::pool_high`] anew, from what is in use now.
    pub fn reset_pool_high(&self) -> Result<()> {
        let (attribute, mut zero) = (PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
        // SAFETY: the attribute is 64-bit, and zero is the one value it takes.
        unsafe { cu!(self, cuMemPoolSetAttribute(self.pool, attribute, (&raw mut zero).cast())) }
    }

    fn pool_value(&self, attribute: CUmemPool_attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: the memory attributes are 64-bit.
        unsafe { cu!(self, cuMemPoolGetAttribute(self.pool, attribute, (&raw mut value).cast())) }?;
        Ok(value)
    }

    /// Gives cached memory of the pool back to the system, down to `keep_bytes`, and frees cached pinned memory. Memory
    /// whose free the device has not reached yet stays: synchronise first to return all of it.
    pub fn trim(&self, keep_bytes: u64) -> Result<()> {
        self.collect_parked();
        let keep = usize::try_from(keep_bytes).unwrap_or(usize::MAX);
        // SAFETY: trimming only releases memory no buffer owns.
        unsafe { cu!(self, cuMemPoolTrimTo(self.pool, keep)) }?;
        self.pinned.trim(self)
    }

    /// Marks the context as lost. Every later call returns [`Error::Poisoned`] with the first cause given.
    pub fn poison(&self, cause: impl Into<String>) {
        lock(&self.cause).get_or_insert_with(|| cause.into());
        self.poisoned.store(true, Ordering::Release);
    }

    /// The error of a lost context, if it is lost.
    pub fn check_poison(&self) -> Result<()> {
        if !self.poisoned.load(Ordering::Acquire) {
            return Ok(());
        }
        let cause = lock(&self.cause).clone().unwrap_or_default();
        Err(Error::Poisoned { device: self.name(), cause })
    }

    /// The first error of something that could not report it, such as freeing a buffer. Returns it once.
    pub fn check(&self) -> Result<()> {
        self.check_poison()?;
        lock(&self.deferred).take().map_or(Ok(()), Err)
    }

    /// Keeps an error that has no caller to return to, for [`Context::check`].
    pub(super) fn defer(&self, result: Result<()>) {
        if let Err(error) = result {
            lock(&self.deferred).get_or_insert(error);
        }
    }

    /// `cuda:N`, as devices are named in errors.
    pub fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    pub(super) fn pool(&self) -> CUmemoryPool {
        self.pool
    }

    /// Turns the result of a driver call into an error; a sticky one poisons the context.
    pub(super) fn check_code(&self, call: &'static str, code: u32) -> Result<()> {
        if code == driver::SUCCESS {
            return Ok(());
        }
        if driver::is_sticky(code) {
            self.poison(format!("{call}: {}", self.api.describe(code)));
            return self.check_poison();
        }
        self.api.check(call, code)
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.props.name)
    }
}

/// A pool of our own, so that its statistics are ours and trimming it disturbs no other user of CUDA.
fn create_pool(api: &Api, ordinal: u32) -> Result<CUmemoryPool> {
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: ordinal as c_int,
        },
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the properties are complete (reserved bytes zero, as asked) and the driver writes one handle.
    api.check("cuMemPoolCreate", unsafe { (api.cuMemPoolCreate)(&mut pool, &props) })?;
    // Without this, every synchronisation would return the cached memory to the system, and the next allocation would
    // pay for it again.
    let mut threshold = u64::MAX;
    let attribute = PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is 64-bit.
    let code = unsafe { (api.cuMemPoolSetAttribute)(pool, attribute, (&raw mut threshold).cast()) };
    api.check("cuMemPoolSetAttribute", code)?;
    Ok(pool)
}

/// Locks a mutex whose data stays valid if a holder panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text_before_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn uuid_reads_as_nvidia_smi_prints_it() {
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn a_name_ends_at_its_nul() {
        assert_eq!(text_before_nul(b"NVIDIA H200\0\0junk"), "NVIDIA H200");
        assert_eq!(text_before_nul(b"full"), "full");
    }

    #[test]
    fn every_entry_point_answers_without_a_device() {
        if device_count() > 0 {
            assert!(status().is_ok());
            let error = Context::get(1 << 20).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            return;
        }
        for error in [status().unwrap_err(), Context::get(0).unwrap_err()] {
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
    }
}
