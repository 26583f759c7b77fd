//! The plans that are kept.

use super::Plan;
use super::signature::Asked;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, RwLock};

/// Most plans that are kept.
pub(super) const MOST_PLANS: usize = 4096;

/// The plans that are kept: beyond [`MOST_PLANS`] each new one takes the place of an old one that is not in use.
#[derive(Default)]
pub(super) struct Table {
    /// By their hash, which is one already.
    pub by_hash: HashMap<u64, Vec<Plan>, BuildHasherDefault<Identity>>,
    /// All of them with their hashes. The first goes next, unless it was found again since it came to the end of the queue.
    pub queue: VecDeque<(u64, Plan)>,
}

impl Table {
    pub fn find(&self, hash: u64, asked: &Asked<'_>) -> Option<&Plan> {
        let plan = self.by_hash.get(&hash)?.iter().find(|plan| plan.is_of(asked))?;
        // Read before writing, so that a flag many threads check stays in all their caches.
        if !plan.0.found_again.load(Ordering::Relaxed) {
            plan.0.found_again.store(true, Ordering::Relaxed);
        }
        Some(plan)
    }

    pub fn insert(&mut self, hash: u64, plan: Plan) {
        while self.queue.len() >= MOST_PLANS
            && let Some((old_hash, old)) = self.queue.pop_front()
        {
            if old.0.found_again.swap(false, Ordering::Relaxed) {
                self.queue.push_back((old_hash, old));
            } else if let Entry::Occupied(mut same) = self.by_hash.entry(old_hash) {
                same.get_mut().retain(|plan| !Arc::ptr_eq(&plan.0, &old.0));
                if same.get().is_empty() {
                    same.remove();
                }
            }
        }
        self.by_hash.entry(hash).or_default().push(plan.clone());
        self.queue.push_back((hash, plan));
    }

    fn clear(&mut self) {
        self.by_hash.clear();
        self.queue.clear();
    }
}

#[derive(Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only hashes are hashed");
    }
    fn write_u64(&mut self, hash: u64) {
        // The table uses the upper bits for something other than the lower ones.
        self.0 = hash ^ hash >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) static PLANS: LazyLock<RwLock<Table>> = LazyLock::new(Default::default);

/// Drops all cached plans, because kernel choices may change. Plans that callers hold are not affected.
pub(in crate::op) fn forget() {
    PLANS.write().unwrap_or_else(|e| e.into_inner()).clear();
}
