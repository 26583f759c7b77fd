//! Inputs that an op makes itself: see [`Fill::Generated`](crate::lab::Fill::Generated).

use crate::lab::{ArgPlan, Case, Generator};

/// What the generators of a case have made so far: each runs once, for all its arguments together.
pub(super) struct Generated<'a> {
    case: &'a Case,
    seed: u64,
    made: Vec<(Generator, Vec<Vec<f64>>)>,
}

impl<'a> Generated<'a> {
    /// Nothing yet.
    pub fn new(case: &'a Case, seed: u64) -> Self {
        Generated { case, seed, made: Vec::new() }
    }

    /// The values of argument `index`, rounded to its dtype.
    ///
    /// # Panics
    /// If the generator gives another number of values than the plan has elements: a mistake in the op.
    pub fn values(&mut self, generator: Generator, index: usize, plan: &ArgPlan) -> Vec<f64> {
        let known = self.made.iter().position(|(made_by, _)| std::ptr::fn_addr_eq(*made_by, generator));
        let known = known.unwrap_or_else(|| {
            self.made.push((generator, generator(self.case, self.seed)));
            self.made.len() - 1
        });
        let values = &self.made[known].1[index];
        assert_eq!(values.len(), plan.shape.iter().product::<usize>(), "values of argument {index}");
        values.iter().map(|&value| plan.dtype.round(value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Fill;
    use crate::op::OpSpec;
    use crate::tensor::DType;

    static SPEC: OpSpec = OpSpec { name: "test_op", ..OpSpec::EMPTY };

    fn counted(case: &Case, seed: u64) -> Vec<Vec<f64>> {
        vec![Vec::new(), vec![seed as f64; case.sizes[0]], (0..case.sizes[0]).map(|i| i as f64).collect()]
    }

    #[test]
    fn arguments_of_one_call_come_from_one_seed() {
        let case = Case::new(&SPEC, DType::I32).sizes(&[3]);
        let plan =
            ArgPlan { shape: vec![3], dtype: DType::I32, fill: Fill::Generated(counted), batch_dim: None };
        let mut generated = Generated::new(&case, 7);
        assert_eq!(generated.values(counted, 2, &plan), [0.0, 1.0, 2.0]);
        assert_eq!(generated.values(counted, 1, &plan), [7.0; 3]);
        assert_eq!(generated.made.len(), 1);
    }
}
