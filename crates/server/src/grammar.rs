//! Structured output: JSON schemas, regular expressions and grammars, by llguidance.
//!
//! Grammars come from requests, so their size, their nesting and the work that they cause are limited. They are compiled on a
//! thread with a stack of its own, and kept for those who use the same again.

mod constraint;

use crate::error::{ApiError, Result};
use crate::fields;
use crate::options::Limits;
use crate::output::Start;
use constraint::Compiled;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use warpsmith_engine::SharedGrammar;
use warpsmith_engine::text::Tokenizer;

/// Compiled grammars that are kept.
const KEPT: usize = 64;
/// Stack of the thread that compiles: enough for the nesting that is allowed.
const STACK: usize = 64 << 20;
/// States of a lexer: one takes up to 2 KiB.
const MAX_STATES: usize = 50_000;
/// What may be between two parts of a JSON value: a space, or a line break and an indentation.
const SPACE: &str = "( |\\n[ ]{0,16})?";
/// Brackets inside one another in a regular expression or a grammar, for each level that a schema may have.
const BRACKETS_PER_LEVEL: usize = 4;
/// How many times as long as one schema those of all tools may be, if one of them must be called.
const CALLS_PER_SCHEMA: usize = 4;

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// A value of this JSON schema.
    Schema(Value),
    /// A text that matches this regular expression as a whole.
    Regex(String),
    /// A text of this grammar, in llguidance's form of Lark.
    Lark(String),
}

impl Form {
    /// Any JSON object.
    pub fn object() -> Form {
        Form::Schema(json!({ "type": "object" }))
    }

    /// Whether it is within limits. `path` is where it is in the request.
    ///
    /// # Errors
    /// If not.
    pub fn check(&self, path: &str, limits: &Limits) -> Result<()> {
        let (bytes, depth, most_depth) = match self {
            Form::Schema(schema) => {
                if !(schema.is_object() || schema.is_boolean()) {
                    return Err(ApiError::value(path, "a JSON schema: an object, true or false", schema));
                }
                (schema.to_string().len(), fields::depth(schema), limits.max_grammar_depth)
            }
            Form::Regex(text) | Form::Lark(text) => {
                (text.len(), nesting(text), limits.max_grammar_depth * BRACKETS_PER_LEVEL)
            }
        };
        if bytes > limits.max_grammar {
            let told = format!("expected at most {} bytes, got {bytes}", limits.max_grammar);
            return Err(ApiError::field(path, told));
        }
        if depth > most_depth {
            return Err(ApiError::field(
                path,
                format!("nested {depth} deep, at most {most_depth} is allowed"),
            ));
        }
        Ok(())
    }

    /// Whether the grammar of calls that an answer must have is within limits: the schemas of its tools were checked one by one.
    ///
    /// # Errors
    /// If they are too long together.
    pub fn check_calls(&self, path: &str, limits: &Limits) -> Result<()> {
        let (bytes, most) = (self.text().len(), CALLS_PER_SCHEMA * limits.max_grammar);
        match bytes <= most {
            true => Ok(()),
            false => Err(ApiError::field(
                path,
                format!(
                    "the schemas of tools of which one must be called have {bytes} bytes together; at most {most} are possible"
                ),
            )),
        }
    }

    /// All of it.
    fn text(&self) -> Cow<'_, str> {
        match self {
            Form::Schema(schema) => schema.to_string().into(),
            Form::Regex(text) | Form::Lark(text) => text.into(),
        }
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(laid_out(schema)),
            Form::Regex(text) => TopLevelGrammar::from_regex(text),
            Form::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        }
    }

    fn key(&self) -> [u8; 32] {
        let kind = match self {
            Form::Schema(_) => b's',
            Form::Regex(_) => b'r',
            Form::Lark(_) => b'l',
        };
        *blake3::Hasher::new().update(&[kind]).update(self.text().as_bytes()).finalize().as_bytes()
    }
}

/// A schema whose values have little space between their parts. Models can get lost in spaces, which JSON allows without end.
pub fn laid_out(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Value::Object(fields) = &mut schema {
        fields.insert("x-guidance".into(), json!({ "whitespace_pattern": SPACE }));
    }
    schema
}

