//! The outputs of recent calls, which are mostly those of the next. To infer them costs as much as a small kernel.

use super::kernel::Kernel;
use std::cell::RefCell;
use std::rc::Rc;
use warpsmith::op::{Args, Attrs, Form};
use warpsmith::tensor::Layout;
use warpsmith::{DType, Result};

/// Calls that are remembered. A later one takes the place of an earlier one with the same number.
const CALLS: usize = 64;

thread_local! {
    static RECENT: RefCell<[Option<Known>; CALLS]> = const { RefCell::new([const { None }; CALLS]) };
}

/// The forms of a call's outputs, by position.
pub type Forms = Rc<[Option<Form>]>;

/// A call, by all that its outputs' forms follow from.
struct Known {
    kernel: *const Kernel,
    attrs: Attrs,
    wanted: Vec<usize>,
    inputs: Vec<Option<(DType, Layout)>>,
    forms: Forms,
}

/// What the outputs of a call must be.
pub fn outputs(kernel: &Kernel, args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Forms> {
    let place = place(kernel, args);
    let known = RECENT.with_borrow(|recent| {
        let known = recent[place].as_ref().filter(|known| known.is(kernel, args, attrs, wanted))?;
        Some(known.forms.clone())
    });
    if let Some(forms) = known {
        return Ok(forms);
    }
    let forms: Forms = kernel.op.outputs(args, attrs, wanted)?.into();
    let count = kernel.signature.spec.args.len();
    let inputs = (0..count).map(|index| args.get(index).map(|view| (view.dtype(), *view.layout()))).collect();
    let known = Known { kernel, attrs: *attrs, wanted: wanted.to_vec(), inputs, forms: forms.clone() };
    RECENT.with_borrow_mut(|recent| recent[place] = Some(known));
    Ok(forms)
}

impl Known {
    fn is(&self, kernel: &Kernel, args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> bool {
        std::ptr::eq(self.kernel, kernel)
            && self.wanted == wanted
            && self.attrs == *attrs
            && self.inputs.iter().enumerate().all(|(index, input)| match (input, args.get(index)) {
                (None, None) => true,
                (Some((dtype, layout)), Some(view)) => *dtype == view.dtype() && layout == view.layout(),
                _ => false,
            })
    }
}

/// Where a call is looked for: by the op and the sizes of its first argument.
fn place(kernel: &Kernel, args: &Args<'_>) -> usize {
    let sizes =
        (0..kernel.signature.spec.args.len()).find_map(|index| args.get(index)).map(|view| view.shape());
    let seed = (std::ptr::from_ref(kernel) as usize) >> 4;
    let mixed = sizes
        .unwrap_or(&[])
        .iter()
        .fold(seed, |mix, &size| (mix.rotate_left(5) ^ size).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (mixed >> 32) % CALLS
}
