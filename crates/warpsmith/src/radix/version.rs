//! Versions: which tree a copy or a search result belongs to, and in which state.

use super::{NAME, RadixTree};
use crate::error::{Error, Result};
use std::ops::Range;

/// A state of a tree. Copies and search results carry it, so that the tree can tell what has changed since, and
/// whether they belong to it at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    tree: u64,
    /// Number of changes made until then.
    change: u64,
}

impl Version {
    /// The number of the tree.
    pub(super) fn tree(self) -> u64 {
        self.tree
    }

    /// Whether this state includes a change.
    pub(super) fn has_seen(self, change: u64) -> bool {
        change <= self.change
    }
}

/// Changed rows of the arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Of the table.
    pub slots: Vec<Range<usize>>,
    /// Of tokens and pages.
    pub pages: Vec<Range<usize>>,
}

impl RadixTree {
    /// The current version. Operations that do not change the arrays (a lookup, a pin that splits no edge) do not
    /// change it.
    pub fn version(&self) -> Version {
        Version { tree: self.id, change: self.change }
    }

    /// The parts of the arrays that have changed since a version. An array whose length has changed counts as changed
    /// entirely.
    ///
    /// # Errors
    /// If the version belongs to another tree.
    pub fn changes_since(&self, version: Version) -> Result<Changes> {
        self.check_version(version)?;
        let slots = self.index.marks.since(version.change, self.index.table().len());
        Ok(Changes { slots, pages: self.arena.marks.since(version.change, self.arena.used()) })
    }

    /// Everything in use.
    pub(super) fn everything(&self) -> Changes {
        let all = |len: usize| Vec::from_iter(Some(0..len).filter(|all| !all.is_empty()));
        Changes { slots: all(self.index.table().len()), pages: all(self.arena.used()) }
    }

    /// Refuses a version of another tree.
    pub(super) fn check_version(&self, version: Version) -> Result<()> {
        if version.tree != self.id {
            let expected = format!("one of this tree, number {}", self.id);
            return Err(Error::argument(NAME, "version", expected, format!("one of tree {}", version.tree)));
        }
        Ok(())
    }

    /// Begins a change of the arrays: later writes belong to no version returned so far.
    pub(super) fn begin_change(&mut self) {
        self.change += 1;
        self.index.marks.begin(self.change);
        self.arena.marks.begin(self.change);
    }
}
