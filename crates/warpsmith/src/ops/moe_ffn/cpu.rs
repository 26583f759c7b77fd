//! `moe_ffn` on the CPU. For each part of the tokens: their slots are sorted by expert, the rows of `x` are gathered in that
//! order, both products are computed expert by expert, and then the results of each token are added up in the order of its
//! slots. The shared expert is a group of its own behind the others, with a row for each token.

pub(super) mod routing;
pub(super) mod rows;
pub(super) mod stage;

use super::problem::ROW_X;
use super::{B1, B2, IDS, OUT, Problem, RESIDUAL, ROUTING, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::cpu::Tier;
use crate::cpu::scratch::{self, Need, Region};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::grouped::slots::Sorted;
use routing::Routing;
use rows::{Sums, Tokens};
use stage::Stage;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<Problem> {
    Kernel::cpu(name, tier, run).configured(|p, _| p.arithmetic())
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    scratch::with(Routing::need(p), |mut region| {
        let routing = Routing::read(p, launch.args, [IDS, ROUTING], &mut region)?;
        let most = p.part_tokens();
        for first in (0..p.tokens).step_by(most) {
            let count = most.min(p.tokens - first);
            let slots = first * p.top_k..(first + count) * p.top_k;
            scratch::with(Part::need(p, count), |mut region| {
                let sorted = Sorted::new(&mut region, &routing.experts[slots.clone()], p.experts);
                let tokens = Tokens { p, first, count, sorted: &sorted };
                Part::new(p, count, region).compute(launch, tokens, &routing.weights[slots]);
            });
        }
        Ok(())
    })
}

/// What is between the products of some tokens: the first of these addresses is of the experts, the second of the shared one.
struct Part {
    /// Rows of `x`.
    x: usize,
    /// What the first product made of them.
    h: [usize; 2],
    /// What the second product made of those.
    y: usize,
}

impl Part {
    /// Scratch for the rows, and for sorting them.
    fn need(p: &Problem, tokens: usize) -> Need {
        let [x, h, shared_h, y] = Part::bytes(p, tokens);
        let sorting = Sorted::need(tokens.saturating_mul(p.top_k), p.experts);
        sorting.and::<u8>(x).and::<u8>(h).and::<u8>(shared_h).and::<u8>(y)
    }

    fn bytes(p: &Problem, tokens: usize) -> [usize; 4] {
        let slots = tokens.saturating_mul(p.top_k);
        let rows = slots.saturating_add(if p.shared_ffn.is_some() { tokens } else { 0 });
        let of = |rows: usize, columns: usize, size: usize| rows.saturating_mul(columns).saturating_mul(size);
        [
            of(rows, p.hidden, p.dtype.size()),
            of(slots, p.ffn, p.dtype.size()),
            of(tokens, p.shared_ffn.unwrap_or(0), p.dtype.size()),
            of(rows, p.hidden, size_of::<f32>()),
        ]
    }

    fn new(p: &Problem, tokens: usize, mut region: Region<'_>) -> Part {
        let [x, h, shared_h, y] =
            Part::bytes(p, tokens).map(|bytes| region.slice::<u8>(bytes).as_mut_ptr() as usize);
        Part { x, h: [h, shared_h], y }
    }

    fn compute(&self, launch: &Launch<'_, Problem>, tokens: Tokens<'_>, weights: &[f32]) {
        let (p, args, tier) = (launch.problem, launch.args, launch.tier);
        let (shared_ffn, rows) = (p.shared_ffn.unwrap_or(0), tokens.sorted.slots.len() * p.hidden);
        let first = Stage {
            products: [p.first(p.w1, p.ffn, p.b1), p.first(p.shared_w1, shared_ffn, None)],
            weights: [(args.address(W1), p.w1), (args.address(SHARED_W1), p.shared_w1)],
            bias: p.b1.map(|[apart, _]| (args.address(B1), apart)),
            x: [self.x, self.x + rows * p.dtype.size()],
            out: self.h,
        };
        let second = Stage {
            products: [p.second(p.w2, p.ffn, p.b2), p.second(p.shared_w2, shared_ffn, None)],
            weights: [(args.address(W2), p.w2), (args.address(SHARED_W2), p.shared_w2)],
            bias: p.b2.map(|[apart, _]| (args.address(B2), apart)),
            x: self.h,
            out: [self.y, self.y + rows * size_of::<f32>()],
        };
        let residual = p.has_residual.then(|| args.address(RESIDUAL));
        let (weights, scale, out) = (Some(weights), p.scale(), args.address(OUT));
        // SAFETY: `check` bound all tensors to their sizes and strides, and scratch has room for the rows, which are apart.
        unsafe {
            tokens.gather(args.address(X), ROW_X, self.x);
            first.run(tokens.sorted.starts, tokens.shared(), tier);
            second.run(tokens.sorted.starts, tokens.shared(), tier);
            Sums { tokens, y: self.y, weights, scale, residual, out }.run(tier);
        }
    }
}
