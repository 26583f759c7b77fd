//! The prefix tree as a list of branches, for people who watch it: sizes and counts, never tokens.

use super::Pages;
use crate::request::Salt;
use std::cmp::Reverse;
use warpsmith::radix::flat::{ROOT, Slot};

/// A run of pages that prefixes have in common, between two places where they part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// Its number in the tree. Later, another may get it.
    pub id: u32,
    /// The branch it continues; 0 if it is the beginning of prompts.
    pub parent: u32,
    /// Tokens of the branch.
    pub tokens: usize,
    /// Sequences that use it now. None: it is kept for later, and can be evicted.
    pub users: usize,
    /// Tokens of it and of all that continues it.
    pub subtree_tokens: usize,
}

/// What the prefix tree holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Branches {
    /// Branches, parents before children: all, or those in use and the largest.
    pub shown: Vec<Branch>,
    /// Branches and their tokens, with those that are not shown because there are too many.
    pub total: (usize, usize),
    /// Tokens of prefixes with another salt.
    pub other_tokens: usize,
}

/// A node while the tree is read.
#[derive(Clone, Copy, Default)]
struct Node {
    parent: usize,
    /// Pages of the pool in its edge.
    pages: usize,
    /// The last of them.
    last: i32,
    /// The page of the salt that its edge begins with.
    salt: Option<i32>,
    /// Children that were not added to it yet.
    open: usize,
    subtree: usize,
}

impl Pages {
    /// The branches of the prefix tree that have a salt for which `shows` holds, at most this many.
    pub fn branches(&self, most: usize, shows: impl Fn(Option<&Salt>) -> bool) -> Branches {
        let (nodes, order) = self.read_tree();
        let mut branches = Branches::default();
        // For each node, whether the salt above it lets it be shown.
        let mut is_shown = vec![shows(None); nodes.len()];
        let mut candidates = Vec::new();
        for (rank, &id) in order.iter().enumerate() {
            let node = &nodes[id];
            is_shown[id] = match node.salt {
                Some(page) => shows(Some(self.salts.of_page(page))),
                None => is_shown[node.parent],
            };
            if !is_shown[id] {
                branches.other_tokens += node.pages * self.page_size;
            } else if node.pages > 0 {
                branches.total.0 += 1;
                branches.total.1 += node.pages * self.page_size;
                // The tree itself is one user of its pages.
                let users = self.pool.uses(node.last) as usize - 1;
                candidates.push((users == 0, Reverse(node.subtree), rank, users));
            }
        }
        // A parent has at least the users and more pages than its children: none is chosen before its parent.
        if candidates.len() > most {
            candidates.select_nth_unstable(most);
            candidates.truncate(most);
        }
        candidates.sort_unstable_by_key(|&(.., rank, _)| rank);
        branches.shown.extend(candidates.into_iter().map(|(_, Reverse(subtree), rank, users)| {
            let id = order[rank];
            let parent = nodes[id].parent;
            Branch {
                id: id as u32,
                // Above the first pages of a prompt there may be the page of a salt, which holds no tokens.
                parent: if nodes[parent].pages == 0 { ROOT as u32 } else { parent as u32 },
                tokens: nodes[id].pages * self.page_size,
                users,
                subtree_tokens: subtree * self.page_size,
            }
        }));
        branches
    }

