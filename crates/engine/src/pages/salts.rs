//! Salts: tenants whose cached prefixes nobody else finds.
//!
//! A prefix with a salt lies in the tree behind a page of its own, whose tokens are one negative number that no other salt has.
//! So it is found with the same salt alone, by comparing tokens, as everything is found there.

use crate::request::Salt;
use std::collections::BTreeMap;

/// The most salts with something in the cache.
const MAX_SALTS: usize = 1 << 16;

/// The salts whose pages are in the tree, and pages for others.
#[derive(Debug)]
pub(super) struct Salts {
    /// The first number that is no page of the pool.
    first: i32,
    /// Each with its page, and the sequences that have pinned it.
    known: BTreeMap<Salt, (i32, usize)>,
    /// The salt of each page in use.
    salt_of: Vec<Salt>,
    free: Vec<i32>,
    /// Salts with pins.
    pinned: usize,
}

impl Salts {
    /// For a pool of this many pages. A salt without a page in the cache is of no use, so there are never more salts than pages.
    pub fn new(num_pages: usize) -> Salts {
        let count = num_pages.min(MAX_SALTS);
        Salts {
            first: num_pages as i32,
            known: BTreeMap::new(),
            salt_of: vec![[0; 32]; count],
            free: (num_pages..num_pages + count).rev().map(|page| page as i32).collect(),
            pinned: 0,
        }
    }

    /// The most salts at a time.
    pub fn capacity(&self) -> usize {
        self.salt_of.len()
    }

    /// Salts with something in the tree.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Salts with something in the tree that can be evicted.
    pub fn num_unpinned(&self) -> usize {
        self.known.len() - self.pinned
    }

    /// Whether no further salt can be added.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// The page of a salt that is known.
    pub fn page(&self, salt: &Salt) -> Option<i32> {
        self.known.get(salt).map(|&(page, _)| page)
    }

    /// The salt of a page that is known.
    pub fn of_page(&self, page: i32) -> &Salt {
        &self.salt_of[(page - self.first) as usize]
    }

    /// Adds a salt. `None` if there is no room.
    pub fn add(&mut self, salt: &Salt) -> Option<i32> {
        let page = self.free.pop()?;
        self.known.insert(*salt, (page, 0));
        self.salt_of[(page - self.first) as usize] = *salt;
        Some(page)
    }

    /// Forgets the salt of a page. `false` if it is a page of the pool.
    pub fn forget(&mut self, page: i32) -> bool {
        if page < self.first {
            return false;
        }
        self.known.remove(&self.salt_of[(page - self.first) as usize]);
        self.free.push(page);
        true
    }

    /// One more sequence has pinned the page of a salt.
    pub fn pin(&mut self, salt: &Salt) {
        let (_, pins) = self.known.get_mut(salt).expect("what is pinned is known");
        *pins += 1;
        self.pinned += usize::from(*pins == 1);
    }

    /// One of them has ended.
    pub fn unpin(&mut self, salt: &Salt) {
        let (_, pins) = self.known.get_mut(salt).expect("what is pinned is not forgotten");
        *pins -= 1;
        self.pinned -= usize::from(*pins == 0);
    }

    /// Whether the counts are right, if these are the pins of the sequences.
    pub fn check(&self, pins: &BTreeMap<Salt, usize>) -> bool {
        let counted = self.known.iter().filter(|(_, (_, pins))| *pins > 0);
        self.known.len() + self.free.len() == self.capacity()
            && self.pinned == pins.len()
            && counted.map(|(salt, (_, pins))| (salt, pins)).eq(pins)
            && self.known.iter().all(|(salt, &(page, _))| self.salt_of[(page - self.first) as usize] == *salt)
    }
}

/// The tokens of a prefix behind the page of a salt.
pub(super) fn behind(page: i32, page_size: usize, tokens: &[i32]) -> Vec<i32> {
    let mut all = Vec::with_capacity(page_size + tokens.len());
    // No token is negative.
    all.resize(page_size, -1 - page);
    all.extend_from_slice(tokens);
    all
}
