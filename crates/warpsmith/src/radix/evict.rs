//! Eviction and removal.

use super::flat::ROOT;
use super::{NAME, NONE, RadixTree};
use crate::error::{Error, Result};

impl RadixTree {
    /// Evicts leaves that are not pinned, the least recently used first, until `pages` or more are free or none is
    /// left. Returns the pages, which now belong to the caller.
    pub fn evict(&mut self, pages: usize) -> Vec<i32> {
        let mut freed = Vec::new();
        while freed.len() < pages {
            let Some(leaf) = self.lru.oldest() else { break };
            self.remove_leaf(leaf, &mut freed);
        }
        freed
    }

    /// Removes everything stored after `prefix`, in every sequence that begins with it; with an empty prefix,
    /// everything. The prefix itself stays. Returns the pages, which now belong to the caller.
    ///
    /// # Errors
    /// If the prefix is not a number of whole pages, or something after it is pinned. The tree is unchanged then.
    pub fn remove(&mut self, prefix: &[i32]) -> Result<Vec<i32>> {
        if !prefix.len().is_multiple_of(self.page_size()) {
            let expected = format!("whole pages of {} tokens", self.page_size());
            return Err(Error::argument(NAME, "prefix", expected, format!("{} tokens", prefix.len())));
        }
        let found = self.flat().find(prefix, |_, _| ());
        if found.pages * self.page_size() != prefix.len() {
            return Ok(Vec::new());
        }
        let ends_here = found.inside == found.edge;
        let node = found.node as u32;
        let pinned = match ends_here {
            true => self.children(node).any(|child| self.nodes[child as usize].pins > 0),
            false => self.nodes[node as usize].pins > 0,
        };
        if pinned {
            return Err(Error::argument(NAME, "prefix", "one after which nothing is pinned", "pins"));
        }
        let end = self.end_at(found);
        let mut doomed: Vec<u32> = self.children(end).collect();
        let mut next = 0;
        while next < doomed.len() {
            let below: Vec<u32> = self.children(doomed[next]).collect();
            doomed.extend(below);
            next += 1;
        }
        let mut freed = Vec::new();
        // In reverse order every node is a leaf when its turn comes.
        for leaf in doomed.into_iter().rev() {
            self.remove_leaf(leaf, &mut freed);
        }
        Ok(freed)
    }

    pub(super) fn children(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        let present = |id: u32| Some(id).filter(|&id| id != NONE);
        let next = move |&id: &u32| present(self.nodes[id as usize].next);
        std::iter::successors(present(self.nodes[id as usize].first_child), next)
    }

    fn remove_leaf(&mut self, id: u32, freed: &mut Vec<i32>) {
        debug_assert_ne!(id, ROOT as u32);
        self.begin_change();
        let slot = self.slot_of(id);
        let leaf = self.nodes[id as usize];
        self.lru.remove(id, &leaf);
        let from = freed.len();
        freed.extend_from_slice(&self.arena.pages()[leaf.run()]);
        self.release_pages(&freed[from..]);
        self.index.remove(&self.arena, slot);
        self.arena.drop_run(leaf.len as usize);
        self.relink(leaf, leaf.next, leaf.previous);
        self.nodes[id as usize].len = 0;
        self.free.push(id);
        let parent = &self.nodes[leaf.parent as usize];
        self.lru.add(leaf.parent, parent);
    }
}
