//! Products with the matrices of LoRA adapters, added to those of the model.
//!
//! The tokens of a batch that have the same adapter are neighbours, because those of a sequence are. Each such run of rows has
//! two products of its own: `x · aᵀ` for all parts of a projection together, and `· bᵀ` for each part. Rows of a product do not
//! depend on each other, so a sequence's bits do not depend on the others of its batch.

use super::loader::Loader;
use super::matrix::{Matrix, stacked};
use super::names::Part;
use super::products::Packed;
use crate::adapters::Pair;
use crate::batch::Batch;
use crate::error::Result;
use warpsmith::op::Plan;
use warpsmith::ops::linear::Gate;
use warpsmith::{Stream, Tensor, TensorView, TensorViewMut};

/// The adapters of a projection.
pub struct Lora {
    /// By the adapter's number; `None` for those that do not adapt the projection.
    adapters: Vec<Option<Delta>>,
}

/// What one adapter adds.
struct Delta {
    down: Packed,
    rank: usize,
    ups: Vec<Up>,
    plan: Option<Plan>,
}

/// The second product of a part.
struct Up {
    weight: Packed,
    /// Which results of the first product it takes.
    ranks: (usize, usize),
    /// Which results of the projection it adds to.
    columns: (usize, usize),
    plan: Option<Plan>,
}

impl Lora {
    /// The adapters of a projection of these parts, each with its number of outputs; `None` if there are none.
    pub fn load(
        loader: &Loader<'_>,
        parts: &[(Part, usize)],
        layer: usize,
        input: usize,
    ) -> Result<Option<Lora>> {
        let mut adapters = Vec::new();
        for adapter in loader.adapters {
            let (mut downs, mut ups, mut rank, mut column) = (Vec::new(), Vec::new(), 0, 0);
            for &(part, out) in parts {
                // The router's products are not rounded to the type of the others.
                let module = loader.module(part, layer).filter(|_| part != Part::Router);
                let pair =
                    module.map(|module| adapter.pair(&module, [out, input], loader.dtype())).transpose()?;
                if let Some(Pair { a, b }) = pair.flatten() {
                    let own = a.shape()[0];
                    let weight = packed(loader.place(&b)?, loader)?;
                    ups.push(Up { weight, ranks: (rank, own), columns: (column, out), plan: None });
                    rank += own;
                    downs.push(a);
                }
                column += out;
            }
            if ups.is_empty() {
                adapters.push(None);
                continue;
            }
            let views: Vec<TensorView<'_>> = downs.iter().map(Tensor::view).collect();
            let down = packed(loader.place(&stacked(&views, &Stream::Host)?)?, loader)?;
            adapters.push(Some(Delta { down, rank, ups, plan: None }));
        }
        Ok(adapters.iter().any(Option::is_some).then_some(Lora { adapters }))
    }

    /// Adds to the projection's results `out` of the tokens `x` what their adapters make of them.
    pub fn add_to(&mut self, x: TensorView<'_>, mut out: TensorViewMut<'_>, batch: &Batch) -> Result<()> {
        let stream = batch.stream();
        for run in &batch.adapted {
            let Some(delta) = &mut self.adapters[run.adapter] else { continue };
            let rows = x.narrow(0, run.first, run.count).expect("a run of the batch's tokens");
            let mut inner = Tensor::empty_on(&[run.count, delta.rank], x.dtype(), stream)?;
            delta.down.run_into(rows, inner.view_mut(), &mut delta.plan, stream)?;
            for up in &mut delta.ups {
                let taken = inner.view().narrow(1, up.ranks.0, up.ranks.1).expect("ranks of all parts");
                let place = out.reborrow().narrow(0, run.first, run.count).expect("a row for each token");
                let place = place.narrow(1, up.columns.0, up.columns.1).expect("columns of all parts");
                up.weight.add_to(taken, place, &mut up.plan, stream)?;
            }
        }
        Ok(())
    }
}

fn packed(matrix: Tensor, loader: &Loader<'_>) -> Result<Packed> {
    Packed::new(Matrix::Plain(matrix), Gate::None, loader.dtype())
}
