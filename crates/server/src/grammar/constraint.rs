//! A grammar while an output is generated.

use crate::output::{CLOSE, OPEN, Start};
use llguidance::Matcher;
use std::sync::{Arc, Mutex, PoisonError};
use warpsmith_engine::text::Tokenizer;
use warpsmith_engine::{Constraint, Grammar};

/// Line breaks that a model may write between its reasoning and its answer.
const MAX_BREAKS: usize = 4;

/// A compiled grammar at its beginning.
pub(super) struct Compiled(Mutex<Matcher>);

impl Compiled {
    pub fn new(matcher: Matcher) -> Compiled {
        Compiled(Mutex::new(matcher))
    }

    /// A copy that shares nothing with others.
    fn begin(&self) -> Matcher {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

/// A compiled grammar for the outputs of a request.
pub(super) struct Prepared {
    compiled: Arc<Compiled>,
    tokenizer: Arc<Tokenizer>,
    end_ids: Arc<Vec<i32>>,
    start: Start,
    /// The token that begins reasoning.
    open: Option<u32>,
    /// Tokens that are nothing but line breaks.
    breaks: Arc<Vec<u32>>,
}

impl Prepared {
    pub fn new(
        compiled: Arc<Compiled>,
        tokenizer: Arc<Tokenizer>,
        end_ids: Vec<i32>,
        start: Start,
    ) -> Prepared {
        let is_break = |id: &u32| {
            let bytes = tokenizer.bytes(*id);
            !bytes.is_empty() && bytes.len() <= MAX_BREAKS && bytes.iter().all(|&byte| byte == b'\n')
        };
        let breaks = match start {
            Start::Closed => Vec::new(),
            _ => (0..tokenizer.len() as u32).filter(is_break).collect(),
        };
        let (breaks, open) = (Arc::new(breaks), tokenizer.id_of(OPEN));
        Prepared { compiled, tokenizer, end_ids: Arc::new(end_ids), start, open, breaks }
    }
}

impl Grammar for Prepared {
    fn begin(&self) -> Box<dyn Constraint> {
        let stage = match (self.start, self.open) {
            (Start::Inside, _) => Stage::Reasoning(Vec::new()),
            (Start::Unknown, Some(_)) => Stage::First,
            _ => Stage::Inside,
        };
        Box::new(Running {
            matcher: self.compiled.begin(),
            tokenizer: self.tokenizer.clone(),
            end_ids: self.end_ids.clone(),
            open: self.open,
            breaks: self.breaks.clone(),
            stage,
        })
    }
}

enum Stage {
    /// Reasoning may begin.
    First,
    /// Before its end: the last bytes so far.
    Reasoning(Vec<u8>),
    /// Behind it, after this many line breaks.
    Between(usize),
    Inside,
}

struct Running {
    matcher: Matcher,
    tokenizer: Arc<Tokenizer>,
    end_ids: Arc<Vec<i32>>,
    open: Option<u32>,
    breaks: Arc<Vec<u32>>,
    stage: Stage,
}

impl Constraint for Running {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<bool, String> {
        if let Stage::Reasoning(_) = self.stage {
            return Ok(false);
        }
        let found = self.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        for (word, found) in mask.iter_mut().zip(found.as_slice()) {
            *word = *found;
        }
        let mut set = |id: usize| {
            if let Some(word) = mask.get_mut(id / 32) {
                *word |= 1 << (id % 32);
            }
        };
        // The grammar knows one of the tokens that end an answer; where it may end, it may end with any of them.
        if self.end_ids.iter().any(|&id| found.is_allowed(id as u32)) {
            self.end_ids.iter().for_each(|&id| set(id as usize));
        }
        if matches!(self.stage, Stage::Between(breaks) if breaks < MAX_BREAKS) {
            self.breaks.iter().for_each(|&id| set(id as usize));
        }
        if let (Stage::First, Some(open)) = (&self.stage, self.open) {
            set(open as usize);
        }
        Ok(true)
    }

    fn accept(&mut self, token: i32) -> Result<bool, String> {
        let id = token as u32;
        match &mut self.stage {
            Stage::First if self.open == Some(id) => {
                self.stage = Stage::Reasoning(Vec::new());
                return Ok(false);
            }
            Stage::First => self.stage = Stage::Inside,
            Stage::Reasoning(last) => {
                last.extend_from_slice(self.tokenizer.bytes(id));
                if last.windows(CLOSE.len()).any(|window| window == CLOSE.as_bytes()) {
                    self.stage = Stage::Between(0);
                } else {
                    last.drain(..last.len().saturating_sub(CLOSE.len()));
                }
                return Ok(false);
            }
            Stage::Between(breaks) => {
                if *breaks < MAX_BREAKS && self.breaks.contains(&id) {
                    *breaks += self.tokenizer.bytes(id).len();
                    return Ok(false);
                }
                self.stage = Stage::Inside;
            }
            Stage::Inside => {}
        }
        if self.end_ids.contains(&token) {
            return Ok(true);
        }
        self.matcher.consume_token(id).map_err(|error| error.to_string())?;
        Ok(self.matcher.is_stopped())
    }
}
