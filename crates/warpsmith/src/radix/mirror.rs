//! A copy of the tree's arrays on a device.

use super::{Changes, RadixTree};
use crate::device::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;
use std::ops::Range;

/// The arrays of a tree as tensors, for the op [`prefix_match`](crate::ops::prefix_match). Belongs to one tree: it is
/// told of changes once.
#[derive(Debug)]
pub struct Mirror {
    table: Tensor,
    tokens: Tensor,
    pages: Tensor,
    seed: u32,
}

impl Mirror {
    /// Copies the whole tree, in the order of `stream`.
    pub fn new(tree: &mut RadixTree, stream: &Stream) -> Result<Mirror> {
        let flat = tree.flat();
        let (slots, pages) = (flat.table.len(), flat.pages.len());
        let mut mirror = Mirror {
            table: Tensor::empty_on(&[slots, 4], DType::I32, stream)?,
            tokens: Tensor::empty_on(&[pages, flat.page_size], DType::I32, stream)?,
            pages: Tensor::empty_on(&[pages], DType::I32, stream)?,
            seed: flat.seed,
        };
        tree.index.dirty.mark(0..slots);
        tree.arena.dirty.mark(0..tree.arena.used());
        mirror.update(tree, stream)?;
        Ok(mirror)
    }

    /// Copies what has changed since the last copy, in the order of `stream`. Searches must be enqueued on the same
    /// stream, or wait for it.
    pub fn update(&mut self, tree: &mut RadixTree, stream: &Stream) -> Result<()> {
        let flat = tree.flat();
        if self.table.shape()[0] != flat.table.len() || self.pages.shape()[0] != flat.pages.len() {
            *self = Mirror::new(tree, stream)?;
            return Ok(());
        }
        self.seed = flat.seed;
        let changes = tree.take_changes();
        let copied = self.copy(tree, &changes, stream);
        if copied.is_err() {
            tree.give_back(changes);
        }
        copied
    }

    fn copy(&mut self, tree: &RadixTree, changes: &Changes, stream: &Stream) -> Result<()> {
        let flat = tree.flat();
        let rows = |tensor: &mut Tensor, data: &[i32], width: usize, ranges: &[Range<usize>]| {
            ranges.iter().try_for_each(|rows| {
                tensor.write(rows.start * width, &data[rows.start * width..rows.end * width], stream)
            })
        };
        rows(&mut self.table, flat.table.as_flattened(), 4, &changes.slots)?;
        rows(&mut self.tokens, flat.tokens, flat.page_size, &changes.pages)?;
        rows(&mut self.pages, flat.pages, 1, &changes.pages)
    }

    /// `[num_slots, 4]`: see [`flat`](super::flat).
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// `[num_pages, page_size]`.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// `[num_pages]`.
    pub fn pages(&self) -> &Tensor {
        &self.pages
    }

    /// Of the hash.
    pub fn seed(&self) -> u32 {
        self.seed
    }
}
