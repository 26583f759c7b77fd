//! Files of weights: what is read is right, and what is wrong is refused.

mod formats;
mod mutate;
mod refusals;

use mutate::{Target, attack};

#[test]
fn damaged_files_are_refused_or_read_but_never_panic() {
    for target in [Target::Gguf, Target::Safetensors] {
        let outcome = attack(target, 1, 100_000).unwrap_or_else(|input| panic!("{target:?}: {input:?}"));
        // Both must happen, or the damage is too small or too large to show anything.
        assert!(outcome.accepted > 1_000 && outcome.refused > 50_000, "{target:?}: {outcome:?}");
    }
}
