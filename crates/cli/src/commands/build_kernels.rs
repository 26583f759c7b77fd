//! `warpsmith build-kernels`: a pack of compiled kernels.

use crate::inputs::{ProfileArgs, find_op};
use crate::kernels::{self, Variant};
use crate::model::WeightsArgs;
use crate::source::{self, Source};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use warpsmith::device::DeviceInfo;
use warpsmith::jit::cache::{Cache, EntryId};
use warpsmith::jit::nvrtc::{self, Nvrtc};
use warpsmith::jit::{Arch, Compiler, Output, Request, pack};
use warpsmith::lab::bench;
use warpsmith::{Error, Result, ops};
use warpsmith_engine::EngineOptions;

/// Compile CUDA kernels ahead of time into a pack
///
/// A pack is a folder of compiled kernels for machines that cannot or should not compile. Name it in
/// WARPSMITH_KERNEL_PACK.
///
/// It holds every configuration of the kernels of most ops. `linear` and its gradient, `attention` and
/// `paged_attention` have thousands; of these it holds a covering set: every type, tile and option, but not every
/// combination. Other combinations are compiled on first use and kept in the cache on disk. With
/// WARPSMITH_DISABLE_JIT=1 they are only taken from that cache; if they are not there, the call fails with an error
/// that names the kernel. `warpsmith dump KERNEL` lists the configurations of a kernel that a pack holds.
///
/// With --model or --random the pack holds exactly what one model needs on a GPU: for all captured steps, prompts of
/// all lengths, and every way of choosing tokens. The model's first start then compiles nothing. That holds for the
/// engine's options as `generate` and `chat` have them, for GPUs with as many multiprocessors as the typical one of the
/// architecture, and where no other kernels were chosen by `warpsmith tune`; --dtype, --kv-dtype, --expand and
/// --context must be those of the later start. Without a model these options are refused.
///
/// A pack also serves GPUs of the same major and a higher minor version: one for 80 works on 8.6 and 8.9. Building needs
/// NVRTC but no GPU; kernels that are in the cache are not compiled again.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Architectures to compile for
    #[arg(long, value_delimiter = ',', required = true)]
    arch: Vec<Arch>,
    /// Folder of the pack; an existing pack is replaced, a folder with anything else in it is left alone
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Only the kernels of this op; can be repeated
    #[arg(long, conflicts_with_all = ["model", "random"])]
    op: Vec<String>,
    #[command(flatten)]
    weights: WeightsArgs,
    #[arg(long, value_name = "CONFIG", conflicts_with = "model", help = source::RANDOM)]
    random: Option<String>,
    /// With a model: the most sequences that generate at the same time [default: 64]
    #[arg(long, value_name = "SEQUENCES")]
    max_running: Option<usize>,
    /// With a model: the most tokens of a step [default: 1024]
    #[arg(long, value_name = "TOKENS")]
    max_batch_tokens: Option<usize>,
    /// Kernels to compile in parallel [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    #[command(flatten)]
    profile: ProfileArgs,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith build-kernels --arch 80,90a --out kernels
  warpsmith build-kernels --arch 90a --out kernels --op rms_norm \\
      --op rms_norm_backward
  warpsmith build-kernels --arch 90a --out kernels --model Qwen/Qwen3-0.6B
  warpsmith build-kernels --arch 90a --out kernels --random qwen3-0.6b \\
      --kv-dtype fp8_e4m3
  WARPSMITH_KERNEL_PACK=kernels WARPSMITH_DISABLE_JIT=1 your-program";

