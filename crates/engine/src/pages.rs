//! The pages of the pool: who uses them, which are free, and which hold prefixes that later requests may share.

mod branches;
mod salts;

use crate::error::{Error, Result};
use crate::request::Salt;
use salts::{Salts, behind};
use std::collections::BTreeMap;
use warpsmith::radix::{Pin, RadixTree};

pub use branches::{Branch, Branches};

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

    /// The number of users of a page.
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

    /// Adds a user to a page in use.
    pub fn share(&mut self, page: i32) {
        let uses = &mut self.uses[page as usize];
        assert!(*uses > 0, "page {page} is free and cannot be shared");
        *uses += 1;
    }

    /// Removes a user of a page.
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
    /// Pins the leading pages, which are in the prefix cache, against eviction.
    pin: Option<Pin>,
    /// How many of the pages are in the prefix cache.
    cached: usize,
    /// The salt whose page is part of what is pinned.
    salt: Option<Salt>,
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
    salts: Salts,
}

impl Pages {
    /// Free pages and an empty cache.
    ///
    /// # Errors
    /// If a size is out of range.
    pub fn new(num_pages: usize, page_size: usize, caching: bool) -> Result<Pages> {
        let salts = Salts::new(num_pages);
        let tree = RadixTree::new(page_size, num_pages + salts.capacity())?;
        Ok(Pages { pool: PagePool::new(num_pages), tree, page_size, caching, salts })
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number of pages, used or not.
    pub fn num_pages(&self) -> usize {
        self.pool.len()
    }

    /// Pages available now: free ones, and unpinned ones of the cache.
    pub fn available(&self) -> usize {
        let stats = self.tree.stats();
        self.pool.num_free() + stats.pages - stats.pinned_pages - self.salts.num_unpinned()
    }

    /// Pages that hold nothing.
    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    /// Pages that hold prefixes.
    pub fn num_cached(&self) -> usize {
        self.tree.stats().pages - self.salts.len()
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
    pub fn find(&mut self, tokens: &[i32], salt: Option<&Salt>) -> Result<Held> {
        if !self.caching || salt.is_some_and(|salt| self.salts.page(salt).is_none()) {
            return Ok(Held::default());
        }
        let (pages, pin) = self.look_up(tokens, salt)?;
        pages.iter().for_each(|&page| self.pool.share(page));
        Ok(Held { cached: pages.len(), pages, pin: Some(pin), salt: salt.copied() })
    }

    /// The pages of a prefix in the tree, pinned. The salt's own page must be there.
    fn look_up(&mut self, tokens: &[i32], salt: Option<&Salt>) -> Result<(Vec<i32>, Pin)> {
        let Some(salt) = salt else {
            let (found, pin) = self.tree.lookup_pinned(tokens)?;
            return Ok((found.pages, pin));
        };
        let page = self.salts.page(salt).expect("the salt is known");
        let (mut found, pin) = self.tree.lookup_pinned(&behind(page, self.page_size, tokens))?;
        self.salts.pin(salt);
        debug_assert_eq!(found.pages.first(), Some(&page), "a known salt has its page in the tree");
        found.pages.remove(0);
        Ok((found.pages, pin))
    }

    /// Gives a pin back.
    fn unpin(&mut self, pin: Pin, salt: Option<&Salt>) -> Result<()> {
        if let Some(salt) = salt {
            self.salts.unpin(salt);
        }
        Ok(self.tree.unpin(pin)?)
    }

    /// The page of a salt, a new one if it has none. `None` if there are too many salts in use.
    fn page_of_salt(&mut self, salt: &Salt) -> Option<i32> {
        if let Some(page) = self.salts.page(salt) {
            return Some(page);
        }
        while self.salts.is_full() {
            let evicted = self.tree.evict(1);
            if evicted.is_empty() {
                return None;
            }
            self.take_back(evicted);
        }
        self.salts.add(salt)
    }

    /// Takes pages back that the tree has evicted.
    fn take_back(&mut self, evicted: Vec<i32>) {
        for page in evicted {
            if !self.salts.forget(page) {
                self.pool.release(page);
            }
        }
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
        while self.pool.num_free() == 0 {
            // What is evicted may be the page of a salt alone.
            let evicted = self.tree.evict(1);
            if evicted.is_empty() {
                return None;
            }
            self.take_back(evicted);
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
        let mut fork = Held { pages: held.pages.clone(), pin: None, cached: held.cached, salt: held.salt };
        if held.pin.is_some() {
            let (pages, pin) = self.look_up(&tokens[..held.cached * self.page_size], held.salt.as_ref())?;
            debug_assert_eq!(pages, held.pages[..held.cached], "what is pinned stays where it is");
            fork.pin = Some(pin);
        }
        fork.pages.iter().for_each(|&page| self.pool.share(page));
        Ok(fork)
    }

    /// Puts the full pages of `tokens`, whose keys and values the sequence has stored, into the cache. Where the cache
    /// has the same tokens already, the sequence switches to those pages and returns its own.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn publish(&mut self, held: &mut Held, tokens: &[i32], salt: Option<&Salt>) -> Result<()> {
        let full = tokens.len() / self.page_size;
        if !self.caching || full <= held.cached {
            return Ok(());
        }
        let tokens = &tokens[..full * self.page_size];
        let present = match salt {
            None => self.tree.insert(tokens, &held.pages[..full])?.present,
            Some(salt) => {
                let Some(page) = self.page_of_salt(salt) else { return Ok(()) };
                let pages = [&[page], &held.pages[..full]].concat();
                let inserted = self.tree.insert(&behind(page, self.page_size, tokens), &pages);
                let inserted = inserted.inspect_err(|_| self.forget_unused(salt))?;
                inserted.present.saturating_sub(1)
            }
        };
        held.pages[present..full].iter().for_each(|&page| self.pool.share(page));
        let (pages, pin) = self.look_up(tokens, salt)?;
        for (own, &cached) in held.pages[held.cached..full].iter_mut().zip(&pages[held.cached..]) {
            if *own != cached {
                self.pool.share(cached);
                self.pool.release(std::mem::replace(own, cached));
            }
        }
        held.cached = full;
        let before = std::mem::replace(&mut held.salt, salt.copied());
        match held.pin.replace(pin) {
            Some(shorter) => self.unpin(shorter, before.as_ref()),
            None => Ok(()),
        }
    }

    /// Forgets a salt that has nothing in the tree.
    fn forget_unused(&mut self, salt: &Salt) {
        let Some(page) = self.salts.page(salt) else { return };
        if self.tree.find(&behind(page, self.page_size, &[])).pages.is_empty() {
            self.salts.forget(page);
        }
    }

    /// The end of a sequence's use of its pages.
    ///
    /// # Errors
    /// If they are those of another pool.
    pub fn release(&mut self, held: Held) -> Result<()> {
        held.pages.iter().for_each(|&page| self.pool.release(page));
        match held.pin {
            Some(pin) => self.unpin(pin, held.salt.as_ref()),
            None => Ok(()),
        }
    }

    /// Empties the unused part of the cache.
    pub fn clear_cache(&mut self) {
        let evicted = self.tree.evict(usize::MAX);
        self.take_back(evicted);
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
        let mut salt_pins = BTreeMap::<Salt, usize>::new();
        for held in sequences {
            held.pages.iter().for_each(|&page| uses[page as usize] += 1);
            pins += held.pin.is_some() as usize;
            pinned.extend(&held.pages[..held.cached]);
            if let (Some(salt), true) = (held.salt, held.pin.is_some()) {
                *salt_pins.entry(salt).or_default() += 1;
            }
        }
        if !self.salts.check(&salt_pins) {
            return broken(format!("{:?}, but the sequences have pinned {salt_pins:?}", self.salts));
        }
        let stats = self.tree.stats();
        if (stats.pins, stats.pinned_pages) != (pins, pinned.len() + salt_pins.len()) {
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
        if in_tree + self.salts.len() != stats.pages {
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
        let mut first = pages.find(&tokens(10), None).unwrap();
        assert!(first.pages.is_empty() && pages.grow(&mut first, 3));
        pages.publish(&mut first, &tokens(10), None).unwrap();
        pages.check([&first].into_iter()).unwrap();
        pages.release(first).unwrap();
        assert_eq!((pages.available(), pages.num_cached()), (4, 2));

        let mut second = pages.find(&tokens(7), None).unwrap();
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
        let (mut a, mut b) = (pages.find(&tokens(9), None).unwrap(), pages.find(&tokens(9), None).unwrap());
        assert!(pages.grow(&mut a, 3) && pages.grow(&mut b, 3));
        pages.publish(&mut a, &tokens(9), None).unwrap();
        pages.publish(&mut b, &tokens(9), None).unwrap();
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
            let mut a = pages.find(&tokens(6), None).unwrap();
            assert!(pages.grow(&mut a, 2));
            pages.publish(&mut a, &tokens(6), None).unwrap();
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

    #[test]
    fn a_prefix_is_found_with_its_own_salt_alone() {
        let salts: Vec<Option<Salt>> = [None, Some([1; 32]), Some([2; 32])].into();
        let mut pages = Pages::new(12, 4, true).unwrap();
        for salt in &salts {
            let mut held = pages.find(&tokens(10), salt.as_ref()).unwrap();
            assert!(held.pages.is_empty() && pages.grow(&mut held, 3), "{salt:?} finds what others have");
            pages.publish(&mut held, &tokens(10), salt.as_ref()).unwrap();
            pages.check([&held].into_iter()).unwrap();
            let fork = pages.fork(&held, &tokens(10)).unwrap();
            pages.check([&held, &fork].into_iter()).unwrap();
            pages.release(held).unwrap();
            pages.release(fork).unwrap();
            pages.check(std::iter::empty()).unwrap();
        }
        assert_eq!((pages.available(), pages.num_cached()), (12, 6));
        let found: Vec<Held> =
            salts.iter().map(|salt| pages.find(&tokens(9), salt.as_ref()).unwrap()).collect();
        assert!(found.iter().all(|held| held.pages.len() == 2) && pages.available() == 6);
        let all: std::collections::BTreeSet<i32> = found.iter().flat_map(|held| held.pages.clone()).collect();
        assert_eq!(all.len(), 6, "nothing is shared");
        pages.check(found.iter()).unwrap();
        found.into_iter().for_each(|held| pages.release(held).unwrap());
        // A salt whose prefixes are evicted is forgotten.
        let mut greedy = pages.find(&tokens(1), None).unwrap();
        assert!(pages.grow(&mut greedy, 12));
        pages.check([&greedy].into_iter()).unwrap();
        assert!(pages.salts.len() == 0 && pages.num_cached() == 0);
        pages.release(greedy).unwrap();
    }

    #[test]
    fn salts_come_and_go_without_end() {
        let mut pages = Pages::new(4, 4, true).unwrap();
        for round in 0..100u8 {
            let salt = [round; 32];
            let mut held = pages.find(&tokens(5), Some(&salt)).unwrap();
            assert!(held.pages.is_empty() && pages.grow(&mut held, 2));
            pages.publish(&mut held, &tokens(5), Some(&salt)).unwrap();
            pages.check([&held].into_iter()).unwrap();
            pages.release(held).unwrap();
            pages.check(std::iter::empty()).unwrap();
            assert_eq!(pages.available(), 4);
        }
        pages.clear_cache();
        assert!(pages.salts.len() == 0 && pages.available() == 4);
    }
}
