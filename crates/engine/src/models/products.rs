//! Products with matrices of weights, and the layers that are made of them.

use super::config::Config;
use super::loader::Loader;
use super::lora::Lora;
use super::matrix::{Matrix, stacked};
use super::names::Part;
use crate::batch::Batch;
use crate::error::Result;
use warpsmith::op::{Plan, survey};
use warpsmith::ops::linear::{Activation, Gate};
use warpsmith::ops::{self, Copy, GatedAct, Linear, LinearQuant, PackedQuantWeight, PackedWeight};
use warpsmith::{DType, Device, Stream, Tensor, TensorView, TensorViewMut};

/// A matrix in the layout that its products take.
pub(super) enum Packed {
    Plain(PackedWeight),
    Blocks(PackedQuantWeight),
}

impl Packed {
    /// For products with activations of type `x_dtype`. On the CPU the packed form is all that is kept.
    pub(super) fn new(matrix: Matrix, gate: Gate, x_dtype: DType) -> Result<Packed> {
        Ok(match matrix {
            Matrix::Plain(mut matrix) => {
                // Products on a GPU then load it while the kernel before them still runs. A survey asks what they need there.
                if matrix.device() != Device::Cpu || survey::is_running() {
                    matrix.make_constant()?;
                }
                Packed::Plain(PackedWeight::gated_for(matrix, gate, x_dtype)?.without_tensor()?)
            }
            Matrix::Blocks(blocks, format) => {
                Packed::Blocks(PackedQuantWeight::gated(blocks, format, gate)?.without_tensor()?)
            }
        })
    }
}

/// Does something with a call of the op that multiplies by a packed matrix.
macro_rules! product {
    ($weight:expr, $x:expr, $call:ident => $body:expr) => {
        match $weight {
            Packed::Plain(weight) => {
                let $call = Linear::packed($x, weight);
                $body
            }
            Packed::Blocks(weight) => {
                let $call = LinearQuant::packed($x, weight);
                $body
            }
        }
    };
}

impl Packed {
    /// Writes the product to `out`.
    pub(super) fn run_into(
        &self,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
        plan: &mut Option<Plan>,
        stream: &Stream,
    ) -> Result<()> {
        product!(self, x, call => Ok(call.keep_plan(plan).run_into(out, stream)?))
    }

    /// Adds the product to `residual`.
    pub(super) fn add_to(
        &self,
        x: TensorView<'_>,
        residual: TensorViewMut<'_>,
        plan: &mut Option<Plan>,
        stream: &Stream,
    ) -> Result<()> {
        product!(self, x, call => Ok(call.keep_plan(plan).add_to(residual, stream)?))
    }
}

/// Some columns of a projection.
struct Columns {
    weight: Packed,
    bias: Option<Tensor>,
    count: usize,
    plan: Option<Plan>,
}

/// Products of the same input with one matrix or several, side by side: `out = act(x · wᵀ + bias)`.
pub struct Projection {
    /// Neighbours that are stored in the same way are one product.
    columns: Vec<Columns>,
    activation: Activation,
    lora: Option<Lora>,
}

impl Projection {
    /// The matrices of `parts`, each with its number of outputs.
    pub fn load(
        loader: &Loader<'_>,
        parts: &[(Part, usize)],
        layer: usize,
        input: usize,
    ) -> Result<Projection> {
        let mut groups: Vec<(Vec<Matrix>, Vec<Option<Tensor>>)> = Vec::new();
        for &(part, out) in parts {
            let (matrix, bias) = (loader.matrix(part, layer, out, input)?, loader.bias(part, layer, out)?);
            match groups.last_mut() {
                Some((matrices, biases)) if matrices[0].is_stored_like(&matrix) => {
                    matrices.push(matrix);
                    biases.push(bias);
                }
                _ => groups.push((vec![matrix], vec![bias])),
            }
        }
        let mut columns = Vec::new();
        for (matrices, biases) in groups {
            let counts: Vec<usize> = matrices.iter().map(Matrix::rows).collect();
            columns.push(Columns {
                weight: Packed::new(Matrix::joined(matrices, loader.stream())?, Gate::None, loader.dtype())?,
                bias: joined_biases(biases, &counts, loader)?,
                count: counts.iter().sum(),
                plan: None,
            });
        }
        loader.release();
        let lora = Lora::load(loader, parts, layer, input)?;
        Ok(Projection { columns, activation: Activation::None, lora })
    }

