//! Launches that are prepared once and repeated with other addresses.
//!
//! The host half of a kernel computes its defines, its configuration and its parameters from the problem. That is done once,
//! with symbols in place of the addresses of tensors and workspace. What remains for a call is to put addresses where the
//! symbols were and to launch.

use super::context::lock;
use super::launch::{Attributes, check_limits, check_params, launch_raw};
use super::{Context, Function, LaunchConfig, Module, Stream, TensorMap, Tiled};
use crate::error::{Error, Result};
use crate::jit::{self, AddressKind, CType, CudaKernel, Defines, Request};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::{LazyLock, Mutex, RwLock};

/// Bytes of the largest parameters of any kernel.
const MOST_PARAMS: usize = 4096;

/// Which symbol an address stands for: arguments by position, and the workspace.
const WORKSPACE: usize = 0xff;
const SYMBOL: u64 = 0x7e;
/// A symbol is in the middle of the range that its upper bits name, so that addresses before an argument's start belong
/// to it, too.
const MIDDLE: u64 = 1 << 47;

/// An arbitrary address and an offset from it, for trying out tensor maps.
const SOME_ADDRESS: u64 = 1 << 40;
const SOME_DISTANCE: u64 = 0x12_3456_7000;

/// The stand-in for an address, with its low bits, which determine alignment.
fn symbol(source: usize, address: usize) -> u64 {
    SYMBOL << 56 | (source as u64) << 48 | MIDDLE | (address as u64 & 15)
}

/// What a recording needs to know while the host half of a kernel runs.
pub struct Recorder {
    /// None if the device is only described: then launches are listed, not prepared.
    context: Option<&'static Context>,
    listed: Mutex<Vec<(&'static CudaKernel, Defines)>>,
    /// The addresses of the call at hand, by source.
    arguments: Vec<usize>,
    maps: Mutex<Vec<(TensorMap, Patch)>>,
    steps: Mutex<Vec<Step>>,
}

/// One launch.
struct Step {
    function: &'static Function,
    config: LaunchConfig,
    attributes: Attributes,
    /// Bytes of a C struct, of which padding is not initialised.
    params: Box<[MaybeUninit<u8>]>,
    patches: Box<[Patch]>,
}

/// Where a parameter holds an address: `delta` bytes from that of `source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patch {
    at: u32,
    source: u8,
    kind: AddressKind,
    delta: i64,
}

/// Memory for the parameters of one launch, aligned as the most demanding of them, a tensor map.
#[repr(C, align(64))]
struct Params([u8; MOST_PARAMS]);

impl Recorder {
    /// A recorder for a call whose arguments are at these addresses; zero for those left out.
    pub fn new(context: &'static Context, arguments: Vec<usize>) -> Recorder {
        Recorder { context: Some(context), ..Recorder::imagined(arguments) }
    }

    /// A recorder that lists the functions that would be launched.
    pub fn imagined(arguments: Vec<usize>) -> Recorder {
        Recorder {
            context: None,
            listed: Mutex::default(),
            arguments,
            maps: Mutex::default(),
            steps: Mutex::default(),
        }
    }

    /// The functions that were listed.
    pub fn into_functions(self) -> Vec<(&'static CudaKernel, Defines)> {
        self.listed.into_inner().unwrap_or_else(|e| e.into_inner())
    }

    /// The stand-in for an argument's address.
    pub fn argument(&self, index: usize) -> usize {
        match self.arguments.get(index) {
            None | Some(0) => 0,
            Some(&address) => symbol(index, address) as usize,
        }
    }

    /// The stand-in for the address of the workspace.
    pub fn workspace(&self) -> usize {
        symbol(WORKSPACE, 0) as usize
    }

    /// The source of an address and the distance from it. Zero stands for nothing.
    fn resolve(&self, value: u64) -> Option<(u8, i64)> {
        let source = (value >> 48 & 0xff) as usize;
        let base = match source {
            WORKSPACE => 0,
            _ => *self.arguments.get(source).filter(|&&address| address != 0)?,
        };
        (value >> 56 == SYMBOL).then(|| (source as u8, value.wrapping_sub(symbol(source, base)) as i64))
    }

