//! The middle of a step: computes what was planned, and chooses tokens.

use super::Engine;
use super::flight::Landing;
use crate::batch::{Batch, Chunk};
use crate::decode::{Decode, Row, Sizes};
use crate::error::Result;
use crate::request::Event;
use crate::sampler::{self, Choice, Draw};
use crate::scheduler::{Share, StepPlan};
use crate::sequence::Key;
use warpsmith::profile::{self, Kind};

/// Whether every sequence of a plan has one token, its last known.
fn only_generates(plan: &StepPlan) -> bool {
    plan.shares.iter().all(|share| share.count == 1 && share.reaches_end)
}

impl Engine {
    /// Computes the tokens of a plan. Logits of the sequences that reach their ends are in `decode` if tokens are
    /// returned, which are those that the sequences' plain options choose, and otherwise in `logits`. `landing` is the
    /// place of a plan that was launched already.
    pub(super) fn run(&mut self, plan: &StepPlan, landing: Option<Landing>) -> Result<Option<Vec<i32>>> {
        self.stats.steps += 1;
        self.stats.computed_tokens += plan.shares.iter().map(|share| share.count as u64).sum::<u64>();
        if let Some(landing) = landing {
            return self.finish_decode(plan, &landing).map(Some);
        }
        self.kv.copy_pages(&plan.copies, &self.stream)?;
        if only_generates(plan) && self.options.has_fixed_decode() {
            let landing = self.begin_decode(plan)?;
            return self.finish_decode(plan, &landing).map(Some);
        }
        let chunk = |share: &Share| {
            let sequence = self.scheduler.running(share.key).expect("what is planned is running");
            Chunk {
                tokens: &sequence.tokens[share.start..share.start + share.count],
                start: share.start,
                pages: &sequence.held.pages,
                wants_logits: share.reaches_end,
                adapter: sequence.adapter,
            }
        };
        let chunks: Vec<Chunk<'_>> = plan.shares.iter().map(chunk).collect();
        let batch = Batch::new(&chunks, self.options.page_size, &self.stream)?;
        self.model.forward(&batch, &mut self.kv, self.logits.write(batch.num_logits())?)?;
        self.ask_grammars(plan);
        Ok(None)
    }

    /// Puts sequences that share a prefix next to each other, if steps can use that.
    pub(super) fn arrange(&self, plan: &mut StepPlan) {
        if !self.options.has_fixed_decode() || !only_generates(plan) {
            return;
        }
        let sequence = |share: &Share| {
            let sequence = self.scheduler.running(share.key).expect("what is planned is running");
            (&sequence.held.pages[..], share.start)
        };
        let sequences: Vec<(&[i32], usize)> = plan.shares.iter().map(sequence).collect();
        if let Some(order) = self.options.cascade.order(&sequences, self.options.page_size) {
            plan.shares = order.iter().map(|&i| plan.shares[i]).collect();
        }
    }

    /// The memory of decode steps.
    pub(super) fn new_decode(&self) -> Result<Decode> {
        let config = self.model.config();
        let sizes = Sizes {
            max_rows: self.options.max_running,
            max_pages: self.scheduler.most_pages(config.max_positions),
            page_size: self.options.page_size,
            columns: config.vocab_size,
            vocab: self.options.vocab_size.unwrap_or(config.vocab_size),
            cascade: self.options.cascade,
        };
        Decode::new(sizes, &self.stream)
    }

    /// Launches a plan in which every sequence has one token, its last known.
    fn begin_decode(&mut self, plan: &StepPlan) -> Result<Landing> {
        if self.decode.is_none() {
            self.decode = Some(self.new_decode()?);
        }
        let row = |(row, share): (usize, &Share)| {
            let Key { request, index, .. } = share.key;
            let sequence = self.scheduler.running(share.key).expect("what is planned is running");
            Some(Row {
                id: sequence.tokens[share.start],
                position: share.start,
                pages: &sequence.held.pages,
                draw: self.requests[&request].outputs[&index].draw(row, sequence.tokens.len()),
            })
        };
        let rows: Vec<Option<Row<'_>>> = plan.shares.iter().enumerate().map(row).collect();
        let decode = self.decode.as_mut().expect("it was just made");
        let ticket = decode.launch(&mut *self.model, &mut self.kv, &rows, false)?;
        Ok(Landing { ticket, rows: (0..rows.len()).collect(), num_rows: rows.len() })
    }

