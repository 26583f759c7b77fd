//! What the engine is doing, for people who watch it: sizes and counts, never tokens.

use super::Engine;
use crate::pages::Branches;
use crate::request::{RequestId, Salt};

/// A sequence, as others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceView {
    /// The request.
    pub request: RequestId,
    /// Which of its outputs.
    pub index: usize,
    /// Whether it runs, or waits for pages.
    pub is_running: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache when it was first admitted.
    pub cached_tokens: usize,
    /// Tokens, of prompt and output, whose keys and values are stored.
    pub computed_tokens: usize,
    /// Tokens of the output so far.
    pub output_tokens: usize,
    /// Pages that it uses, alone or with others.
    pub pages: usize,
    /// How often it lost them.
    pub preemptions: usize,
}

/// The engine between two steps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Pages of the pool.
    pub num_pages: usize,
    /// Pages that hold nothing.
    pub free_pages: usize,
    /// Pages of prefixes that nobody uses now: they are kept until they are needed.
    pub cached_pages: usize,
    /// The prefix tree.
    pub tree: Branches,
    /// Sequences, in the order in which they are served.
    pub sequences: Vec<SequenceView>,
    /// Sequences that run and that wait, of those who are not shown.
    pub others: (usize, usize),
}

impl Engine {
    /// What the engine is doing: at most this many branches of the prefix tree, those in use and the largest, and at most this many
    /// sequences. Only prefixes and sequences with a salt for which `shows` holds are shown; others are counted. The time is linear
    /// in the branches of the tree and the sequences.
    pub fn view(
        &self,
        most_branches: usize,
        most_sequences: usize,
        shows: impl Fn(Option<&Salt>) -> bool,
    ) -> View {
        let pages = self.scheduler.pages();
        let free_pages = pages.num_free();
        let mut view = View {
            num_pages: pages.num_pages(),
            free_pages,
            cached_pages: pages.available() - free_pages,
            tree: pages.branches(most_branches, &shows),
            ..View::default()
        };
        for (sequence, is_running) in self.scheduler.sequences() {
            if !shows(sequence.salt.as_ref()) || view.sequences.len() >= most_sequences {
                let (running, waiting) = &mut view.others;
                *if is_running { running } else { waiting } += 1;
                continue;
            }
            view.sequences.push(SequenceView {
                request: sequence.key.request,
                index: sequence.key.index,
                is_running,
                prompt_tokens: sequence.prompt_len,
                cached_tokens: sequence.cached_tokens.unwrap_or(0),
                computed_tokens: sequence.computed,
                output_tokens: sequence.tokens.len() - sequence.prompt_len,
                pages: sequence.held.pages.len(),
                preemptions: sequence.preemptions,
            });
        }
        view
    }
}
