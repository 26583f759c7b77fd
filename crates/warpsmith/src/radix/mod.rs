//! A radix tree over token ids: which pages of a KV cache hold the keys and values of which prefix.
//!
//! Every edge is a run of whole pages, `page_size` tokens each, and owns their page ids. Sequences with a common
//! prefix share edges; an edge is split where they diverge. Requests pin the paths they use. Everything else can be
//! evicted, the least recently used leaf first.
//!
//! The tree is stored in three arrays ([`flat`]) that a GPU can search too: the op `prefix_match` takes them as
//! arguments. A [`Mirror`] keeps a copy of them on a device and updates only what has changed. A tree can have any
//! number of mirrors.
//!
//! Everything is deterministic: the same calls give the same nodes, pages and evictions. No operation recurses, so no
//! depth can overflow the stack.
//!
//! ```
//! use warpsmith::radix::RadixTree;
//! let mut tree = RadixTree::new(2, 100)?;
//! tree.insert(&[1, 2, 3, 4], &[10, 11])?;
//! tree.insert(&[1, 2, 5, 6], &[12, 13])?; // shares the first page: 12 stays the caller's
//! let (found, pin) = tree.lookup_pinned(&[1, 2, 5, 6, 7])?;
//! assert_eq!((found.tokens, found.pages), (4, vec![10, 13]));
//! assert_eq!(tree.evict(100), [11]); // the rest is pinned
//! tree.unpin(pin)?;
//! assert_eq!(tree.evict(100), [13, 10]);
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! The tree may change between a search on a device and the use of its result: making room for one request of a batch
//! may evict pages that another request has just found. So a result carries the [`Version`] of the tree it was found
//! in, and [`RadixTree::pin_match`] pins the pages of a match only if they still hold its tokens:
//!
//! ```
//! use warpsmith::radix::{Mirror, RadixTree};
//! use warpsmith::{Stream, Tensor, Device::Cpu, ops::PrefixMatch};
//! let mut tree = RadixTree::new(2, 100)?;
//! tree.insert(&[1, 2, 3, 4], &[10, 11])?;
//! tree.insert(&[5, 6], &[12])?;
//! let mut mirror = Mirror::new(&tree, &Stream::Host)?;
//!
//! // The requests 1 2 3 4 9 and 5 6 7.
//! mirror.update(&tree, &Stream::Host)?;
//! let tokens = [1, 2, 3, 4, 9, 5, 6, 7];
//! let (batch, starts) = (Tensor::from_slice(&tokens, &[8], Cpu)?, Tensor::from_slice(&[0, 5, 8], &[3], Cpu)?);
//! let found = PrefixMatch::new(&mirror, &batch, &starts).max_pages(2).run()?;
//! let (matched, nodes) = (found.matched.to_vec::<i32>()?, found.nodes.to_vec::<i32>()?);
//! assert_eq!((&matched[..], found.pages.to_vec::<i32>()?), (&[4, 2][..], vec![10, 11, 12, -1]));
//!
//! let first = tree.pin_match(found.version, nodes[0] as u32, matched[0] as usize)?;
//! assert!(first.is_some()); // pages 10 and 11 stay until the pin is given back
//! let room = tree.evict(1); // for the first request's new tokens: takes what the second has found
//! let inserted = tree.insert(&[8, 8], &room)?;
//! assert_eq!((room, inserted.node), (vec![12], nodes[1] as u32)); // and the node's number is another's
//! let second = tree.pin_match(found.version, nodes[1] as u32, matched[1] as usize)?;
//! assert!(second.is_none()); // so this one looks again
//! let (found, second) = tree.lookup_pinned(&tokens[5..])?;
//! assert_eq!(found.tokens, 0);
//! # tree.unpin(first.unwrap())?;
//! # tree.unpin(second)?;
//! # Ok::<(), warpsmith::Error>(())
//! ```

mod arena;
mod check;
mod evict;
pub mod flat;
mod index;
mod marks;
mod mirror;
mod pins;
#[cfg(feature = "tests")]
mod tests;
mod version;

pub use check::Broken;
pub use mirror::Mirror;
pub use pins::Pin;
pub use version::{Changes, Version};

