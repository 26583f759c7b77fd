//! Shrinks a failing case.

use crate::lab::{AnyProvable, Arrangement, Case, Values};
use crate::op::Attrs;

/// The simplest case found that still fails: smaller sizes, fewer options and arguments, a plainer layout, plainer
/// values. `fails` is asked about at most `attempts` cases.
pub fn reduce(
    op: &dyn AnyProvable,
    case: &Case,
    attempts: usize,
    mut fails: impl FnMut(&Case) -> bool,
) -> Case {
    let mut smallest = case.clone();
    let mut left = attempts;
    loop {
        let mut candidates = simpler(op, &smallest).into_iter();
        let found = candidates.find(|candidate| {
            left = left.saturating_sub(1);
            left > 0 && fails(candidate)
        });
        match found {
            Some(candidate) => smallest = candidate,
            None => return smallest,
        }
    }
}

/// Cases that are simpler in one respect, those that simplify most first.
fn simpler(op: &dyn AnyProvable, case: &Case) -> Vec<Case> {
    let spec = op.spec();
    let mut all: Vec<Case> = Vec::new();
    all.push(case.clone().values(Values::Typical));
    all.push(case.clone().arranged(Arrangement::Contiguous));
    if case.arrangement == Arrangement::Mixed {
        let one = [
            Arrangement::Misaligned,
            Arrangement::PaddedRows,
            Arrangement::Transposed,
            Arrangement::HeadsFirst,
        ];
        all.extend(one.map(|arrangement| case.clone().arranged(arrangement)));
    }
    all.push(Case { in_place: false, ..case.clone() });
    for index in (0..spec.args.len()).filter(|&index| case.gives(index)) {
        let linked = |other: &usize| spec.args[*other].with == Some(index);
        let dropped = (0..spec.args.len()).filter(linked).chain([index]).chain(spec.args[index].with);
        let optional = dropped.fold(case.optional, |optional, other| optional & !(1 << other));
        all.push(Case { optional, ..case.clone() });
    }
    let defaults = Attrs::defaults(spec);
    all.extend((0..spec.attrs.len()).map(|index| {
        let attrs = case.attrs.with(index, defaults.value(index));
        Case { attrs, ..case.clone() }
    }));
    for (index, &size) in case.sizes.iter().enumerate() {
        for smaller in [1, size / 8, size / 2, size - size / 4, size.saturating_sub(1)] {
            if (1..size).contains(&smaller) {
                let mut sizes = case.sizes.clone();
                sizes[index] = smaller;
                all.push(case.clone().sizes(&sizes));
            }
        }
    }
    all.iter_mut().for_each(|candidate| op.constrain(candidate));
    // If a constraint made it larger again, it is no progress.
    let grows = |candidate: &Case| candidate.sizes.iter().zip(&case.sizes).any(|(now, before)| now > before);
    all.retain(|candidate| candidate != case && !grows(candidate));
    all
}
