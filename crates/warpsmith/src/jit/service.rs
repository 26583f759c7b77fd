//! Where a kernel is looked for, in order, and the guarantee that it is compiled once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use super::cache::{Cache, EntryId};
use super::observe::{CompileEvent, tell};
use super::pack::Pack;
use super::{Compiled, Compiler, Key, Origin, Request, nvrtc};
use crate::{Error, Result, env};

/// What a [`Jit`] compiles with.
#[derive(Clone)]
pub enum Toolchain {
    /// Nothing: only packs and the cache are used.
    Off,
    /// The NVRTC of this machine, found when first needed.
    Nvrtc,
    /// This one.
    Given(Arc<dyn Compiler>),
}

/// The compiled kernels of this process, and the sources of further ones.
pub struct Jit {
    toolchain: Toolchain,
    cache: Cache,
    packs: Result<Vec<Pack>>,
    kernels: Mutex<HashMap<Key, Slot>>,
}

/// The result for one key. Its lock is held while the result is computed, so that other threads wait for it.
type Slot = Arc<Mutex<Option<Result<Arc<Compiled>>>>>;

impl Jit {
    /// Kernels from these packs, this cache and this toolchain, in that order.
    pub fn new(packs: Vec<Pack>, cache: Cache, toolchain: Toolchain) -> Jit {
        Jit { toolchain, cache, packs: Ok(packs), kernels: Mutex::default() }
    }

    /// The one configured by the environment: `WARPSMITH_KERNEL_PACK` (several folders may be joined with `:`),
    /// `WARPSMITH_CACHE_DIR` and `WARPSMITH_DISABLE_JIT`.
    pub fn global() -> &'static Jit {
        static GLOBAL: LazyLock<Jit> = LazyLock::new(|| {
            let folders = env::path(env::KERNEL_PACK);
            let folders: Vec<PathBuf> = folders.iter().flat_map(std::env::split_paths).collect();
            Jit {
                toolchain: if env::flag(env::DISABLE_JIT) { Toolchain::Off } else { Toolchain::Nvrtc },
                cache: Cache::default_location(),
                packs: folders.into_iter().map(Pack::open).collect(),
                kernels: Mutex::default(),
            }
        });
        &GLOBAL
    }

    /// The disk cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The compiled form of a request.
    ///
    /// A pack that was named but cannot be read, or whose contents are damaged, is an error, because the alternative
    /// is to compile silently. A damaged cache entry is rebuilt.
    pub fn get(&self, request: &Request) -> Result<Arc<Compiled>> {
        request.check()?;
        let key = request.key();
        let slot =
            Arc::clone(self.kernels.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default());
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(outcome) = &*slot {
            return outcome.clone();
        }
        let outcome = self.produce(request, key).map(Arc::new);
        // A kernel that does not compile never will. Other failures (a full disk, a missing library) may be
        // temporary.
        if matches!(outcome, Ok(_) | Err(Error::Compile { .. })) {
            *slot = Some(outcome.clone());
        }
        outcome
    }

    /// Whether a request needs no compiler: a pack or the cache has it.
    pub fn has(&self, request: &Request) -> bool {
        let in_pack = |pack: &Pack| matches!(pack.find(request), Ok(Some(_)));
        let id = |compiler: &dyn Compiler| EntryId {
            key: request.key(),
            arch: request.arch,
            nvrtc: compiler.version(),
        };
        let id = self.compiler(request).map(id).ok();
        self.packs.iter().flatten().any(in_pack)
            || self.on_disk(request, request.key(), id.as_ref()).is_some()
    }

    fn produce(&self, request: &Request, key: Key) -> Result<Compiled> {
        for pack in self.packs.as_ref().map_err(Error::clone)? {
            if let Some((path, cubin)) = pack.find(request)? {
                return Ok(Compiled { cubin, key, origin: Origin::Pack(path), log: String::new() });
            }
        }
        let compiler = match self.compiler(request) {
            Ok(compiler) => compiler,
            // There is no version to look for, so take what any compiler has made.
            Err(error) => return self.on_disk(request, key, None).ok_or(error),
        };
        let version = compiler.version();
        let id = EntryId { key, arch: request.arch, nvrtc: version };
        if let Some(found) = self.on_disk(request, key, Some(&id)) {
            return Ok(found);
        }
        let _lock = self.cache.lock(&id);
        // The previous holder of the lock may have built it.
        if let Some(found) = self.on_disk(request, key, Some(&id)) {
            return Ok(found);
        }
        let start = Instant::now();
        let kernel = request.source.name;
        tell(CompileEvent::Started { kernel });
        let output = compiler.compile(request);
        let ms = start.elapsed().as_millis() as u64;
        tell(CompileEvent::Ended { kernel, ms });
        let output = output?;
        // If storing fails, the cache keeps the reason as its warning.
        let _ = self.cache.put(&id, request.source.name, &output.cubin, &output.log);
        Ok(Compiled { cubin: output.cubin.into(), key, origin: Origin::Built { ms }, log: output.log })
    }

    fn on_disk(&self, request: &Request, key: Key, id: Option<&EntryId>) -> Option<Compiled> {
        let hit = match id {
            Some(id) => self.cache.get(id)?,
            None => self.cache.get_any(&key, request.arch)?,
        };
        Some(Compiled { cubin: hit.cubin, key, origin: Origin::Disk(hit.path), log: hit.log })
    }

    fn compiler(&self, request: &Request) -> Result<&dyn Compiler> {
        match &self.toolchain {
            Toolchain::Given(compiler) => Ok(compiler.as_ref()),
            Toolchain::Nvrtc => nvrtc::find_for(&[request.arch]).map(|nvrtc| nvrtc as &dyn Compiler),
            Toolchain::Off => Err(Error::Unavailable {
                what: format!("kernel `{}` for {}", request.source.name, request.arch),
                why: "it is in no kernel pack and not in the disk cache, and compiling at run time is off"
                    .into(),
                fix: format!(
                    "Build a pack that has it with `warpsmith build-kernels` and name it in {}, or unset {}",
                    env::KERNEL_PACK,
                    env::DISABLE_JIT
                ),
            }),
        }
    }
}
