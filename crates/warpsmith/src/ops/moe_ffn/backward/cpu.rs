//! `moe_ffn_backward` on the CPU: rows of `x` and `dy` are gathered by expert, `z` and `da` are computed, a pass over them makes
//! what the other products need in their place, and those follow.

use super::{
    B1, B2, BackwardProblem, DB1, DB2, DOUT, DROUTING, DSHARED_W1, DSHARED_W2, DW1, DW2, DX, IDS, ROUTING,
    SHARED_W1, SHARED_W2, W1, W2, X,
};
use crate::cpu::rows::{for_vectors, load_at, store_at, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::function::{Function, with_function};
use crate::ops::grouped::Matrices;
use crate::ops::grouped::cpu::{Group, multiply};
use crate::ops::grouped::slots::Sorted;
use crate::ops::grouped::sums::ColumnSums;
use crate::ops::linear::Gate;
use crate::ops::linear::problem::{Matrix, Part as Operands, Problem as Product};
use crate::ops::moe_ffn::cpu::routing::Routing;
use crate::ops::moe_ffn::cpu::rows::{Sums, Tokens, scale};
use crate::ops::moe_ffn::cpu::stage::Stage;
use crate::ops::moe_ffn::problem::{ROW_RESIDUAL, ROW_X};
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<BackwardProblem> {
    Kernel::cpu(name, tier, run)
}

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 13;

fn run(launch: &Launch<'_, BackwardProblem>) -> Result<()> {
    let p = &launch.problem.forward;
    let slots = p.tokens.saturating_mul(p.top_k);
    let need = Routing::need(p).plus(Sorted::need(slots, p.experts)).and::<f32>(slots).and::<f32>(slots);
    scratch::with(need, |mut region| {
        let routing = Routing::read(p, launch.args, [IDS, ROUTING], &mut region)?;
        let sorted = Sorted::new(&mut region, routing.experts, p.experts);
        let tokens = Tokens { p, first: 0, count: p.tokens, sorted: &sorted };
        let weights = region.slice::<f32>(sorted.slots.len());
        weights.iter_mut().zip(sorted.slots).for_each(|(to, &slot)| *to = routing.weights[slot]);
        let scores = region.filled(slots, 0f32);
        scratch::with(Rows::need(&tokens), |region| {
            let rows = Rows::new(&tokens, region);
            compute(&Call { launch, tokens, experts: routing.experts, weights, rows }, scores);
        });
        Ok(())
    })
}

/// Dense rows in the order of the experts, and behind them, or at the second address, those of the shared one.
struct Rows {
    x: usize,
    dy: usize,
    /// `z`, and then `dz` before it is rounded.
    z: [usize; 2],
    /// What is rounded of it.
    dz: [usize; 2],
    da: [usize; 2],
    /// `r * h`.
    h: [usize; 2],
    dx: usize,
}

impl Rows {
    fn need(tokens: &Tokens<'_>) -> Need {
        Rows::bytes(tokens).into_iter().fold(Need::default(), |need, bytes| need.and::<u8>(bytes))
    }

    fn bytes(tokens: &Tokens<'_>) -> [usize; 11] {
        let p = tokens.p;
        let (slots, shared, ffn) = (tokens.sorted.slots.len(), tokens.shared(), p.shared_ffn.unwrap_or(0));
        let (narrow, wide) = (p.dtype.size(), size_of::<f32>());
        let of = |rows: usize, columns: usize, size: usize| rows.saturating_mul(columns).saturating_mul(size);
        let [first, shared_first] = [p.rows_of(p.ffn), p.rows_of(ffn)];
        [
            of(slots + shared, p.hidden, narrow),
            of(slots + shared, p.hidden, narrow),
            of(slots, first, wide),
            of(shared, shared_first, wide),
            of(slots, first, narrow),
            of(shared, shared_first, narrow),
            of(slots, p.ffn, wide),
            of(shared, ffn, wide),
            of(slots, p.ffn, narrow),
            of(shared, ffn, narrow),
            of(slots + shared, p.hidden, wide),
        ]
    }

    fn new(tokens: &Tokens<'_>, mut region: Region<'_>) -> Rows {
        let [x, dy, z, shared_z, dz, shared_dz, da, shared_da, h, shared_h, dx] =
            Rows::bytes(tokens).map(|bytes| region.slice::<u8>(bytes).as_mut_ptr() as usize);
        Rows { x, dy, z: [z, shared_z], dz: [dz, shared_dz], da: [da, shared_da], h: [h, shared_h], dx }
    }
}

/// A call, with its routing and rows.
struct Call<'a> {
    launch: &'a Launch<'a, BackwardProblem>,
    tokens: Tokens<'a>,
    /// Of the slots.
    experts: &'a [usize],
    /// Of the rows.
    weights: &'a [f32],
    rows: Rows,
}

