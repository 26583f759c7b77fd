//! Which tokens of which sequences are computed next.
//!
//! A sequence has known tokens and computed ones; a step computes some more of the known. There is no difference between
//! prompts and outputs, nor between a new request and one that starts again after losing its pages: each catches up.
//!
//! A step first takes the running sequences that miss one token, then chunks of those that miss more, and then admits
//! waiting ones, until its budget of tokens is used up. When pages run out, the youngest running sequence that is not
//! part of the step loses its own and waits again. The oldest never does, so there is always progress: a sequence is
//! admitted only if it fits alone.

mod admission;

use crate::error::{Error, Result};
use crate::pages::{Held, Pages};
use crate::request::RequestId;
use crate::sequence::{Key, Sequence};
use std::collections::{BTreeMap, BTreeSet};

/// The limits of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens of a step.
    pub max_batch_tokens: usize,
    /// The most running sequences.
    pub max_running: usize,
    /// The most tokens of one sequence in a step.
    pub max_chunk: usize,
}

/// A sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The sequence.
    pub key: Key,
    /// Its first token in the step.
    pub start: usize,
    /// Tokens in the step.
    pub count: usize,
    /// Whether the step reaches the last known token, so that the next can be chosen.
    pub reaches_end: bool,
}

/// A step: what to copy, then what to compute.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Pages to copy before, `[from, to]`.
    pub copies: Vec<[i32; 2]>,
    /// What to compute, each sequence at most once.
    pub shares: Vec<Share>,
}

impl StepPlan {
    /// What it computes, in a few words: `decode of 3`, `prompts of 512 tokens, decode of 1`.
    pub fn title(&self) -> String {
        let (decode, prompts): (Vec<&Share>, Vec<&Share>) =
            self.shares.iter().partition(|share| share.count == 1 && share.reaches_end);
        let tokens: usize = prompts.iter().map(|share| share.count).sum();
        match (prompts.len(), decode.len()) {
            (0, count) => format!("decode of {count}"),
            (_, 0) => format!("prompts of {tokens} tokens"),
            (_, count) => format!("prompts of {tokens} tokens, decode of {count}"),
        }
    }
}

/// The sequences, and the pages that are divided among them.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pages: Pages,
    waiting: BTreeMap<Key, Sequence>,
    running: BTreeMap<Key, Sequence>,
    preemptions: usize,
    /// The requests that were first admitted in the last step.
    started: Vec<RequestId>,
}

impl Scheduler {
    /// No sequences yet.
    pub fn new(limits: Limits, pages: Pages) -> Scheduler {
        let (waiting, running) = (BTreeMap::new(), BTreeMap::new());
        Scheduler { limits, pages, waiting, running, preemptions: 0, started: Vec::new() }
    }

    /// Whether a sequence of this many tokens, when finished, can ever have all pages it needs.
    pub fn can_ever_hold(&self, max_len: usize) -> bool {
        self.pages.pages_for(max_len.saturating_sub(1)) <= self.pages.num_pages()
    }

    /// Tokens that the pool can hold for one sequence.
    pub fn capacity(&self) -> usize {
        self.pages.num_pages() * self.pages.page_size()
    }

    /// The most pages that a sequence of at most this many tokens can have.
    pub fn most_pages(&self, max_len: usize) -> usize {
        self.pages.pages_for(max_len).min(self.pages.num_pages())
    }

    /// The pages.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Empties the unused part of the prefix cache.
    pub fn clear_cache(&mut self) {
        self.pages.clear_cache();
    }

    /// Pages of its own for `tokens` tokens that are computed between two steps. `None` if too few are unused now: nobody
    /// loses any for it but the cache.
    pub fn lend(&mut self, tokens: usize) -> Option<Held> {
        let mut held = Held::default();
        self.pages.grow(&mut held, self.pages.pages_for(tokens)).then_some(held)
    }

    /// Takes lent pages back. What was in them is forgotten.
    ///
    /// # Errors
    /// If they are those of another pool.
    pub fn take_back(&mut self, held: Held) -> Result<()> {
        self.pages.release(held)
    }

    /// Numbers of running and of waiting sequences.
    pub fn counts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// A step begins, in which nothing has been admitted yet.
    pub fn forget_started(&mut self) {
        self.started.clear();
    }

    /// The requests that were first admitted in the last step.
    pub fn started(&self) -> &[RequestId] {
        &self.started
    }

    /// How often a sequence lost its pages so far.
    pub fn num_preemptions(&self) -> usize {
        self.preemptions
    }

    /// Adds a sequence that waits for pages.
    pub fn add(&mut self, sequence: Sequence) {
        self.waiting.insert(sequence.key, sequence);
    }

