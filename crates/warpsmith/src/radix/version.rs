//! Which tree, and in which state: how copies and answers know what they are about.

use super::{NAME, RadixTree};
use crate::error::{Error, Result};
use std::ops::Range;

/// A state of a tree. Copies and the answers found in them carry it, so that the tree can tell what has changed since,
/// and that they are not another tree's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    tree: u64,
    /// Changes that had been made.
    change: u64,
}

impl Version {
    /// The tree, by number.
    pub(super) fn tree(self) -> u64 {
        self.tree
    }

    /// Whether what came with a change was there in this state.
    pub(super) fn has_seen(self, change: u64) -> bool {
        change <= self.change
    }
}

/// What has changed in the arrays, in rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Of the table.
    pub slots: Vec<Range<usize>>,
    /// Of tokens and pages.
    pub pages: Vec<Range<usize>>,
}

impl RadixTree {
    /// The state of the tree now. What changes nothing in the arrays (a look-up, a pin that splits no edge) leaves it
    /// as it is.
    pub fn version(&self) -> Version {
        Version { tree: self.id, change: self.change }
    }

    /// The parts of the arrays that have changed since a version. An array that has another length than then has
    /// changed in all its parts.
    ///
    /// # Errors
    /// If it is a version of another tree.
    pub fn changes_since(&self, version: Version) -> Result<Changes> {
        self.check_version(version)?;
        let slots = self.index.marks.since(version.change, self.index.table().len());
        Ok(Changes { slots, pages: self.arena.marks.since(version.change, self.arena.used()) })
    }

    /// All that is in use.
    pub(super) fn everything(&self) -> Changes {
        let all = |len: usize| Vec::from_iter(Some(0..len).filter(|all| !all.is_empty()));
        Changes { slots: all(self.index.table().len()), pages: all(self.arena.used()) }
    }

    /// Refuses what is about another tree.
    pub(super) fn check_version(&self, version: Version) -> Result<()> {
        if version.tree != self.id {
            let expected = format!("one of this tree, number {}", self.id);
            return Err(Error::argument(NAME, "version", expected, format!("one of tree {}", version.tree)));
        }
        Ok(())
    }

    /// Begins a change of the arrays: what is written from here on is in no version that was given out.
    pub(super) fn begin_change(&mut self) {
        self.change += 1;
        self.index.marks.begin(self.change);
        self.arena.marks.begin(self.change);
    }
}