fn compute(call: &Call<'_>, scores: &mut [f32]) {
    let Call { launch, tokens, rows, .. } = call;
    let (p, args, tier) = (&launch.problem.forward, launch.args, launch.tier);
    let (starts, shared) = (tokens.sorted.starts, tokens.shared());
    let slots = tokens.sorted.slots.len();
    let shared_ffn = p.shared_ffn.unwrap_or(0);
    let address = |index: usize| args.address(index);
    // The addresses of rows of `columns` elements of `size` bytes, of the experts and of the shared one.
    let both = |base: usize, columns: usize, size: usize| [base, base + slots * columns * size];
    let narrow = p.dtype.size();
    let first = |w: Matrices, ffn: usize, bias: Option<[isize; 2]>| {
        p.product(w, [p.rows_of(ffn), p.hidden], bias).into_f32()
    };
    let turned = |w: Matrices| Matrices { row: w.col, col: w.row, ..w };
    let z = Stage {
        products: [first(p.w1, p.ffn, p.b1), first(p.shared_w1, shared_ffn, None)],
        weights: [(address(W1), p.w1), (address(SHARED_W1), p.shared_w1)],
        bias: p.b1.map(|[apart, _]| (address(B1), apart)),
        x: both(rows.x, p.hidden, narrow),
        out: rows.z,
    };
    let [w2, shared_w2] = [turned(p.w2), turned(p.shared_w2)];
    let da = Stage {
        products: [
            p.product(w2, [p.ffn, p.hidden], None).into_f32(),
            p.product(shared_w2, [shared_ffn, p.hidden], None).into_f32(),
        ],
        weights: [(address(W2), w2), (address(SHARED_W2), shared_w2)],
        bias: None,
        x: both(rows.dy, p.hidden, narrow),
        out: rows.da,
    };
    // SAFETY: `check` bound all tensors to their sizes and strides, and scratch has room for the rows, which are apart.
    unsafe {
        tokens.gather(address(X), ROW_X, rows.x);
        tokens.gather(address(DOUT), ROW_RESIDUAL, rows.dy);
        if p.scale() != 1.0 {
            scale(rows.dy, p.dtype, tokens.rows() * p.hidden, p.scale(), tier);
        }
        z.run(starts, shared, tier);
        da.run(starts, shared, tier);
        between(call, scores);
        biases(call);
        weights(call);
        if launch.problem.has_dx {
            let [w1, shared_w1] = [turned(p.w1), turned(p.shared_w1)];
            let dx = |w: Matrices, ffn: usize| p.product(w, [p.hidden, p.rows_of(ffn)], None).into_f32();
            let stage = Stage {
                products: [dx(w1, p.ffn), dx(shared_w1, shared_ffn)],
                weights: [(address(W1), w1), (address(SHARED_W1), shared_w1)],
                bias: None,
                x: rows.dz,
                out: both(rows.dx, p.hidden, size_of::<f32>()),
            };
            stage.run(starts, shared, tier);
            let (tokens, y, out) = (*tokens, rows.dx, address(DX));
            Sums { tokens, y, weights: None, scale: 1.0, residual: None, out }.run(tier);
        }
    }
}