    /// The nodes by number, and the numbers of all but the root, parents before children.
    fn read_tree(&self) -> (Vec<Node>, Vec<usize>) {
        let flat = self.tree.flat();
        let slots = || flat.table.iter().map(|&row| Slot::new(row)).filter(|slot| !slot.is_empty());
        let count = slots().map(|slot| slot.child as usize + 1).max().unwrap_or(1);
        let mut nodes = vec![Node::default(); count];
        for slot in slots() {
            let run = &flat.pages[slot.start as usize..][..slot.len as usize];
            let salt = run.first().copied().filter(|&page| page as usize >= self.pool.len());
            let pages = run.len() - usize::from(salt.is_some());
            let last = run.last().copied().unwrap_or_default();
            nodes[slot.parent as usize].open += 1;
            let open = nodes[slot.child as usize].open;
            nodes[slot.child as usize] =
                Node { parent: slot.parent as usize, pages, last, salt, open, subtree: pages };
        }
        // From the leaves up: a node is done when all its children are.
        let mut order: Vec<usize> =
            slots().map(|slot| slot.child as usize).filter(|&id| nodes[id].open == 0).collect();
        let mut at = 0;
        while let Some(&id) = order.get(at) {
            at += 1;
            let Node { parent, subtree, .. } = nodes[id];
            nodes[parent].subtree += subtree;
            nodes[parent].open -= 1;
            if nodes[parent].open == 0 && parent != ROOT as usize {
                order.push(parent);
            }
        }
        order.reverse();
        (nodes, order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(pages: &mut Pages, tokens: &[i32], salt: Option<&Salt>) -> super::super::Held {
        let mut held = pages.find(tokens, salt).unwrap();
        let count = pages.pages_for(tokens.len());
        assert!(pages.grow(&mut held, count));
        pages.publish(&mut held, tokens, salt).unwrap();
        held
    }

    fn prompt(shared: i32, own: i32, len: i32) -> Vec<i32> {
        (0..len).map(|i| if i < shared { i } else { 1000 * own + i }).collect()
    }

    /// Without numbers: parent by place in the list, tokens, users, tokens of the subtree; sorted.
    fn shape(branches: &Branches) -> Vec<(usize, usize, usize, usize)> {
        let depth = |mut id: u32| {
            let mut depth = 0;
            while let Some(branch) = branches.shown.iter().find(|branch| branch.id == id) {
                (id, depth) = (branch.parent, depth + 1);
            }
            depth
        };
        let mut all: Vec<_> =
            branches.shown.iter().map(|b| (depth(b.id), b.tokens, b.users, b.subtree_tokens)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn branches_tell_what_is_shared() {
        let mut pages = Pages::new(64, 4, true).unwrap();
        let all = |pages: &Pages| pages.branches(200, |_| true);
        assert_eq!(all(&pages), Branches::default());
        let first = hold(&mut pages, &prompt(8, 1, 16), None);
        let second = hold(&mut pages, &prompt(8, 2, 12), None);
        let third = hold(&mut pages, &prompt(0, 3, 4), None);
        let expected = vec![(1, 4, 1, 4), (1, 8, 2, 20), (2, 4, 1, 4), (2, 8, 1, 8)];
        assert_eq!(shape(&all(&pages)), expected);
        assert_eq!((all(&pages).total, all(&pages).other_tokens), ((4, 24), 0));
        pages.release(second).unwrap();
        let expected = vec![(1, 4, 1, 4), (1, 8, 1, 20), (2, 4, 0, 4), (2, 8, 1, 8)];
        assert_eq!(shape(&all(&pages)), expected);
        // What is in use comes first, then what is largest; never a branch without its parent.
        assert_eq!(shape(&pages.branches(1, |_| true)), [(1, 8, 1, 20)]);
        assert_eq!(shape(&pages.branches(3, |_| true)), [(1, 4, 1, 4), (1, 8, 1, 20), (2, 8, 1, 8)]);
        assert_eq!(pages.branches(3, |_| true).total, (4, 24));
        pages.release(first).unwrap();
        pages.release(third).unwrap();
        assert_eq!(shape(&pages.branches(2, |_| true)), [(1, 8, 0, 20), (2, 8, 0, 8)]);
    }

    #[test]
    fn branches_of_other_salts_are_only_counted() {
        let mut pages = Pages::new(64, 4, true).unwrap();
        let (ours, theirs): (Salt, Salt) = ([1; 32], [2; 32]);
        let open = hold(&mut pages, &prompt(8, 1, 12), None);
        let own: Vec<_> = [4, 5].map(|own| hold(&mut pages, &prompt(8, own, 12), Some(&ours))).into();
        // With nothing in common, so that the page of the salt stands alone.
        let other: Vec<_> = [6, 7].map(|own| hold(&mut pages, &prompt(0, own, 8), Some(&theirs))).into();
        let seen = pages.branches(200, |salt| salt == Some(&ours));
        assert_eq!(shape(&seen), [(1, 8, 2, 16), (2, 4, 1, 4), (2, 4, 1, 4)]);
        assert_eq!((seen.total, seen.other_tokens), ((3, 16), 12 + 16));
        let seen = pages.branches(200, |salt| salt == Some(&theirs));
        assert_eq!(shape(&seen), [(1, 8, 1, 8), (1, 8, 1, 8)]);
        let seen = pages.branches(200, |salt| salt.is_none());
        assert_eq!((shape(&seen), seen.other_tokens), (vec![(1, 12, 1, 12)], 32));
        for held in own.into_iter().chain(other).chain([open]) {
            pages.release(held).unwrap();
        }
    }
}
