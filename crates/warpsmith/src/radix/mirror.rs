//! A copy of the tree's arrays on a device.

use super::{Changes, NAME, RadixTree, Version};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// The arrays of one tree as tensors, for the op `prefix_match`. A mirror knows the version of the tree it holds, so a
/// tree can have any number of mirrors (such as one per GPU), each updated independently.
#[derive(Debug)]
pub struct Mirror {
    table: Tensor,
    tokens: Tensor,
    pages: Tensor,
    seed: u32,
    version: Version,
}

impl Mirror {
    /// Copies the whole tree, in the order of `stream`.
    pub fn new(tree: &RadixTree, stream: &Stream) -> Result<Mirror> {
        let flat = tree.flat();
        let (slots, pages) = (flat.table.len(), flat.pages.len());
        let mut mirror = Mirror {
            table: Tensor::empty_on(&[slots, 4], DType::I32, stream)?,
            tokens: Tensor::empty_on(&[pages, flat.page_size], DType::I32, stream)?,
            pages: Tensor::empty_on(&[pages], DType::I32, stream)?,
            seed: flat.seed,
            version: tree.version(),
        };
        mirror.copy(tree, &tree.everything(), stream)?;
        Ok(mirror)
    }

    /// Copies what has changed in the tree since the last update, in stream order; copies everything if an array has
    /// grown. Searches must be enqueued on the same stream, or wait for it.
    ///
    /// # Errors
    /// If this is not the tree the mirror was made from, or if memory cannot be allocated or written. In the latter
    /// case the mirror must not be searched until an update succeeds: parts of it may be newer than others.
    pub fn update(&mut self, tree: &RadixTree, stream: &Stream) -> Result<()> {
        let (expected, got) = (self.version.tree(), tree.version().tree());
        if got != expected {
            let expected = format!("the tree that the mirror was made of, number {expected}");
            return Err(Error::argument(NAME, "tree", expected, format!("tree {got}")));
        }
        let flat = tree.flat();
        if self.table.shape()[0] != flat.table.len() || self.pages.shape()[0] != flat.pages.len() {
            *self = Mirror::new(tree, stream)?;
            return Ok(());
        }
        self.copy(tree, &tree.changes_since(self.version)?, stream)?;
        (self.seed, self.version) = (flat.seed, tree.version());
        Ok(())
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

    /// The version of the tree it holds. Search results refer to that version.
    pub fn version(&self) -> Version {
        self.version
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

    /// Seed of the hash.
    pub fn seed(&self) -> u32 {
        self.seed
    }
}
