//! The pages of the pool: who uses them, which are free, and which hold prefixes that later requests may share.

use crate::error::{Error, Result};
use warpsmith::radix::{Pin, RadixTree};

/// Counts how often each page is used. A page that nobody uses is free.
#[derive(Debug)]
pub struct PagePool {
    uses: Vec<u32>,
    /// The last is given out first, so that few pages are touched while few are needed.
    free: Vec<i32>,
}

impl PagePool {
    /// `num_pages` free pages.
    pub fn new(num_pages: usize) -> PagePool {
        PagePool { uses: vec![0; num_pages], free: (0..num_pages as i32).rev().collect() }
    }

    /// Number of pages, used or not.
    pub fn len(&self) -> usize {
        self.uses.len()
    }

    /// Whether the pool has no pages at all.
    pub fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    /// Number of free pages.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// How many use a page.
    pub fn uses(&self, page: i32) -> u32 {
        self.uses[page as usize]
    }

    /// A free page, which then has one user.
    pub fn take(&mut self) -> Option<i32> {
        let page = self.free.pop()?;
        debug_assert_eq!(self.uses[page as usize], 0, "page {page} was free and used");
        self.uses[page as usize] = 1;
        Some(page)
    }

    /// One more uses a page that is used already.
    pub fn share(&mut self, page: i32) {
        let uses = &mut self.uses[page as usize];
        assert!(*uses > 0, "page {page} is free and cannot be shared");
        *uses += 1;
    }

    /// One less uses a page.
    pub fn release(&mut self, page: i32) {
        let uses = &mut self.uses[page as usize];
        assert!(*uses > 0, "page {page} was released twice");
        *uses -= 1;
        if *uses == 0 {
            self.free.push(page);
        }
    }
}

/// The pages of one sequence, in order.
#[derive(Debug, Default)]
pub struct Held {
    /// The pages. Each counts the sequence as a user.
    pub pages: Vec<i32>,
    /// Keeps those in the prefix cache, which come first, from being evicted.
    pin: Option<Pin>,
    /// How many of the pages are in the prefix cache.
    cached: usize,
}

/// The pool together with the prefix cache, which is a user of the pages it holds.
///
/// A page of a sequence that is in the cache is pinned by that sequence. So all pages of the cache that are not pinned
/// have no other user, and evicting them makes them free.
#[derive(Debug)]
pub struct Pages {
    pool: PagePool,
    tree: RadixTree,
    page_size: usize,
    /// Whether prefixes are kept at all.
    caching: bool,
}

impl Pages {
    /// Free pages and an empty cache.
    ///
    /// # Errors
    /// If a size is out of range.
    pub fn new(num_pages: usize, page_size: usize, caching: bool) -> Result<Pages> {
        let tree = RadixTree::new(page_size, num_pages)?;
        Ok(Pages { pool: PagePool::new(num_pages), tree, page_size, caching })
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number of pages, used or not.
    pub fn num_pages(&self) -> usize {
        self.pool.len()
    }

    /// Pages that can be had now: free ones, and those of the cache that nobody has pinned.
    pub fn available(&self) -> usize {
        let stats = self.tree.stats();
        self.pool.num_free() + stats.pages - stats.pinned_pages
    }

    /// Pages that hold prefixes.
    pub fn num_cached(&self) -> usize {
        self.tree.stats().pages
    }

    /// Whether prefixes are kept for later requests.
    pub fn keeps_prefixes(&self) -> bool {
        self.caching
    }

    /// Pages for `tokens` tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }

    /// The pages that hold the longest known prefix of `tokens`, pinned.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn find(&mut self, tokens: &[i32]) -> Result<Held> {
        if !self.caching {
            return Ok(Held::default());
        }
        let (found, pin) = self.tree.lookup_pinned(tokens)?;
        found.pages.iter().for_each(|&page| self.pool.share(page));
        Ok(Held { cached: found.pages.len(), pages: found.pages, pin: Some(pin) })
    }

