//! The tensors of a case: filled, laid out as the case says, with poison in every byte that is not an element.

use super::generated::Generated;
use super::values::draw;
use crate::device::Device;
use crate::error::Result;
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill};
use crate::op::{Args, OpSpec, Role};
use crate::tensor::{DType, Layout, Shape, Tensor, TensorView, TensorViewMut};

/// Bytes of poison before and after the elements: more than any vector access, and keeps 256-byte alignment.
const GUARD: usize = 256;
/// A byte that makes NaN in every float type, so that reads from gaps and missing writes show.
const POISON: u8 = 0xff;

/// One argument: a raw allocation with the elements inside.
struct Slot {
    memory: Tensor,
    /// What was uploaded, to detect changes.
    image: Vec<u8>,
    layout: Layout,
    dtype: DType,
    /// Bytes from the start of the allocation to the first element.
    start: usize,
}

/// All tensors of a case on one device.
pub struct Tensors {
    spec: &'static OpSpec,
    slots: Vec<Option<Slot>>,
    /// Values before a run, rounded to their dtypes, of inputs and of arguments that are changed in part.
    pub inputs: Vec<Option<Array<f64>>>,
    in_place: bool,
}

impl Tensors {
    /// Draws inputs from `seed` and places everything on `device`.
    pub fn new(
        spec: &'static OpSpec,
        case: &Case,
        plan: &[Option<ArgPlan>],
        device: Device,
        seed: u64,
    ) -> Result<Tensors> {
        let mut tensors = Tensors { spec, slots: Vec::new(), inputs: Vec::new(), in_place: case.in_place };
        let mut generated = Generated::new(case, seed);
        for (index, (arg, plan)) in spec.args.iter().zip(plan).enumerate() {
            let Some(plan) = plan else {
                tensors.slots.push(None);
                tensors.inputs.push(None);
                continue;
            };
            let values = arg.is_input().then(|| match plan.fill {
                Fill::Generated(generator) => generated.values(generator, index, plan),
                _ => draw(plan, case.values, index, seed),
            });
            let arrangement = case.arrangement.of(index, seed);
            tensors.slots.push(Some(Slot::new(plan, arrangement, values.as_deref(), device)?));
            tensors.inputs.push(values.map(|data| Array { shape: plan.shape.clone(), data }));
        }
        // Kernels may treat constant inputs in another way: every second case has some.
        if seed % 2 == 1 {
            let written: Vec<usize> = tensors.written().collect();
            for (index, slot) in tensors.slots.iter_mut().enumerate() {
                if let Some(slot) = slot.as_mut().filter(|_| !written.contains(&index)) {
                    slot.memory.make_constant()?;
                }
            }
        }
        Ok(tensors)
    }

    /// The arguments whose memory outputs use.
    fn written(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.slots.len()).filter(|&i| self.spec.args[i].is_output()).map(|i| self.home(i))
    }

    /// A bit for every argument of the call.
    pub fn present(&self) -> u32 {
        self.slots.iter().enumerate().filter(|(_, s)| s.is_some()).map(|(i, _)| 1 << i).sum()
    }

    fn home(&self, index: usize) -> usize {
        home(self.spec, self.in_place, |i| self.slots[i].is_some(), index)
    }

    /// The call's arguments. `part` restricts the batch dimension of each argument.
    pub fn args(&mut self, plan: &[Option<ArgPlan>], part: Option<std::ops::Range<usize>>) -> Args<'_> {
        let mut args = Args::new(self.spec);
        for (index, arg) in self.spec.args.iter().enumerate() {
            if self.slots[index].is_none() {
                continue;
            }
            let mut view = self.slots[self.home(index)].as_ref().expect("a home is present").view();
            if let (Some(part), Some(dim)) = (&part, plan[index].as_ref().and_then(|p| p.batch_dim)) {
                view = view.narrow(dim, part.start, part.len()).expect("parts lie inside the batch");
            }
            args = match arg.is_output() {
                false => args.input(index, view),
                // SAFETY: `self` is borrowed alone for as long as these arguments live; an output shares memory with an input
                // only where the op defines it.
                true => args.output(index, unsafe { TensorViewMut::assume_unique(view) }),
            };
        }
        args
    }

    /// Restores every byte that can change to its state before the first run.
    pub fn reset(&mut self) -> Result<()> {
        for slot in self.slots.iter_mut().flatten().filter(|slot| !slot.memory.is_constant()) {
            slot.memory.write(0, &slot.image, &slot.memory.device().default_stream()?)?;
        }
        Ok(())
    }

    /// The bytes of an argument's elements in row-major order.
    pub fn bytes(&self, index: usize) -> Result<Vec<u8>> {
        self.slots[self.home(index)].as_ref().expect("a given argument").view().to_bytes()
    }

    /// Bytes that changed but must not: inputs, and bytes around or between the elements of outputs.
    pub fn damage(&self) -> Result<Option<String>> {
        let written: Vec<usize> = self.written().collect();
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let mut now = slot.memory.to_vec::<u8>()?;
            if written.contains(&index) {
                slot.copy_elements(&slot.image, &mut now);
            }
            if let Some(at) = now.iter().zip(&slot.image).position(|(a, b)| a != b) {
                let name = self.spec.args[index].name;
                let at = at as i64 - slot.start as i64;
                return Ok(Some(format!("`{name}`: byte {at} from its start was overwritten")));
            }
        }
        Ok(None)
    }
}

