//! Parts of a model of the user's size, each beside what it replaces.

use super::{Args, print};
use crate::table;
use std::time::Instant;
use warpsmith::ops::linear::{self, Gate};
use warpsmith::ops::{Activation, Attention, Linear, MoeFfn, MoeRoute, Softmax};
use warpsmith::{DType, Device, Error, Result, Tensor};
use warpsmith_whatif::change::{Target, compare};
use warpsmith_whatif::{Change, Layers, Model, Step};

/// The sizes of the flags.
pub struct Sizes {
    batch: usize,
    tokens: usize,
    width: usize,
    heads: usize,
    block: usize,
    experts: usize,
    top_k: usize,
}

impl Sizes {
    /// Of the command line, whose flags must fit each other.
    pub fn new(args: &Args) -> Result<Sizes> {
        /// Elements of a head; the first that divides the width.
        const HEADS: [u32; 4] = [64, 32, 16, 8];
        let refuse = |what: &str, expected: String, got: u32| Error::parse(what, expected, got.to_string());
        let head = HEADS.into_iter().find(|head| args.d_model.is_multiple_of(*head));
        let head = head.ok_or_else(|| refuse("--d-model", "a multiple of 8".into(), args.d_model))?;
        if args.top_k > args.num_experts {
            return Err(refuse(
                "--top-k",
                format!("at most the {} of --num-experts", args.num_experts),
                args.top_k,
            ));
        }
        Ok(Sizes {
            batch: args.batch_size as usize,
            tokens: args.seq_len as usize,
            width: args.d_model as usize,
            heads: (args.d_model / head) as usize,
            block: args.block_size as usize,
            experts: args.num_experts as usize,
            top_k: args.top_k as usize,
        })
    }
}

/// Seconds of runs of one thing.
const SECONDS: f64 = 0.2;
const MOST_RUNS: usize = 50;

/// The median milliseconds of some runs, after one to warm up, and the bytes that the process grew by meanwhile.
fn measure(device: Device, memory: bool, mut run: impl FnMut() -> Result<()>) -> Result<(f64, Option<u64>)> {
    let peak = if memory { Peak::begin(device) } else { None };
    run()?;
    device.synchronize()?;
    let grown = peak.and_then(|peak| peak.end());
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || (begin.elapsed().as_secs_f64() < SECONDS && times.len() < MOST_RUNS) {
        let start = Instant::now();
        run()?;
        device.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], grown))
}

/// Memory in use at a moment; later, how much more there was at most since.
struct Peak {
    device: Device,
    before: u64,
}

impl Peak {
    fn begin(device: Device) -> Option<Peak> {
        match device {
            // The kernel forgets the peak so far; then the peak is what is there.
            Device::Cpu => std::fs::write("/proc/self/clear_refs", "5").ok()?,
            Device::Cuda(ordinal) => warpsmith::cuda::Context::get(ordinal).ok()?.reset_pool_high().ok()?,
        }
        Some(Peak { device, before: Peak::high(device)? })
    }

    fn end(self) -> Option<u64> {
        Some(Peak::high(self.device)?.saturating_sub(self.before))
    }

    fn high(device: Device) -> Option<u64> {
        match device {
            Device::Cpu => {
                let status = std::fs::read_to_string("/proc/self/status").ok()?;
                let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
                Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
            }
            Device::Cuda(ordinal) => {
                Some(warpsmith::cuda::Context::get(ordinal).ok()?.memory().ok()?.pool_high)
            }
        }
    }
}

/// All parts. One that a device has no kernel for is named with the reason.
pub fn show(sizes: &Sizes, device: Device, memory: bool) -> Result<()> {
    let Sizes { batch, tokens, width, heads, .. } = sizes;
    println!();
    print(&format!("A layer of {batch} x {tokens} tokens of {width} in {heads} heads, f32:"));
    for (name, part) in [("attention", attention as Part), ("experts", experts), ("fusion", fusion)] {
        match part(sizes, device, memory) {
            Ok(text) => print(&text),
            Err(Error::OutOfMemory { .. }) => print(&format!("{name}: too large for the memory of {device}")),
            Err(error) => print(&format!("{name}: {error}")),
        }
    }
    print(&hardware()?);
    Ok(())
}

type Part = fn(&Sizes, Device, bool) -> Result<String>;

/// `1.23 ms` and what it grew by, if that was measured.
fn told((ms, grown): (f64, Option<u64>)) -> String {
    let memory = grown.map_or(String::new(), |bytes| format!(", peak +{}", table::amount(bytes as f64, "B")));
    table::time(ms) + &memory
}

