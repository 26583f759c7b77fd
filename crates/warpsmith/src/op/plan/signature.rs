//! Everything that a plan depends on, and how plans are found by it.

use super::work::{Work, make};
#[cfg(feature = "cuda")]
use crate::device::DeviceInfo;
use crate::device::{Device, Stream};
use crate::error::Result;
use crate::op::select::Select;
#[cfg(feature = "cuda")]
use crate::op::survey;
use crate::op::{Args, Attrs, Op, OpSpec};
use crate::tensor::{DType, Layout, TensorView};
use std::any::TypeId;
use std::hash::{Hash, Hasher};

/// Only the lowest bits of addresses matter: no kernel moves more than 16 bytes at once.
const ALIGNMENT: usize = 16;

/// Everything a plan depends on.
pub(super) struct Signature {
    /// The op itself: two ops of different crates may have one name.
    op: TypeId,
    pub spec: &'static OpSpec,
    attrs: Attrs,
    select: Select,
    pub args: Box<[Option<Form>]>,
}

/// What a plan depends on of one argument.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Form {
    pub dtype: DType,
    device: Device,
    pub layout: Layout,
    misalignment: u8,
    constant: bool,
}

impl Form {
    fn of(view: &TensorView<'_>) -> Form {
        let misalignment = (view.address() % ALIGNMENT) as u8;
        Form {
            dtype: view.dtype(),
            device: view.device(),
            layout: *view.layout(),
            misalignment,
            constant: view.is_constant(),
        }
    }

    fn is(&self, view: &TensorView<'_>) -> bool {
        self.misalignment == (view.address() % ALIGNMENT) as u8
            && self.dtype == view.dtype()
            && self.device == view.device()
            && self.constant == view.is_constant()
            && self.layout == *view.layout()
    }
}

impl Signature {
    pub fn of(asked: &Asked<'_>) -> Signature {
        let (spec, args) = (asked.maker.spec, asked.args);
        let args = (0..spec.args.len()).map(|index| args.get(index).map(Form::of)).collect();
        Signature { op: asked.maker.op, spec, attrs: *asked.attrs, select: asked.select.clone(), args }
    }

    pub fn is(&self, asked: &Asked<'_>) -> bool {
        self.op == asked.maker.op
            && self.attrs == *asked.attrs
            && self.select == *asked.select
            && self.fits(asked.args)
    }

    /// Whether arguments are of the op and of the forms that the plan was made for.
    pub fn fits(&self, args: &Args<'_>) -> bool {
        self.spec.takes_the_same(args.spec())
            && self.args.iter().enumerate().all(|(index, form)| match (form, args.get(index)) {
                (None, None) => true,
                (Some(form), Some(view)) => form.is(view),
                _ => false,
            })
    }
}

/// What plans need of an op's type, so that looking for them is compiled once and not for each op.
pub(in crate::op) struct Maker {
    op: TypeId,
    /// The op's own description, not that of the arguments: it decides which of them exist.
    spec: &'static OpSpec,
    pub(super) make: fn(&Asked<'_>, Option<&Stream>) -> Result<Option<Work>>,
    /// Notes what a call needs on a GPU that is only described.
    #[cfg(feature = "cuda")]
    pub note: fn(&DeviceInfo, &Asked<'_>) -> Result<()>,
}

impl Maker {
    fn of<O: Op>() -> &'static Maker {
        const {
            &Maker {
                op: TypeId::of::<O>(),
                spec: &O::SPEC,
                make: make::<O>,
                #[cfg(feature = "cuda")]
                note: survey::note::<O>,
            }
        }
    }
}

/// A call that a plan is wanted for.
#[derive(Clone, Copy)]
pub(in crate::op) struct Asked<'a> {
    pub maker: &'static Maker,
    pub args: &'a Args<'a>,
    pub attrs: &'a Attrs,
    pub select: &'a Select,
}

impl<'a> Asked<'a> {
    pub fn of<O: Op>(args: &'a Args<'_>, attrs: &'a Attrs, select: &'a Select) -> Asked<'a> {
        Asked { maker: Maker::of::<O>(), args, attrs, select }
    }
}

/// A quick hash of everything a plan depends on. Plans with the same hash are compared.
pub(super) fn hash(asked: &Asked<'_>) -> u64 {
    let Asked { maker, args, attrs, select } = asked;
    let mut mix = Mix(0);
    maker.op.hash(&mut mix);
    for (index, view) in args.given() {
        let layout = view.layout();
        mix.add(((index << 16) | (layout.rank() << 8) | (view.address() % ALIGNMENT)) as u64);
        mix.add(view.dtype() as u64);
        for (&size, &stride) in layout.shape().iter().zip(layout.strides()) {
            mix.add(size as u64);
            mix.add(stride as u64);
        }
    }
    attrs.bits().for_each(|bits| mix.add(bits));
    mix.add(select.allow_batch_variant as u64);
    mix.0
}

/// Multiplies and rotates each word into the state.
struct Mix(u64);

impl Mix {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.add(byte.into()));
    }
    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}
