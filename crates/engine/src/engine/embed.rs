//! Embeddings: one vector for some tokens, from the hidden states of the model.
//!
//! They are computed between two steps, in pages of their own that are free again before the next one. Running requests
//! wait for that pass and are otherwise as they were: rows do not depend on each other, and everything is ordered by the
//! stream.

use super::Engine;
use crate::batch::{Batch, Chunk};
use crate::error::{Error, Result};
use std::str::FromStr;

/// How the hidden states of the tokens become one vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pooling {
    /// That of the last token, which has seen all others.
    #[default]
    Last,
    /// The mean of all.
    Mean,
}

impl Pooling {
    /// All names.
    pub const NAMES: [&str; 2] = ["last", "mean"];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Last => "last",
            Pooling::Mean => "mean",
        }
    }
}

impl FromStr for Pooling {
    type Err = Error;

    fn from_str(name: &str) -> Result<Pooling> {
        match name {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            other => Err(Error::settings("pooling", Pooling::NAMES.join(" or "), format!("`{other}`"))),
        }
    }
}

impl Engine {
    /// The most tokens that can be embedded: by the model's context, and by the pages.
    pub fn longest_input(&self) -> usize {
        self.model.config().max_positions.min(self.scheduler.capacity())
    }

    /// The embedding of tokens: their hidden states after the final norm, pooled, of length 1. `None` if too few pages are
    /// unused now; then it can be tried again after a step. Nothing is read from the prefix cache, and nothing is kept in it.
    ///
    /// It takes as long as the prompt would: no step runs meanwhile.
    ///
    /// # Errors
    /// If the tokens can never be embedded, or the pass fails.
    pub fn embed(
        &mut self,
        tokens: &[i32],
        pooling: Pooling,
        adapter: Option<&str>,
    ) -> Result<Option<Vec<f32>>> {
        let most = self.longest_input();
        if tokens.is_empty() || tokens.len() > most {
            return Err(Error::request("input", format!("1 to {most} tokens"), tokens.len()));
        }
        self.check_exist("input", tokens)?;
        let adapter = adapter.map(|name| self.adapter(name)).transpose()?;
        let Some(held) = self.scheduler.lend(tokens.len()) else { return Ok(None) };
        let sums = self.pool(tokens, pooling, &held.pages, adapter);
        self.scheduler.take_back(held)?;
        match sums {
            Ok(sums) => Ok(Some(of_length_one(&sums)?)),
            Err(error) => {
                self.note_fault(&error);
                Err(error)
            }
        }
    }

    /// The pooled hidden states times any factor, which has no effect on the direction.
    fn pool(
        &mut self,
        tokens: &[i32],
        pooling: Pooling,
        pages: &[i32],
        adapter: Option<usize>,
    ) -> Result<Vec<f64>> {
        let mut sums = vec![0f64; self.model.config().hidden_size];
        let mut start = 0;
        // Chunks as in steps: the memory of the model is large enough for them, and graphs have its addresses.
        for chunk in tokens.chunks(self.options.max_chunk) {
            let ends = start + chunk.len() == tokens.len();
            let wants_logits = ends || pooling == Pooling::Mean;
            let chunk = Chunk { tokens: chunk, start, pages, wants_logits, adapter };
            let mut batch = Batch::new(&[chunk], self.options.page_size, &self.stream)?;
            if pooling == Pooling::Mean {
                batch.logit_rows = None;
            }
            let rows = batch.num_logits();
            self.model.hidden(&batch, &mut self.kv, self.hidden.write(rows)?)?;
            start += batch.num_tokens();
            if rows == 0 {
                continue;
            }
            for state in self.hidden.read(rows).to_f64()?.chunks_exact(sums.len()) {
                sums.iter_mut().zip(state).for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(sums)
    }
}

/// A vector of this direction and length 1.
fn of_length_one(vector: &[f64]) -> Result<Vec<f32>> {
    let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    if !length.is_finite() || length == 0.0 {
        let expected = "hidden states that have a direction";
        return Err(Error::request("input", expected, format!("a vector of length {length}")));
    }
    Ok(vector.iter().map(|x| (x / length) as f32).collect())
}
