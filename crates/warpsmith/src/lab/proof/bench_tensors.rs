//! Tensors of any size, for timing and for cases past 2^31 elements: no guards, filled by repeating one block of
//! values.

use super::generated::Generated;
use super::tensors::{arrange, home};
use crate::cpu;
use crate::device::Device;
use crate::error::Result;
use crate::lab::{ArgPlan, Arrangement, Case, Fill};
use crate::op::{Args, OpSpec};
use crate::tensor::{DType, Layout, Random, Shape, Tensor, TensorView, TensorViewMut};
use std::sync::LazyLock;

/// Values of the repeated block: large enough that no cache or compressor profits from the repetition.
const BLOCK: usize = 4 << 20;
/// Of all values.
const SEED: u64 = 0x5eed;

static NORMALS: LazyLock<Vec<f32>> = LazyLock::new(|| {
    let mut rng = Random::new(SEED);
    (0..BLOCK).map(|_| rng.normal() as f32).collect()
});

/// One argument.
struct Slot {
    memory: Tensor,
    layout: Layout,
    dtype: DType,
    /// Bytes from the start of the allocation to the first element.
    start: usize,
}

/// All tensors of a case on one device. Inputs hold typical values, never zeros; outputs are uninitialised.
pub struct BenchTensors {
    spec: &'static OpSpec,
    slots: Vec<Option<Slot>>,
    in_place: bool,
}

impl BenchTensors {
    /// Allocates everything and fills the inputs, synchronously.
    pub fn new(
        spec: &'static OpSpec,
        case: &Case,
        plan: &[Option<ArgPlan>],
        device: Device,
    ) -> Result<BenchTensors> {
        Ok(BenchTensors::copies(spec, case, plan, device, 1)?.swap_remove(0))
    }

    /// Like [`BenchTensors::new`], several times with the same values.
    pub fn copies(
        spec: &'static OpSpec,
        case: &Case,
        plan: &[Option<ArgPlan>],
        device: Device,
        count: usize,
    ) -> Result<Vec<BenchTensors>> {
        let empty = || BenchTensors { spec, slots: Vec::new(), in_place: case.in_place };
        let mut copies: Vec<BenchTensors> = (0..count).map(|_| empty()).collect();
        let mut generated = Generated::new(case, SEED);
        for (index, (arg, plan)) in spec.args.iter().zip(plan).enumerate() {
            let Some(plan) = plan else {
                copies.iter_mut().for_each(|set| set.slots.push(None));
                continue;
            };
            let mut values = None;
            for set in &mut copies {
                let slot = Slot::new(plan, case.arrangement, device)?;
                if arg.is_input() {
                    let values = values.get_or_insert_with(|| match plan.fill {
                        Fill::Generated(generator) => slot.image(&generated.values(generator, index, plan)),
                        _ => block(plan, index, slot.layout.span()),
                    });
                    slot.fill(values)?;
                }
                set.slots.push(Some(slot));
            }
        }
        device.synchronize()?;
        Ok(copies)
    }

    /// Bytes that [`BenchTensors::new`] allocates; `usize::MAX` stands for more than can be addressed.
    pub fn bytes(plan: &[Option<ArgPlan>], arrangement: Arrangement) -> Result<usize> {
        plan.iter().flatten().try_fold(0usize, |sum, plan| {
            let span = arrange(Shape::new(&plan.shape)?, arrangement)?.span();
            Ok(sum.saturating_add(span.saturating_mul(plan.dtype.size())))
        })
    }

    /// The arguments of a call on these tensors.
    pub fn args(&mut self) -> Args<'_> {
        let mut args = Args::new(self.spec);
        for (index, arg) in self.spec.args.iter().enumerate() {
            if self.slots[index].is_none() {
                continue;
            }
            let view = self.view(index);
            args = match arg.is_output() {
                false => args.input(index, view),
                // SAFETY: `self` is borrowed alone for as long as these arguments live; an output shares memory with an input
                // only where the op defines it.
                true => args.output(index, unsafe { TensorViewMut::assume_unique(view) }),
            };
        }
        args
    }

    /// One argument that the case gives.
    pub fn view(&self, index: usize) -> TensorView<'_> {
        let home = home(self.spec, self.in_place, |i| self.slots[i].is_some(), index);
        self.slots[home].as_ref().expect("a given argument").view()
    }

    /// Overwrites an argument by repeating `bytes`, synchronously.
    pub fn refill(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let home = home(self.spec, self.in_place, |i| self.slots[i].is_some(), index);
        let slot = self.slots[home].as_ref().expect("a given argument");
        slot.fill(bytes)?;
        slot.memory.device().synchronize()
    }
}