/// The pass over the rows of `z` and `da`, and the gradients of the weights of slots.
///
/// # Safety
/// The rows must be those of the call.
unsafe fn between(call: &Call<'_>, scores: &mut [f32]) {
    let (p, launch) = (&call.launch.problem.forward, call.launch);
    let longest = p.ffn.max(p.shared_ffn.unwrap_or(0));
    // Gate and up of a row, where they are not halves of it.
    let apart = if p.gate == Gate::Interleaved { p.rows_of(longest) } else { 0 };
    let scores = Scores(scores.as_mut_ptr());
    let all = call.tokens.rows();
    parallel_for_with_scratch(
        all,
        GRAIN.div_ceil(longest.max(1)),
        Need::of::<f32>(apart),
        |rows, mut region| {
            let (scores, apart) = (&scores, region.slice::<f32>(apart));
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Between::<T> { call, scores, rows, apart, t: PhantomData });
            });
        },
    );
    let Some((space, step)) = &launch.problem.dweights else { return };
    for token in 0..p.tokens {
        let offset = space.offsets(token)[0] as isize;
        for slot in 0..p.top_k {
            let at = offset + slot as isize * step;
            // SAFETY: `check` bound the gradient to this space, and the scores are there.
            unsafe {
                let score = *scores.0.add(token * p.top_k + slot);
                with_float!(p.weight_dtype, T => {
                    *(launch.args.address(DROUTING) as *mut T).wrapping_offset(at) = T::from_f32(score);
                });
            }
        }
    }
}

/// The gradients of the biases.
///
/// # Safety
/// The rows must be those of the call, after the pass.
unsafe fn biases(call: &Call<'_>) {
    let Call { launch, tokens, weights, rows, .. } = call;
    let (p, tier, starts) = (&launch.problem.forward, launch.tier, tokens.sorted.starts);
    let out_dtype = p.dtype;
    // SAFETY: passed on; `check` bound the results.
    unsafe {
        if let Some(strides) = launch.problem.db1 {
            let (n, out) = (p.rows_of(p.ffn), launch.args.address(DB1));
            let (rows, dtype, weights) = (rows.z[0], DType::F32, None);
            ColumnSums { rows, dtype, n, starts, weights, out, out_dtype, strides }.run(tier);
        }
        if let Some(strides) = launch.problem.db2 {
            let (n, out) = (p.hidden, launch.args.address(DB2));
            let (rows, dtype, weights) = (rows.dy, p.dtype, Some(*weights));
            ColumnSums { rows, dtype, n, starts, weights, out, out_dtype, strides }.run(tier);
        }
    }
}

