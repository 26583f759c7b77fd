//! `moe_ffn` on the CPU. For each part of the tokens: their slots are sorted by expert, the rows of `x` are gathered in that
//! order, both products are computed expert by expert, and then the results of each token are added up in the order of its
//! slots. The shared expert is a group of its own behind the others, with a row for each token.

use super::problem::{ROW_IDS, ROW_OUT, ROW_RESIDUAL, ROW_ROUTING, ROW_X};
use super::{B1, B2, IDS, OUT, Problem, RESIDUAL, ROUTING, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::cpu::rows::{DenseRows, for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for, parallel_for_with_scratch};
use crate::error::{Error, Result};
use crate::op::{Kernel, Launch};
use crate::ops::grouped::Matrices;
use crate::ops::grouped::cpu::{Group, multiply};
use crate::ops::grouped::slots::{DROPPED, Sorted};
use crate::ops::linear::problem::{Part as Operands, Problem as Product};
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<Problem> {
    Kernel::cpu(name, tier, run).configured(|p, _| p.arithmetic())
}

/// The fewest elements a thread moves or adds: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

/// The experts of all slots, and their weights.
#[derive(Clone, Copy)]
struct Routing<'a> {
    experts: &'a [usize],
    weights: &'a [f32],
}

impl<'a> Routing<'a> {
    fn need(p: &Problem) -> Need {
        let slots = p.tokens.saturating_mul(p.top_k);
        Need::of::<usize>(slots).and::<f32>(slots)
    }

    /// Reads the routing of a call; an error if an id is neither an expert nor -1.
    fn read(launch: &Launch<'_, Problem>, region: &mut Region<'a>) -> Result<Routing<'a>> {
        let (p, args) = (launch.problem, launch.args);
        let (experts, weights) = (region.slice(p.tokens * p.top_k), region.slice(p.tokens * p.top_k));
        for token in 0..p.tokens {
            let offsets = p.space.offsets(token);
            for slot in 0..p.top_k {
                let at = |row: usize| offsets[row].wrapping_add(slot * p.steps[row] as usize);
                // SAFETY: the offsets of elements of these tensors, which have these types.
                let (id, weight) = unsafe {
                    let id = index_at(args.address(IDS), p.id_dtype, at(ROW_IDS));
                    let weights = args.address(ROUTING);
                    let weight = with_float!(p.weight_dtype, T => (*(weights as *const T).add(at(ROW_ROUTING))).to_f32());
                    (id, weight)
                };
                let expert = match id {
                    -1 => Some(DROPPED),
                    _ => usize::try_from(id).ok().filter(|&id| id < p.experts),
                };
                experts[token * p.top_k + slot] = expert.ok_or_else(|| {
                    let expected = format!("-1 or ids from 0 to below experts={}", p.experts);
                    Error::argument(args.spec().name, "ids", expected, format!("{id} at [{token}, {slot}]"))
                })?;
                weights[token * p.top_k + slot] = weight;
            }
        }
        Ok(Routing { experts, weights })
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    scratch::with(Routing::need(p), |mut region| {
        let routing = Routing::read(launch, &mut region)?;
        let most = p.part_tokens();
        for first in (0..p.tokens).step_by(most) {
            let tokens = first..p.tokens.min(first + most);
            let slots = tokens.start * p.top_k..tokens.end * p.top_k;
            let part = Routing { experts: &routing.experts[slots.clone()], weights: &routing.weights[slots] };
            scratch::with(Part::need(p, tokens.len()), |region| {
                Part::new(launch, tokens, part, region).compute();
            });
        }
        Ok(())
    })
}

/// Some tokens, and what is between their products.
struct Part<'a> {
    launch: &'a Launch<'a, Problem>,
    tokens: Range<usize>,
    routing: Routing<'a>,
    sorted: Sorted<'a>,
    /// Rows of `x` in the order of the experts, then those of the tokens for the shared expert.
    x: usize,
    /// What the first product made of them; those of the shared expert.
    h: usize,
    shared_h: usize,
    /// What the second product made of them.
    y: &'a [f32],
}