impl Slot {
    fn new(plan: &ArgPlan, arrangement: Arrangement, values: Option<&[f64]>, device: Device) -> Result<Slot> {
        let layout = arrange(Shape::new(&plan.shape)?, arrangement)?;
        let size = plan.dtype.size();
        let start = GUARD + if arrangement == Arrangement::Misaligned { size } else { 0 };
        let mut image = vec![POISON; start + layout.span() * size + GUARD];
        let dense = layout.is_contiguous();
        for (i, &value) in values.unwrap_or_default().iter().enumerate() {
            let at = start + if dense { i } else { layout.offset_of(i) } * size;
            plan.dtype.write(value, &mut image[at..at + size]);
        }
        let memory = Tensor::from_slice(&image, &[image.len()], device)?;
        Ok(Slot { memory, image, layout, dtype: plan.dtype, start })
    }

    fn view(&self) -> TensorView<'_> {
        self.memory.view().recast(self.start, self.dtype, self.layout)
    }

    fn copy_elements(&self, from: &[u8], to: &mut [u8]) {
        let size = self.dtype.size();
        if self.layout.is_contiguous() {
            let all = self.start..self.start + self.layout.numel() * size;
            return to[all.clone()].copy_from_slice(&from[all]);
        }
        for i in 0..self.layout.numel() {
            let at = self.start + self.layout.offset_of(i) * size;
            to[at..at + size].copy_from_slice(&from[at..at + size]);
        }
    }
}

/// The argument whose memory `index` uses: its input when computing in place.
pub(super) fn home(spec: &OpSpec, in_place: bool, given: impl Fn(usize) -> bool, index: usize) -> usize {
    match spec.args[index].role {
        Role::Out { in_place_of: Some(input) } if in_place && given(input) => input,
        _ => index,
    }
}

/// The layout of a tensor of this shape in a case of this arrangement.
pub fn arrange(shape: Shape, arrangement: Arrangement) -> Result<Layout> {
    let rank = shape.len();
    let mut memory = shape.to_vec();
    match arrangement {
        Arrangement::Contiguous | Arrangement::Misaligned | Arrangement::Mixed => {
            Ok(Layout::contiguous(shape))
        }
        Arrangement::PaddedRows if rank >= 2 => {
            memory[rank - 1] += 3;
            Layout::strided(shape, Layout::contiguous(Shape::new(&memory)?).strides())
        }
        Arrangement::Transposed if rank >= 2 => {
            memory.swap(rank - 1, rank - 2);
            let mut order: Vec<usize> = (0..rank).collect();
            order.swap(rank - 1, rank - 2);
            Ok(Layout::contiguous(Shape::new(&memory)?).permute(&order))
        }
        Arrangement::HeadsFirst if rank >= 3 => {
            memory.swap(rank - 2, rank - 3);
            let mut order: Vec<usize> = (0..rank).collect();
            order.swap(rank - 2, rank - 3);
            Ok(Layout::contiguous(Shape::new(&memory)?).permute(&order))
        }
        // A vector has no rows to pad or transpose, so use every second element.
        _ if rank == 1 => Layout::strided(shape, &[2]),
        _ => Ok(Layout::contiguous(shape)),
    }
}
