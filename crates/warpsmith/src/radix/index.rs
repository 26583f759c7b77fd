//! The hash table of edges.

use super::arena::Arena;
use super::flat::{Flat, MAX_PROBES, Slot, hash, slots_for};
use super::marks::Marks;
use crate::error::Result;
use crate::tensor::storage::room_for;

/// Seeds to try before the table grows.
const TRIES: u32 = 4;

/// The table, at most half full.
#[derive(Debug)]
pub(super) struct Index {
    table: Vec<[i32; 4]>,
    used: usize,
    seed: u32,
    pub marks: Marks,
}

impl Index {
    /// An empty table with room for this many edges.
    pub fn new(edges: usize, seed: u32) -> Result<Index> {
        let slots = slots_for(edges);
        let mut table = room_for(slots)?;
        table.resize(slots, Slot::default().row());
        Ok(Index { table, used: 0, seed, marks: Marks::default() })
    }

    pub fn table(&self) -> &[[i32; 4]] {
        &self.table
    }

    pub fn used(&self) -> usize {
        self.used
    }

    /// The tree as arrays.
    pub fn flat<'a>(&'a self, arena: &'a Arena) -> Flat<'a> {
        Flat {
            table: &self.table,
            tokens: arena.tokens(),
            pages: arena.pages(),
            page_size: arena.page_size(),
            seed: self.seed,
        }
    }

    /// The slot number of the edge from `parent` to `child` with this first page.
    pub fn position(&self, arena: &Arena, parent: i32, child: i32, page: &[i32]) -> Option<usize> {
        let mut probes = self.flat(arena).probes(parent, page);
        probes.find(|(_, slot)| slot.parent == parent && slot.child == child).map(|(at, _)| at)
    }

    /// Replaces an edge by another with the same parent and first page.
    pub fn replace(&mut self, at: usize, slot: Slot) {
        self.table[at] = slot.row();
        self.marks.mark(at..at + 1);
    }

    /// Adds an edge whose tokens are in the arena.
    pub fn insert(&mut self, arena: &Arena, slot: Slot) {
        let slots = self.table.len();
        if 2 * (self.used + 1) > slots {
            self.rebuild(arena, slot, 2 * slots, self.seed);
        } else if self.place(arena, slot).is_none() {
            self.rebuild(arena, slot, slots, self.seed.wrapping_add(1));
        }
    }

    /// Takes an edge out, and moves those behind it up so that no search passes an empty slot on its way.
    pub fn remove(&mut self, arena: &Arena, at: usize) {
        let mask = self.table.len() - 1;
        let (mut hole, mut next) = (at, at);
        loop {
            next = (next + 1) & mask;
            let slot = Slot::new(self.table[next]);
            if slot.is_empty() {
                break;
            }
            // It may move only if the hole is on the way from its home to where it is.
            let home = self.home(arena, slot);
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.replace(hole, slot);
                hole = next;
            }
        }
        self.replace(hole, Slot::default());
        self.used -= 1;
    }

    /// Updates the edges after compaction; `start_of` gives the new start of a node's edge.
    pub fn relocate(&mut self, start_of: impl Fn(i32) -> i32) {
        for row in self.table.iter_mut().filter(|row| !Slot::new(**row).is_empty()) {
            let slot = Slot::new(*row);
            *row = Slot { start: start_of(slot.child), ..slot }.row();
        }
        self.marks.mark(0..self.table.len());
    }

    fn home(&self, arena: &Arena, slot: Slot) -> usize {
        hash(self.seed, slot.parent, arena.page_tokens(slot.start as usize)) as usize & (self.table.len() - 1)
    }

    /// Puts an edge into the first empty slot after its home position; `None` if all slots within [`MAX_PROBES`] are
    /// taken.
    fn place(&mut self, arena: &Arena, slot: Slot) -> Option<()> {
        let (home, mask) = (self.home(arena, slot), self.table.len() - 1);
        let mut places = (0..self.table.len().min(MAX_PROBES)).map(|i| (home + i) & mask);
        let at = places.find(|&at| Slot::new(self.table[at]).is_empty())?;
        self.replace(at, slot);
        self.used += 1;
        Some(())
    }

    /// Rebuilds the table with one more edge. If too many hashes collide, by bad luck or because an attacker chose
    /// the tokens, it tries other seeds and finally more slots.
    fn rebuild(&mut self, arena: &Arena, more: Slot, mut slots: usize, seed: u32) {
        let old = std::mem::take(&mut self.table).into_iter().map(Slot::new);
        let edges: Vec<Slot> = old.filter(|slot| !slot.is_empty()).chain([more]).collect();
        for attempt in 0u32.. {
            self.seed = seed.wrapping_add(attempt);
            self.used = 0;
            self.table = vec![Slot::default().row(); slots];
            if edges.iter().all(|&slot| self.place(arena, slot).is_some()) {
                break;
            }
            slots <<= u32::from(attempt % TRIES == TRIES - 1);
        }
        self.marks.mark(0..slots);
    }
}