/// The most brackets that are open at the same time. Escaped ones do not count.
fn nesting(text: &str) -> usize {
    let (mut depth, mut most, mut escaped) = (0usize, 0, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}

/// Makes grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
    end_ids: Vec<i32>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    compiled: HashMap<[u8; 32], (Arc<Compiled>, u64)>,
    uses: u64,
}

impl Grammars {
    /// For a tokenizer of which `vocab` tokens exist.
    ///
    /// # Errors
    /// If the tokens cannot be used.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize, end_ids: &[i32]) -> Result<Grammars, String> {
        let Some(&end) = end_ids.first() else {
            return Err("the model has no token that ends an answer".into());
        };
        let mut words = Vec::with_capacity(vocab);
        for id in 0..vocab as u32 {
            let bytes = tokenizer.bytes(id);
            // Tokens that are no text begin with a byte that no text has.
            words.push(match tokenizer.is_control(id) || end_ids.contains(&(id as i32)) {
                true => [&[0xFF], bytes].concat(),
                false => bytes.to_vec(),
            });
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, end as u32), &words);
        let environment: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
        factory.quiet();
        // Errors reach the client: they must not quote what others have sent.
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_lexer_states = MAX_STATES;
        Ok(Grammars { factory, tokenizer, end_ids: end_ids.to_vec(), kept: Mutex::default() })
    }

    /// A grammar for a request, from a form that was checked. `start` says where the prompt has left the reasoning, if the
    /// model reasons: the grammar begins behind it.
    ///
    /// # Errors
    /// If it is none.
    pub fn compile(&self, form: &Form, start: Option<Start>) -> Result<SharedGrammar, String> {
        let compiled = self.compiled(form)?;
        let prepared = constraint::Prepared::new(
            compiled,
            self.tokenizer.clone(),
            self.end_ids.clone(),
            start.unwrap_or(Start::Closed),
        );
        Ok(SharedGrammar::new(Arc::new(prepared)))
    }

    fn compiled(&self, form: &Form) -> Result<Arc<Compiled>, String> {
        let key = form.key();
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut kept = lock();
            kept.uses += 1;
            let now = kept.uses;
            if let Some((compiled, used)) = kept.compiled.get_mut(&key) {
                *used = now;
                return Ok(compiled.clone());
            }
        }
        let make = || Matcher::new(self.factory.create_parser(form.grammar()));
        let made = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let work = || catch_unwind(AssertUnwindSafe(make));
            let thread = thread.spawn_scoped(scope, work).map_err(|error| error.to_string())?;
            thread.join().ok().and_then(Result::ok).ok_or_else(|| "it cannot be compiled".to_owned())
        });
        let matcher = made?;
        if let Some(error) = matcher.get_error() {
            return Err(error);
        }
        let compiled = Arc::new(Compiled::new(matcher));
        let mut kept = lock();
        if kept.compiled.len() >= KEPT {
            let oldest = kept.compiled.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            oldest.and_then(|key| kept.compiled.remove(&key));
        }
        let now = kept.uses;
        kept.compiled.insert(key, (compiled.clone(), now));
        Ok(compiled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpsmith_engine::{Constraint, Grammar};

    fn grammars() -> Grammars {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures/tokenizer");
        let tokenizer = Arc::new(Tokenizer::from_folder(folder).unwrap());
        let vocab = tokenizer.len();
        Grammars::new(tokenizer, vocab, &[0, 2]).unwrap()
    }

    fn begin(grammars: &Grammars, form: &Form, start: Start) -> Box<dyn Constraint> {
        let (compiled, tokenizer) = (grammars.compiled(form).unwrap(), grammars.tokenizer.clone());
        constraint::Prepared::new(compiled, tokenizer, grammars.end_ids.clone(), start).begin()
    }

    /// The texts of the tokens that may come next; `None` if all may.
    fn next(grammars: &Grammars, state: &mut Box<dyn Constraint>) -> Option<Vec<String>> {
        let mut mask = vec![0; grammars.tokenizer.len().div_ceil(32)];
        let is_limited = state.allowed(&mut mask).unwrap();
        let allowed = (0..grammars.tokenizer.len()).filter(|&id| mask[id / 32] >> (id % 32) & 1 == 1);
        let text = |id: usize| String::from_utf8_lossy(grammars.tokenizer.bytes(id as u32)).into_owned();
        is_limited.then(|| allowed.map(text).collect())
    }

    /// Takes a text token by token. Whether the output was complete with the last.
    fn take(grammars: &Grammars, state: &mut Box<dyn Constraint>, text: &str) -> bool {
        let ids = grammars.tokenizer.encode(text).unwrap();
        ids.into_iter().map(|id| state.accept(id as i32).unwrap()).last().unwrap()
    }

    #[test]
    fn a_grammar_allows_what_fits_and_ends_with_it() {
        let grammars = grammars();
        let form = Form::Regex("[0-9]{2}".into());
        let mut state = begin(&grammars, &form, Start::Closed);
        let digits = next(&grammars, &mut state).unwrap();
        assert!(
            !digits.is_empty() && digits.iter().all(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        );
        assert!(!take(&grammars, &mut state, "4"));
        assert!(take(&grammars, &mut state, "2"), "nothing can follow");
        // Where it may end, it may end with any of the model's ends.
        let mut state = begin(&grammars, &Form::Regex("a+".into()), Start::Closed);
        take(&grammars, &mut state, "a");
        let allowed = next(&grammars, &mut state).unwrap();
        assert!(["<|endoftext|>", "<|im_end|>"].iter().all(|end| allowed.iter().any(|text| text == end)));
        assert!(state.accept(2).unwrap());
        assert!(begin(&grammars, &form, Start::Closed).accept(40).is_err(), "a token that was not allowed");
    }

    #[test]
    fn a_grammar_begins_behind_the_reasoning() {
        let grammars = grammars();
        let form = Form::Regex("[0-9]".into());
        let is_digit = |text: &String| text.bytes().all(|byte| byte.is_ascii_digit());
        let mut state = begin(&grammars, &form, Start::Inside);
        assert_eq!(next(&grammars, &mut state), None);
        take(&grammars, &mut state, "so 7 </th");
        assert_eq!(next(&grammars, &mut state), None);
        take(&grammars, &mut state, "ink>");
        let allowed = next(&grammars, &mut state).unwrap();
        let (breaks, rest): (Vec<String>, Vec<String>) =
            allowed.into_iter().partition(|text| text.trim().is_empty());
        assert!(!breaks.is_empty() && !rest.is_empty() && rest.iter().all(is_digit), "{rest:?}");
        take(&grammars, &mut state, "\n\n");
        assert!(take(&grammars, &mut state, "7"));
        // It may begin with reasoning, or without.
        let mut state = begin(&grammars, &form, Start::Unknown);
        let allowed = next(&grammars, &mut state).unwrap();
        assert!(allowed.contains(&"<think>".to_owned()));
        let open = grammars.tokenizer.id_of("<think>").unwrap();
        assert!(!state.accept(open as i32).unwrap());
        assert_eq!(next(&grammars, &mut state), None);
        let mut state = begin(&grammars, &form, Start::Unknown);
        assert!(take(&grammars, &mut state, "3"));
    }

    #[test]
    fn the_same_form_is_compiled_once_and_few_are_kept() {
        let grammars = grammars();
        let form = Form::Regex("x".into());
        let first = grammars.compiled(&form).unwrap();
        assert!(Arc::ptr_eq(&first, &grammars.compiled(&form).unwrap()));
        for i in 0..KEPT {
            grammars.compiled(&Form::Regex(format!("y{i}"))).unwrap();
        }
        assert!(!Arc::ptr_eq(&first, &grammars.compiled(&form).unwrap()));
        assert_eq!(grammars.kept.lock().unwrap().compiled.len(), KEPT);
        for wrong in
            [Form::Lark("start: x".into()), Form::Regex("(".into()), Form::Schema(json!({ "type": "x" }))]
        {
            let error = grammars.compiled(&wrong).err().unwrap();
            assert!(!error.is_empty() && error.len() < 1000, "{error}");
        }
    }
}
