//! What would otherwise happen when it is first needed, and keep somebody waiting.

use super::Engine;
use crate::error::{Error, Result};
use crate::request::{EventKind, FinishReason, Request, SamplingParams};

impl Engine {
    /// Runs the largest step of prompts once, so that memory that grows has grown, and on a GPU captures the graphs of all
    /// decode steps but those that share prefixes. Calls `tick` with how many graphs are done and how many there are. Kernels
    /// are compiled too unless they were before: [`needed_kernels`](crate::needed_kernels) tells which, and they can be
    /// compiled in parallel. On the CPU there is little to gain.
    ///
    /// Afterwards the engine is as it was: nothing is in its prefix cache, and its figures have not changed.
    ///
    /// # Errors
    /// If there are requests already, or the model cannot be run.
    pub fn warm_up(&mut self, tick: &mut dyn FnMut(usize, usize)) -> Result<()> {
        if self.has_work() {
            return Err(Error::request("warm_up", "an engine without requests", self.requests.len()));
        }
        let stats = self.stats;
        self.run_prompts()?;
        if self.options.has_fixed_decode() {
            let mut decode = match self.decode.take() {
                Some(decode) => decode,
                None => self.new_decode()?,
            };
            let captured = decode.capture_forms(&mut *self.model, &mut self.kv, tick);
            self.decode = Some(decode);
            captured?;
        }
        self.clear_prefix_cache();
        self.stats = stats;
        Ok(())
    }

    /// Computes as many tokens of prompts as a step may have, and two of each answer.
    fn run_prompts(&mut self) -> Result<()> {
        let length = self.options.max_chunk.min(self.room().saturating_sub(2)).max(1);
        let count = self.options.max_batch_tokens.div_ceil(length).min(self.options.max_running);
        let vocab = self.vocab_size();
        for i in 0..count {
            // Prompts that begin differently, so that none is found in the cache.
            let prompt = vec![(i % vocab) as i32; length];
            let most = self.room().saturating_sub(length).min(2);
            let params =
                SamplingParams { max_tokens: Some(most), ignore_eos: true, ..SamplingParams::greedy() };
            self.add_request(Request { prompt, params, ..Request::default() })?;
        }
        while self.has_work() {
            for event in self.step()? {
                if let EventKind::Finished { reason: FinishReason::Failed(why), .. } = event.kind {
                    return Err(Error::Broken(format!("the model cannot generate a token: {why}")));
                }
            }
        }
        Ok(())
    }
}