/// The gradients of the matrices: products along the rows of each expert.
///
/// # Safety
/// The rows must be those of the call, after the pass.
unsafe fn weights(call: &Call<'_>) {
    let Call { launch, tokens, rows, .. } = call;
    let (b, p, args) = (launch.problem, &launch.problem.forward, launch.args);
    let (starts, shared, size) = (tokens.sorted.starts, tokens.shared(), p.dtype.size());
    let shared_ffn = p.shared_ffn.unwrap_or(0);
    let behind = starts[p.experts] * p.hidden * size;
    // For each of both matrices: the rows that its own rows and columns come from, and how long they are.
    let first = |ffn: usize, dz: usize, x: usize| ([dz, x], [p.rows_of(ffn), p.hidden]);
    let second = |ffn: usize, dy: usize, h: usize| ([dy, h], [p.hidden, ffn]);
    let of_experts =
        [(b.dw1, DW1, first(p.ffn, rows.dz[0], rows.x)), (b.dw2, DW2, second(p.ffn, rows.dy, rows.h[0]))];
    let of_shared = [
        (b.dshared_w1, DSHARED_W1, first(shared_ffn, rows.dz[1], rows.x + behind)),
        (b.dshared_w2, DSHARED_W2, second(shared_ffn, rows.dy + behind, rows.h[1])),
    ];
    for (is_shared, gradients) in [(false, of_experts), (true, of_shared)] {
        for (to, index, (from, [m, n])) in gradients {
            let Some(to) = to else { continue };
            let column = |len: usize| Matrix { row: 1, col: len as isize, aligned: false };
            let out = Matrix { row: to.row, col: to.col, aligned: false };
            let product = Product::product(p.dtype, false, [m, n, 0], [column(m), column(n), out]);
            let group = |expert: usize, start: usize, end: usize| {
                let at = |base: usize, elements: usize| base + elements * size;
                let matrix = expert as isize * to.group * size as isize;
                let out = args.address(index).wrapping_add_signed(matrix);
                let part = Operands::product(at(from[0], start * m), at(from[1], start * n), out);
                Group { rows: m, depth: end - start, product: 0, part }
            };
            scratch::with(Need::of::<Group>(p.experts.max(1)), |mut region| {
                let mut groups = region.list::<Group>(p.experts.max(1));
                match is_shared {
                    true => groups.push(group(0, 0, shared)),
                    false => groups.extend((0..p.experts).map(|e| group(e, starts[e], starts[e + 1]))),
                }
                // SAFETY: passed on; `check` bound the gradient.
                unsafe { multiply(&[product], &groups, launch.tier) };
            });
        }
    }
}

/// A place for the gradient of the weight of each slot.
struct Scores(*mut f32);

// SAFETY: each slot has one row, which one thread goes through.
unsafe impl Sync for Scores {}

/// Some rows: from `z` and `da` to `dz`, `r * h` and the gradient of the weight.
struct Between<'a, T> {
    call: &'a Call<'a>,
    scores: &'a Scores,
    rows: Range<usize>,
    /// Room for gate and up of a row.
    apart: &'a mut [f32],
    t: PhantomData<T>,
}

/// A row of the pass.
struct Row<T> {
    ffn: usize,
    weight: f32,
    /// Gate and up, or what the activation is applied to twice; replaced by their gradients.
    z: [*mut f32; 2],
    da: *const f32,
    h: *mut T,
}

impl<T: CpuElement> Task for Between<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.call.launch.problem.forward.activation {
            None => self.go(
                s,
                #[inline(always)]
                |z| z,
                #[inline(always)]
                |_| s.splat(1.0),
            ),
            Some(kind) => with_function!(kind, F in Gelu GeluTanh Silu Relu => self.go(
                s,
                #[inline(always)] |z| F::value_anywhere::<S, f32>(s, z),
                #[inline(always)] |z| F::derivative::<S, f32>(s, z)
            )),
        }
    }
}

