//! Feed-forward layers that are mixtures of experts.

mod blocks;
#[cfg(test)]
mod tests;

use super::config::{Config, ExpertsConfig};
use super::layers::Buffer;
use super::loader::Loader;
use super::names::{Naming, Part};
use super::products::Projection;
use crate::batch::Batch;
use crate::error::Result;
use blocks::BlockExperts;
use warpsmith::op::Plan;
use warpsmith::ops::linear::{Activation, Gate};
use warpsmith::ops::{self, MoeFfn, MoeRoute};
use warpsmith::{DType, Device, Stream, Tensor, TensorView, TensorViewMut};

/// A router and the experts that it chooses from: the sum of what the experts of a token make of it, weighted.
pub struct Experts {
    router: Projection,
    used: usize,
    normalize: bool,
    activation: Activation,
    weights: Weights,
    route_plan: Option<Plan>,
}

/// The matrices of all experts.
enum Weights {
    Plain(Box<Stacked>),
    Blocks(Box<BlockExperts>),
}

/// Matrices of numbers.
struct Stacked {
    /// `[experts, 2 * inner, hidden]`: the rows of gates, then those of what they multiply.
    gate_up: Tensor,
    /// `[experts, hidden, inner]`.
    down: Tensor,
    plan: Option<Plan>,
}

/// Room for the routing of a batch, for all layers.
pub struct Routing {
    logits: Buffer,
    weights: Buffer,
    ids: Buffer,
}

impl Routing {
    /// Room for the experts of a model.
    pub fn new(loader: &Loader<'_>, experts: &ExpertsConfig) -> Result<Routing> {
        let rows = loader.options.reserve_tokens;
        let buffer = |width, dtype| Buffer::new(rows, width, dtype, loader.stream());
        Ok(Routing {
            // Small differences of logits choose other experts: they are not rounded.
            logits: buffer(experts.count, DType::F32)?,
            weights: buffer(experts.used, DType::F32)?,
            ids: buffer(experts.used, DType::I32)?,
        })
    }
}

impl Experts {
    /// The experts of a layer.
    pub fn load(
        loader: &Loader<'_>,
        layer: usize,
        config: &Config,
        experts: &ExpertsConfig,
    ) -> Result<Experts> {
        let hidden = config.hidden_size;
        let router = Projection::load(loader, &[(Part::Router, experts.count)], layer, hidden)?;
        let matrices = Matrices { loader, layer, count: experts.count };
        let inner = experts.intermediate_size;
        let weights = match BlockExperts::load(&matrices, hidden, inner)? {
            Some(blocks) => Weights::Blocks(Box::new(blocks)),
            None => {
                let (gate_up, down) = matrices.load(hidden, inner)?;
                Weights::Plain(Box::new(Stacked { gate_up, down, plan: None }))
            }
        };
        loader.release();
        Ok(Experts {
            router,
            used: experts.used,
            normalize: experts.normalize,
            activation: config.activation,
            weights,
            route_plan: None,
        })
    }

    /// Adds the layer's result to `residual`.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        routing: &mut Routing,
        residual: TensorViewMut<'_>,
        batch: &Batch,
    ) -> Result<()> {
        let (tokens, stream) = (x.shape()[0], batch.stream());
        let mut logits = routing.logits.write(tokens)?;
        self.router.forward(x, logits.reborrow(), batch)?;
        let (mut weights, mut ids) = (routing.weights.write(tokens)?, routing.ids.write(tokens)?);
        let route = MoeRoute::new(logits.as_view(), self.used).normalize(self.normalize);
        route.keep_plan(&mut self.route_plan).run_into(weights.reborrow(), ids.reborrow(), stream)?;
        match &mut self.weights {
            Weights::Plain(all) => {
                let experts = MoeFfn::new(x, &all.gate_up, &all.down, ids.as_view(), weights.as_view());
                let experts = experts.gated(Gate::Halves, self.activation);
                Ok(experts.keep_plan(&mut all.plan).add_to(residual, stream)?)
            }
            Weights::Blocks(blocks) => {
                let routing = [ids.as_view(), weights.as_view()];
                blocks.add_to(x, routing, self.activation, residual, stream)
            }
        }
    }
}

/// The matrices of a layer's experts: all in one tensor in GGUF, a tensor for each in checkpoints of transformers.
struct Matrices<'a> {
    loader: &'a Loader<'a>,
    layer: usize,
    count: usize,
}

/// Which matrix of an expert.
#[derive(Clone, Copy)]
enum Which {
    Gate,
    Up,
    Down,
}

impl Matrices<'_> {
    /// Gates above what they multiply, and the second products.
    fn load(&self, hidden: usize, inner: usize) -> Result<(Tensor, Tensor)> {
        let dtype = self.dtype();
        let make = |shape: &[usize]| Tensor::empty(shape, dtype, Device::Cpu);
        let mut gate_up = make(&[self.count, 2 * inner, hidden])?;
        self.fill(Which::Gate, gate_up.view_mut(), 0, [inner, hidden])?;
        self.fill(Which::Up, gate_up.view_mut(), inner, [inner, hidden])?;
        let mut down = make(&[self.count, hidden, inner])?;
        self.fill(Which::Down, down.view_mut(), 0, [hidden, inner])?;
        Ok((self.loader.place(&gate_up)?, self.loader.place(&down)?))
    }

    /// The names of the tensors with this matrix, in the order of the experts.
    fn names(&self, which: Which) -> Vec<String> {
        let layer = self.layer;
        if self.loader.source.naming() == Naming::Gguf {
            let part = ["gate", "up", "down"][which as usize];
            return vec![format!("blk.{layer}.ffn_{part}_exps.weight")];
        }
        let (block, parts) = match self.loader.config.architecture.as_str() {
            "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let part = parts[which as usize];
        let name = |expert| format!("model.layers.{layer}.{block}.experts.{expert}.{part}.weight");
        (0..self.count).map(|expert| self.loader.present(name(expert))).collect()
    }

    /// The type that all of them are kept in: that of the file if they have the same and products widen it.
    fn dtype(&self) -> DType {
        let all = [Which::Gate, Which::Up, Which::Down].into_iter().flat_map(|which| self.names(which));
        let mut dtypes = all.map(|name| self.loader.matrix_dtype(&name));
        let first = dtypes.next().unwrap_or(self.loader.dtype());
        if dtypes.all(|dtype| dtype == first) { first } else { self.loader.dtype() }
    }

    /// Copies a matrix of every expert to rows of `all` from `row` on.
    fn fill(
        &self,
        which: Which,
        all: TensorViewMut<'_>,
        row: usize,
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let dtype = all.as_view().dtype();
        let mut places = all.narrow(1, row, rows).expect("rows of every expert");
        let names = self.names(which);
        let each = self.count / names.len();
        for (index, name) in names.iter().enumerate() {
            let shape = [each, rows, width];
            self.loader.check_shape(name, if names.len() == 1 { &shape } else { &shape[1..] })?;
            let matrix = self.loader.numbers_as(name, dtype)?;
            let matrix = matrix.reshape(&shape).expect("the shape was checked");
            let place = places.reborrow().narrow(0, index * each, each).expect("a place for each expert");
            ops::Copy::new(&matrix).run_into(place, &Stream::Host)?;
        }
        Ok(())
    }
}
