//! `relu_squared`: `out = max(x, 0)²`, element by element.
//!
//! - Shapes: `x` and `out` are `[..., hidden]` and contiguous.
//! - Types: f32. The square is rounded once.
//! - A NaN in `x` gives NaN. Negative infinity gives zero, positive infinity stays.
//! - `out` may be `x`, in place. An empty tensor is left alone.

use warpsmith::cpu::{Simd, Task, Tier, dispatch, map, parallel_for, should_stream};
use warpsmith::cuda::LaunchConfig;
use warpsmith::cuda::rows::grid_blocks;
use warpsmith::jit::{Arch, CudaKernel, Source};
use warpsmith::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Launch, Matcher, OneOutput, Op, OpSpec, SizeSpec,
    shape,
};
use warpsmith::{Error, Result, Tensor, kernel_params};

pub const X: usize = 0;
pub const OUT: usize = 1;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    count: usize,
}

/// The op.
#[derive(Default)]
pub struct ReluSquared;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for ReluSquared {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "relu_squared",
        summary: "Square of what is positive",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::F32, "contiguous"),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::F32, "contiguous").in_place_of(X),
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Matcher::of(args, attrs)?;
        for index in [X, OUT] {
            let layout = args.at(index).layout();
            if !layout.is_contiguous() {
                let name = Self::SPEC.args[index].name;
                return Err(Error::argument(
                    "relu_squared",
                    name,
                    "a contiguous tensor",
                    format!("{layout:?}"),
                ));
            }
        }
        Ok(Problem { count: args.at(X).layout().numel() })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        static KERNELS: &[Kernel<Problem>] = &[
            Kernel::cuda("relu_squared_elementwise", &DEVICE, run_cuda),
            Kernel::cpu("relu_squared_avx512", Tier::Avx512, run_cpu),
            Kernel::cpu("relu_squared_avx2", Tier::Avx2, run_cpu),
            Kernel::cpu("relu_squared_portable", Tier::Portable, run_cpu),
        ];
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        let elements = problem.count as f64;
        Cost::moving(8.0 * elements, 2.0 * elements)
    }
}

impl OneOutput for ReluSquared {
    const OUTPUT: usize = OUT;
}

/// A call with a new output. The methods of [`Call`] make richer builders.
pub fn relu_squared(x: &Tensor) -> Result<Tensor> {
    Call::<ReluSquared>::start().input(X, x).run()
}

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

/// One source for all tiers: threads outside, instructions inside.
fn run_cpu(launch: &Launch<'_, Problem>) -> Result<()> {
    let count = launch.problem.count;
    let (x, out) = (launch.args.address(X), launch.args.address(OUT));
    let stream = should_stream(count * size_of::<f32>());
    parallel_for(count, GRAIN, |part| {
        let at = part.start * size_of::<f32>();
        dispatch(launch.tier, Part { x: x + at, out: out + at, count: part.len(), stream });
    });
    Ok(())
}

struct Part {
    x: usize,
    out: usize,
    count: usize,
    stream: bool,
}

impl Task for Part {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let zero = s.splat(0.0);
        // SAFETY: `check` made sure that both tensors have these elements; parts are disjoint, and each element is read before
        // it is written.
        unsafe {
            map(
                s,
                self.x as *const f32,
                self.out as *mut f32,
                self.count,
                self.stream,
                #[inline(always)]
                |v| {
                    // `max` gives its second operand where one is NaN.
                    let positive = s.max(zero, v);
                    s.mul(positive, positive)
                },
            );
        }
    }
}

kernel_params! {
    struct ReluSquaredParams { x: u64, out: u64, count: i64 }
}

const THREADS: u32 = 256;

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "relu_squared", code: include_str!("relu_squared.cu") },
    prelude: ReluSquaredParams::prelude,
    function: "relu_squared",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![vec![]],
};

/// The host half: it runs once for a plan, and its launch is recorded.
fn run_cuda(launch: &Launch<'_, Problem>) -> Result<()> {
    let count = launch.problem.count;
    let blocks = grid_blocks("relu_squared", count.div_ceil(THREADS as usize))?;
    let params = ReluSquaredParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        count: count as i64,
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1], 0);
    // SAFETY: `check` made sure that both tensors have `count` elements, and the kernel touches no others.
    unsafe { launch.record(&vec![], &config, &params) }
}
