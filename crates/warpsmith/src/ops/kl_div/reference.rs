//! The definitions of `kl_div` and its gradient.

use super::backward as back;
use super::options::{DIRECTION, REDUCTION, TEMPERATURE};
use super::{COUNT, LOSS, LSE, ROW_LOSSES, STUDENT, TARGETS, TEACHER, TEACHER_LSE};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::cross_entropy::reference::counted;
pub(super) use crate::ops::cross_entropy::reference::{MEAN, NONE};

/// What logits are multiplied by.
fn inverse<R: Real>(attrs: &Attrs) -> R {
    R::one() / R::of(attrs.float(TEMPERATURE) as f32 as f64)
}

fn is_reverse(attrs: &Attrs) -> bool {
    attrs.choice(DIRECTION) == 1
}

/// Which rows count: all, without targets.
fn counts<R: Real>(targets: Option<&Array<R>>, rows: usize, attrs: &Attrs) -> Vec<bool> {
    targets.map_or(vec![true; rows], |targets| counted(targets, attrs))
}

/// x: [v]. The logits below their largest, over the temperature, and the logarithm of the sum of their exponentials; and `lse`.
fn below<R: Real>(x: &[R], attrs: &Attrs) -> (Vec<R>, R, R) {
    let top = x.iter().fold(R::of(f64::NEG_INFINITY), |top, &x| top.max_nan(x));
    let z: Vec<R> = x.iter().map(|&x| (x - top) * inverse(attrs)).collect();
    let sum = z.iter().fold(R::zero(), |sum, &z| sum + z.exp());
    let log = (sum - R::one()).ln_1p();
    (z, log, top + R::of(attrs.float(TEMPERATURE) as f32 as f64) * log)
}

/// x, y: [v]. The loss of the row, of whose distributions that of `x` weighs, and both lse.
fn row_loss<R: Real>(x: &[R], y: &[R], attrs: &Attrs) -> (R, [R; 2]) {
    let ((a, log_a, lse_a), (b, log_b, lse_b)) = (below(x, attrs), below(y, attrs));
    let lowest = R::of(f64::NEG_INFINITY);
    let lacks = x.iter().zip(y).any(|(&x, &y)| y == lowest && x != lowest);
    let powers = a.iter().fold(R::zero(), |sum, &a| sum + a.exp());
    let above = a.iter().zip(&b).fold(R::zero(), |sum, (&a, &b)| {
        let p = a.exp();
        // What has no weight adds nothing, infinite or not.
        if p == R::zero() { sum } else { sum + p * (a - b) }
    });
    let apart = log_b - log_a;
    (if lacks { apart - lowest } else { above / powers + apart }, [lse_a, lse_b])
}

/// student: [m, v], teacher: [m, v], targets: [m].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (student, teacher) = (&inputs[STUDENT], &inputs[TEACHER]);
    let v = student.row_len();
    let m = student.shape[0];
    let counted = counts(inputs.get(TARGETS), m, attrs);
    let [mut losses, mut lse, mut teacher_lse] = [(); 3].map(|()| Array::zeros(&[m]));
    for i in (0..m).filter(|&i| counted[i]) {
        let [x, y] = [student, teacher].map(|logits| &logits.data[i * v..][..v]);
        if is_reverse(attrs) {
            (losses.data[i], [lse.data[i], teacher_lse.data[i]]) = row_loss(x, y, attrs);
        } else {
            (losses.data[i], [teacher_lse.data[i], lse.data[i]]) = row_loss(y, x, attrs);
        }
    }
    let count = counted.iter().filter(|&&counts| counts).count() as f64;
    let sum = losses.data.iter().fold(R::zero(), |sum, &loss| sum + loss);
    let number = |value: R| Array { shape: vec![], data: vec![value] };
    let mut out = vec![None; COUNT + 1];
    out[LOSS] = Some(match attrs.choice(REDUCTION) {
        NONE => losses.clone(),
        MEAN => number(sum / R::of(count)),
        _ => number(sum),
    });
    out[LSE] = inputs.wants(LSE).then_some(lse);
    out[TEACHER_LSE] = inputs.wants(TEACHER_LSE).then_some(teacher_lse);
    out[ROW_LOSSES] = inputs.wants(ROW_LOSSES).then_some(losses);
    out[COUNT] = inputs.wants(COUNT).then(|| Array::of(&[], &[count]));
    out
}

/// student and teacher: [m, v], lse, teacher_lse, row_losses and targets: [m], count: [], dloss: [m] or [].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (student, teacher) = (&inputs[back::STUDENT], &inputs[back::TEACHER]);
    let (lse, teacher_lse, losses) =
        (&inputs[back::LSE], &inputs[back::TEACHER_LSE], &inputs[back::ROW_LOSSES]);
    let (count, dloss) = (inputs[back::COUNT].data[0], &inputs[back::DLOSS]);
    let v = student.row_len();
    let m = student.shape[0];
    let counted = counts(inputs.get(back::TARGETS), m, attrs);
    let mut dstudent = Array::zeros(&student.shape);
    for i in (0..m).filter(|&i| counted[i]) {
        let dloss = match attrs.choice(REDUCTION) {
            NONE => dloss.data[i],
            MEAN => dloss.data[0] / count,
            _ => dloss.data[0],
        };
        let loss = losses.data[i];
        // An infinite loss has no gradient: zero times it is NaN.
        let dloss = if is_reverse(attrs) { dloss + loss * R::zero() } else { dloss };
        let factor = dloss * inverse(attrs);
        for j in i * v..(i + 1) * v {
            let a = (student.data[j] - lse.data[i]) * inverse(attrs);
            let b = (teacher.data[j] - teacher_lse.data[i]) * inverse(attrs);
            let q = a.exp();
            dstudent.data[j] = factor
                * match is_reverse(attrs) {
                    false => q - b.exp(),
                    true if q == R::zero() => q,
                    true => q * ((a - b) - loss),
                };
        }
    }
    let mut out = vec![None; back::DSTUDENT + 1];
    out[back::DSTUDENT] = Some(dstudent);
    out
}
