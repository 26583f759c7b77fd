//! The tokens and pages of all edges, end to end.

use super::marks::Marks;
use crate::error::Result;
use crate::tensor::storage::{host_out_of_memory, zeroed};
use std::ops::Range;

/// Runs of pages. New runs go behind the last; the gaps of dropped runs are reclaimed by compaction.
#[derive(Debug)]
pub(super) struct Arena {
    page_size: usize,
    tokens: Vec<i32>,
    pages: Vec<i32>,
    /// Pages up to the end of the last run.
    used: usize,
    /// Pages that belong to edges.
    live: usize,
    pub marks: Marks,
}

impl Arena {
    /// Room for this many pages.
    pub fn new(page_size: usize, pages: usize) -> Result<Arena> {
        let (tokens, pages) = (zeroed(pages * page_size)?, zeroed(pages)?);
        Ok(Arena { page_size, tokens, pages, used: 0, live: 0, marks: Marks::default() })
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    pub fn pages(&self) -> &[i32] {
        &self.pages
    }

    pub fn used(&self) -> usize {
        self.used
    }

    pub fn live(&self) -> usize {
        self.live
    }

    /// The tokens of one page.
    pub fn page_tokens(&self, page: usize) -> &[i32] {
        &self.tokens[page * self.page_size..][..self.page_size]
    }

    /// Whether `pages` more do not fit behind the last run.
    pub fn is_full_for(&self, pages: usize) -> bool {
        self.used + pages > self.pages.len()
    }

    /// Whether compaction leaves at least half of the arena free after adding `pages` more.
    pub fn is_worth_packing(&self, pages: usize) -> bool {
        2 * (self.live + pages) <= self.pages.len()
    }

    /// Makes room for `pages` more behind the last run, at least doubling the capacity.
    pub fn grow(&mut self, pages: usize) {
        let capacity = self.grown(pages);
        self.tokens.resize(capacity * self.page_size, 0);
        self.pages.resize(capacity, 0);
    }

    fn grown(&self, pages: usize) -> usize {
        (self.used + pages).max(2 * self.pages.len())
    }

    /// Gets the memory that [`Arena::grow`] will need.
    pub fn reserve(&mut self, pages: usize) -> Result<()> {
        let capacity = self.grown(pages);
        let tokens = capacity * self.page_size;
        let missing = |_| host_out_of_memory(tokens.saturating_mul(size_of::<i32>()));
        self.tokens.try_reserve_exact(tokens.saturating_sub(self.tokens.len())).map_err(missing)?;
        self.pages.try_reserve_exact(capacity.saturating_sub(self.pages.len())).map_err(missing)
    }

    /// Adds a run, for which there must be room. Returns its first page.
    pub fn push(&mut self, tokens: &[i32], pages: &[i32]) -> usize {
        let start = self.used;
        self.tokens[start * self.page_size..][..tokens.len()].copy_from_slice(tokens);
        self.pages[start..][..pages.len()].copy_from_slice(pages);
        self.used += pages.len();
        self.live += pages.len();
        self.marks.mark(start..self.used);
        start
    }

    /// Notes that a run of `pages` no longer belongs to an edge.
    pub fn drop_run(&mut self, pages: usize) {
        self.live -= pages;
    }

    /// Begins compaction. Every run must then be passed to [`Arena::pack`], in memory order.
    pub fn begin_packing(&mut self) {
        (self.used, self.live) = (0, 0);
    }

    /// Moves a run down to the end of the previous one. Returns its first page.
    pub fn pack(&mut self, run: Range<usize>) -> usize {
        let start = self.used;
        let size = self.page_size;
        self.tokens.copy_within(run.start * size..run.end * size, start * size);
        self.used += run.len();
        self.live += run.len();
        self.pages.copy_within(run, start);
        self.marks.mark(start..self.used);
        start
    }
}