use crate::error::{Error, Result};
use crate::tensor::storage::zeroed;
use arena::Arena;
use flat::{Flat, Found, ROOT, Slot};
use index::Index;
use pins::Lru;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The tree's name in errors.
const NAME: &str = "radix_tree";
/// No node.
const NONE: u32 = u32::MAX;
/// Upper bound for pages of the pool, tokens of a page and nodes. The arrays hold 32-bit numbers and up to four times
/// the pages of the pool.
const LIMIT: usize = 1 << 28;

/// A node, without the tokens and pages of its edge.
#[derive(Debug, Clone, Copy)]
struct Node {
    parent: u32,
    first_child: u32,
    /// Neighbours among the children of the parent.
    previous: u32,
    next: u32,
    /// The run of pages of the edge that leads here.
    start: u32,
    len: u32,
    /// Pins of this node and of all nodes below it.
    pins: u32,
    /// When it was last used; never earlier than a node below it.
    stamp: u64,
    /// The change that created it. Distinguishes it from earlier nodes with the same number.
    born: u64,
}

impl Node {
    fn run(&self) -> Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

/// A match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The node in whose edge the match ends. After that node is evicted or removed, another may get its number.
    pub node: u32,
    /// Tokens that matched: whole pages.
    pub tokens: usize,
    /// The pages that hold them.
    pub pages: Vec<i32>,
}

/// What an insertion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inserted {
    /// The node in whose edge the sequence ends.
    pub node: u32,
    /// Pages the tree already held: that many of the caller's first pages were not taken.
    pub present: usize,
}

/// What the tree holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Nodes, the root not counted.
    pub nodes: usize,
    /// Pages in all edges.
    pub pages: usize,
    /// Pages on pinned paths; all others can be evicted.
    pub pinned_pages: usize,
    /// Pins that were not returned yet.
    pub pins: usize,
    /// Slots of the hash table.
    pub slots: usize,
    /// Pages the arrays have room for.
    pub capacity: usize,
}

/// The tree. See the [module](self).
#[derive(Debug)]
pub struct RadixTree {
    /// Distinguishes pins and versions of this tree from those of other trees.
    id: u64,
    /// Changes of the arrays so far.
    change: u64,
    arena: Arena,
    index: Index,
    nodes: Vec<Node>,
    /// Free nodes; the last is reused first.
    free: Vec<u32>,
    lru: Lru,
    /// A bit for every page of the pool that the tree holds.
    held: Vec<u64>,
    num_pages: usize,
    pinned_pages: usize,
}

impl RadixTree {
    /// An empty tree for pages of `page_size` tokens, out of a pool of `num_pages` with ids from zero on.
    ///
    /// # Errors
    /// If the page size is zero, or one of the two is above 2^28.
    pub fn new(page_size: usize, num_pages: usize) -> Result<RadixTree> {
        Self::with_capacity(page_size, num_pages, 0, 0, 0)
    }

    /// As [`RadixTree::new`], with room for `edges` edges of `pages` pages in all before an array grows. `seed` is
    /// the first seed of the hash. A secret seed prevents attackers from choosing tokens that collide.
    ///
    /// # Errors
    /// As [`RadixTree::new`], and if there is no memory for that.
    pub fn with_capacity(
        page_size: usize,
        num_pages: usize,
        edges: usize,
        pages: usize,
        seed: u32,
    ) -> Result<RadixTree> {
        static TREES: AtomicU64 = AtomicU64::new(0);
        for (name, value, least) in [("page_size", page_size, 1), ("num_pages", num_pages, 0)] {
            if !(least..=LIMIT).contains(&value) {
                let expected = format!("a number from {least} to {LIMIT}");
                return Err(Error::argument(NAME, name, expected, value.to_string()));
            }
        }
        let root = Node {
            parent: NONE,
            first_child: NONE,
            previous: NONE,
            next: NONE,
            start: 0,
            len: 0,
            pins: 0,
            stamp: 0,
            born: 0,
        };
        Ok(RadixTree {
            id: TREES.fetch_add(1, Ordering::Relaxed),
            change: 0,
            arena: Arena::new(page_size, pages.min(num_pages))?,
            index: Index::new(edges.min(num_pages), seed)?,
            nodes: vec![root],
            free: Vec::new(),
            lru: Lru::default(),
            held: zeroed(num_pages.div_ceil(64))?,
            num_pages,
            pinned_pages: 0,
        })
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.arena.page_size()
    }