    /// The map of a tensor at a symbolic address. Only its address is set anew for each launch.
    pub fn tensor_map(&self, tensor: &Tiled<'_>) -> Result<TensorMap> {
        let (source, delta) = self.resolve(tensor.address).ok_or_else(unknown_address)?;
        if self.context.is_none() {
            return Ok(TensorMap::placeholder(0));
        }
        // The workspace has no address yet; any aligned one that the driver accepts works.
        let base = self.arguments.get(source as usize).map_or(SOME_ADDRESS, |&address| address as u64);
        let address = base.wrapping_add_signed(delta);
        let map = TensorMap::encode(&Tiled { address, ..*tensor })?;
        // Drivers keep the address in the first word of a map. Where that holds, writing it saves a driver call per
        // launch.
        let mut moved = map;
        moved.replace_address(address + SOME_DISTANCE)?;
        let kind = match moved == map.with_first_word(address + SOME_DISTANCE) {
            true => AddressKind::Plain,
            false => AddressKind::TensorMap,
        };
        let mut maps = lock(&self.maps);
        maps.push((map, Patch { at: 0, source, kind, delta }));
        Ok(TensorMap::placeholder(maps.len() - 1))
    }

    /// Adds a launch of `kernel`, compiled with `defines`.
    pub fn launch<T: CType>(
        &self,
        kernel: &'static CudaKernel,
        defines: &Defines,
        config: &LaunchConfig,
        params: &T,
    ) -> Result<()> {
        let Some(context) = self.context else {
            lock(&self.listed).push((kernel, defines.clone()));
            return Ok(());
        };
        let function = load(context, kernel, defines)?;
        let props = context.info();
        let config = LaunchConfig { pdl: config.pdl || kernel.overlaps, ..*config };
        check_limits(function.name(), props, function.attributes(), &config)?;
        check_params(function.name(), props, function.attributes(), size_of::<T>())?;
        if size_of::<T>() > MOST_PARAMS {
            let (kernel, got) = (function.name().to_string(), size_of::<T>() as u64);
            return Err(Error::Launch {
                kernel,
                what: "size of the parameters",
                got,
                limit: MOST_PARAMS as u64,
            });
        }
        function.prepare(&config)?;
        let start = (&raw const *params).cast::<MaybeUninit<u8>>();
        // SAFETY: the struct's own bytes, initialised or not.
        let mut template: Box<[MaybeUninit<u8>]> =
            unsafe { std::slice::from_raw_parts(start, size_of::<T>()) }.into();
        let mut found = Vec::new();
        T::addresses(0, &mut found);
        let mut patches = Vec::new();
        for (at, kind) in found {
            match kind {
                AddressKind::Plain => {
                    // SAFETY: the field is a `u64`, read from where the struct holds it.
                    let value = unsafe { template.as_ptr().add(at).cast::<u64>().read_unaligned() };
                    if value != 0 {
                        let (source, delta) = self.resolve(value).ok_or_else(unknown_address)?;
                        patches.push(Patch { at: at as u32, source, kind, delta });
                    }
                }
                AddressKind::TensorMap => {
                    // SAFETY: the field is a tensor map, read from where the struct holds it.
                    let map = unsafe { template.as_ptr().add(at).cast::<TensorMap>().read_unaligned() };
                    if let Some(index) = map.placeholder_index() {
                        let (map, patch) = lock(&self.maps)[index];
                        // SAFETY: as above, written.
                        unsafe { template.as_mut_ptr().add(at).cast::<TensorMap>().write_unaligned(map) };
                        patches.push(Patch { at: at as u32, ..patch });
                    }
                }
            }
        }
        lock(&self.steps).push(Step {
            function,
            config,
            attributes: Attributes::of(&config, props),
            params: template,
            patches: patches.into(),
        });
        Ok(())
    }

    /// What was recorded.
    pub fn finish(self) -> Recording {
        Recording { steps: self.steps.into_inner().unwrap_or_else(|e| e.into_inner()).into() }
    }
}

