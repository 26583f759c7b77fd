//! One product of all experts.

use crate::cpu::Tier;
use crate::cpu::scratch::{self, Need};
use crate::ops::grouped::Matrices;
use crate::ops::grouped::cpu::{Group, multiply};
use crate::ops::linear::problem::{Part as Operands, Problem as Product};

/// A product of all experts, and of the shared one: dense rows, sorted by expert, with the matrix of each.
pub(in crate::ops::moe_ffn) struct Stage {
    pub products: [Product; 2],
    /// Addresses of the matrices.
    pub weights: [(usize, Matrices); 2],
    /// Address of the biases of the experts, and elements from one to the next.
    pub bias: Option<(usize, isize)>,
    /// The first rows, and where the first results go.
    pub x: [usize; 2],
    pub out: [usize; 2],
}

impl Stage {
    /// Computes the products. `starts` says where the rows of each expert begin; the shared one has `shared` rows.
    ///
    /// # Safety
    /// The addresses must hold what they say, and the results overlap nothing.
    pub unsafe fn run(&self, starts: &[usize], shared: usize, tier: Tier) {
        let experts = starts.len() - 1;
        let at =
            |base: usize, elements: isize, size: usize| base.wrapping_add_signed(elements * size as isize);
        scratch::with(Need::of::<Group>(experts + 1), |mut region| {
            let mut groups = region.list::<Group>(experts + 1);
            let p = &self.products[0];
            for expert in (0..experts).filter(|&expert| starts[expert] < starts[expert + 1]) {
                let (first, (w, matrices)) = (starts[expert], self.weights[0]);
                let operands = Operands::product(
                    self.x[0] + first * p.k * p.x_dtype.size(),
                    at(w, expert as isize * matrices.group, p.w_dtype.size()),
                    self.out[0] + first * p.n * p.out_dtype.size(),
                );
                let bias = self
                    .bias
                    .map_or(0, |(bias, apart)| at(bias, expert as isize * apart, p.bias_dtype.size()));
                let rows = starts[expert + 1] - first;
                groups.push(Group { rows, product: 0, depth: p.k, part: Operands { bias, ..operands } });
            }
            if shared > 0 {
                let part = Operands::product(self.x[1], self.weights[1].0, self.out[1]);
                groups.push(Group { rows: shared, product: 1, depth: self.products[1].k, part });
            }
            // SAFETY: passed on.
            unsafe { multiply(&self.products, &groups, tier) };
        });
    }
}