    /// The tree as arrays.
    pub fn flat(&self) -> Flat<'_> {
        self.index.flat(&self.arena)
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        Stats {
            nodes: self.index.used(),
            pages: self.arena.live(),
            pinned_pages: self.pinned_pages,
            pins: self.nodes[ROOT as usize].pins as usize,
            slots: self.index.table().len(),
            capacity: self.arena.pages().len(),
        }
    }

    /// The longest stored prefix of `tokens`. Does not count as a use.
    pub fn find(&self, tokens: &[i32]) -> Match {
        self.search(tokens).1
    }

    /// The longest stored prefix of `tokens`, which becomes the most recently used.
    pub fn lookup(&mut self, tokens: &[i32]) -> Match {
        let found = self.find(tokens);
        self.touch(found.node);
        found
    }

    /// Like [`RadixTree::lookup`], but pins what was found: it cannot be evicted until the pin is returned to
    /// [`RadixTree::unpin`].
    ///
    /// # Errors
    /// If there are 2^32 pins already.
    pub fn lookup_pinned(&mut self, tokens: &[i32]) -> Result<(Match, Pin)> {
        let (end, mut found) = self.search(tokens);
        let pin = self.pin_end(end)?;
        found.node = pin.node();
        Ok((found, pin))
    }

    /// Stores a sequence of whole pages: `pages` holds the keys and values of `tokens`. The tree takes ownership of
    /// the pages whose tokens it did not hold yet; the others stay with the caller.
    ///
    /// # Errors
    /// If there are not `page_size` tokens for every page, or a page to be taken is outside the pool, occurs twice or
    /// is held by the tree already, or if there is no memory for them. The tree is unchanged then.
    pub fn insert(&mut self, tokens: &[i32], pages: &[i32]) -> Result<Inserted> {
        if pages.len().checked_mul(self.page_size()) != Some(tokens.len()) {
            let expected = format!("{} tokens for each of {} pages", self.page_size(), pages.len());
            return Err(Error::argument(NAME, "tokens", expected, tokens.len().to_string()));
        }
        let found = self.index.flat(&self.arena).find(tokens, |_, _| ());
        let present = found.pages;
        if present == pages.len() {
            self.touch(found.node as u32);
            return Ok(Inserted { node: found.node as u32, present });
        }
        let new = pages.len() - present;
        if self.arena.is_full_for(new) && !self.arena.is_worth_packing(new) {
            self.arena.reserve(new)?;
        }
        self.take_pages(&pages[present..])?;
        let parent = self.end_at(found);
        self.begin_change();
        self.make_room(pages.len() - present);
        let start = self.arena.push(&tokens[present * self.page_size()..], &pages[present..]);
        let node = self.add_leaf(parent, start as u32, (pages.len() - present) as u32);
        self.touch(node);
        Ok(Inserted { node, present })
    }

    fn search(&self, tokens: &[i32]) -> (Found, Match) {
        let flat = self.flat();
        let mut pages = Vec::with_capacity(tokens.len() / flat.page_size);
        let found = flat.find(tokens, |start, len| pages.extend_from_slice(&flat.pages[start..start + len]));
        (found, Match { node: found.node as u32, tokens: found.pages * self.page_size(), pages })
    }

    /// Marks pages as held: all of them, or none on an error.
    fn take_pages(&mut self, pages: &[i32]) -> Result<()> {
        for (i, &page) in pages.iter().enumerate() {
            let wrong = match usize::try_from(page).ok().filter(|&page| page < self.num_pages) {
                None => Some(format!("a page from 0 to below {}", self.num_pages)),
                Some(page) if self.held[page / 64] & (1 << (page % 64)) != 0 => {
                    Some("a page that the tree does not hold".into())
                }
                Some(page) => {
                    self.held[page / 64] |= 1 << (page % 64);
                    None
                }
            };
            if let Some(expected) = wrong {
                self.release_pages(&pages[..i]);
                return Err(Error::argument(NAME, "pages", expected, page.to_string()));
            }
        }
        Ok(())
    }

    fn release_pages(&mut self, pages: &[i32]) {
        for page in pages.iter().map(|&page| page as usize) {
            self.held[page / 64] &= !(1 << (page % 64));
        }
    }

    /// Makes room for `pages` behind the last edge: by compacting the edges if that leaves half of the array free,
    /// otherwise by growing it. Either way a page costs amortised constant time.
    fn make_room(&mut self, pages: usize) {
        if !self.arena.is_full_for(pages) {
            return;
        }
        if !self.arena.is_worth_packing(pages) {
            return self.arena.grow(pages);
        }
        let mut live: Vec<u32> =
            self.flat().table.iter().map(|row| Slot::new(*row).child as u32).filter(|&id| id != 0).collect();
        live.sort_unstable_by_key(|&id| self.nodes[id as usize].start);
        self.arena.begin_packing();
        for id in live {
            let node = &mut self.nodes[id as usize];
            node.start = self.arena.pack(node.run()) as u32;
        }
        let nodes = &self.nodes;
        self.index.relocate(|id| nodes[id as usize].start as i32);
    }

    /// The node that ends where a search ended. Splits the edge if necessary.
    fn end_at(&mut self, found: Found) -> u32 {
        let id = found.node as u32;
        if found.inside == found.edge {
            return id;
        }
        self.begin_change();
        let (lower, len) = (self.nodes[id as usize], found.inside as u32);
        let at = self.slot_of(id);
        let upper = Node { first_child: id, len, born: self.change, ..lower };
        let upper_id = self.add_node(upper);
        self.index.replace(
            at,
            Slot {
                parent: lower.parent as i32,
                child: upper_id as i32,
                start: lower.start as i32,
                len: len as i32,
            },
        );
        self.relink(lower, upper_id, upper_id);
        let node = &mut self.nodes[id as usize];
        (node.parent, node.previous, node.next) = (upper_id, NONE, NONE);
        (node.start, node.len) = (lower.start + len, lower.len - len);
        self.add_slot(id);
        upper_id
    }

    fn add_leaf(&mut self, parent: u32, start: u32, len: u32) -> u32 {
        self.lru.remove(parent, &self.nodes[parent as usize]);
        let next = self.nodes[parent as usize].first_child;
        let (first_child, previous, born) = (NONE, NONE, self.change);
        let leaf = Node { parent, first_child, previous, next, start, len, pins: 0, stamp: 0, born };
        let id = self.add_node(leaf);
        self.nodes[parent as usize].first_child = id;
        if next != NONE {
            self.nodes[next as usize].previous = id;
        }
        self.add_slot(id);
        self.lru.add(id, &leaf);
        id
    }

    fn add_node(&mut self, node: Node) -> u32 {
        match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    fn add_slot(&mut self, id: u32) {
        let Node { parent, start, len, .. } = self.nodes[id as usize];
        let slot = Slot { parent: parent as i32, child: id as i32, start: start as i32, len: len as i32 };
        self.index.insert(&self.arena, slot);
    }

    /// The slot of the edge to a node.
    fn slot_of(&self, id: u32) -> usize {
        let node = &self.nodes[id as usize];
        let page = self.arena.page_tokens(node.start as usize);
        let at = self.index.position(&self.arena, node.parent as i32, id as i32, page);
        at.expect("every node but the root has a slot")
    }

    /// Makes the neighbours and the parent of `node` point to other nodes instead.
    fn relink(&mut self, node: Node, from_previous: u32, from_next: u32) {
        match node.previous {
            NONE => self.nodes[node.parent as usize].first_child = from_previous,
            previous => self.nodes[previous as usize].next = from_previous,
        }
        if node.next != NONE {
            self.nodes[node.next as usize].previous = from_next;
        }
    }

    /// Makes a node and all above it the most recently used.
    fn touch(&mut self, id: u32) {
        let stamp = self.lru.tick();
        let mut at = id;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            self.lru.remove(at, node);
            node.stamp = stamp;
            self.lru.add(at, node);
            at = node.parent;
        }
    }
}