/// Fused attention beside a product, a softmax and a product, which keep all scores.
fn attention(sizes: &Sizes, device: Device, memory: bool) -> Result<String> {
    let &Sizes { batch, tokens, width, heads, block, .. } = sizes;
    let (rows, dim) = (batch * heads, width / heads);
    let random = |seed| Tensor::randn(&[rows, tokens, dim], DType::F32, device, seed);
    let (q, k, v) = (random(0)?, random(1)?, random(2)?);
    let by_token =
        |x: &Tensor| x.reshape(&[batch, heads, tokens, dim]).and_then(|x| x.permute(&[0, 2, 1, 3]));
    let (Some(qt), Some(kt), Some(vt), Some(columns)) =
        (by_token(&q), by_token(&k), by_token(&v), v.permute(&[0, 2, 1]))
    else {
        return Err(Error::parse("attention", "sizes that divide", format!("{width} in {heads} heads")));
    };
    // Blocks that no kernel has for this call leave it the choice.
    let blocks = Attention::new(&qt, &kt, &vt).blocks(0, block).run().map_or(0, |_| block);
    let fused = measure(device, memory, || Attention::new(&qt, &kt, &vt).blocks(0, blocks).run().map(drop))?;
    let scale = 1.0 / (dim as f32).sqrt();
    let apart = measure(device, memory, || {
        let mut scores = Linear::new(&q, &k).scale(scale).run()?;
        Softmax::in_place().run_in_place(scores.view_mut(), &device.default_stream()?)?;
        Linear::new(&scores, &columns).run().map(drop)
    })?;
    let kept = 4.0 * (rows * tokens * tokens) as f64;
    let blocks =
        if blocks == 0 { "blocks of its own choice".into() } else { format!("blocks of {blocks} keys") };
    Ok(format!(
        "attention: {} in one, {}; product, softmax, product: {}, {:.1}x as long, and {} of scores between",
        told(fused),
        blocks,
        told(apart),
        apart.0 / fused.0,
        table::amount(kept, "B")
    ))
}

/// The chosen experts of each token beside all of them.
fn experts(sizes: &Sizes, device: Device, memory: bool) -> Result<String> {
    let &Sizes { batch, tokens, width, experts, top_k, .. } = sizes;
    let (count, inner) = (batch * tokens, 2 * width);
    let random = |shape: &[usize], seed| Tensor::randn(shape, DType::F32, device, seed);
    let (x, logits) = (random(&[count, width], 3)?, random(&[count, experts], 4)?);
    let (w1, w2) = (random(&[experts, 2 * inner, width], 5)?, random(&[experts, width, inner], 6)?);
    let routed = measure(device, false, || MoeRoute::new(&logits, top_k).run().map(drop))?;
    let some = MoeRoute::new(&logits, top_k).run()?;
    let all = MoeRoute::new(&logits, experts).run()?;
    let run = |ids: &Tensor, weights: &Tensor| {
        let call = MoeFfn::new(&x, &w1, &w2, ids, weights).gated(Gate::Halves, linear::Activation::Silu);
        call.run().map(drop)
    };
    let sparse = measure(device, memory, || run(&some.ids, &some.weights))?;
    let dense = measure(device, memory, || run(&all.ids, &all.weights))?;
    let counts = some.counts.to_vec::<i32>()?;
    let fullest = f64::from(counts.iter().copied().max().unwrap_or(0));
    let even = (count * top_k) as f64 / experts as f64;
    Ok(format!(
        "experts: {top_k} of {experts}: routing {}, experts {}; all {experts} for every token: {}, {:.1}x as long. The \
         fullest has {:.2}x an even share",
        told(routed),
        told(sparse),
        told(dense),
        dense.0 / sparse.0,
        fullest / even
    ))
}

/// A layer with bias and GELU in one beside the product and what follows it.
fn fusion(sizes: &Sizes, device: Device, memory: bool) -> Result<String> {
    let &Sizes { batch, tokens, width, .. } = sizes;
    let random = |shape: &[usize], seed| Tensor::randn(shape, DType::F32, device, seed);
    let (x, w, bias) =
        (random(&[batch * tokens, width], 7)?, random(&[4 * width, width], 8)?, random(&[4 * width], 9)?);
    let fused = measure(device, memory, || Linear::new(&x, &w).bias(&bias).gelu().run().map(drop))?;
    let apart = measure(device, memory, || {
        let z = Linear::new(&x, &w).bias(&bias).run()?;
        Activation::gelu(&z).run().map(drop)
    })?;
    Ok(format!(
        "fusion: linear + bias + GELU to {}: {} in one, {} in two, {:.2}x as long",
        4 * width,
        told(fused),
        told(apart),
        apart.0 / fused.0
    ))
}

/// What other hardware would change in a decode step of a well-known model, in two lines.
fn hardware() -> Result<String> {
    let layers = Layers {
        name: "Qwen3-8B".into(),
        layers: 36,
        hidden: 4096,
        inner: 12288,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        vocab: 151_936,
        head_norms: true,
    };
    let model = Model::built_in();
    let changes = [Change::Memory(2.0), Change::Tensor(2.0), Change::Units(1.5)];
    let compared = compare(&model, &Target::Step(Step::new(layers, 1, 1024)?), &changes)?;
    let told = compared.outcomes.iter().map(|outcome| match outcome.faster {
        Some(faster) => format!("{} {faster:.2}x as fast", outcome.change),
        None => format!("{} no difference", outcome.change),
    });
    Ok(format!(
        "hardware: a decode step of Qwen3-8B on an H200 takes {} by the model (error {:.0} %): {}. More: `warpsmith whatif`",
        table::time(compared.now_us * 1e-3),
        100.0 * compared.held_out.median,
        told.collect::<Vec<_>>().join(", ")
    ))
}
