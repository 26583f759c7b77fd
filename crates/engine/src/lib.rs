//! Runs language models on the kernels of warpsmith: weights, text, models, scheduling.

pub mod text;
pub mod weights;