    /// The product that gives logits.
    pub fn head(loader: &Loader<'_>) -> Result<Projection> {
        let matrix = loader.head()?;
        let count = matrix.rows();
        let weight = Packed::new(matrix, Gate::None, loader.dtype())?;
        let columns = vec![Columns { weight, bias: None, count, plan: None }];
        loader.release();
        Ok(Projection { columns, activation: Activation::None, lora: None })
    }

    /// Applies a function to the result.
    pub fn activation(self, activation: Activation) -> Projection {
        Projection { activation, ..self }
    }

    /// Writes the product to `out`.
    pub fn forward(&mut self, x: TensorView<'_>, out: TensorViewMut<'_>, batch: &Batch) -> Result<()> {
        if self.lora.is_none() || self.activation == Activation::None {
            return self.activated(self.activation, x, out, batch);
        }
        // Adapters add to what the function is applied to.
        let mut sums = Tensor::empty_on(out.shape(), out.as_view().dtype(), batch.stream())?;
        self.activated(Activation::None, x, sums.view_mut(), batch)?;
        apply(self.activation, &sums, out, batch.stream())
    }

    /// The products with their adapters, and a function of them.
    fn activated(
        &mut self,
        activation: Activation,
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
        batch: &Batch,
    ) -> Result<()> {
        let (mut first, stream) = (0, batch.stream());
        for columns in &mut self.columns {
            let out = out.reborrow().narrow(1, first, columns.count).expect("a place for all columns");
            product!(&columns.weight, x, call => {
                let mut call = call.activation(activation);
                if let Some(bias) = &columns.bias {
                    call = call.bias(bias);
                }
                call.keep_plan(&mut columns.plan).run_into(out, stream)?;
            });
            first += columns.count;
        }
        match &mut self.lora {
            Some(lora) => lora.add_to(x, out, batch),
            None => Ok(()),
        }
    }

    /// Adds the product to `residual`.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        mut residual: TensorViewMut<'_>,
        batch: &Batch,
    ) -> Result<()> {
        let (mut first, stream) = (0, batch.stream());
        for columns in &mut self.columns {
            let part = residual.reborrow().narrow(1, first, columns.count).expect("a place for all columns");
            product!(&columns.weight, x, call => {
                let mut call = call.activation(self.activation);
                if let Some(bias) = &columns.bias {
                    call = call.bias(bias);
                }
                call.keep_plan(&mut columns.plan).add_to(part, stream)?;
            });
            first += columns.count;
        }
        match &mut self.lora {
            Some(lora) => lora.add_to(x, residual, batch),
            None => Ok(()),
        }
    }
}

/// Writes a function of `x` to `out`.
fn apply(function: Activation, x: &Tensor, out: TensorViewMut<'_>, stream: &Stream) -> Result<()> {
    let call = match function {
        Activation::None => return Ok(Copy::new(x).run_into(out, stream)?),
        Activation::Relu => ops::Activation::relu(x),
        Activation::Gelu => ops::Activation::gelu(x),
        Activation::GeluTanh => ops::Activation::gelu_tanh(x),
        Activation::Silu => ops::Activation::silu(x),
    };
    Ok(call.run_into(out, stream)?)
}

/// One bias for all parts, with zeros for those that have none.
fn joined_biases(
    biases: Vec<Option<Tensor>>,
    counts: &[usize],
    loader: &Loader<'_>,
) -> Result<Option<Tensor>> {
    if biases.iter().all(Option::is_none) {
        return Ok(None);
    }
    let mut filled = Vec::new();
    for (bias, &count) in biases.into_iter().zip(counts) {
        filled.push(match bias {
            Some(bias) => bias,
            None => Tensor::zeros(&[count], loader.dtype(), loader.device())?,
        });
    }
    let views: Vec<TensorView<'_>> = filled.iter().map(Tensor::view).collect();
    Ok(Some(stacked(&views, loader.stream())?))
}

/// The gated feed-forward layer: `down(act(gate(x)) * up(x))`.
pub struct GatedMlp {
    activation: Activation,
    gate_up: GateUp,
    down: Projection,
}

/// The first half of the layer.
enum GateUp {
    /// One product with its activation.
    Fused { weight: Box<Packed>, bias: Option<Tensor>, plan: Option<Plan> },
    /// The two matrices are stored differently, or adapted: their products first, then the activation.
    Apart(Projection, Option<Plan>),
}