impl<'a> Part<'a> {
    fn need(p: &Problem, tokens: usize) -> Need {
        let slots = tokens * p.top_k;
        let rows = slots + Self::shared_rows(p, tokens);
        let narrow = |rows: usize, columns: usize| Need::of::<u8>(rows * columns * p.dtype.size());
        Sorted::need(slots, p.experts)
            .plus(narrow(rows, p.hidden))
            .plus(narrow(slots, p.ffn))
            .plus(narrow(tokens, p.shared_ffn.unwrap_or(0)))
            .and::<f32>(rows * p.hidden)
    }

    /// Rows for the shared expert.
    fn shared_rows(p: &Problem, tokens: usize) -> usize {
        if p.shared_ffn.is_some() { tokens } else { 0 }
    }

    fn new(
        launch: &'a Launch<'a, Problem>,
        tokens: Range<usize>,
        routing: Routing<'a>,
        mut region: Region<'a>,
    ) -> Part<'a> {
        let p = launch.problem;
        let slots = tokens.len() * p.top_k;
        let rows = slots + Self::shared_rows(p, tokens.len());
        let size = p.dtype.size();
        let sorted = Sorted::new(&mut region, routing.experts, p.experts);
        let mut bytes = |len: usize| region.slice::<u8>(len * size).as_mut_ptr() as usize;
        let [x, h] = [bytes(rows * p.hidden), bytes(slots * p.ffn)];
        let shared_h = bytes(tokens.len() * p.shared_ffn.unwrap_or(0));
        let y = region.slice(rows * p.hidden);
        Part { launch, tokens, routing, sorted, x, h, shared_h, y }
    }

    /// Rows of the shared expert.
    fn shared(&self) -> usize {
        Self::shared_rows(self.launch.problem, self.tokens.len())
    }

    fn compute(&self) {
        let p = self.launch.problem;
        let rows = self.sorted.slots.len() + self.shared();
        let grain = GRAIN.div_ceil(p.hidden.max(1));
        parallel_for(rows, grain, |rows| self.gather(rows));
        let args = self.launch.args;
        let (shared_ffn, shared) = (p.shared_ffn.unwrap_or(0), self.sorted.slots.len());
        let first = Stage {
            products: [p.first(p.w1, p.ffn, p.b1), p.first(p.shared_w1, shared_ffn, None)],
            weights: [(args.address(W1), p.w1), (args.address(SHARED_W1), p.shared_w1)],
            bias: p.b1.map(|[apart, _]| (args.address(B1), apart)),
            x: [self.x, self.x + shared * p.hidden * p.dtype.size()],
            out: [self.h, self.shared_h],
        };
        let y = self.y.as_ptr() as usize;
        let second = Stage {
            products: [p.second(p.w2, p.ffn, p.b2), p.second(p.shared_w2, shared_ffn, None)],
            weights: [(args.address(W2), p.w2), (args.address(SHARED_W2), p.shared_w2)],
            bias: p.b2.map(|[apart, _]| (args.address(B2), apart)),
            x: first.out,
            out: [y, y + shared * p.hidden * size_of::<f32>()],
        };
        for stage in [first, second] {
            // SAFETY: `check` bound weights and biases, and there is room for the rows of all groups, which are apart.
            unsafe { stage.run(self.sorted.starts, self.shared(), self.launch.tier) };
        }
        let (part, tier) = (self, self.launch.tier);
        let need = Sum::need(p);
        parallel_for_with_scratch(
            self.tokens.len(),
            grain.div_ceil(p.top_k.max(1)),
            need,
            |tokens, region| {
                with_float!(p.dtype, T => dispatch(tier, Sum::<T> { part, tokens, region, t: PhantomData }));
            },
        );
    }

    /// Copies rows of `x` to their places.
    fn gather(&self, rows: Range<usize>) {
        let (p, x) = (self.launch.problem, self.launch.args.address(X));
        let size = p.dtype.size();
        let step = p.steps[ROW_X];
        for row in rows {
            let token = match self.sorted.slots.get(row) {
                Some(slot) => slot / p.top_k,
                None => row - self.sorted.slots.len(),
            };
            let from = x.wrapping_add(p.space.offsets(self.tokens.start + token)[ROW_X].wrapping_mul(size));
            let to = self.x + row * p.hidden * size;
            // SAFETY: `check` bound the rows of x, and there is room for each; nobody else writes this one.
            unsafe {
                if step == 1 {
                    std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, p.hidden * size);
                    continue;
                }
                for i in 0..p.hidden {
                    let from = from.wrapping_add_signed(i as isize * step * size as isize) as *const u8;
                    std::ptr::copy_nonoverlapping(from, (to + i * size) as *mut u8, size);
                }
            }
        }
    }
}