impl Slot {
    fn new(plan: &ArgPlan, arrangement: Arrangement, device: Device) -> Result<Slot> {
        let layout = arrange(Shape::new(&plan.shape)?, arrangement)?;
        let size = plan.dtype.size();
        let start = if arrangement == Arrangement::Misaligned { size } else { 0 };
        let memory = Tensor::empty(&[start + layout.span() * size], DType::U8, device)?;
        Ok(Slot { memory, layout, dtype: plan.dtype, start })
    }

    fn view(&self) -> TensorView<'_> {
        self.memory.view().recast(self.start, self.dtype, self.layout)
    }

    /// The bytes of the whole span with `values` in place and zeros elsewhere.
    fn image(&self, values: &[f64]) -> Vec<u8> {
        let size = self.dtype.size();
        let mut bytes = vec![0; self.layout.span() * size];
        for (i, &value) in values.iter().enumerate() {
            self.dtype.write(value, &mut bytes[self.layout.offset_of(i) * size..][..size]);
        }
        bytes
    }

    /// Repeats `block` over the whole span, gaps between elements included.
    fn fill(&self, block: &[u8]) -> Result<()> {
        let (address, total) = (self.view().address(), self.layout.span() * self.dtype.size());
        if total == 0 || block.is_empty() {
            return Ok(());
        }
        match self.memory.device() {
            Device::Cpu => {
                let parts = total.div_ceil(block.len());
                // In parallel, also because a page is placed near the thread that writes it first.
                cpu::parallel_for(parts, 1, |range| {
                    for part in range {
                        let at = part * block.len();
                        let len = block.len().min(total - at);
                        // SAFETY: the parts are disjoint and inside our memory, which no view reads meanwhile.
                        unsafe {
                            std::ptr::copy_nonoverlapping(block.as_ptr(), (address + at) as *mut u8, len);
                        }
                    }
                });
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                use crate::cuda::{Context, copy_d2d, upload};
                let stream = Context::get(ordinal)?.default_stream();
                let address = address as u64;
                let mut filled = block.len().min(total);
                // SAFETY: the range lies inside our memory, which was allocated on this stream.
                unsafe { upload(stream, address, &block[..filled]) }?;
                while filled < total {
                    let len = filled.min(total - filled);
                    // SAFETY: the filled part and the part after it do not overlap, and both are ours.
                    unsafe { copy_d2d(stream, address + filled as u64, address, len) }?;
                    filled += len;
                }
                Ok(())
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
        }
    }
}

/// The first `count` elements of an argument, or a block of them to be repeated. Arguments of one call differ.
fn block(plan: &ArgPlan, index: usize, count: usize) -> Vec<u8> {
    let count = count.min(BLOCK);
    let mut bytes = vec![0; count * plan.dtype.size()];
    let elements = bytes.chunks_exact_mut(plan.dtype.size());
    match plan.fill {
        Fill::Normal(mean, deviation) => {
            let values = NORMALS.iter().cycle().skip(index * 1_000_003 % BLOCK);
            for (element, value) in elements.zip(values) {
                plan.dtype.write(mean + deviation * f64::from(*value), element);
            }
        }
        Fill::Factor | Fill::AnyFactor | Fill::Exponent(_) | Fill::Weighted => {
            return block(&ArgPlan { fill: Fill::Normal(0.0, 1.0), ..plan.clone() }, index, count);
        }
        Fill::Below(bound) => {
            let mut rng = Random::new(index as u64);
            elements.for_each(|element| plan.dtype.write(rng.below(bound as u64) as f64, element));
        }
        Fill::Distinct(bound) => {
            let numbers = Random::new(index as u64).distinct(count, bound);
            elements.zip(numbers).for_each(|(element, n)| plan.dtype.write(n as f64, element));
        }
        Fill::Constant(value) => elements.for_each(|element| plan.dtype.write(value, element)),
        Fill::Generated(_) => unreachable!("generated by the op"),
        Fill::Starts(lengths) => {
            elements.enumerate().for_each(|(i, element)| plan.dtype.write(lengths.sum(i) as f64, element));
        }
    }
    bytes
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_filled_to_the_last_element_and_differ() {
        let op = crate::lab::find("rms_norm").unwrap();
        let weight = 1;
        let case = Case::new(op.spec(), DType::BF16).sizes(&[5, BLOCK / 4 + 3]).give(weight);
        let plan = op.plan(&case);
        let set = BenchTensors::new(op.spec(), &case, &plan, Device::Cpu).unwrap();
        let x = set.view(0).to_f64().unwrap();
        assert_eq!(
            x.len() * 2 + x.len() * 2 + (BLOCK / 4 + 3) * 2,
            BenchTensors::bytes(&plan, case.arrangement).unwrap()
        );
        assert_eq!(x[..100], x[BLOCK..BLOCK + 100], "the block repeats");
        assert!(x.iter().filter(|x| **x == 0.0).count() < 100);
        assert_ne!(x[..100], set.view(weight).to_f64().unwrap()[..100]);
    }
}