impl<T: CpuElement> Between<'_, T> {
    #[inline(always)]
    fn go<S: Simd>(self, s: S, act: impl Fn(S::V) -> S::V, slope: impl Fn(S::V) -> S::V) {
        let Call { launch, tokens, weights, rows, experts } = self.call;
        let (p, slots) = (&launch.problem.forward, tokens.sorted.slots);
        for row in self.rows.clone() {
            let (of, index) = if row < slots.len() { (0, row) } else { (1, row - slots.len()) };
            let ffn = if of == 0 { p.ffn } else { p.shared_ffn.unwrap_or(0) };
            let columns = p.rows_of(ffn);
            let z = (rows.z[of] as *mut f32).wrapping_add(index * columns);
            let dz = (rows.dz[of] as *mut T).wrapping_add(index * columns);
            let halves = match p.gate {
                Gate::None => [z, z],
                Gate::Halves => [z, z.wrapping_add(ffn)],
                Gate::Interleaved => {
                    let apart = self.apart.as_mut_ptr();
                    [apart, apart.wrapping_add(ffn)]
                }
            };
            // SAFETY: the call has these rows, and no other thread does; there is room for gate and up of the longest.
            unsafe {
                if p.gate == Gate::Interleaved {
                    for j in 0..ffn {
                        (*halves[0].add(j), *halves[1].add(j)) = (*z.add(2 * j), *z.add(2 * j + 1));
                    }
                }
                let score = of_row(
                    s,
                    p.gate != Gate::None,
                    &Row {
                        ffn,
                        weight: if of == 0 { weights[index] } else { 1.0 },
                        z: halves,
                        da: (rows.da[of] as *const f32).wrapping_add(index * ffn),
                        h: (rows.h[of] as *mut T).wrapping_add(index * ffn),
                    },
                    &act,
                    &slope,
                );
                if p.gate == Gate::Interleaved {
                    for j in 0..ffn {
                        (*z.add(2 * j), *z.add(2 * j + 1)) = (*halves[0].add(j), *halves[1].add(j));
                    }
                }
                for_vectors::<S>(
                    columns,
                    #[inline(always)]
                    |i, count| store_at(s, dz, i, count, load_at(s, z, i, count)),
                );
                if of == 0 {
                    let slot = slots[index];
                    let dy = (rows.dy as *const T).wrapping_add(row * p.hidden);
                    *self.scores.0.add(slot) = score + self.of_bias(s, dy, experts[slot]);
                }
            }
        }
    }

    /// The product of a row of `dy` with the second bias of its expert.
    ///
    /// # Safety
    /// The row must be there.
    #[inline(always)]
    unsafe fn of_bias<S: Simd>(&self, s: S, dy: *const T, expert: usize) -> f32 {
        let (launch, hidden) = (self.call.launch, self.call.tokens.p.hidden);
        let Some([apart, step]) = launch.problem.forward.b2 else { return 0.0 };
        let bias = (launch.args.address(B2) as *const T).wrapping_offset(expert as isize * apart);
        let mut sum = s.zero();
        for_vectors::<S>(
            hidden,
            #[inline(always)]
            // SAFETY: passed on; `check` bound the bias, and no vector has more lanes.
            |i, count| unsafe {
                let bias = if step == 1 {
                    load_at(s, bias, i, count)
                } else {
                    let mut lanes = [0f32; MAX_LANES];
                    for (lane, to) in lanes.iter_mut().take(count).enumerate() {
                        *to = (*bias.wrapping_offset((i + lane) as isize * step)).to_f32();
                    }
                    s.load(lanes.as_ptr())
                };
                sum = s.add(sum, s.mul(load_at(s, dy, i, count), bias));
            },
        );
        s.reduce_add(sum)
    }
}

/// Goes through a row; returns the product of `da` and `h`.
///
/// # Safety
/// The row must be as its fields say.
#[inline(always)]
unsafe fn of_row<S: Simd, T: CpuElement>(
    s: S,
    gated: bool,
    row: &Row<T>,
    act: impl Fn(S::V) -> S::V,
    slope: impl Fn(S::V) -> S::V,
) -> f32 {
    let (weight, mut score) = (s.splat(row.weight), s.zero());
    for_vectors::<S>(
        row.ffn,
        #[inline(always)]
        // SAFETY: passed on. Lanes past the row are zero in `da` and `h`.
        |i, count| unsafe {
            let z = load_at(s, row.z[0], i, count);
            let up = if gated { load_at(s, row.z[1], i, count) } else { s.splat(1.0) };
            let a = act(z);
            let h = if gated { s.mul(a, up) } else { a };
            store_at(s, row.h, i, count, h);
            let h = load_at(s, row.h, i, count);
            let da = load_at(s, row.da, i, count);
            score = s.add(score, s.mul(da, h));
            store_at(s, row.h, i, count, s.mul(weight, h));
            let dh = s.mul(weight, da);
            let dz = s.mul(dh, slope(z));
            if gated {
                store_at(s, row.z[1], i, count, s.mul(dh, a));
                store_at(s, row.z[0], i, count, s.mul(dz, up));
            } else {
                store_at(s, row.z[0], i, count, dz);
            }
        },
    );
    s.reduce_add(score)
}
