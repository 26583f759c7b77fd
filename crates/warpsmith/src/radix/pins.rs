//! Pins, and the order in which what is not pinned goes.

use super::flat::ROOT;
use super::{NAME, NONE, Node, RadixTree};
use crate::error::{Error, Result};
use std::collections::BTreeSet;

/// Keeps a path from being evicted until it is given back to [`RadixTree::unpin`]. One that is dropped instead pins the
/// path for as long as the tree lives.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is pinned cannot be evicted before the pin is given back"]
pub struct Pin {
    tree: u64,
    node: u32,
}

impl Pin {
    /// The node up to which the path is pinned.
    pub fn node(&self) -> u32 {
        self.node
    }
}

impl RadixTree {
    /// Pins a node and the path to it.
    ///
    /// # Errors
    /// If the tree has no such node (it was evicted, say), or there are 2^32 pins already.
    pub fn pin(&mut self, node: u32) -> Result<Pin> {
        if !self.is_live(node) {
            return Err(Error::argument(NAME, "node", "a node of the tree", node.to_string()));
        }
        // The root counts all pins: where it does not overflow, nothing does.
        if self.nodes[ROOT as usize].pins == u32::MAX {
            return Err(Error::argument(NAME, "node", "fewer than 2^32 pins", "one more"));
        }
        let mut at = node;
        while at != NONE {
            let above = &mut self.nodes[at as usize];
            self.lru.remove(at, above);
            if above.pins == 0 {
                self.pinned_pages += above.len as usize;
            }
            above.pins += 1;
            at = above.parent;
        }
        Ok(Pin { tree: self.id, node })
    }

    /// Gives a pin back.
    ///
    /// # Errors
    /// If it is a pin of another tree.
    pub fn unpin(&mut self, pin: Pin) -> Result<()> {
        if pin.tree != self.id {
            return Err(Error::argument(NAME, "pin", "a pin of this tree", "a pin of another"));
        }
        // The node exists: what is pinned is not removed, and a pin can be given back only once.
        let mut at = pin.node;
        while at != NONE {
            let above = &mut self.nodes[at as usize];
            above.pins -= 1;
            if above.pins == 0 {
                self.pinned_pages -= above.len as usize;
            }
            self.lru.add(at, above);
            at = above.parent;
        }
        Ok(())
    }

    /// Whether a node exists: the root always does, others where the table has their edge.
    pub(super) fn is_live(&self, id: u32) -> bool {
        id == ROOT as u32 || self.nodes.get(id as usize).is_some_and(|node| node.len > 0)
    }
}

/// The leaves that can be evicted, in the order in which they will be.
#[derive(Debug, Default)]
pub(super) struct Lru {
    clock: u64,
    leaves: BTreeSet<(u64, u32)>,
}

impl Lru {
    /// The next time.
    pub fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether a node can be evicted now.
    pub fn takes(id: u32, node: &Node) -> bool {
        id != ROOT as u32 && node.first_child == NONE && node.pins == 0
    }

    /// Adds a node if it can be evicted.
    pub fn add(&mut self, id: u32, node: &Node) {
        if Lru::takes(id, node) {
            self.leaves.insert((node.stamp, id));
        }
    }

    /// Takes a node out that is about to change, if it could be evicted.
    pub fn remove(&mut self, id: u32, node: &Node) {
        if Lru::takes(id, node) {
            self.leaves.remove(&(node.stamp, id));
        }
    }

    /// The next leaf to go.
    pub fn oldest(&self) -> Option<u32> {
        self.leaves.first().map(|&(_, id)| id)
    }

    pub fn leaves(&self) -> &BTreeSet<(u64, u32)> {
        &self.leaves
    }
}
