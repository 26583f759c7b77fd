//! Experts with quantised matrices, on the CPU: one product after the other, each of the rows that were sent to its expert. The
//! matrices stay as they are in the file, so that a large mixture takes no more memory than that.
//!
//! The results of a token are added in the order of its slots, and rows of a product do not depend on each other: its bits do
//! not depend on where others are sent.

use super::{Matrices, Which};
use crate::error::Result;
use crate::models::matrix::stacked;
use warpsmith::op::Plan;
use warpsmith::op::survey;
use warpsmith::ops::linear::{Activation, Gate};
use warpsmith::ops::{Cast, Embedding, Linear, LinearQuant, PackedQuantWeight, QuantFormat};
use warpsmith::{DType, Device, Stream, Tensor, TensorView, TensorViewMut};

/// The matrices of all experts of a layer.
pub struct BlockExperts {
    experts: Vec<Expert>,
    inner: usize,
    plans: Plans,
}

struct Expert {
    /// Gates, and below them what they multiply.
    gate_up: PackedQuantWeight,
    down: PackedQuantWeight,
    plans: [Option<Plan>; 2],
}

/// Of what is done once for all experts.
#[derive(Default)]
struct Plans {
    gather: Option<Plan>,
    back: Option<Plan>,
    sum: Option<Plan>,
}

/// The quantised rows of one of the three matrices, of all experts.
struct Rows {
    /// One tensor for all experts, or one for each.
    tensors: Vec<Tensor>,
    format: QuantFormat,
    of_expert: usize,
}

impl Rows {
    /// `None` if a tensor has no blocks, or others than the first.
    fn read(matrices: &Matrices<'_>, which: Which, [rows, width]: [usize; 2]) -> Result<Option<Rows>> {
        let names = matrices.names(which);
        let each = matrices.count / names.len();
        let (mut tensors, mut common) = (Vec::with_capacity(names.len()), None);
        for name in &names {
            let shape = [each, rows, width];
            matrices.loader.check_shape(name, if names.len() == 1 { &shape } else { &shape[1..] })?;
            let Some((blocks, format)) = matrices.loader.source.blocks(name)? else { return Ok(None) };
            if *common.get_or_insert(format) != format {
                return Ok(None);
            }
            tensors.push(blocks);
        }
        Ok(common.map(|format| Rows { tensors, format, of_expert: rows }))
    }

    fn of(&self, expert: usize) -> Tensor {
        match &self.tensors[..] {
            [all] => all.narrow(0, expert * self.of_expert, self.of_expert).expect("rows of every expert"),
            each => each[expert].clone(),
        }
    }
}

/// Slots in the order of their experts.
struct Order {
    /// The token of each.
    tokens: Vec<i32>,
    /// The place of each slot in that order.
    places: Vec<i32>,
    /// Where the slots of each expert begin, and the end.
    starts: Vec<usize>,
}

impl Order {
    fn of(ids: &[i32], experts: usize, used: usize) -> Order {
        let mut starts = vec![0; experts + 1];
        ids.iter().for_each(|&id| starts[id as usize + 1] += 1);
        (1..=experts).for_each(|i| starts[i] += starts[i - 1]);
        let (mut next, mut tokens) = (starts.clone(), vec![0; ids.len()]);
        let mut places = Vec::with_capacity(ids.len());
        for (slot, &id) in ids.iter().enumerate() {
            let place = &mut next[id as usize];
            tokens[*place] = (slot / used) as i32;
            places.push(*place as i32);
            *place += 1;
        }
        Order { tokens, places, starts }
    }
}

