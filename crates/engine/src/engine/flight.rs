//! Steps that are launched before the tokens of the step ahead of them are known.
//!
//! The next decode step follows from the present one: the same rows, one position further, with the tokens that the
//! device chose. So the host can launch it first and process the present one while the device computes. Learning too
//! late that a sequence has ended does no harm: its row is ignored, and what it stored is past the end of that
//! sequence, in pages that others write only later in stream order.

use super::Engine;
use crate::decode::{Row, Ticket};
use crate::error::Result;
use crate::scheduler::{Share, StepPlan};
use crate::sequence::Key;

/// A step in flight whose sequences may have ended meanwhile.
pub(super) struct Flight {
    ticket: Ticket,
    /// The sequence of each row; `None` if it was known to end.
    keys: Vec<Option<Key>>,
}

/// A step in flight, whose tokens are waited for next.
pub(super) struct Landing {
    pub ticket: Ticket,
    /// The row of each share of its plan.
    pub rows: Vec<usize>,
    /// All rows, those of sequences that have ended among them.
    pub num_rows: usize,
}

impl Engine {
    /// The plan of the step in flight, for the sequences that continue.
    pub(super) fn land(&mut self) -> Option<(StepPlan, Landing)> {
        let Flight { ticket, keys } = self.flight.take()?;
        let (mut plan, mut rows) = (StepPlan::default(), Vec::new());
        for (row, key) in keys.iter().enumerate() {
            let Some(sequence) = key.and_then(|key| self.scheduler.running(key)) else { continue };
            plan.shares.push(Share {
                key: sequence.key,
                start: sequence.computed,
                count: 1,
                reaches_end: true,
            });
            rows.push(row);
        }
        if rows.is_empty() {
            return None;
        }
        self.stats.steps_ahead += 1;
        Some((plan, Landing { ticket, rows, num_rows: keys.len() }))
    }

    /// Launches the step after `plan`, which is in flight already. `None` if that must wait until `plan` is processed.
    pub(super) fn take_off(&mut self, plan: &StepPlan, landing: &Landing) -> Result<Option<Flight>> {
        if !self.options.overlap || !self.is_foreseeable(plan) {
            return Ok(None);
        }
        let mut keys = vec![None; landing.num_rows];
        for (share, &row) in plan.shares.iter().zip(&landing.rows) {
            if !self.ends_with(share) {
                if !self.scheduler.reserve(share.key, share.start + 1) {
                    return Ok(None);
                }
                keys[row] = Some(share.key);
            }
        }
        if keys.iter().all(Option::is_none) {
            return Ok(None);
        }
        let row = |(row, key): (usize, &Option<Key>)| {
            let key = (*key)?;
            let sequence = self.scheduler.running(key).expect("what is planned is running");
            let output = &self.requests[&key.request].outputs[&key.index];
            Some(Row {
                id: 0,
                position: sequence.computed + 1,
                pages: &sequence.held.pages,
                draw: output.draw(row, sequence.tokens.len() + 1),
            })
        };
        let rows: Vec<Option<Row<'_>>> = keys.iter().enumerate().map(row).collect();
        let decode = self.decode.as_mut().expect("it has the step before");
        let ticket = decode.launch(&mut *self.model, &mut self.kv, &rows, true)?;
        Ok(Some(Flight { ticket, keys }))
    }

    /// Whether the token that a share brings is the last of its sequence, whatever it is.
    fn ends_with(&self, share: &Share) -> bool {
        let sequence = self.scheduler.running(share.key).expect("what is planned is running");
        sequence.tokens.len() + 1 >= sequence.max_len
    }

    /// Whether the step after `plan` has the same sequences, as far as they go on, and the device can choose its tokens.
    fn is_foreseeable(&self, plan: &StepPlan) -> bool {
        let (running, waiting) = self.scheduler.counts();
        let full =
            running >= self.options.max_running && !plan.shares.iter().any(|share| self.ends_with(share));
        (waiting == 0 || full)
            && running == plan.shares.len()
            && plan.shares.iter().all(|share| {
                let request = &self.requests[&share.key.request];
                !request.has_forks && request.outputs[&share.key.index].draw(0, 0).is_plain()
            })
    }
}
