//! How positions rotate queries and keys, as configuration and file say together.

use super::config::{RopeConfig, RopeScaling};
use super::loader::Loader;
use super::names::Naming;
use crate::error::Result;
use warpsmith::DType;

impl Loader<'_> {
    /// How queries and keys are rotated, with the divisors that GGUF stores as tensors.
    pub fn rope(&self) -> Result<Option<RopeConfig>> {
        const DIVISORS: &str = "rope_freqs.weight";
        let Some(mut rope) = self.config.rope.clone() else { return Ok(None) };
        if self.source.naming() != Naming::Gguf {
            return Ok(Some(rope));
        }
        if let RopeScaling::LongRope { short, long, attention_factor, .. } = &mut rope.scaling {
            const FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
            match FACTORS.map(|name| self.has(name)) {
                [false, false] if *attention_factor == 1.0 => rope.scaling = RopeScaling::None,
                _ => {
                    for (name, divisors) in FACTORS.into_iter().zip([short, long]) {
                        *divisors = self.divisors(name)?.into_iter().map(f64::from).collect();
                    }
                }
            }
        } else if self.has(DIVISORS) {
            let mut divisors = self.divisors(DIVISORS)?;
            if let RopeScaling::Linear(factor) = rope.scaling {
                divisors.iter_mut().for_each(|divisor| *divisor *= factor as f32);
            }
            rope.scaling = RopeScaling::Divisors(divisors);
        }
        Ok(Some(rope))
    }

    /// A number for each pair that is rotated.
    fn divisors(&self, name: &str) -> Result<Vec<f32>> {
        let pairs = self.config.rotary_dim.unwrap_or(self.config.head_dim) / 2;
        self.check_shape(name, &[pairs])?;
        self.note(name);
        let divisors: Vec<f32> = self.source.tensor(name, DType::F32)?.to_vec()?;
        match divisors.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0)) {
            Some(wrong) => Err(self.wrong(name, "finite numbers above 0", wrong)),
            None => Ok(divisors),
        }
    }
}