pub fn run(args: &Args) -> warpsmith_engine::Result<ExitCode> {
    let mut variants: Vec<(Arch, Variant)> = Vec::new();
    if args.weights.is_given() || args.random.is_some() {
        let source = Source::new(args.random.as_deref(), || args.weights.path())?;
        let default = EngineOptions::default();
        let max_batch_tokens = args.max_batch_tokens.unwrap_or(default.max_batch_tokens);
        let engine = EngineOptions {
            max_running: args.max_running.unwrap_or(default.max_running),
            max_batch_tokens,
            max_chunk: default.max_chunk.min(max_batch_tokens),
            ..default
        };
        for &arch in &args.arch {
            let options = args.weights.options(engine.clone());
            let needed = source.needed_kernels(&options, DeviceInfo::typical_gpu(arch, None))?;
            variants.extend(needed.into_iter().map(|needed| (arch, Variant::from(needed))));
        }
    } else {
        let option = args.weights.first_option();
        let option = option.or(args.max_running.map(|_| "--max-running"));
        if let Some(option) = option.or(args.max_batch_tokens.map(|_| "--max-batch-tokens")) {
            return Err(Error::parse(option, "a model beside it: --model or --random", "none").into());
        }
        for &arch in &args.arch {
            let fitting = variants_of(&args.op)?;
            let fitting = fitting.into_iter().filter(|variant| kernels::compiles_for(variant.device, arch));
            variants.extend(fitting.map(|variant| (arch, variant)));
        }
    }
    let requests: Vec<Request<'_>> =
        variants.iter().map(|(arch, variant)| variant.request(*arch, args.profile.profile())).collect();
    let compiler = Caching {
        nvrtc: nvrtc::find_for(&args.arch)?,
        cache: Cache::default_location(),
        hits: AtomicUsize::new(0),
    };
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(jobs) = args.jobs {
        pool = pool.num_threads(jobs.into());
    }
    let pool = pool.build().map_err(|error| Error::Unavailable {
        what: "threads to compile with".into(),
        why: error.to_string(),
        fix: "Ask for fewer with --jobs".into(),
    })?;
    // Ops share sources, so only the builder knows the number of distinct requests.
    let bar = kernels::progress_bar(requests.len());
    let start = Instant::now();
    let built = pool.install(|| {
        pack::build_with(&compiler, &requests, &args.out, &|progress| {
            bar.set_length(progress.total as u64);
            bar.set_message(format!("{} {}", progress.kernel, progress.arch));
            bar.inc(1);
        })
    });
    bar.finish_and_clear();
    let built = built?;

    let (total, hits) = (built.entries().len(), compiler.hits.into_inner());
    for &arch in &args.arch {
        let entries: Vec<_> = built.entries().iter().filter(|entry| entry.arch == arch).collect();
        let bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        println!("{arch}: {} kernels, {:.1} MB", entries.len(), bytes as f64 / 1e6);
    }
    println!(
        "{}: {total} kernels in {:.1} s, {} compiled by NVRTC {}.{}, {hits} from the cache",
        built.folder().display(),
        start.elapsed().as_secs_f64(),
        total - hits,
        built.nvrtc_version().0,
        built.nvrtc_version().1,
    );
    println!("Use it with WARPSMITH_KERNEL_PACK={}", built.folder().display());
    Ok(ExitCode::SUCCESS)
}

/// Every variant of the named ops; without names, of all ops and of the kernels that measure the machine's limits.
fn variants_of(names: &[String]) -> Result<Vec<Variant>> {
    let chosen = match names {
        [] => ops::provable(),
        names => names.iter().map(|name| find_op(name)).collect::<Result<_>>()?,
    };
    let kernels = chosen.iter().flat_map(|op| op.kernels());
    let mut variants: Vec<Variant> = kernels.flat_map(|kernel| kernels::variants(&kernel)).collect();
    if names.is_empty() {
        variants.extend(bench::device_functions().into_iter().flat_map(kernels::device_variants));
    }
    Ok(variants)
}

/// NVRTC behind the disk cache, so that rebuilding a pack after a small change compiles only what changed.
struct Caching {
    nvrtc: &'static Nvrtc,
    cache: Cache,
    hits: AtomicUsize,
}

impl Compiler for Caching {
    fn version(&self) -> (i32, i32) {
        self.nvrtc.version()
    }

    fn compile(&self, request: &Request) -> Result<Output> {
        let id = EntryId { key: request.key(), arch: request.arch, nvrtc: self.version() };
        if let Some(hit) = self.cache.get(&id) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Output { cubin: hit.cubin.to_vec(), log: hit.log });
        }
        let output = self.nvrtc.compile_with(request)?;
        // If the cache cannot be written, the next build is slower, but the pack is complete.
        let _ = self.cache.put(&id, request.source.name, &output.cubin, &output.log);
        Ok(output)
    }
}
