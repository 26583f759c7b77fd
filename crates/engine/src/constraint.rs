//! Grammars that limit which tokens an output may have.
//!
//! The engine knows no grammar itself: whoever makes a request brings one. Before a token is chosen, the engine asks which
//! tokens are possible and removes the others from the logits, on the device; then it tells which token was chosen.

use std::sync::Arc;

/// What the outputs of a request must look like.
pub trait Grammar: Send + Sync {
    /// The state of a new output.
    fn begin(&self) -> Box<dyn Constraint>;
}

/// Where an output is in its grammar.
pub trait Constraint: Send {
    /// Writes which tokens may come next: bit `i % 32` of word `i / 32` is set if token `i` may. `false`, and nothing need be
    /// written, if all may. `mask` has enough words for all tokens, all zero.
    ///
    /// The tokens that end an output must be among them where the output may end.
    ///
    /// # Errors
    /// Why nothing can come next. The output fails with it.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<bool, String>;

    /// Takes the token that was chosen. `true` if the output is complete and nothing may follow.
    ///
    /// # Errors
    /// Why it cannot be taken. The output fails with it.
    fn accept(&mut self, token: i32) -> Result<bool, String>;
}

/// A grammar that requests share. Two are equal if they are the same object.
#[derive(Clone)]
pub struct SharedGrammar(Arc<dyn Grammar>);

impl SharedGrammar {
    /// For requests.
    pub fn new(grammar: Arc<dyn Grammar>) -> SharedGrammar {
        SharedGrammar(grammar)
    }

    pub(crate) fn begin(&self) -> Box<dyn Constraint> {
        self.0.begin()
    }
}

impl PartialEq for SharedGrammar {
    fn eq(&self, other: &SharedGrammar) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for SharedGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedGrammar")
    }
}
