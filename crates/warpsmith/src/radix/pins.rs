//! Pins, and the order in which unpinned leaves are evicted.

use super::flat::{Found, ROOT};
use super::{NAME, NONE, Node, RadixTree, Version};
use crate::error::{Error, Result};
use std::collections::BTreeSet;

/// Protects a path from eviction until it is returned to [`RadixTree::unpin`]. A pin that is dropped instead keeps
/// its path for the lifetime of the tree.
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
    /// Pins what a search found in a copy of the tree ([`Mirror`](super::Mirror)), and makes it the most recently
    /// used: the first `tokens` of the path to `node` (whole pages, and no more than matched), and nothing after
    /// them. `version` is the version of the mirror when it was searched.
    ///
    /// Returns `None` if the node has been evicted or removed since, even if its number was reused. As long as a node
    /// exists, the path to it has the same tokens and pages, so a pin guarantees that the pages the search reported
    /// still hold the tokens of the query. Without a pin, [`RadixTree::lookup_pinned`] finds what is left. The time
    /// is linear in the edges of the path; tokens are not compared again.
    ///
    /// # Errors
    /// If the version belongs to another tree, if the path has fewer tokens or they are not whole pages, or if there
    /// are 2^32 pins already.
    pub fn pin_match(&mut self, version: Version, node: u32, tokens: usize) -> Result<Option<Pin>> {
        self.check_version(version)?;
        if !self.has_node_of(version, node) {
            return Ok(None);
        }
        let path: usize = self.path_up(node).map(|id| self.nodes[id as usize].len as usize).sum();
        let pages = tokens / self.page_size();
        if pages > path || !tokens.is_multiple_of(self.page_size()) {
            let expected = format!("whole pages of {} tokens, at most {path}", self.page_size());
            return Err(Error::argument(NAME, "tokens", expected, format!("{tokens} tokens")));
        }
        self.pin_end(self.end_on_path(node, path, pages)).map(Some)
    }

    /// Pins the path up to where a search ended, and makes it the most recently used. Only what matched is pinned: the
    /// edge ends there afterwards.
    pub(super) fn pin_end(&mut self, found: Found) -> Result<Pin> {
        // The root counts all pins: if it does not overflow, no node does.
        if self.nodes[ROOT as usize].pins == u32::MAX {
            return Err(Error::argument(NAME, "pins", "fewer than 2^32", "one more"));
        }
        let node = self.end_at(found);
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
        self.touch(node);
        Ok(Pin { tree: self.id, node })
    }

    /// Returns a pin.
    ///
    /// # Errors
    /// If it is a pin of another tree.
    pub fn unpin(&mut self, pin: Pin) -> Result<()> {
        if pin.tree != self.id {
            return Err(Error::argument(NAME, "pin", "a pin of this tree", "a pin of another"));
        }
        // The node exists: pinned nodes are not removed, and a pin can be returned only once.
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

    /// Whether a node that existed in a version still exists, rather than another with its number. The root always
    /// does.
    fn has_node_of(&self, version: Version, id: u32) -> bool {
        let node = self.nodes.get(id as usize);
        node.is_some_and(|node| (id == ROOT as u32 || node.len > 0) && version.has_seen(node.born))
    }

    /// A node and all nodes above it, ending with the root.
    fn path_up(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(id), |&id| Some(self.nodes[id as usize].parent).filter(|&id| id != NONE))
    }

    /// Where a search that matches the first `pages` of the `path` pages up to a node ends. That is in an edge above
    /// the node if fewer pages are wanted, or if the edge was split since.
    fn end_on_path(&self, node: u32, path: usize, pages: usize) -> Found {
        let mut before = path;
        for id in self.path_up(node) {
            let edge = self.nodes[id as usize].len as usize;
            before -= edge;
            if before < pages || id == ROOT as u32 {
                return Found { node: id as i32, pages, inside: pages - before, edge };
            }
        }
        unreachable!("every path begins at the root")
    }
}

/// The leaves that can be evicted, in order of eviction.
#[derive(Debug, Default)]
pub(super) struct Lru {
    clock: u64,
    leaves: BTreeSet<(u64, u32)>,
}

impl Lru {
    /// Advances the clock.
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

    /// Removes a node that is about to change, if it could be evicted.
    pub fn remove(&mut self, id: u32, node: &Node) {
        if Lru::takes(id, node) {
            self.leaves.remove(&(node.stamp, id));
        }
    }

    /// The next leaf to evict.
    pub fn oldest(&self) -> Option<u32> {
        self.leaves.first().map(|&(_, id)| id)
    }

    pub fn leaves(&self) -> &BTreeSet<(u64, u32)> {
        &self.leaves
    }
}
