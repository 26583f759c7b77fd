//! The definition of `linear`.

use super::backward as back;
use super::problem::SCALE_BLOCK;
use super::{ACT, Activation, BIAS, GATE, Gate, PRECISION, Precision, RESIDUAL, SCALE, SCALING, Scaling};
use super::{TOLERANCE, W, W_SCALE, X, X_SCALE};
use crate::lab::reference::{TENSOR_GROUP, alignment_error, smallest_factor, subnormal_product};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = residual + scale act(x wᵀ + bias), or residual + scale (act(gate) up).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w) = (&inputs[X], &inputs[W]);
    let gate = Gate::ALL[attrs.choice(GATE)];
    let rows = w.shape[w.shape.len() - 2]; // of one matrix
    let n = if gate == Gate::None { rows } else { rows / 2 };
    let k = x.row_len();
    let lines = x.shape[..x.shape.len() - 1].iter().product::<usize>();
    let matrices: usize = w.shape[..w.shape.len() - 2].iter().product();
    // Lines of x that go with one matrix of w.
    let m = if w.shape.len() == 2 { lines } else { x.shape[x.shape.len() - 2] };
    debug_assert_eq!(lines, m * matrices);

    let activation = Activation::ALL[attrs.choice(ACT)].kind();
    let scale = R::of(attrs.float(SCALE) as f32 as f64);
    let mut shape = x.shape.clone();
    *shape.last_mut().expect("a row") = n;
    let mut out = Array::zeros(&shape);
    for line in 0..lines {
        let matrix = line / m;
        let sum = |row: usize| {
            let mut z = product(inputs, attrs, line, matrix * rows + row, rows, k);
            if let Some(bias) = inputs.get(BIAS) {
                z = z + bias.data[row];
            }
            z
        };
        let act = |z: R| activation.map_or(z, |kind| kind.value_of_product(z));
        for j in 0..n {
            let mut y = match gate {
                Gate::None => act(sum(j)),
                Gate::Halves => act(sum(j)) * sum(n + j),
                Gate::Interleaved => act(sum(2 * j)) * sum(2 * j + 1),
            };
            y = y * scale;
            if let Some(residual) = inputs.get(RESIDUAL) {
                y = y + residual.data[line * n + j];
            }
            out.data[line * n + j] = y;
        }
    }
    vec![None, None, None, None, None, None, Some(out)]
}

/// dz = dout scale act'(z), stored; dx = dz w; dw = dzᵀ x; dbias = the sum of the lines of dz before they were stored.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w, dout) = (&inputs[back::X], &inputs[back::W], &inputs[back::DOUT]);
    let tf32 = Precision::ALL[attrs.choice(back::PRECISION)].is_tf32(attrs.float(back::TOLERANCE));
    let element = |v: R| if tf32 { v.tf32() } else { v };
    let activation = Activation::ALL[attrs.choice(back::ACT)].kind();
    let scale = R::of(attrs.float(back::SCALE) as f32 as f64);
    let (n, k) = (dout.row_len(), x.row_len());
    let lines = x.shape[..x.shape.len() - 1].iter().product::<usize>();
    let slope = |i: usize| activation.map_or(R::one(), |kind| kind.derivative(inputs[back::Z].data[i]));
    let exact: Vec<R> = (0..lines * n).map(|i| dout.data[i] * scale * slope(i)).collect();
    let dz: Vec<R> = exact.iter().map(|&v| v.stored().flushed_factor()).collect();
    let (mut dx, mut dw, mut dbias) =
        (Array::<R>::zeros(&x.shape), Array::<R>::zeros(&w.shape), Array::zeros(&[n]));
    for line in 0..lines {
        for j in 0..n {
            let d = dz[line * n + j];
            dbias.data[j] = dbias.data[j] + exact[line * n + j];
            for i in 0..k {
                let (of_x, of_w) = (&mut dx.data[line * k + i], &mut dw.data[j * k + i]);
                *of_x = (*of_x + (element(d) * element(w.data[j * k + i])).flushed()).flushed();
                *of_w = (*of_w + (element(d) * element(x.data[line * k + i])).flushed()).flushed();
            }
        }
    }
    let (d_lines, d_columns) = (Extremes::of_lines(&dz, n, lines), Extremes::of_columns(&dz, n));
    let (w_columns, x_columns) = (Extremes::of_columns(&w.data, k), Extremes::of_columns(&x.data, k));
    for (i, v) in dx.data.iter_mut().enumerate() {
        *v = v.blurred(alignment_error(d_lines[i / k].aligned_with(&w_columns[i % k])));
    }
    for (i, v) in dw.data.iter_mut().enumerate() {
        *v = v.blurred(alignment_error(d_columns[i / k].aligned_with(&x_columns[i % k])));
    }
    let wanted = |index: usize, array| inputs.wants(index).then_some(array);
    let gradients = [wanted(back::DX, dx), wanted(back::DW, dw), wanted(back::DBIAS, dbias)];
    [vec![None; back::DX], gradients.to_vec()].concat()
}

