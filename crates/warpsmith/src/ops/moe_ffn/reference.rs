//! The definition of `moe_ffn`.

use super::backward as back;
use super::{ACT, B1, B2, GATE, IDS, RESIDUAL, ROUTING, SCALE, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::grouped::reference::{activated, dot, dot_of};
use crate::ops::linear::{Activation, Gate};

/// One expert: w1 [rows, hidden], w2 [hidden, ffn], b1 [rows], b2 [hidden].
#[derive(Clone, Copy)]
struct Expert<'a, R> {
    pub w1: &'a [R],
    pub w2: &'a [R],
    pub b1: Option<&'a [R]>,
    pub b2: Option<&'a [R]>,
}

impl<'a, R: Real> Expert<'a, R> {
    /// Expert `e` of a call, whose weights and biases are these arguments.
    pub fn of(inputs: &Inputs<'a, R>, [w1, w2, b1, b2]: [usize; 4], e: usize) -> Self {
        let matrix = |array: &'a Array<R>| {
            let len = array.shape[1..].iter().product::<usize>();
            &array.data[e * len..][..len]
        };
        let [w1, w2] = [w1, w2].map(|index| matrix(inputs.get(index).expect("required")));
        Expert { w1, w2, b1: inputs.get(b1).map(matrix), b2: inputs.get(b2).map(matrix) }
    }

    /// The expert that all tokens are sent to, whose weights are these arguments.
    pub fn shared(inputs: &Inputs<'a, R>, [w1, w2]: [usize; 2]) -> Option<Self> {
        let (w1, w2) = (inputs.get(w1)?, inputs.get(w2)?);
        Some(Expert { w1: &w1.data, w2: &w2.data, b1: None, b2: None })
    }

    /// The sums of the first product, `rows` of them.
    pub fn first(&self, x: &[R], rows: usize) -> Vec<R> {
        let row = |j: usize| dot(x, &self.w1[j * x.len()..][..x.len()]);
        (0..rows).map(|j| self.b1.map_or_else(|| row(j), |b| row(j) + b[j])).collect()
    }

    /// The result for a row of h, stored.
    pub fn second(&self, h: &[R], hidden: usize) -> Vec<R> {
        let row = |i: usize| dot(h, &self.w2[i * h.len()..][..h.len()]);
        (0..hidden).map(|i| self.b2.map_or_else(|| row(i), |b| row(i) + b[i])).collect()
    }
}

/// The rows of a first matrix: of the experts, or of the shared one.
fn rows_of<R>(array: &Array<R>) -> usize {
    array.shape[array.shape.len() - 2]
}

/// The experts of a token that were not dropped, each once, in the order of their first slots, with the weights of their slots.
fn by_expert<R: Real>(ids: &[R], weights: &[R]) -> Vec<(usize, Vec<R>)> {
    let mut found: Vec<(usize, Vec<R>)> = Vec::new();
    for (id, &weight) in ids.iter().map(|id| id.f64()).zip(weights).filter(|(id, _)| *id >= 0.0) {
        match found.iter_mut().find(|(of, _)| *of == id as usize) {
            Some((_, weights)) => weights.push(weight),
            None => found.push((id as usize, vec![weight])),
        }
    }
    found
}