    /// All sequences in the order in which they are served, and whether they run.
    pub fn sequences(&self) -> impl Iterator<Item = (&Sequence, bool)> {
        let running = self.running.values().map(|sequence| (sequence, true));
        running.chain(self.waiting.values().map(|sequence| (sequence, false)))
    }

    /// A running sequence.
    pub fn running(&self, key: Key) -> Option<&Sequence> {
        self.running.get(&key)
    }

    /// Plans the next step. Pages for it are taken; the plan must be carried out and then [`commit`](Self::commit)ted.
    ///
    /// # Errors
    /// If an internal invariant is broken.
    pub fn schedule(&mut self) -> Result<StepPlan> {
        let mut plan = StepPlan::default();
        let mut budget = self.limits.max_batch_tokens;
        let mut planned = BTreeSet::new();
        let mut short_of_pages = false;
        let keys_of = |few: bool, running: &BTreeMap<Key, Sequence>| -> Vec<Key> {
            running.values().filter(|s| (s.remaining() == 1) == few).map(|s| s.key).collect()
        };
        // Decode first, so that running outputs keep their pace beside long prompts. Both lists are oldest first.
        for key in [keys_of(true, &self.running), keys_of(false, &self.running)].concat() {
            if budget == 0 {
                break;
            }
            let Some(sequence) = self.running.get(&key) else { continue }; // it has just lost its pages
            let is_prompt = sequence.remaining() > 1;
            let wanted = sequence.remaining().min(budget).min(self.limits.max_chunk);
            let mut count = self.prepare(key, wanted, &mut plan);
            while count < wanted {
                short_of_pages = true;
                let victim = self.running.keys().rev().find(|other| !planned.contains(*other)).copied();
                match victim {
                    Some(victim) if victim > key => self.preempt(victim)?,
                    // The youngest itself. A prompt can continue with a part, or wait for the others; an output cannot.
                    _ if count > 0 || is_prompt => break,
                    _ => {
                        self.preempt(key)?;
                        break;
                    }
                }
                count = self.prepare(key, wanted, &mut plan);
            }
            if count > 0 {
                budget -= count;
                planned.insert(key);
                self.share(key, count, &mut plan);
            }
        }
        if !short_of_pages {
            self.admit(budget, &mut plan)?;
        }
        if plan.shares.is_empty() && !self.running.is_empty() {
            // Nothing could be planned although something is running: a prompt waits for pages that nothing will
            // return.
            let youngest = *self.running.keys().next_back().expect("something is running");
            if self.running.len() == 1 {
                return Err(Error::Broken(format!("{youngest:?} is alone and has too few pages")));
            }
            self.preempt(youngest)?;
            return self.schedule();
        }
        Ok(plan)
    }

    /// Takes a page for the token at `position` of a running sequence, the one after those of the present step, if it needs
    /// one. `false`, with nothing changed, if there is none.
    pub fn reserve(&mut self, key: Key, position: usize) -> bool {
        let Some(sequence) = self.running.get_mut(&key) else { return false };
        self.pages.grow(&mut sequence.held, self.pages.pages_for(position + 1))
    }

    /// Takes pages for up to `wanted` more tokens of a running sequence. Returns for how many there are pages; if it is
    /// fewer than wanted, nothing is taken.
    fn prepare(&mut self, key: Key, wanted: usize, plan: &mut StepPlan) -> usize {
        let sequence = self.running.get_mut(&key).expect("only running sequences are planned");
        let page_size = self.pages.page_size();
        let (start, first) = (sequence.computed, sequence.computed / page_size);
        let must_copy = !start.is_multiple_of(page_size) && self.pages.is_shared(&sequence.held, first);
        let room = self.pages.available();
        let needed = self.pages.pages_for(start + wanted) - sequence.held.pages.len() + must_copy as usize;
        if needed <= room {
            if must_copy {
                plan.copies.extend(self.pages.make_own(&mut sequence.held, first));
            }
            let grown = self.pages.grow(&mut sequence.held, self.pages.pages_for(start + wanted));
            debug_assert!(grown, "the pages were counted before");
            return wanted;
        }
        match room.checked_sub(must_copy as usize) {
            None => 0,
            Some(pages) => ((sequence.held.pages.len() + pages) * page_size - start).min(wanted - 1),
        }
    }

    /// Adds a share to the plan. If the sequence got pages for a part of what it wanted, they are taken here.
    fn share(&mut self, key: Key, count: usize, plan: &mut StepPlan) {
        let prepared = self.prepare(key, count, plan);
        debug_assert_eq!(prepared, count, "so many tokens have pages");
        let sequence = &self.running[&key];
        let reaches_end = count == sequence.remaining();
        plan.shares.push(Share { key, start: sequence.computed, count, reaches_end });
    }

