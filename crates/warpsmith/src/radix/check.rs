//! The invariants of a tree, which hold after every operation.

use super::flat::{MAX_PROBES, ROOT, Slot, hash};
use super::pins::Lru;
use super::{NONE, Node, RadixTree};
use std::collections::BTreeSet;
use std::fmt;

/// A violated invariant of a [`RadixTree`]: a bug in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken(String);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the radix tree is broken: {}", self.0)
    }
}

impl std::error::Error for Broken {}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken(what())) }
}

impl RadixTree {
    /// Checks every invariant, in time linear in the size of the tree.
    ///
    /// # Errors
    /// Names the first violated invariant.
    pub fn check(&self) -> Result<(), Broken> {
        let mut reached = vec![ROOT as u32];
        let mut next = 0;
        while next < reached.len() {
            let id = reached[next];
            self.check_children(id)?;
            reached.extend(self.children(id));
            require(reached.len() <= self.nodes.len(), || "children form a cycle".into())?;
            next += 1;
        }
        for &id in &reached[1..] {
            self.check_node(id)?;
        }
        require(reached.len() + self.free.len() == self.nodes.len(), || {
            format!("{} nodes reached, {} free, of {}", reached.len(), self.free.len(), self.nodes.len())
        })?;
        let ids: BTreeSet<u32> = reached.iter().chain(&self.free).copied().collect();
        require(ids.len() == self.nodes.len(), || "a node is reached twice, or free and in use".into())?;
        require(self.free.iter().all(|&id| self.nodes[id as usize].len == 0), || {
            "a free node has pages".into()
        })?;
        self.check_table(reached.len() - 1)?;
        self.check_pages(&reached[1..])?;
        let leaves = reached.iter().filter(|&&id| Lru::takes(id, self.node(id)));
        let leaves: BTreeSet<(u64, u32)> = leaves.map(|&id| (self.node(id).stamp, id)).collect();
        require(leaves == *self.lru.leaves(), || {
            format!("leaves to evict are {:?}, should be {leaves:?}", self.lru.leaves())
        })
    }

    fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    /// Checks the list of a node's children, and the node's fields that depend on them.
    fn check_children(&self, id: u32) -> Result<(), Broken> {
        let (mut previous, mut pins, mut count) = (NONE, 0u64, 0);
        for child in self.children(id) {
            let node = self.node(child);
            require(node.parent == id && node.previous == previous, || {
                format!(
                    "node {child} has parent {} and neighbour {}, is listed under {id} after {previous}",
                    node.parent, node.previous
                )
            })?;
            require(node.stamp <= self.node(id).stamp, || {
                format!("node {child} was used after its parent {id}")
            })?;
            count += 1;
            require(count <= self.nodes.len(), || format!("children of node {id} form a cycle"))?;
            pins += u64::from(node.pins);
            previous = child;
        }
        require(pins <= u64::from(self.node(id).pins), || {
            format!("node {id} has {} pins, its children {pins}", self.node(id).pins)
        })
    }

    /// Checks a node's edge, and that a search finds it.
    fn check_node(&self, id: u32) -> Result<(), Broken> {
        let node = self.node(id);
        require(node.len > 0, || format!("the edge to node {id} is empty"))?;
        require(self.version().has_seen(node.born), || {
            format!("node {id} came with change {}, which is still to come", node.born)
        })?;
        require(node.run().end <= self.arena.used(), || {
            format!("the edge to node {id} ends outside the arrays")
        })?;
        let size = self.page_size();
        let edge = &self.arena.tokens()[node.run().start * size..node.run().end * size];
        let found = self.flat().edge(node.parent as i32, edge).map(|(_, slot, inside)| (slot, inside));
        let slot = Slot {
            parent: node.parent as i32,
            child: id as i32,
            start: node.start as i32,
            len: node.len as i32,
        };
        require(found == Some((slot, node.len as usize)), || {
            format!("a search for the edge to node {id}, {slot:?}, finds {found:?}")
        })
    }

    fn check_table(&self, edges: usize) -> Result<(), Broken> {
        let flat = self.flat();
        let slots =
            flat.table.iter().map(|row| Slot::new(*row)).enumerate().filter(|(_, slot)| !slot.is_empty());
        let slots: Vec<(usize, Slot)> = slots.collect();
        require(slots.len() == edges && self.index.used() == edges, || {
            format!("the table has {} edges, counts {}, of {edges}", slots.len(), self.index.used())
        })?;
        require(flat.table.len().is_power_of_two() && 2 * edges <= flat.table.len(), || {
            format!("{edges} edges in {} slots", flat.table.len())
        })?;
        for (at, slot) in slots {
            let home = hash(flat.seed, slot.parent, self.arena.page_tokens(slot.start as usize)) as usize;
            let distance = at.wrapping_sub(home) & (flat.table.len() - 1);
            require(distance < MAX_PROBES, || format!("slot {at} is {distance} from its home"))?;
        }
        Ok(())
    }

    /// Checks that edges do not overlap, and that the counts of pages and pins are right.
    fn check_pages(&self, ids: &[u32]) -> Result<(), Broken> {
        let mut runs: Vec<_> = ids.iter().map(|&id| self.node(id).run()).collect();
        runs.sort_unstable_by_key(|run| run.start);
        require(runs.windows(2).all(|pair| pair[0].end <= pair[1].start), || "edges overlap".into())?;
        let pages: usize = runs.iter().map(ExactSizeIterator::len).sum();
        require(pages == self.arena.live(), || format!("{pages} pages, counted {}", self.arena.live()))?;
        let pinned = ids.iter().map(|&id| self.node(id)).filter(|node| node.pins > 0);
        let pinned: usize = pinned.map(|node| node.len as usize).sum();
        require(pinned == self.pinned_pages, || {
            format!("{pinned} pinned pages, counted {}", self.pinned_pages)
        })?;
        let mut held = vec![0u64; self.held.len()];
        for page in runs.iter().flat_map(|run| &self.arena.pages()[run.clone()]).map(|&page| page as usize) {
            let bit = 1 << (page % 64);
            require(page < self.num_pages && held[page / 64] & bit == 0, || {
                format!("page {page} is held twice or outside the pool")
            })?;
            held[page / 64] |= bit;
        }
        require(held == self.held, || "the pages held are not those of the edges".into())
    }
}
