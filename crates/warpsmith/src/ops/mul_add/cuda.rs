//! `mul_add` on CUDA devices.

use super::backward::{self, Wanted};
use super::{A, B, C, OUT, Problem};
use crate::jit::Source;
use crate::jit::{CudaKernel, Defines};
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::cuda::{Signature, describe, device, run, variants};

const SOURCE: Source = Source { name: "mul_add", code: include_str!("kernel.cu") };
const VALUE: Signature = Signature { inputs: 3, outputs: 1, shared: false, pairs: false };
const GRADIENTS: Signature = Signature { outputs: 2, ..VALUE };
const GRADIENT: Signature = Signature { inputs: 2, ..VALUE };
/// No defines but the engine's.
const NONE: &[Defines] = &[Vec::new()];

static VALUE_DEVICE: CudaKernel = device(SOURCE, "mul_add", || variants(VALUE, NONE));
static GRADIENTS_DEVICE: CudaKernel = device(SOURCE, "mul_add_backward", || variants(GRADIENTS, NONE));
static GRADIENT_DEVICE: CudaKernel = device(SOURCE, "mul_add_backward_one", || variants(GRADIENT, NONE));

pub(super) const FORWARD: Kernel<Problem> =
    Kernel::cuda("mul_add_cuda", &VALUE_DEVICE, |launch: &Launch<'_, Problem>| {
        let at = [A, B, C, OUT].map(|index| launch.args.address(index));
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, &VALUE_DEVICE, &launch.problem.grid, VALUE, &at, Vec::new()) }
    })
    .configured(|p, info| describe(&p.grid, VALUE, info));

pub(super) const BACKWARD: Kernel<backward::Problem> =
    Kernel::cuda("mul_add_backward_cuda", &GRADIENTS_DEVICE, |launch: &Launch<'_, backward::Problem>| {
        let backward::Problem { grid, wanted } = launch.problem;
        let at: Vec<usize> = wanted.operands().iter().map(|&index| launch.args.address(index)).collect();
        let (device, signature) = match wanted {
            Wanted::Neither => return Ok(()),
            Wanted::Da | Wanted::Db => (&GRADIENT_DEVICE, GRADIENT),
            Wanted::Both => (&GRADIENTS_DEVICE, GRADIENTS),
        };
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, device, grid, signature, &at, Vec::new()) }
    })
    .configured(|p, info| {
        describe(&p.grid, if p.wanted == Wanted::Both { GRADIENTS } else { GRADIENT }, info)
    })
    .and(&GRADIENT_DEVICE);