impl GatedMlp {
    /// The layer's weights. `is_one` says that gate and up are one matrix in the file.
    pub fn load(loader: &Loader<'_>, layer: usize, config: &Config, is_one: bool) -> Result<GatedMlp> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let down = |loader| Projection::load(loader, &[(Part::Down, hidden)], layer, inner);
        let is_adapted =
            [Part::Gate, Part::Up, Part::GateUp].iter().any(|&part| loader.is_adapted(part, layer));
        if is_one && is_adapted {
            let projection = Projection::load(loader, &[(Part::GateUp, 2 * inner)], layer, hidden)?;
            let gate_up = GateUp::Apart(projection, None);
            return Ok(GatedMlp { activation: config.activation, gate_up, down: down(loader)? });
        }
        if is_one {
            let both = loader.matrix(Part::GateUp, layer, 2 * inner, hidden)?;
            let bias = loader.bias(Part::GateUp, layer, 2 * inner)?;
            let weight = Box::new(Packed::new(both, Gate::Halves, loader.dtype())?);
            let gate_up = GateUp::Fused { weight, bias, plan: None };
            return Ok(GatedMlp { activation: config.activation, gate_up, down: down(loader)? });
        }
        let matrix = |part| loader.matrix(part, layer, inner, hidden);
        let (gate, up) = (matrix(Part::Gate)?, matrix(Part::Up)?);
        let gate_up = match gate.is_stored_like(&up) && !is_adapted {
            true => {
                let both = Matrix::joined(vec![gate, up], loader.stream())?;
                let bias = |part| loader.bias(part, layer, inner);
                let biases = vec![bias(Part::Gate)?, bias(Part::Up)?];
                let bias = joined_biases(biases, &[inner, inner], loader)?;
                let weight = Box::new(Packed::new(both, Gate::Halves, loader.dtype())?);
                GateUp::Fused { weight, bias, plan: None }
            }
            false => {
                let parts = [(Part::Gate, inner), (Part::Up, inner)];
                GateUp::Apart(Projection::load(loader, &parts, layer, hidden)?, None)
            }
        };
        Ok(GatedMlp { activation: config.activation, gate_up, down: down(loader)? })
    }

    /// Adds the layer's result to `residual`. `inner` is room for the activations between the two halves.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        mut inner: TensorViewMut<'_>,
        residual: TensorViewMut<'_>,
        batch: &Batch,
    ) -> Result<()> {
        self.first_half(x, inner.reborrow(), batch)?;
        self.down.add_to(inner.as_view(), residual, batch)
    }

    /// Writes the layer's result to `out`. `inner` is room for the activations between the two halves.
    pub fn forward(
        &mut self,
        x: TensorView<'_>,
        mut inner: TensorViewMut<'_>,
        out: TensorViewMut<'_>,
        batch: &Batch,
    ) -> Result<()> {
        self.first_half(x, inner.reborrow(), batch)?;
        self.down.forward(inner.as_view(), out, batch)
    }

    /// The activations between the two halves.
    fn first_half(&mut self, x: TensorView<'_>, mut inner: TensorViewMut<'_>, batch: &Batch) -> Result<()> {
        let stream = batch.stream();
        match &mut self.gate_up {
            GateUp::Fused { weight, bias, plan } => product!(&**weight, x, call => {
                let mut call = call.activation(self.activation);
                if let Some(bias) = &*bias {
                    call = call.bias(bias);
                }
                call.keep_plan(plan).run_into(inner.reborrow(), stream)?;
            }),
            GateUp::Apart(projection, plan) => {
                let (rows, width) = (x.shape()[0], 2 * inner.shape()[1]);
                let mut both = Tensor::empty_on(&[rows, width], x.dtype(), stream)?;
                projection.forward(x, both.view_mut(), batch)?;
                let act = match self.activation {
                    Activation::Gelu => GatedAct::gelu,
                    Activation::GeluTanh => GatedAct::gelu_tanh,
                    Activation::Relu => GatedAct::relu,
                    // No configuration asks for none.
                    Activation::Silu | Activation::None => GatedAct::silu,
                };
                act(&both).keep_plan(plan).run_into(inner.reborrow(), stream)?;
            }
        }
        Ok(())
    }
}