    /// Adds pages to a sequence until it has `count`, evicting from the cache if needed. `false`, with nothing changed, if
    /// there are too few.
    pub fn grow(&mut self, held: &mut Held, count: usize) -> bool {
        let need = count.saturating_sub(held.pages.len());
        if need > self.available() {
            return false;
        }
        for _ in 0..need {
            let page = self.take().expect("enough pages are available");
            held.pages.push(page);
        }
        true
    }

    /// A free page; evicts if there is none.
    fn take(&mut self) -> Option<i32> {
        if self.pool.num_free() == 0 {
            for page in self.tree.evict(1) {
                self.pool.release(page);
            }
        }
        self.pool.take()
    }

    /// Whether a page has other users than one sequence.
    pub fn is_shared(&self, held: &Held, index: usize) -> bool {
        held.pages.get(index).is_some_and(|&page| self.pool.uses(page) > 1)
    }

    /// Replaces a shared page of a sequence by one of its own. Returns what must be copied, `[from, to]`; `None`, with
    /// nothing changed, if there is no page.
    pub fn make_own(&mut self, held: &mut Held, index: usize) -> Option<[i32; 2]> {
        debug_assert!(index >= held.cached, "pages of the cache are full and never written again");
        let to = self.take()?;
        let from = std::mem::replace(&mut held.pages[index], to);
        self.pool.release(from);
        Some([from, to])
    }