/// A product of all experts, and of the shared one: dense rows, sorted by expert, with the matrix of each.
pub(super) struct Stage {
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

/// The results of some tokens of a part.
struct Sum<'a, T> {
    part: &'a Part<'a>,
    tokens: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

/// A row that is added to the sum of a token.
#[derive(Clone, Copy)]
struct Term {
    row: *const f32,
    weight: f32,
}

impl Sum<'_, ()> {
    fn need(p: &Problem) -> Need {
        let dense = DenseRows::<f32>::need(p.dtype, p.hidden, &Self::steps(p));
        dense.and::<Term>(p.top_k)
    }

    /// Strides along rows of residual and result.
    fn steps(p: &Problem) -> [isize; 2] {
        [p.steps[ROW_RESIDUAL], p.steps[ROW_OUT]]
    }
}

impl<T: CpuElement> Task for Sum<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let part = self.part;
        let (p, args) = (part.launch.problem, part.launch.args);
        let steps = Sum::steps(p);
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.hidden, &steps);
        let mut terms = self.region.list::<Term>(p.top_k);
        let scale = s.splat(p.scale());
        for token in self.tokens {
            terms.clear();
            for slot in token * p.top_k..(token + 1) * p.top_k {
                let place = part.sorted.places[slot];
                if place != DROPPED {
                    let row = part.y[place * p.hidden..].as_ptr();
                    terms.push(Term { row, weight: part.routing.weights[slot] });
                }
            }
            let shared =
                p.shared_ffn.map(|_| part.y[(part.sorted.slots.len() + token) * p.hidden..].as_ptr());
            let offsets = p.space.offsets(part.tokens.start + token);
            let to = (args.address(OUT) as *mut T).wrapping_add(offsets[ROW_OUT]);
            // SAFETY: `check` bound rows and steps to the tensors, and the part has a row of results for each term. The residual
            // is the result only element for element, and each is read before it is written.
            unsafe {
                let dense = scratch.target(1, to, steps[1]);
                let residual = p.has_residual.then(|| {
                    let from = (args.address(RESIDUAL) as *const T).wrapping_add(offsets[ROW_RESIDUAL]);
                    scratch.gather(0, from, steps[0])
                });
                for_vectors::<S>(
                    p.hidden,
                    #[inline(always)]
                    |i, count| {
                        let mut sum = s.zero();
                        for term in terms.iter() {
                            let y = load_at(s, term.row, i, count);
                            sum = s.add(sum, s.mul(s.splat(term.weight), y));
                        }
                        if let Some(shared) = shared {
                            sum = s.add(sum, load_at(s, shared, i, count));
                        }
                        let y = match residual {
                            Some(residual) => s.fma(scale, sum, load_at(s, residual, i, count)),
                            None => s.mul(scale, sum),
                        };
                        store_at(s, dense, i, count, y);
                    },
                );
                scratch.scatter(1, to, steps[1]);
            }
        }
    }
}