/// x: [m, hidden], ids and weights: [m, top_k].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, ids, weights) = (&inputs[X], &inputs[IDS], &inputs[ROUTING]);
    let (hidden, top_k) = (x.row_len(), ids.row_len());
    let (activation, gate) = (Activation::ALL[attrs.choice(ACT)], Gate::ALL[attrs.choice(GATE)]);
    let scale = R::of(attrs.float(SCALE) as f32 as f64);
    let result = |expert: &Expert<'_, R>, x: &[R], rows: usize| {
        let h = activated(&expert.first(x, rows), activation, gate);
        let h: Vec<R> = h.into_iter().map(R::stored).collect();
        expert.second(&h, hidden)
    };
    let mut out = Array::zeros(&x.shape);
    for (token, row) in x.rows().enumerate() {
        let sum = &mut out.data[token * hidden..][..hidden];
        for (id, weights) in by_expert(&ids.data[token * top_k..][..top_k], &weights.data[token * top_k..]) {
            let y = result(&Expert::of(inputs, [W1, W2, B1, B2], id), row, rows_of(&inputs[W1]));
            let total = weights.iter().fold(R::zero(), |sum, &weight| sum + weight);
            for (sum, y) in sum.iter_mut().zip(y) {
                // Slots of one expert have the same error, which their number multiplies: not as errors at random add up.
                *sum = match total.f64().is_finite() && y.f64().is_finite() {
                    true => *sum + total * y,
                    false => weights.iter().fold(*sum, |sum, &weight| sum + weight * y),
                };
            }
        }
        if let Some(shared) = Expert::shared(inputs, [SHARED_W1, SHARED_W2]) {
            let y = result(&shared, row, rows_of(&inputs[SHARED_W1]));
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum = *sum + y);
        }
        for (i, sum) in sum.iter_mut().enumerate() {
            *sum = *sum * scale;
            if let Some(residual) = inputs.get(RESIDUAL) {
                *sum = *sum + residual.data[token * hidden + i];
            }
        }
    }
    let mut all = vec![None; super::OUT];
    all.push(Some(out));
    all
}

/// What a slot, or the shared expert, gives to the gradients.
struct Slot<R> {
    x: Vec<R>,
    dy: Vec<R>,
    weight: R,
    /// Before and after it is stored.
    exact_dz: Vec<R>,
    dz: Vec<R>,
    /// weight * h, stored.
    h: Vec<R>,
    dweight: R,
}

impl<R: Real> Slot<R> {
    fn new(expert: &Expert<'_, R>, x: &[R], dy: &[R], weight: R, rows: usize, attrs: &Attrs) -> Self {
        let (activation, gate) =
            (Activation::ALL[attrs.choice(back::ACT)], Gate::ALL[attrs.choice(back::GATE)]);
        let act = |z: R| activation.kind().map_or(z, |kind| kind.value(z));
        let slope = |z: R| activation.kind().map_or(R::one(), |kind| kind.derivative(z));
        let z = expert.first(x, rows);
        let h: Vec<R> = activated(&z, activation, gate).into_iter().map(R::stored).collect();
        let ffn = h.len();
        let da: Vec<R> = (0..ffn).map(|j| dot_of(dy.len(), |i| (dy[i], expert.w2[i * ffn + j]))).collect();
        let of_bias = expert.b2.map_or(R::zero(), |b2| dot(dy, b2));
        let dweight = dot(&da, &h) + of_bias;
        let pair = |j: usize| match gate {
            Gate::None => [j, j],
            Gate::Halves => [j, ffn + j],
            Gate::Interleaved => [2 * j, 2 * j + 1],
        };
        let mut exact_dz = vec![R::zero(); rows];
        for (j, &da) in da.iter().enumerate() {
            let (dh, [g, u]) = (weight * da, pair(j));
            if gate == Gate::None {
                exact_dz[j] = dh * slope(z[j]);
            } else {
                exact_dz[g] = dh * slope(z[g]) * z[u];
                exact_dz[u] = dh * act(z[g]);
            }
        }
        let dz = exact_dz.iter().map(|dz| dz.stored()).collect();
        let h = h.iter().map(|&h| (weight * h).stored()).collect();
        Slot { x: x.to_vec(), dy: dy.to_vec(), weight, exact_dz, dz, h, dweight }
    }

    /// What it adds to the gradient of x.
    fn dx(&self, expert: &Expert<'_, R>) -> Vec<R> {
        let hidden = self.x.len();
        (0..hidden).map(|i| dot_of(self.dz.len(), |j| (self.dz[j], expert.w1[j * hidden + i]))).collect()
    }
}

/// The products of the columns of two rows of each slot: `rows` x `columns`.
fn outer<R: Real>(
    slots: &[Slot<R>],
    of: impl Fn(&Slot<R>) -> (&[R], &[R]),
    [rows, columns]: [usize; 2],
) -> Vec<R> {
    let sum = |at: usize| {
        dot_of(slots.len(), |s| {
            let (left, right) = of(&slots[s]);
            (left[at / columns], right[at % columns])
        })
    };
    (0..rows * columns).map(sum).collect()
}

