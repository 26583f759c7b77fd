//! Embeddings: one input between two steps, so that running requests wait for one at a time.

use super::Worker;
use crate::bridge::{Embed, EmbedFailure};
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Worker {
    /// Takes a request for embeddings.
    pub(super) fn take_embed(&mut self, embed: Embed) {
        // While the server ends it is dropped, which its client is told.
        if self.deadline.is_none() {
            self.embeds.push_back(embed);
        }
    }

    /// Computes the next input, if there is one and its pages are unused. Requests take turns.
    pub(super) fn embed_next(&mut self) -> Result<(), String> {
        let is_late = |embed: &Embed| embed.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let Some(mut embed) = self.embeds.pop_front() else { return Ok(()) };
        if embed.answer.is_closed() {
            return Ok(());
        }
        if is_late(&embed) {
            embed.end(Err(EmbedFailure::Late));
            return Ok(());
        }
        let Some(input) = embed.inputs.get(embed.vectors.len()) else {
            let vectors = std::mem::take(&mut embed.vectors);
            embed.end(Ok(vectors));
            return Ok(());
        };
        let now = self.shared.start.elapsed().as_millis() as u64 + 1;
        self.shared.step.store(now, Ordering::Relaxed);
        let vector = self.engine.embed(input, embed.pooling, embed.adapter.as_deref());
        self.shared.step.store(0, Ordering::Relaxed);
        match vector {
            Ok(Some(vector)) => {
                self.shared.metrics.embedded(input.len());
                embed.vectors.push(vector);
                if embed.vectors.len() == embed.inputs.len() {
                    let vectors = std::mem::take(&mut embed.vectors);
                    embed.end(Ok(vectors));
                } else {
                    self.embeds.push_back(embed);
                }
            }
            // Running requests will return pages. Without any, all pages are unused.
            Ok(None) if self.engine.has_work() => self.embeds.push_front(embed),
            Ok(None) => {
                let why = "there are no pages for it although nothing runs".to_owned();
                embed.end(Err(EmbedFailure::Failed(why)));
            }
            Err(error) => {
                let fault = self.engine.fault().map(ToString::to_string);
                if let Some(fault) = &fault {
                    // Before its client learns of it: no request may find a healthy face after that.
                    self.shared.state.send_replace(crate::bridge::State::Failed(fault.clone()));
                }
                embed.end(Err(EmbedFailure::Failed(error.to_string())));
                return fault.map_or(Ok(()), Err);
            }
        }
        Ok(())
    }
}
