//! Rotary position embedding: what positions rotate queries and keys by.

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// What is done to the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// How the frequencies of rope are changed for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All angles are divided by a factor.
    Linear(f64),
    /// Llama 3: low frequencies are divided by a factor, high ones stay, and there is a smooth passage between them.
    Llama3 {
        /// Divides low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Positions the model was first trained with.
        original: f64,
    },
    /// YaRN: as Llama 3, with a linear passage between the pairs that turn this many times.
    Yarn {
        /// Divides low frequencies.
        factor: f64,
        /// Positions the model was first trained with.
        original: f64,
        /// Pairs that turn more often over these positions stay.
        beta_fast: f64,
        /// Pairs that turn less often are divided by all of the factor.
        beta_slow: f64,
        /// Whether the passage begins and ends at whole pairs.
        truncate: bool,
        /// Multiplies cosine and sine.
        attention_factor: f64,
    },
    /// LongRoPE: a divisor for each frequency; others where the context is longer than the one the model was first trained
    /// with.
    LongRope {
        /// The divisors for short contexts. Empty if a tensor has them.
        short: Vec<f64>,
        /// Those for long contexts. Empty if a tensor has them.
        long: Vec<f64>,
        /// The longest of the short contexts.
        original: f64,
        /// Multiplies cosine and sine.
        attention_factor: f64,
    },
    /// A divisor for each frequency, as GGUF stores it in `rope_freqs.weight`.
    Divisors(Vec<f32>),
}

impl RopeConfig {
    /// What the angle of each pair is divided by, where `rotary_dim` elements of a head are rotated and a context has up to
    /// `context` tokens; `None` if all are divided by the same number.
    pub fn divisors(&self, rotary_dim: usize, context: usize) -> Option<Vec<f64>> {
        let pairs = rotary_dim / 2;
        match &self.scaling {
            RopeScaling::None | RopeScaling::Linear(_) => None,
            RopeScaling::Divisors(divisors) => Some(divisors.iter().map(|&d| f64::from(d)).collect()),
            RopeScaling::LongRope { short, long, original, .. } => {
                Some(if context as f64 > *original { long.clone() } else { short.clone() })
            }
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let divisor = |pair: usize| {
                    let frequency = self.theta.powf(-2.0 * pair as f64 / rotary_dim as f64);
                    let wavelength = std::f64::consts::TAU / frequency;
                    if wavelength > original / low_freq_factor {
                        return factor;
                    }
                    if wavelength < original / high_freq_factor {
                        return 1.0;
                    }
                    let smooth =
                        (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                };
                Some((0..pairs).map(divisor).collect())
            }
            &RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, .. } => {
                // The pair that turns this many times over the original positions.
                let pair = |turns: f64| {
                    let ratio = (original / (turns * std::f64::consts::TAU)).ln() / self.theta.ln();
                    rotary_dim as f64 * ratio / 2.0
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min((rotary_dim - 1) as f64));
                if low == high {
                    high += 0.001;
                }
                let divisor = |pair: usize| {
                    let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    1.0 / (divided / factor + (1.0 - divided))
                };
                Some((0..pairs).map(divisor).collect())
            }
        }
    }

    /// What cosine and sine are multiplied by.
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        }
    }
}
