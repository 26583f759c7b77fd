use super::*;
use crate::lab::proof::kernels_on;
use crate::lab::{Arrangement, Values};
use crate::op::Attrs;

fn draws(name: &str) -> (&'static dyn AnyProvable, Draws) {
    let op = crate::lab::find(name).unwrap();
    (op, Draws::new(op, Pinned::default()).unwrap())
}

#[test]
fn a_draw_depends_on_the_seed_its_number_and_the_op_alone() {
    let (_, norms) = draws("rms_norm");
    assert_eq!(norms.draw(7, 3), draws("rms_norm").1.draw(7, 3));
    assert_ne!(norms.draw(7, 3), norms.draw(7, 4));
    assert_ne!(norms.draw(7, 3), norms.draw(8, 3));
    let (_, layers) = draws("layer_norm");
    let sizes = |draws: &Draws| (0..20).map(|number| draws.draw(7, number).case.sizes).collect::<Vec<_>>();
    assert_ne!(sizes(&norms), sizes(&layers));
}

/// What the sanitizers run besides the other tests: under each of them, to build the command line too would take twice as long.
#[test]
#[ignore = "a minute, for scripts/sanitize.sh; `warpsmith check --random` does more"]
fn a_minute_of_random_calls() {
    use std::time::{Duration, Instant, SystemTime};
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 86400;
    println!("seed {seed}");
    let ops: Vec<_> = crate::ops::PROVABLE.iter().map(|op| draws(op.spec().name)).collect();
    let end = Instant::now() + Duration::from_secs(60);
    let mut calls = 0;
    for number in (0..).take_while(|_| Instant::now() < end) {
        for (op, draws) in &ops {
            let draw = draws.draw(seed, number);
            let kernels = kernels_on(*op, Device::Cpu);
            let _instructions = Instructions::draw(draws, Device::Cpu, draw.seed);
            let verdicts = judge(*op, std::slice::from_ref(&draw), &kernels, Device::Cpu).unwrap();
            for (kernel, outcome) in verdicts.into_iter().flat_map(|verdict| match verdict {
                Verdict::Judged(outcomes) => outcomes,
                Verdict::Refused(_) => Vec::new(),
            }) {
                calls += 1;
                assert!(outcome.ok, "draw {number} of {}: {:?}", kernel.name, outcome.failure);
            }
        }
    }
    println!("{calls} calls");
    assert!(calls > 0);
}

/// A draw that the op refuses judges nothing.
#[test]
fn ops_take_almost_all_of_their_draws() {
    const COUNT: u64 = 150;
    for op in crate::ops::PROVABLE {
        let draws = Draws::new(*op, Pinned::default()).unwrap();
        let refusals: Vec<String> = (0..COUNT)
            .map(|number| draws.draw(1, number))
            .filter_map(|draw| Some((Drawn::new(*op, &draw.case, Device::Cpu, draw.seed).err()?, draw)))
            .map(|(error, draw)| format!("{error}: {} {}", draw.case.name(op.spec()), draw.case.dtype))
            .collect();
        assert!(refusals.len() as u64 <= COUNT / 20, "{} refusals, as\n{}", refusals.len(), refusals[0]);
    }
}

#[test]
fn what_is_pinned_stays() {
    let op = crate::lab::find("linear").unwrap();
    let pinned = Pinned {
        dtype: Some(crate::DType::BF16),
        arrangement: Some(Arrangement::Transposed),
        values: Some(Values::Large),
    };
    let draws = Draws::new(op, pinned).unwrap();
    for case in (0..50).map(|number| draws.draw(1, number).case) {
        assert_eq!((Some(case.dtype), Some(case.values)), (pinned.dtype, pinned.values));
        assert_eq!(Some(case.arrangement), pinned.arrangement);
    }
    assert!(Draws::new(op, Pinned { dtype: Some(crate::DType::I64), ..pinned }).is_none());
}

/// What fails for more than 40 columns and with a residual, whatever else it has.
#[test]
fn a_failure_is_reduced_to_what_it_needs() {
    let (op, draws) = draws("rms_norm");
    let residual = op.spec().arg("residual").unwrap();
    let fails = |case: &Case| case.gives(residual) && case.sizes[1] > 40;
    let found = (0..).map(|number| draws.draw(5, number).case).find(fails).unwrap();
    let reduced = reduce(op, &found, 500, fails);
    assert_eq!(reduced.sizes, [1, 41]);
    assert_eq!(reduced.attrs, Attrs::defaults(op.spec()));
    assert!(fails(&reduced) && !reduced.in_place);
    assert_eq!((reduced.arrangement, reduced.values), (Arrangement::Contiguous, Values::Typical));
    // Without attempts it stays as it is.
    assert_eq!(reduce(op, &found, 0, fails), found);
}

#[test]
fn draws_are_judged_and_refusals_told_apart() {
    let (op, draws) = draws("softmax");
    let kernels = kernels_on(op, Device::Cpu);
    let some: Vec<Draw> = (0..8).map(|number| draws.draw(2, number)).collect();
    for verdict in judge(op, &some, &kernels, Device::Cpu).unwrap() {
        let Verdict::Judged(outcomes) = verdict else { panic!("refused") };
        assert_eq!(outcomes.len(), kernels.len());
        for (kernel, outcome) in outcomes {
            assert_eq!(outcome.failure, None, "{}", kernel.name);
        }
    }
    let op = crate::lab::find("attention").unwrap();
    let mut bad = Draw { case: op.cases().remove(1), seed: 0 };
    bad.case.sizes[5] = 33;
    let verdicts = judge(op, &[bad], &kernels_on(op, Device::Cpu), Device::Cpu).unwrap();
    assert!(matches!(&verdicts[0], Verdict::Refused(error) if error.to_string().contains("head_dim")));
}
