//! The tensors of one call.

use super::spec::{MAX_ARGS, OpSpec, Role};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Refusal, TensorView, TensorViewMut};
use std::any::Any;

/// The tensors of one call, by position in [`OpSpec::args`].
///
/// It holds the right to write its outputs, so it cannot be cloned, and what it shows of them cannot outlive a borrow.
pub struct Args<'a> {
    spec: &'static OpSpec,
    slots: [Option<TensorView<'a>>; MAX_ARGS],
    /// The first output that must not be written, and why.
    refusal: Option<(u8, Refusal)>,
    /// A prepared form of an input, and which input. Holding one is proof that it was made from that very tensor.
    prepared: Option<(usize, &'a (dyn Any + Sync))>,
}

impl<'a> Args<'a> {
    /// No tensors yet.
    pub fn new(spec: &'static OpSpec) -> Self {
        Args { spec, slots: [None; MAX_ARGS], refusal: None, prepared: None }
    }

    /// Sets an input.
    ///
    /// # Panics
    /// If the op's argument `index` is an output: a mistake in the op, not in the call.
    pub fn input(mut self, index: usize, view: TensorView<'a>) -> Self {
        self.set_input(index, view);
        self
    }

    /// As [`Args::input`], by reference: arguments are large, and moving them costs as much as a small call.
    pub fn set_input(&mut self, index: usize, view: TensorView<'a>) {
        assert!(!self.spec.args[index].is_output(), "{} is an output", self.spec.args[index].name);
        self.slots[index] = Some(view);
        // Kernels would use the prepared form of the previous tensor, whose shape may differ.
        self.prepared = self.prepared.filter(|(of, _)| *of != index);
    }

    /// Sets an input if there is one.
    pub fn maybe(self, index: usize, view: Option<TensorView<'a>>) -> Self {
        match view {
            Some(view) => self.input(index, view),
            None => self,
        }
    }

    /// Sets an output.
    ///
    /// # Panics
    /// If the op's argument `index` is an input: a mistake in the op, not in the call.
    pub fn output(mut self, index: usize, view: TensorViewMut<'a>) -> Self {
        self.set_output(index, view);
        self
    }

    /// As [`Args::output`], by reference.
    pub fn set_output(&mut self, index: usize, view: TensorViewMut<'a>) {
        assert!(self.spec.args[index].is_output(), "{} is an input", self.spec.args[index].name);
        let (view, refusal) = view.into_parts();
        self.slots[index] = Some(view);
        self.refusal = self.refusal.or(refusal.map(|refusal| (index as u8, refusal)));
    }

    /// Sets an output and the input it is computed in place of to the same memory.
    pub fn in_place(mut self, input: usize, output: usize, view: TensorViewMut<'a>) -> Self {
        self.set_in_place(input, output, view);
        self
    }

    /// As [`Args::in_place`], by reference.
    pub fn set_in_place(&mut self, input: usize, output: usize, view: TensorViewMut<'a>) {
        assert_eq!(self.spec.args[output].role, Role::Out { in_place_of: Some(input) });
        self.set_output(output, view);
        self.slots[input] = self.slots[output];
    }

    /// These arguments with stand-ins for their addresses, for recording a call. They are never read or written.
    #[cfg(feature = "cuda")]
    pub(super) fn with_addresses(&self, address: impl Fn(usize) -> usize) -> Args<'_> {
        let mut slots = self.slots;
        for (index, slot) in slots.iter_mut().enumerate() {
            if let Some(view) = slot {
                view.address = address(index);
            }
        }
        Args { spec: self.spec, slots, refusal: None, prepared: None }
    }

    /// The same tensors under another description, which must read and write the same arguments. The description that
    /// arguments were made for comes from the caller; an op trusts only its own.
    pub(super) fn described_by(&self, spec: &'static OpSpec) -> Args<'_> {
        debug_assert!(spec.takes_the_same(self.spec));
        Args { spec, slots: self.slots, refusal: self.refusal, prepared: self.prepared }
    }

    /// The arguments given, with their positions.
    pub(super) fn given(&self) -> impl Iterator<Item = (usize, &TensorView<'a>)> {
        let slots = self.slots[..self.spec.args.len()].iter().enumerate();
        slots.filter_map(|(index, slot)| Some((index, slot.as_ref()?)))
    }

    /// Gives kernels a prepared form of the input `index`, which must be set already. Only a hint: kernels that cannot
    /// use it take the input itself. Setting another input removes it.
    pub(crate) fn with_prepared<T: Any + Sync>(mut self, index: usize, prepared: &'a T) -> Self {
        self.prepared = Some((index, prepared));
        self
    }

    /// The prepared form of an input, if it has this type.
    pub(crate) fn prepared<T: Any>(&self) -> Option<&'a T> {
        (self.prepared?.1 as &dyn Any).downcast_ref()
    }

    /// A number for the tensor that the call moves most of: its address, or that of its prepared form. For profiles.
    pub(super) fn main_data(&self) -> u64 {
        if let Some((_, prepared)) = self.prepared {
            return (&raw const *prepared).cast::<u8>() as usize as u64;
        }
        let bytes = |view: &TensorView<'_>| view.layout().numel() * view.dtype().size();
        self.given().max_by_key(|(_, view)| bytes(view)).map_or(0, |(_, view)| view.address() as u64)
    }

    /// The op's description.
    pub fn spec(&self) -> &'static OpSpec {
        self.spec
    }

    /// An argument, if given.
    pub fn get<'s>(&'s self, index: usize) -> Option<&'s TensorView<'s>> {
        self.slots[index].as_ref()
    }

    /// A required argument; present once [`Args::validate`] has passed.
    pub fn at<'s>(&'s self, index: usize) -> &'s TensorView<'s> {
        self.get(index)
            .unwrap_or_else(|| panic!("{}: `{}` is missing", self.spec.name, self.spec.args[index].name))
    }

    /// Address of an argument; zero if it was left out.
    #[inline]
    pub fn address(&self, index: usize) -> usize {
        self.get(index).map_or(0, |view| view.address())
    }

    /// The device all arguments live on.
    pub fn device(&self) -> Device {
        self.slots.iter().flatten().next().map_or(Device::Cpu, |view| view.device())
    }

    /// Whether every tensor's rows (its last dimension) are dense, start on 16-byte boundaries and are whole
    /// multiples of 16 bytes long, so that they can be moved in 16-byte pieces.
    pub fn have_vector_rows(&self) -> bool {
        self.slots.iter().flatten().all(has_vector_rows)
    }

    /// The same for some arguments, of those that are given.
    pub fn are_vector_rows(&self, indices: &[usize]) -> bool {
        indices.iter().filter_map(|&index| self.get(index)).all(has_vector_rows)
    }

    /// Whether no output has any element, so that there is nothing to do.
    pub fn outputs_are_empty(&self) -> bool {
        let outputs = self.spec.args.iter().zip(&self.slots).filter(|(arg, _)| arg.is_output());
        outputs.filter_map(|(_, slot)| slot.as_ref()).all(|view| view.layout().numel() == 0)
    }

    /// The checks that are the same for every op: required arguments, one device, alignment, aliasing.
    pub fn validate(&self) -> Result<()> {
        let op = self.spec.name;
        for (index, arg) in self.spec.args.iter().enumerate() {
            let Some(view) = self.get(index) else {
                if arg.optional {
                    continue;
                }
                return Err(Error::argument(op, arg.name, "a tensor", "nothing"));
            };
            if view.device() != self.device() {
                let expected = format!("a tensor on {}, like the other arguments", self.device());
                return Err(Error::argument(op, arg.name, expected, view.device().to_string()));
            }
            if view.layout().numel() > 0 && !view.is_aligned(view.dtype().size()) {
                let expected = format!("an address that is a multiple of {} bytes", view.dtype().size());
                return Err(Error::argument(op, arg.name, expected, format!("{:#x}", view.address())));
            }
            if arg.is_output() && view.layout().overlaps_itself() {
                let got = format!("{:?}", view.layout());
                return Err(Error::argument(op, arg.name, "an output whose elements are all distinct", got));
            }
        }
        self.check_writes()
    }

    /// The checks that depend on addresses, and so are made for every call: that outputs may be written, and share no
    /// element with another argument.
    pub(super) fn check_writes(&self) -> Result<()> {
        if let Some((index, refusal)) = self.refusal {
            let arg = self.spec.args[index as usize].name;
            return Err(Error::argument(self.spec.name, arg, Refusal::EXPECTED, refusal.to_string()));
        }
        let outputs = self.given().filter(|(index, _)| self.spec.args[*index].is_output());
        outputs.into_iter().try_for_each(|(index, view)| self.check_aliases(index, view))
    }

    fn check_aliases(&self, output: usize, view: &TensorView<'_>) -> Result<()> {
        let role = self.spec.args[output].role;
        for (index, other) in self.given().filter(|(index, _)| *index != output) {
            let same = other.address() == view.address()
                && other.dtype() == view.dtype()
                && other.layout() == view.layout();
            let in_place = same && role == (Role::Out { in_place_of: Some(index) });
            if !in_place && !view.is_apart_from(other) {
                return Err(Error::argument(
                    self.spec.name,
                    self.spec.args[output].name,
                    "memory that no other argument uses",
                    format!("memory that overlaps `{}`", self.spec.args[index].name),
                ));
            }
        }
        Ok(())
    }
}

/// Whether rows can be moved in 16-byte pieces.
fn has_vector_rows(view: &TensorView<'_>) -> bool {
    view.has_rows_of(16 / view.dtype().size())
}
