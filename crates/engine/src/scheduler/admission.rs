//! Which waiting sequences start.

use super::{Scheduler, StepPlan};
use crate::error::{Error, Result};
use crate::pages::Held;
use crate::sequence::{Key, Sequence};

/// After this many preemptions a sequence is admitted only where only a request of a lower priority number can make it
/// lose its pages again.
const PATIENCE: usize = 3;

impl Scheduler {
    /// Starts waiting sequences as long as there are tokens in the budget and pages.
    pub(super) fn admit(&mut self, mut budget: usize, plan: &mut StepPlan) -> Result<()> {
        let waiting: Vec<Key> = self.waiting.keys().copied().collect();
        for key in waiting {
            if budget == 0 || self.running.len() >= self.limits.max_running {
                break;
            }
            let sequence = &self.waiting[&key];
            // The last token is computed in any case: the next is chosen from its logits.
            let known = sequence.tokens.len();
            let held = self.pages.find(&sequence.tokens[..known - 1], sequence.salt.as_ref())?;
            let found = held.pages.len() * self.pages.page_size();
            if self.is_being_computed(sequence, found) {
                self.pages.release(held)?; // in some steps its pages will be in the cache
                continue;
            }
            if !self.has_room_for(sequence, &held) {
                self.pages.release(held)?;
                break; // later sequences must not overtake it forever
            }
            let mut sequence = self.waiting.remove(&key).expect("it was waiting");
            (sequence.computed, sequence.verified, sequence.held) = (found, found, held);
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(found);
                self.started.push(key.request);
            }
            let count = sequence.remaining().min(budget).min(self.limits.max_chunk);
            self.running.insert(key, sequence);
            if self.prepare(key, count, plan) < count {
                return Err(Error::Broken(format!("{key:?} was admitted without pages for it")));
            }
            self.share(key, count, plan);
            budget -= count;
        }
        Ok(())
    }

    /// Whether a running prompt will soon have the next page of a waiting sequence in the cache.
    fn is_being_computed(&self, waiting: &Sequence, found: usize) -> bool {
        let end = found + self.pages.page_size();
        end < waiting.tokens.len()
            && self.running.values().any(|running| {
                running.verified < end
                    && running.salt == waiting.salt
                    && running.prompt_len >= end
                    && running.tokens.get(..end) == Some(&waiting.tokens[..end])
                    && self.pages.keeps_prefixes()
            })
    }

    /// Whether there are pages for all known tokens of a sequence, and for some growth of it and of all that run. The
    /// growth is larger the more often the sequence has lost its pages.
    fn has_room_for(&self, sequence: &Sequence, held: &Held) -> bool {
        let growth = match sequence.preemptions {
            PATIENCE.. => usize::MAX,
            few => self.pages.page_size() << (2 * few),
        };
        let page_size = self.pages.page_size();
        let pages = |sequence: &Sequence| {
            self.pages.pages_for(sequence.tokens.len().saturating_add(growth).min(sequence.most_stored()))
        };
        let missing = |running: &Sequence| {
            // A page that a fork has begun together with others must be copied before it is written.
            let (last, full) = (running.computed / page_size, running.computed.is_multiple_of(page_size));
            let copied = !full && self.pages.is_shared(&running.held, last);
            pages(running) + copied as usize - running.held.pages.len()
        };
        let running: usize = self.running.values().map(missing).sum();
        running + pages(sequence) - held.pages.len() <= self.pages.available()
    }
}
