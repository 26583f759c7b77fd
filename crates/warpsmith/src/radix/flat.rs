//! The tree as arrays, and the search in them. The host, the CPU kernel and the CUDA kernel of `prefix_match` share
//! this layout.
//!
//! - `tokens` `[num_pages, page_size]`: the token ids of all edges. An edge is a run of whole pages.
//! - `pages` `[num_pages]`: the id of the cache page behind each of them.
//! - `table` `[num_slots, 4]`: a hash table with open addressing and linear probing. A slot is an edge: its parent
//!   node, its child node, the start of its run and the length of the run in pages. It is found by the parent and the
//!   tokens of its first page. A slot that leads to node 0, the root, is empty.
//!
//! A search compares tokens, never only hashes, and skips slots that point outside the arrays. So whatever the arrays
//! hold, a match has the tokens of the query. The search ends, because every step consumes at least one page of the
//! sequence after at most [`MAX_PROBES`] slots.

/// The node every path starts at.
pub const ROOT: i32 = 0;
/// A slot is less than this far from its home position. The tree changes its seed rather than violate this.
pub const MAX_PROBES: usize = 128;

/// Slots of the smallest table.
const FEWEST_SLOTS: usize = 64;

/// Slots of a table with room for this many edges.
pub fn slots_for(edges: usize) -> usize {
    (2 * edges).next_power_of_two().max(FEWEST_SLOTS)
}

/// An edge of the tree as the table holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slot {
    /// The node it leaves.
    pub parent: i32,
    /// The node it leads to; [`ROOT`] in a slot that is empty.
    pub child: i32,
    /// Its first page in `tokens` and `pages`.
    pub start: i32,
    /// Its pages.
    pub len: i32,
}

impl Slot {
    /// From a row of the table.
    pub fn new([parent, child, start, len]: [i32; 4]) -> Slot {
        Slot { parent, child, start, len }
    }

    /// As a row of the table.
    pub fn row(self) -> [i32; 4] {
        [self.parent, self.child, self.start, self.len]
    }

    /// Whether no edge is here.
    pub fn is_empty(self) -> bool {
        self.child == ROOT
    }
}

/// A tree as arrays.
#[derive(Debug, Clone, Copy)]
pub struct Flat<'a> {
    /// Rows of [`Slot`]s, a power of two of them or none.
    pub table: &'a [[i32; 4]],
    /// Token ids of the edges.
    pub tokens: &'a [i32],
    /// Page ids of the edges.
    pub pages: &'a [i32],
    /// Tokens of a page.
    pub page_size: usize,
    /// Seed of the hash.
    pub seed: u32,
}

/// Where a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The node in whose edge it ended; [`ROOT`] if not one page matched.
    pub node: i32,
    /// Pages that matched.
    pub pages: usize,
    /// Of them, pages of the edge to `node`.
    pub inside: usize,
    /// Pages of that edge.
    pub edge: usize,
}

/// Mixes every bit of `x` into the whole result.
fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The home position of an edge, before reduction to the size of the table. A sum over the tokens, so that the lanes
/// of a warp can divide it; each token is mixed with its position first, so that the order matters.
pub fn hash(seed: u32, parent: i32, page: &[i32]) -> u32 {
    let tokens = page.iter().zip(0u32..).map(|(&token, i)| {
        let placed = (token as u32).wrapping_mul(0x9e37_79b1).wrapping_add(i.wrapping_mul(0x85eb_ca77));
        mix(placed.wrapping_add(seed))
    });
    mix(tokens.fold(mix(parent as u32 ^ seed), u32::wrapping_add))
}

impl<'a> Flat<'a> {
    /// The longest match of whole pages. Calls `each` with every edge on the path: its start, and the pages that
    /// matched.
    pub fn find(&self, tokens: &[i32], mut each: impl FnMut(usize, usize)) -> Found {
        let mut found = Found { node: ROOT, pages: 0, inside: 0, edge: 0 };
        let mut rest = tokens;
        while found.inside == found.edge {
            let Some((_, slot, inside)) = self.edge(found.node, rest) else { break };
            each(slot.start as usize, inside);
            found = Found { node: slot.child, pages: found.pages + inside, inside, edge: slot.len as usize };
            rest = &rest[inside * self.page_size..];
        }
        found
    }

    /// The edge from `node` that begins with the first page of `tokens`: its slot number, the slot, and the number of
    /// pages that match.
    pub(crate) fn edge(&self, node: i32, tokens: &[i32]) -> Option<(usize, Slot, usize)> {
        let page = tokens.get(..self.page_size).filter(|page| !page.is_empty())?;
        self.probes(node, page).find_map(|(at, slot)| {
            let edge = self.tokens_of(slot).filter(|_| slot.parent == node)?;
            let inside = common(edge, tokens) / self.page_size;
            (inside > 0).then_some((at, slot, inside))
        })
    }

    /// The slots in which an edge from `node` with this first page can be.
    pub(crate) fn probes(&self, node: i32, page: &[i32]) -> impl Iterator<Item = (usize, Slot)> + 'a {
        let table = self.table;
        let home = hash(self.seed, node, page) as usize;
        let places = (0..table.len().min(MAX_PROBES)).map(move |i| (home + i) & (table.len() - 1));
        places.map(|at| (at, Slot::new(table[at]))).take_while(|(_, slot)| !slot.is_empty())
    }

    /// The tokens of an edge; `None` if the slot points outside the arrays.
    fn tokens_of(&self, slot: Slot) -> Option<&'a [i32]> {
        let (start, len) = (usize::try_from(slot.start).ok()?, usize::try_from(slot.len).ok()?);
        let inside = slot.child > ROOT && len > 0 && start + len <= self.pages.len();
        let tokens = self.tokens.get(start * self.page_size..(start + len) * self.page_size)?;
        inside.then_some(tokens)
    }
}

/// The length of the common prefix of two sequences.
fn common(a: &[i32], b: &[i32]) -> usize {
    /// Tokens that are compared at once, by `memcmp`.
    const BLOCK: usize = 128;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = blocks * BLOCK;
    same + a[same..].iter().zip(&b[same..]).take_while(|(a, b)| a == b).count()
}
