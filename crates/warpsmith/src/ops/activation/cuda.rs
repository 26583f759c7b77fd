//! `activation` on CUDA devices.

use super::{DOUT, DX, KINDS, OUT, Problem, X};
use crate::jit::Source;
use crate::jit::{CudaKernel, Defines};
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::cuda::{Signature, describe, device, run, variants};
use crate::ops::elementwise::function::Kind;

const SOURCE: Source = Source { name: "activation", code: include_str!("kernel.cu") };
const VALUE: Signature = Signature { inputs: 1, outputs: 1, shared: false, pairs: false };
const GRADIENT: Signature = Signature { inputs: 2, ..VALUE };

fn own(kind: Kind) -> Defines {
    vec![("FUNCTION", kind.device_name().into())]
}

static VALUE_DEVICE: CudaKernel = device(SOURCE, "activation", || variants(VALUE, &KINDS.map(own)));
static GRADIENT_DEVICE: CudaKernel =
    device(SOURCE, "activation_backward", || variants(GRADIENT, &KINDS.map(own)));

pub(super) const FORWARD: Kernel<Problem> =
    Kernel::cuda("activation_cuda", &VALUE_DEVICE, |launch: &Launch<'_, Problem>| {
        let Problem { grid, kind } = launch.problem;
        let at = [X, OUT].map(|index| launch.args.address(index));
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, &VALUE_DEVICE, grid, VALUE, &at, own(*kind)) }
    })
    .configured(|p, info| describe(&p.grid, VALUE, info));

pub(super) const BACKWARD: Kernel<Problem> =
    Kernel::cuda("activation_backward_cuda", &GRADIENT_DEVICE, |launch: &Launch<'_, Problem>| {
        let Problem { grid, kind } = launch.problem;
        let at = [X, DOUT, DX].map(|index| launch.args.address(index));
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run(launch, &GRADIENT_DEVICE, grid, GRADIENT, &at, own(*kind)) }
    })
    .configured(|p, info| describe(&p.grid, GRADIENT, info));