/// The sums of columns of a row of each slot.
fn sums<R: Real>(slots: &[Slot<R>], of: impl Fn(&Slot<R>, usize) -> R, columns: usize) -> Vec<R> {
    (0..columns).map(|j| slots.iter().fold(R::zero(), |sum, slot| sum + of(slot, j))).collect()
}

/// As `forward`, with dout: [m, hidden].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, ids, weights) = (&inputs[back::X], &inputs[back::IDS], &inputs[back::ROUTING]);
    let (hidden, top_k, w1, w2) = (x.row_len(), ids.row_len(), &inputs[back::W1], &inputs[back::W2]);
    let (experts, rows, ffn) = (w1.shape[0], w1.shape[1], w2.shape[2]);
    let scale = R::of(attrs.float(back::SCALE) as f32 as f64);
    let dy: Vec<R> = inputs[back::DOUT].data.iter().map(|&d| (d * scale).stored()).collect();
    let mut of_experts: Vec<Vec<Slot<R>>> = (0..experts).map(|_| Vec::new()).collect();
    let (mut of_shared, mut dx, mut dweights) =
        (Vec::new(), Array::zeros(&x.shape), Array::zeros(&ids.shape));
    for token in 0..ids.shape[..ids.shape.len() - 1].iter().product() {
        let own = token * hidden..(token + 1) * hidden;
        let (x, dy, dx) = (&x.data[own.clone()], &dy[own.clone()], &mut dx.data[own]);
        let mut add = |more: Vec<R>| dx.iter_mut().zip(more).for_each(|(dx, more)| *dx = *dx + more);
        for slot in token * top_k..(token + 1) * top_k {
            let id = ids.data[slot].f64();
            if id < 0.0 {
                continue;
            }
            let expert = Expert::of(inputs, [back::W1, back::W2, back::B1, back::B2], id as usize);
            let of = Slot::new(&expert, x, dy, weights.data[slot], rows, attrs);
            add(of.dx(&expert));
            dweights.data[slot] = of.dweight;
            of_experts[id as usize].push(of);
        }
        if let Some(shared) = Expert::shared(inputs, [back::SHARED_W1, back::SHARED_W2]) {
            let of = Slot::new(&shared, x, dy, R::one(), rows_of(&inputs[back::SHARED_W1]), attrs);
            add(of.dx(&shared));
            of_shared.push(of);
        }
    }
    let first = |slots: &[Slot<R>], rows: usize| outer(slots, |s| (&s.dz, &s.x), [rows, hidden]);
    let second = |slots: &[Slot<R>], ffn: usize| outer(slots, |s| (&s.dy, &s.h), [hidden, ffn]);
    let stacked = |shape: &[usize], of: &dyn Fn(&[Slot<R>]) -> Vec<R>| Array {
        shape: shape.to_vec(),
        data: of_experts.iter().flat_map(|slots| of(slots)).collect(),
    };
    let mut all = vec![None; inputs.count()];
    let mut give = |index: usize, make: &dyn Fn() -> Array<R>| all[index] = inputs.wants(index).then(make);
    give(back::DX, &|| dx.clone());
    give(back::DROUTING, &|| dweights.clone());
    give(back::DW1, &|| stacked(&w1.shape, &|slots| first(slots, rows)));
    give(back::DW2, &|| stacked(&w2.shape, &|slots| second(slots, ffn)));
    give(back::DB1, &|| stacked(&[experts, rows], &|slots| sums(slots, |s, j| s.exact_dz[j], rows)));
    give(back::DB2, &|| stacked(&[experts, hidden], &|slots| sums(slots, |s, i| s.weight * s.dy[i], hidden)));
    give(back::DSHARED_W1, &|| {
        let shape = &inputs[back::SHARED_W1].shape;
        Array { shape: shape.clone(), data: first(&of_shared, shape[0]) }
    });
    give(back::DSHARED_W2, &|| {
        let shape = &inputs[back::SHARED_W2].shape;
        Array { shape: shape.clone(), data: second(&of_shared, shape[1]) }
    });
    all
}
