//! What proves an op: its definition and its cases.

use super::case::{ArgPlan, Case, Values};
use super::reference::{Array, Inputs, Naive, Probe, Random, Real, flushing, storing_as};
use crate::op::{AnyOp, Attrs, Op};
use crate::tensor::DType;

/// An op that can be proven and measured.
pub trait Provable: Op {
    /// The definition: plain loops over `R`. Evaluated in `f64` it gives the truth; evaluated in the naive arithmetic
    /// of a dtype it gives the tolerance. Returns one array per argument of the spec, `None` for inputs and outputs
    /// that were not asked for.
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>>;

    /// The tensors of a case, by position in the spec; `None` for optional arguments not given.
    fn plan(case: &Case) -> Vec<Option<ArgPlan>>;

    /// The cases every kernel must pass. One of [`Values::Exponents`] is added for each type.
    fn cases() -> Vec<Case>;

    /// The cases that are timed and compared with peers.
    fn bench_cases() -> Vec<Case>;

    /// Turns a randomly drawn case into one that the op accepts, where its description does not express a requirement:
    /// sizes that divide others, options that exclude each other. An acceptable case stays as it is.
    fn constrain(_case: &mut Case) {}

    /// Whether an input is a factor of matrix products as it was given. What subnormal factors are zero for takes such an input
    /// as zero; the reference does it itself with what was computed before ([`Real::flushed_factor`]).
    fn is_factor(_index: usize) -> bool {
        true
    }
}

/// Truth, naive result and conditioning of one case: per output argument, in `f64`.
pub struct Expected {
    /// The reference in `f64`.
    pub truth: Vec<Option<Array<f64>>>,
    /// The reference in the naive arithmetic of the dtype.
    pub naive: Vec<Option<Array<f64>>>,
    /// The standard deviation of the naive arithmetic's error, element by element.
    pub deviation: Vec<Option<Array<f64>>>,
}

/// What naive arithmetic gives: per output argument, in `f64`.
pub struct Naively {
    /// The results.
    pub naive: Vec<Option<Array<f64>>>,
    /// The standard deviation of their error.
    pub deviation: Vec<Option<Array<f64>>>,
}

/// What [`Probe`] arithmetic finds out about one case: per output argument, in `f64`.
pub struct Probed {
    /// Results of naive arithmetic with other roundings.
    pub sample: Vec<Option<Array<f64>>>,
    /// The largest number on the way to each element.
    pub peak: Vec<Option<Array<f64>>>,
}

/// The object-safe form of [`Provable`].
pub trait AnyProvable: AnyOp {
    /// The cases every kernel must pass.
    fn cases(&self) -> Vec<Case>;
    /// The cases that are timed.
    fn bench_cases(&self) -> Vec<Case>;
    /// The tensors of a case.
    fn plan(&self, case: &Case) -> Vec<Option<ArgPlan>>;
    /// Changes a case drawn at random to one that the op accepts.
    fn constrain(&self, case: &mut Case);
    /// Evaluates the reference in `f64` and in naive arithmetic on inputs given in `f64`. `wanted` has a bit for
    /// each argument of the call.
    fn expected(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Expected;
    /// Evaluates the reference in naive arithmetic alone, for kernels whose instructions take subnormal products and sums for
    /// zero.
    fn flushed(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Naively;
    /// See [`Provable::is_factor`].
    fn is_factor(&self, index: usize) -> bool;
    /// Evaluates the reference in [`Probe`] arithmetic.
    fn probed(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Probed;
}

impl<O: Provable> AnyProvable for O {
    fn cases(&self) -> Vec<Case> {
        let mut cases = O::cases();
        cases.extend(exponents(&cases));
        cases
    }

    fn bench_cases(&self) -> Vec<Case> {
        O::bench_cases()
    }

    fn plan(&self, case: &Case) -> Vec<Option<ArgPlan>> {
        O::plan(case)
    }

    fn constrain(&self, case: &mut Case) {
        O::constrain(case)
    }

    fn expected(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Expected {
        let truth = O::reference(&Inputs::new(inputs, wanted), attrs);
        let Naively { naive, deviation } = naive::<O>(dtype, inputs, wanted, attrs);
        Expected { truth, naive, deviation }
    }

    fn flushed(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Naively {
        flushing(|| naive::<O>(dtype, inputs, wanted, attrs))
    }

    fn is_factor(&self, index: usize) -> bool {
        O::is_factor(index)
    }

    fn probed(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Probed {
        let probes = storing_as(dtype, || Probe::repeatably(|| results::<O, Probe>(inputs, wanted, attrs)));
        let of =
            |f: fn(&Probe) -> f64| probes.iter().map(|probe| probe.as_ref().map(|a| read(a, f))).collect();
        Probed { sample: of(|probe| probe.f64()), peak: of(Probe::peak) }
    }
}

/// The naive result and the standard deviation of its error.
fn naive<O: Provable>(dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Naively {
    storing_as(dtype, || {
        let naive = evaluate::<O, Naive>(inputs, wanted, attrs, |x| x.f64());
        Naively { naive, deviation: evaluate::<O, Random>(inputs, wanted, attrs, |x| x.deviation()) }
    })
}

/// For each type, a case with values of all exponents: like the first with special values, or the first of some size. Random
/// calls have many more.
fn exponents(cases: &[Case]) -> Vec<Case> {
    let floats = || cases.iter().filter(|case| case.dtype.is_float() && !case.sizes.contains(&0));
    let special = floats().filter(|case| case.values == Values::Special);
    let large = floats().filter(|case| case.sizes.iter().product::<usize>() >= 64);
    let mut twins: Vec<Case> = Vec::new();
    for case in special.chain(large) {
        if !twins.iter().any(|twin| twin.dtype == case.dtype) {
            twins.push(case.clone().values(Values::Exponents));
        }
    }
    twins
}

/// The reference in another arithmetic, with `seen` applied to each result.
fn evaluate<O: Provable, R: Real>(
    inputs: &[Option<Array<f64>>],
    wanted: u32,
    attrs: &Attrs,
    seen: fn(&R) -> f64,
) -> Vec<Option<Array<f64>>> {
    results::<O, R>(inputs, wanted, attrs)
        .iter()
        .map(|result| result.as_ref().map(|a| read(a, seen)))
        .collect()
}

/// The reference in another arithmetic.
fn results<O: Provable, R: Real>(
    inputs: &[Option<Array<f64>>],
    wanted: u32,
    attrs: &Attrs,
) -> Vec<Option<Array<R>>> {
    let inputs: Vec<Option<Array<R>>> =
        inputs.iter().map(|input| input.as_ref().map(|a| Array::of(&a.shape, &a.data))).collect();
    O::reference(&Inputs::new(&inputs, wanted), attrs)
}

fn read<R>(array: &Array<R>, seen: fn(&R) -> f64) -> Array<f64> {
    Array { shape: array.shape.clone(), data: array.data.iter().map(seen).collect() }
}