/// The smallest and the largest magnitude of some factors.
#[derive(Clone, Copy)]
struct Extremes(f64, f64);

impl Extremes {
    fn of_lines<R: Real>(data: &[R], n: usize, lines: usize) -> Vec<Extremes> {
        let of = |line: usize| data[line * n..][..n].iter().fold(Extremes::none(), |e, v| e.with(v.f64()));
        (0..lines).map(of).collect()
    }

    fn of_columns<R: Real>(data: &[R], n: usize) -> Vec<Extremes> {
        let mut all = vec![Extremes::none(); n];
        for (i, v) in data.iter().enumerate() {
            all[i % n] = all[i % n].with(v.f64());
        }
        all
    }

    fn none() -> Self {
        Extremes(f64::INFINITY, 0.0)
    }

    fn with(self, value: f64) -> Self {
        Extremes(self.0.min(value.abs()), self.1.max(value.abs()))
    }

    /// A bound of [`subnormal_product`] of these factors and others.
    fn aligned_with(&self, other: &Extremes) -> f64 {
        let smallest = smallest_factor();
        let of =
            |small: &Extremes, large: &Extremes| if small.0 < smallest { smallest * large.1 } else { 0.0 };
        let product = of(self, other).max(of(other, self));
        if product.is_finite() { product } else { 0.0 }
    }
}

/// A line of x times a line of w (both counted over all matrices), scaled.
fn product<R: Real>(
    inputs: &Inputs<'_, R>,
    attrs: &Attrs,
    line: usize,
    row: usize,
    rows: usize,
    k: usize,
) -> R {
    let (precision, tolerance) = (Precision::ALL[attrs.choice(PRECISION)], attrs.float(TOLERANCE));
    // Types of 8 and 16 bits have no bits that TF32 does not have.
    let tf32 = precision.is_tf32(tolerance);
    let element = |v: R| if tf32 { v.tf32() } else { v };
    let x = &inputs[X].data[line * k..][..k];
    let w = &inputs[W].data[row * k..][..k];
    // In full precision products are added one by one.
    let one_by_one = precision != Precision::Auto || precision.is_full(tolerance, k);
    let dot = |range: std::ops::Range<usize>| {
        let (x, w) = (&x[range.clone()], &w[range]);
        let pairs = x.chunks(TENSOR_GROUP).zip(w.chunks(TENSOR_GROUP));
        pairs.fold(R::zero(), |sum, (x, w)| {
            let factors = || x.iter().zip(w).map(|(&x, &w)| (element(x), element(w)));
            let products: Vec<R> = factors().map(|(x, w)| (x * w).flushed()).collect();
            let subnormal = subnormal_product(factors());
            let add = |sum: R, products: &[R]| sum.add_products(products, subnormal);
            let sum =
                if one_by_one { products.iter().fold(sum, |sum, &p| sum + p) } else { add(sum, &products) };
            sum.flushed().blurred(alignment_error(subnormal))
        })
    };
    let (Some(x_scale), Some(w_scale)) = (inputs.get(X_SCALE), inputs.get(W_SCALE)) else { return dot(0..k) };
    match Scaling::ALL[attrs.choice(SCALING)] {
        Scaling::Tensor => dot(0..k) * x_scale.data[0] * w_scale.data[0],
        Scaling::Row => dot(0..k) * x_scale.data[line] * w_scale.data[row],
        Scaling::Block => {
            let blocks = k.div_ceil(SCALE_BLOCK);
            // Blocks of rows begin anew with each matrix.
            let (matrix, inside) = (row / rows, row % rows);
            let row_block = matrix * rows.div_ceil(SCALE_BLOCK) + inside / SCALE_BLOCK;
            (0..blocks).fold(R::zero(), |sum, b| {
                let part = dot(b * SCALE_BLOCK..((b + 1) * SCALE_BLOCK).min(k));
                sum + part * x_scale.data[line * blocks + b] * w_scale.data[row_block * blocks + b]
            })
        }
    }
}
