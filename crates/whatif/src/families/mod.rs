//! The families of ops, and how long a call of each takes.
//!
//! Forms are physics with few free numbers. What stands in them as a constant is a property of the kernels or of the chip,
//! or was chosen on all rows, which the errors on held-back rows then flatter a little; docs/whatif.md says which.

mod attention;
mod linear;
mod mixtures;
mod rows;
mod tokens;

use crate::fit::Parameter;
use crate::machine::Machine;
use crate::work::Work;

/// Ops whose times have one form.
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// The form, in words.
    pub form: &'static str,
    /// Whether its tensors stay in the L2.
    pub in_cache: bool,
    /// What is fitted.
    pub parameters: &'static [Parameter],
    /// Whether a call belongs to it.
    pub takes: fn(&Work) -> bool,
    /// Rows of one group are held back together.
    pub group: fn(&Work) -> String,
    /// The time of a call with these parameters.
    pub time: fn(&Work, &Machine, &[f64]) -> Parts,
}

/// Where the microseconds of a call go.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Parts {
    /// Before and after the work: launch, first loads, last stores. Work of a neighbour could hide it.
    pub launch: f64,
    /// Moving bytes between memory and chip.
    pub memory: f64,
    /// Arithmetic. It overlaps with memory.
    pub math: f64,
    /// What overlaps with nothing.
    pub serial: f64,
}

impl Parts {
    /// Those of a call that moves its bytes, and does nothing else.
    fn moving(work: &Work, machine: &Machine) -> Parts {
        Parts { memory: machine.moving(work.bytes), ..Parts::default() }
    }

    /// All of them.
    pub fn total(&self) -> f64 {
        self.launch + self.serial + self.memory.max(self.math)
    }

    /// Two calls of which the second takes its input from the first as it comes: one launch, and each resource is used by
    /// both in turn. `saved` are the microseconds of moving what lies between.
    pub fn streamed_into(&self, next: &Parts, saved: f64) -> Parts {
        Parts {
            launch: self.launch.max(next.launch),
            memory: (self.memory + next.memory - saved).max(0.0),
            math: self.math + next.math,
            serial: self.serial + next.serial,
        }
    }
}

/// All of them. A call belongs to the first that takes it.
pub static FAMILIES: [Family; 22] = [
    rows::ROWS,
    rows::ROWS_IN_CACHE,
    rows::TRANSPOSES,
    tokens::STORES,
    linear::HALF,
    linear::HALF_IN_CACHE,
    linear::NARROW,
    linear::FULL,
    linear::QUANTISED,
    linear::QUANTISED_IN_CACHE,
    mixtures::HALF,
    mixtures::FULL,
    mixtures::GROUPED_HALF,
    mixtures::GROUPED_FULL,
    attention::PROMPTS,
    attention::DECODE,
    attention::BACKWARD,
    attention::BACKWARD_WGMMA,
    tokens::SAMPLING,
    tokens::ARGMAX,
    tokens::PREFIXES,
    tokens::PREFIXES_IN_CACHE,
];

/// The family of a call, if one takes it.
pub fn find(work: &Work) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| (family.takes)(work))
}

const fn parameter(name: &'static str, least: f64, most: f64) -> Parameter {
    Parameter { name, least, most }
}

/// Microseconds that every launch takes; none of the records has a shorter one than 1.
const LAUNCH: Parameter = parameter("launch, us", 0.5, 5.0);
/// Of the rate of a copy.
const OF_COPY: Parameter = parameter("of the copy rate", 0.3, 1.2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::h200;

    #[test]
    fn parts_that_overlap_take_as_long_as_the_longer() {
        let parts = Parts { launch: 1.0, memory: 5.0, math: 3.0, serial: 0.5 };
        assert_eq!(parts.total(), 6.5);
        let both = parts.streamed_into(&Parts { launch: 2.0, memory: 1.0, math: 4.0, serial: 0.0 }, 3.0);
        assert_eq!(both, Parts { launch: 2.0, memory: 3.0, math: 7.0, serial: 0.5 });
    }

    #[test]
    fn every_family_gets_slower_with_more_work_and_not_with_faster_memory() {
        let middle = |family: &Family| -> Vec<f64> {
            family.parameters.iter().map(|p| 0.5 * (p.least + p.most)).collect()
        };
        let cases = [
            ("rms_norm", "rms_norm_row", "num_tokens=8192 hidden=4096", "bf16", 1.3e8, 1.3e8),
            ("linear", "linear_sm90", "m=4096 n=4096 k=4096", "bf16", 1e8, 1.37e11),
            (
                "attention",
                "attention_sm90",
                "batch=2 q_len=4096 kv_len=4096 num_heads=16 head_dim=128",
                "bf16",
                1e8,
                1e11,
            ),
            (
                "paged_attention",
                "paged_attention_sm80",
                "requests=16 q_len=1 kv_len=4096 num_heads=32",
                "bf16",
                2e8,
                1e9,
            ),
        ];
        for (op, kernel, case, dtype, bytes, flops) in cases {
            let work = Work::new(op, kernel, case, dtype).costing(bytes, flops);
            let family = find(&work).unwrap_or_else(|| panic!("no family of {op}"));
            let p = middle(family);
            let now = (family.time)(&work, &h200(), &p).total();
            let faster = Machine { copy_gbps: 2.0 * h200().copy_gbps, ..h200() };
            let more = work.clone().costing(100.0 * bytes, flops);
            assert!(now > 0.0 && (family.time)(&work, &faster, &p).total() <= now, "{op}");
            assert!((family.time)(&more, &h200(), &p).total() > now, "{op}");
        }
    }

    #[test]
    fn no_family_has_more_than_three_parameters() {
        for family in &FAMILIES {
            assert!((1..=3).contains(&family.parameters.len()), "{}", family.name);
            assert!(family.parameters.iter().all(|p| p.least < p.most), "{}", family.name);
        }
    }
}
