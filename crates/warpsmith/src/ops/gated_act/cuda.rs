//! `gated_act` on CUDA devices.

use super::backward::BackwardProblem;
use super::{KINDS, OUT, Problem, X};
use crate::jit::Source;
use crate::jit::{CudaKernel, Defines};
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::cuda::{Signature, describe, device, run, variants};
use crate::ops::elementwise::function::Kind;

const SOURCE: Source = Source { name: "gated_act", code: include_str!("kernel.cu") };
const VALUE: Signature = Signature { inputs: 2, outputs: 1, shared: false, pairs: true };
const GRADIENTS: Signature = Signature { inputs: 3, outputs: 2, ..VALUE };

fn own(kind: Kind) -> Defines {
    vec![("FUNCTION", kind.device_name().into())]
}

static VALUE_DEVICE: CudaKernel = device(SOURCE, "gated_act", || variants(VALUE, &KINDS.map(own)));
static GRADIENTS_DEVICE: CudaKernel =
    device(SOURCE, "gated_act_backward", || variants(GRADIENTS, &KINDS.map(own)));

pub(super) const FORWARD: Kernel<Problem> =
    Kernel::cuda("gated_act_cuda", &VALUE_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let [gate, up] = p.halves(launch.args.address(X));
        let at = [gate, up, launch.args.address(OUT)];
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, &VALUE_DEVICE, &p.grid, VALUE, &at, own(p.kind)) }
    })
    .configured(|p, info| describe(&p.grid, VALUE, info));

pub(super) const BACKWARD: Kernel<BackwardProblem> =
    Kernel::cuda("gated_act_backward_cuda", &GRADIENTS_DEVICE, |launch: &Launch<'_, BackwardProblem>| {
        let (at, p) = (launch.problem.addresses(launch.args), &launch.problem.of);
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, &GRADIENTS_DEVICE, &p.grid, GRADIENTS, &at, own(p.kind)) }
    })
    .configured(|p, info| describe(&p.of.grid, GRADIENTS, info));