    /// A second sequence with the same pages.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn fork(&mut self, held: &Held, tokens: &[i32]) -> Result<Held> {
        let mut fork = Held { pages: held.pages.clone(), pin: None, cached: held.cached };
        if held.pin.is_some() {
            let (found, pin) = self.tree.lookup_pinned(&tokens[..held.cached * self.page_size])?;
            debug_assert_eq!(found.pages, held.pages[..held.cached], "what is pinned stays where it is");
            fork.pin = Some(pin);
        }
        fork.pages.iter().for_each(|&page| self.pool.share(page));
        Ok(fork)
    }

    /// Puts the full pages of `tokens`, whose keys and values the sequence has stored, into the cache. Where the cache has
    /// the same tokens already the sequence goes over to its pages and gives its own back.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn publish(&mut self, held: &mut Held, tokens: &[i32]) -> Result<()> {
        let full = tokens.len() / self.page_size;
        if !self.caching || full <= held.cached {
            return Ok(());
        }
        let tokens = &tokens[..full * self.page_size];
        let present = self.tree.insert(tokens, &held.pages[..full])?.present;
        held.pages[present..full].iter().for_each(|&page| self.pool.share(page));
        let (found, pin) = self.tree.lookup_pinned(tokens)?;
        for (own, &cached) in held.pages[held.cached..full].iter_mut().zip(&found.pages[held.cached..]) {
            if *own != cached {
                self.pool.share(cached);
                self.pool.release(std::mem::replace(own, cached));
            }
        }
        held.cached = full;
        match held.pin.replace(pin) {
            Some(shorter) => Ok(self.tree.unpin(shorter)?),
            None => Ok(()),
        }
    }

    /// The end of a sequence's use of its pages.
    ///
    /// # Errors
    /// If they are those of another pool.
    pub fn release(&mut self, held: Held) -> Result<()> {
        held.pages.iter().for_each(|&page| self.pool.release(page));
        match held.pin {
            Some(pin) => Ok(self.tree.unpin(pin)?),
            None => Ok(()),
        }
    }

    /// Empties the cache, as far as nobody uses it.
    pub fn clear_cache(&mut self) {
        for page in self.tree.evict(usize::MAX) {
            self.pool.release(page);
        }
    }

    /// Checks that every page has as many users as it says: the given sequences and the cache.
    ///
    /// # Errors
    /// Says what is broken.
    pub fn check<'a>(&self, sequences: impl Iterator<Item = &'a Held>) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(what));
        if let Err(error) = self.tree.check() {
            return broken(error.to_string());
        }
        let mut uses = vec![0u32; self.pool.len()];
        let (mut pins, mut pinned) = (0, std::collections::BTreeSet::<i32>::new());
        for held in sequences {
            held.pages.iter().for_each(|&page| uses[page as usize] += 1);
            pins += held.pin.is_some() as usize;
            pinned.extend(&held.pages[..held.cached]);
        }
        let stats = self.tree.stats();
        if (stats.pins, stats.pinned_pages) != (pins, pinned.len()) {
            return broken(format!("{stats:?}, but sequences have {pins} pins on {} pages", pinned.len()));
        }
        let mut in_tree = 0;
        for (page, &uses) in uses.iter().enumerate() {
            let counted = self.pool.uses[page];
            match counted.checked_sub(uses) {
                Some(0) if pinned.contains(&(page as i32)) => {
                    return broken(format!("page {page} is pinned, but the cache does not use it"));
                }
                Some(0) => {}
                Some(1) => in_tree += 1,
                _ => return broken(format!("page {page} has {uses} sequences, but counts {counted} users")),
            }
        }
        if in_tree != stats.pages {
            return broken(format!("{in_tree} pages have one more user, but the cache has {}", stats.pages));
        }
        let mut free = self.pool.free.clone();
        free.sort_unstable();
        let unused = (0..self.pool.len()).filter(|&page| self.pool.uses[page] == 0).map(|page| page as i32);
        if !free.into_iter().eq(unused) {
            return broken("the free pages are not those that nobody uses".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(count: usize) -> Vec<i32> {
        (0..count as i32).collect()
    }

    #[test]
    fn a_prefix_is_found_again_and_evicted_for_others() {
        let mut pages = Pages::new(4, 4, true).unwrap();
        let mut first = pages.find(&tokens(10)).unwrap();
        assert!(first.pages.is_empty() && pages.grow(&mut first, 3));
        pages.publish(&mut first, &tokens(10)).unwrap();
        pages.check([&first].into_iter()).unwrap();
        pages.release(first).unwrap();
        assert_eq!((pages.available(), pages.num_cached()), (4, 2));

        let mut second = pages.find(&tokens(7)).unwrap();
        assert_eq!(second.pages.len(), 1);
        assert_eq!(pages.available(), 3);
        assert!(!pages.grow(&mut second, 5), "one page more than there are");
        assert!(pages.grow(&mut second, 4));
        pages.check([&second].into_iter()).unwrap();
        pages.release(second).unwrap();
        pages.check(std::iter::empty()).unwrap();
        assert_eq!(pages.available(), 4);
    }

    #[test]
    fn sequences_with_the_same_tokens_end_with_the_same_pages() {
        let mut pages = Pages::new(8, 4, true).unwrap();
        let (mut a, mut b) = (pages.find(&tokens(9)).unwrap(), pages.find(&tokens(9)).unwrap());
        assert!(pages.grow(&mut a, 3) && pages.grow(&mut b, 3));
        pages.publish(&mut a, &tokens(9)).unwrap();
        pages.publish(&mut b, &tokens(9)).unwrap();
        assert_eq!(a.pages[..2], b.pages[..2]);
        assert_ne!(a.pages[2], b.pages[2]);
        pages.check([&a, &b].into_iter()).unwrap();
        assert_eq!(pages.available(), 4);
        pages.release(a).unwrap();
        pages.release(b).unwrap();
        assert_eq!(pages.available(), 8);
    }

    #[test]
    fn a_fork_shares_all_pages_until_it_writes() {
        for caching in [true, false] {
            let mut pages = Pages::new(8, 4, caching).unwrap();
            let mut a = pages.find(&tokens(6)).unwrap();
            assert!(pages.grow(&mut a, 2));
            pages.publish(&mut a, &tokens(6)).unwrap();
            let mut b = pages.fork(&a, &tokens(6)).unwrap();
            assert_eq!(a.pages, b.pages);
            assert!(pages.is_shared(&b, 1));
            let [from, to] = pages.make_own(&mut b, 1).unwrap();
            assert_eq!((from, to), (a.pages[1], b.pages[1]));
            assert!(!pages.is_shared(&a, 1), "the last user writes in place");
            pages.check([&a, &b].into_iter()).unwrap();
            pages.release(a).unwrap();
            pages.release(b).unwrap();
            pages.check(std::iter::empty()).unwrap();
        }
    }
}