    /// Takes the pages of a running sequence, which waits from then on. What can be shared stays in the cache.
    fn preempt(&mut self, key: Key) -> Result<()> {
        let mut sequence = self.running.remove(&key).expect("only running sequences are preempted");
        self.give_back(&mut sequence)?;
        sequence.preemptions += 1;
        self.preemptions += 1;
        self.waiting.insert(key, sequence);
        Ok(())
    }

    fn give_back(&mut self, sequence: &mut Sequence) -> Result<()> {
        let mut held = std::mem::take(&mut sequence.held);
        self.pages.publish(&mut held, &sequence.tokens[..sequence.verified], sequence.salt.as_ref())?;
        (sequence.computed, sequence.verified) = (0, 0);
        self.pages.release(held)
    }

    /// A share of a step was computed.
    pub fn commit(&mut self, share: &Share) {
        let sequence = self.running.get_mut(&share.key).expect("what was planned is running");
        sequence.computed += share.count;
    }

    /// The next token of a running sequence was chosen, from logits that were all numbers. The pages of a prompt that
    /// were computed go into the cache.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn append(&mut self, key: Key, token: i32) -> Result<()> {
        let sequence = self.running.get_mut(&key).expect("what was planned is running");
        let was_prompt = sequence.verified < sequence.prompt_len;
        sequence.verified = sequence.computed;
        if was_prompt {
            self.pages.publish(
                &mut sequence.held,
                &sequence.tokens[..sequence.prompt_len],
                sequence.salt.as_ref(),
            )?;
        }
        sequence.tokens.push(token);
        Ok(())
    }

    /// Another output of a running sequence that has one token beside its prompt: `token` is that of the other.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn fork(&mut self, from: Key, index: usize, token: i32) -> Result<()> {
        let leader = &self.running[&from];
        let key = Key { index, ..from };
        let mut sequence = Sequence::new(key, leader.tokens[..leader.prompt_len].to_vec(), leader.max_len);
        sequence.tokens.push(token);
        (sequence.cached_tokens, sequence.salt) = (leader.cached_tokens, leader.salt);
        sequence.adapter = leader.adapter;
        if self.running.len() >= self.limits.max_running {
            self.waiting.insert(key, sequence);
            return Ok(());
        }
        sequence.held = self.pages.fork(&leader.held, &leader.tokens)?;
        (sequence.computed, sequence.verified) = (leader.prompt_len, leader.prompt_len);
        self.running.insert(key, sequence);
        Ok(())
    }

    /// Whether a sequence has as many tokens as it may have.
    pub fn is_at_full_length(&self, key: Key) -> bool {
        let sequence = self.running.get(&key).or_else(|| self.waiting.get(&key));
        sequence.is_some_and(|sequence| sequence.tokens.len() >= sequence.max_len)
    }

    /// Ends a sequence, whether it runs or waits. What can be shared stays in the cache. `None` if there is none of this
    /// name.
    ///
    /// # Errors
    /// If there are too many pins.
    pub fn remove(&mut self, key: Key) -> Result<Option<Sequence>> {
        let Some(mut sequence) = self.running.remove(&key) else { return Ok(self.waiting.remove(&key)) };
        self.give_back(&mut sequence)?;
        Ok(Some(sequence))
    }

    /// Checks every rule that holds between steps, in time linear in the pages.
    ///
    /// # Errors
    /// Says what is broken.
    pub fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(what));
        self.pages.check(self.running.values().map(|sequence| &sequence.held))?;
        if self.running.len() > self.limits.max_running {
            return broken(format!("{} sequences are running", self.running.len()));
        }
        for sequence in self.running.values() {
            let (key, computed, known) = (sequence.key, sequence.computed, sequence.tokens.len());
            if computed >= known || sequence.verified > computed || known >= sequence.max_len {
                return broken(format!(
                    "{key:?}: {} verified, {computed} computed, {known} known",
                    sequence.verified
                ));
            }
            // The next token may have its page already.
            let pages = self.pages.pages_for(computed)..=self.pages.pages_for(computed + 1);
            if !pages.contains(&sequence.held.pages.len()) {
                return broken(format!("{key:?}: {} pages for {computed} tokens", sequence.held.pages.len()));
            }
        }
        match self.waiting.values().find(|s| !s.held.pages.is_empty() || s.computed != 0) {
            Some(sequence) => broken(format!("{:?} is waiting and has pages", sequence.key)),
            None => Ok(()),
        }
    }
}
