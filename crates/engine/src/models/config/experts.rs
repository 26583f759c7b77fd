//! Feed-forward layers that are mixtures of experts.

/// The experts of a model, alike in all layers that have some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token goes through.
    pub used: usize,
    /// Width of one expert.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalize: bool,
    /// Layers that have one feed-forward layer instead, ascending.
    pub dense_layers: Vec<usize>,
}

impl ExpertsConfig {
    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        self.dense_layers.binary_search(&layer).is_err()
    }
}