impl BlockExperts {
    /// The matrices as the file has them; `None` if products cannot take them so.
    pub(super) fn load(matrices: &Matrices<'_>, hidden: usize, inner: usize) -> Result<Option<BlockExperts>> {
        // GPUs have no products by group of blocks: there they are expanded.
        let loader = matrices.loader;
        if !loader.options.quantized || loader.device() != Device::Cpu || survey::is_running() {
            return Ok(None);
        }
        let read = |which, shape| Rows::read(matrices, which, shape);
        let (Some(gate), Some(up)) = (read(Which::Gate, [inner, hidden])?, read(Which::Up, [inner, hidden])?)
        else {
            return Ok(None);
        };
        let Some(down) = read(Which::Down, [hidden, inner])?.filter(|_| gate.format == up.format) else {
            return Ok(None);
        };
        for which in [Which::Gate, Which::Up, Which::Down] {
            matrices.names(which).iter().for_each(|name| matrices.loader.note(name));
        }
        let expert = |expert| {
            let both = stacked(&[gate.of(expert).view(), up.of(expert).view()], &Stream::Host)?;
            let gate_up = PackedQuantWeight::gated(both, gate.format, Gate::Halves)?.without_tensor()?;
            let down = PackedQuantWeight::new(down.of(expert), down.format)?.without_tensor()?;
            Ok(Expert { gate_up, down, plans: Default::default() })
        };
        let experts = (0..matrices.count).map(expert).collect::<Result<_>>()?;
        Ok(Some(BlockExperts { experts, inner, plans: Plans::default() }))
    }

    /// Adds what the experts `ids` make of the rows of `x`, weighted, to `residual`.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        [ids, weights]: [TensorView<'_>; 2],
        activation: Activation,
        residual: TensorViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (tokens, hidden, used) = (x.shape()[0], x.shape()[1], ids.shape()[1]);
        let (slots, dtype) = (tokens * used, x.dtype());
        let order = Order::of(&ids.to_vec::<i32>()?, self.experts.len(), used);
        let make = |width: usize| Tensor::empty_on(&[slots, width], dtype, stream);
        let (mut rows, mut h, mut y) = (make(hidden)?, make(self.inner)?, make(hidden)?);
        let places = |places: &[i32]| Tensor::from_slice(places, &[slots], Device::Cpu);
        let taken = places(&order.tokens)?;
        Embedding::new(x, &taken).keep_plan(&mut self.plans.gather).run_into(&mut rows, stream)?;
        for (expert, bounds) in self.experts.iter_mut().zip(order.starts.windows(2)) {
            let (first, count) = (bounds[0], bounds[1] - bounds[0]);
            if count == 0 {
                continue;
            }
            let [up_plan, down_plan] = &mut expert.plans;
            let part = rows.view().narrow(0, first, count).expect("rows of all slots");
            let up = LinearQuant::packed(part, &expert.gate_up).activation(activation);
            let place = h.view_mut().narrow(0, first, count).expect("rows of all slots");
            up.keep_plan(up_plan).run_into(place, stream)?;
            let part = h.view().narrow(0, first, count).expect("rows of all slots");
            let down = LinearQuant::packed(part, &expert.down);
            let place = y.view_mut().narrow(0, first, count).expect("rows of all slots");
            down.keep_plan(down_plan).run_into(place, stream)?;
        }
        // Rows in the order of tokens and their slots again: then the sum of a token is the product of its weights with them.
        let back = places(&order.places)?;
        Embedding::new(&y, &back).keep_plan(&mut self.plans.back).run_into(&mut rows, stream)?;
        let all = rows.view().reshape(&[tokens, used, hidden]).and_then(|all| all.permute(&[0, 2, 1]));
        let narrow = if dtype == DType::F32 { None } else { Some(Cast::new(weights).run(dtype)?) };
        let weights = narrow.as_ref().map_or(weights, Tensor::view).reshape(&[tokens, 1, used]);
        let residual = residual.reshape(&[tokens, 1, hidden]).expect("rows of whole tokens");
        let sum = Linear::new(weights.expect("a row for each token"), all.expect("rows of all slots"));
        Ok(sum.keep_plan(&mut self.plans.sum).add_to(residual, stream)?)
    }
}