    /// Launches the step after `plan`, if possible, and waits for the tokens of `plan`.
    fn finish_decode(&mut self, plan: &StepPlan, landing: &Landing) -> Result<Vec<i32>> {
        self.flight = self.take_off(plan, landing)?;
        self.ask_grammars(plan);
        let decode = self.decode.as_mut().expect("it has the step");
        let tokens = decode.collect(landing.ticket)?;
        Ok(landing.rows.iter().map(|&row| tokens[row]).collect())
    }

    /// Chooses tokens, ends what has reached its end. `tokens` are those of [`run`](Self::run).
    pub(super) fn process(
        &mut self,
        plan: &StepPlan,
        tokens: Option<&[i32]>,
        events: &mut Vec<Event>,
    ) -> Result<()> {
        let _span = profile::span(Kind::Host, || "choose tokens".into());
        let mut ends = Vec::new();
        for share in &plan.shares {
            self.scheduler.commit(share);
            if share.reaches_end {
                ends.push(share.key);
            }
        }
        let takers = self.takers(&ends);
        let draw = |&(row, key): &(usize, Key)| {
            let position =
                self.scheduler.running(ends[row]).expect("what is planned is running").tokens.len();
            self.requests[&key.request].outputs[&key.index].draw(row, position)
        };
        let draws: Vec<Draw<'_>> = takers.iter().map(draw).collect();
        let choices = match (tokens, &self.decode) {
            (Some(tokens), _) if draws.len() == tokens.len() && draws.iter().all(Draw::is_plain) => {
                tokens.iter().map(|&token| Choice::plain(token)).collect()
            }
            (Some(tokens), Some(decode)) => {
                sampler::choose(decode.logits(tokens.len()), &draws, self.vocab_size(), &self.stream)?
            }
            _ => sampler::choose(self.logits.read(ends.len()), &draws, self.vocab_size(), &self.stream)?,
        };
        let is_at_fault = |key: &Key| self.requests[&key.request].outputs[&key.index].fault().is_some();
        let choices: Vec<Option<Choice>> = takers
            .iter()
            .zip(choices)
            .map(|((_, key), choice)| choice.filter(|_| !is_at_fault(key)))
            .collect();
        let mut choices = takers.into_iter().map(|(row, key)| (ends[row], key)).zip(choices).peekable();
        while let Some(((leader, _), choice)) = choices.next() {
            if let Some(choice) = &choice {
                self.scheduler.append(leader, choice.token)?;
            }
            // Forks share the pages of their leader, so they begin before it can end.
            while let Some(((_, fork), choice)) = choices.next_if(|((of, _), _)| *of == leader) {
                if let Some(choice) = &choice {
                    self.scheduler.fork(leader, fork.index, choice.token)?;
                }
                self.deliver(fork, choice, events)?;
            }
            self.deliver(leader, choice, events)?;
        }
        Ok(())
    }

    /// Asks the grammars of the outputs that will take tokens what may come next. On a GPU the host does so while the device
    /// computes the step.
    fn ask_grammars(&mut self, plan: &StepPlan) {
        let vocab = self.vocab_size();
        for key in plan.shares.iter().filter(|share| share.reaches_end).map(|share| share.key) {
            let Some(request) = self.requests.get_mut(&key.request) else { continue };
            let all = request.has_forks;
            let takers = request.outputs.iter_mut().filter(|(index, _)| all || **index == key.index);
            takers.for_each(|(_, output)| output.ask_grammar(vocab));
        }
    }

    /// The outputs that take their next token from the rows of `ends`, each with its row: the sequences themselves, and after
    /// the first of several outputs the others, which begin with its row.
    fn takers(&mut self, ends: &[Key]) -> Vec<(usize, Key)> {
        let mut takers = Vec::with_capacity(ends.len());
        for (row, &key) in ends.iter().enumerate() {
            takers.push((row, key));
            let request = self.requests.get_mut(&key.request).expect("what runs belongs to a request");
            if std::mem::take(&mut request.has_forks) {
                takers.extend((1..request.params.n).map(|index| (row, Key { index, ..key })));
            }
        }
        takers
    }
}