fn unknown_address() -> Error {
    let expected = "addresses of the call's arguments or its workspace";
    Error::argument("recording", "params", expected, "another number of 64 bits")
}

/// The launches of one call.
pub struct Recording {
    steps: Box<[Step]>,
}

impl Recording {
    /// Launches with these addresses, by position of the argument. Allocates nothing, and waits for nothing.
    ///
    /// # Safety
    /// The addresses must be those of tensors as the recording was made for, and of a workspace of the size its kernel asks
    /// for; all good for what the kernels do there until the stream has run them, or as long as the graph, if it is
    /// captured.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        argument: impl Fn(usize) -> usize,
        workspace: usize,
    ) -> Result<()> {
        let mut params = MaybeUninit::<Params>::uninit();
        let start = params.as_mut_ptr().cast::<u8>();
        for step in &self.steps {
            // SAFETY: a template is at most as long as the buffer, and patches lie inside it, as they did when recorded; maps
            // are at multiples of 64 bytes of a struct, and so of the buffer.
            unsafe {
                std::ptr::copy_nonoverlapping(step.params.as_ptr(), start.cast(), step.params.len());
                for patch in &step.patches {
                    let source = match patch.source as usize {
                        WORKSPACE => workspace,
                        index => argument(index),
                    };
                    let address = (source as u64).wrapping_add_signed(patch.delta);
                    let field = start.add(patch.at as usize);
                    match patch.kind {
                        AddressKind::Plain => field.cast::<u64>().write(address),
                        AddressKind::TensorMap => (*field.cast::<TensorMap>()).replace_address(address)?,
                    }
                }
                launch_raw(step.function, stream, &step.config, &step.attributes, start.cast())?;
            }
        }
        Ok(())
    }
}

/// The compiled functions in use, by device, kernel and defines.
type Loaded = HashMap<(u32, usize), Vec<(Defines, &'static Function)>>;

/// The function of `kernel` specialised by `defines` on a device, compiled and loaded by the first call.
pub fn load(
    context: &'static Context,
    kernel: &'static CudaKernel,
    defines: &Defines,
) -> Result<&'static Function> {
    static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(Default::default);
    let id = (context.ordinal(), std::ptr::from_ref(kernel) as usize);
    let known = LOADED.read().unwrap_or_else(|e| e.into_inner());
    if let Some((_, function)) = known.get(&id).into_iter().flatten().find(|(other, _)| other == defines) {
        return Ok(function);
    }
    drop(known);
    let props = context.info();
    let prelude = (kernel.prelude)();
    let request = Request {
        prelude: &prelude,
        defines,
        fast_math: kernel.fast_math || jit::fast_math(),
        profile: jit::profile(),
        ..Request::new(&kernel.source, jit::Arch::for_device(props.major as u8, props.minor as u8))
    };
    let compiled = jit::get(&request)?;
    let module = Module::get(context, &compiled.key.to_string(), &compiled.cubin)?;
    let function = module.function(kernel.function)?;
    let mut known = LOADED.write().unwrap_or_else(|e| e.into_inner());
    known.entry(id).or_default().push((defines.clone(), function));
    Ok(function)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn symbols_resolve_to_their_source_and_distance() {
        let low = 0x7f00_1234_5674usize;
        let split = |value: u64, arguments: &[usize]| {
            let source = (value >> 48 & 0xff) as usize;
            let base = arguments.get(source).copied().unwrap_or(0);
            (source, value.wrapping_sub(symbol(source, base)) as i64)
        };
        let arguments = [low, 0, low + 4096];
        for source in [0, 2, WORKSPACE] {
            let at = symbol(source, arguments.get(source).copied().unwrap_or(0));
            for delta in [0i64, 2, -2, 1 << 40, -(1 << 40)] {
                assert_eq!(split(at.wrapping_add_signed(delta), &arguments), (source, delta));
            }
        }
        assert_eq!(symbol(3, low) % 16, low as u64 % 16, "alignment shows");
    }
}
