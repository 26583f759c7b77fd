//! Formulas: `rms_norm(x + r) * w`, or several with names: `t = exp(x); t / sum(t)`.
//!
//! Signs bind as in Python: `**` most, then unary `-` and `~`, `* /`, `+ -`, `&`, `^`, `|`, and comparisons least.

use super::lexer::{Kind, Token, error_at, tokens};
use crate::error::{Error, Result};
use crate::functions::{self, Value, suggestion};
use crate::graph::{Builder, Graph, NodeId};
use crate::op::{Binary, Unary};
use crate::shape::Dim;
use crate::types::Scalar;
use std::collections::HashMap;
use warpsmith::DType;

/// Parentheses, calls and signs inside each other, at most: each takes some of the stack.
const MAX_DEPTH: usize = 200;

/// The tensors of a formula: name, type and shape.
pub type Inputs<'a> = &'a [(&'a str, DType, &'a [Dim])];

/// The names of tensors in a formula that it does not define itself, in the order in which they appear.
///
/// # Errors
/// If the formula has words that mean nothing.
pub fn free_names(text: &str) -> Result<Vec<String>> {
    let tokens = tokens(text)?;
    let (mut free, mut defined) = (vec![], vec![]);
    let mut depth = 0usize;
    for (i, token) in tokens.iter().enumerate() {
        match &token.kind {
            Kind::Sign("[") => depth += 1,
            Kind::Sign("]") => depth = depth.saturating_sub(1),
            _ => {}
        }
        let Kind::Name(name) = &token.kind else { continue };
        let next = tokens.get(i + 1).map(|token| &token.kind);
        let first = i == 0 || matches!(tokens[i - 1].kind, Kind::Sign(";"));
        if next == Some(&Kind::Sign("=")) {
            if first {
                defined.push(name.clone());
            }
            continue;
        }
        let is_word = constant(name).is_some() || name.parse::<DType>().is_ok() || depth > 0;
        if next != Some(&Kind::Sign("(")) && !is_word && !defined.contains(name) && !free.contains(name) {
            free.push(name.clone());
        }
    }
    Ok(free)
}

/// Reads a formula. The last statement is the output; statements before it are names for what follows. Several outputs
/// are separated by commas: `a, b = x + y, x * y` is `a = x + y; b = x * y; a, b`.
///
/// # Errors
/// With the place in the text, if it is not a formula over these inputs.
pub fn parse(text: &str, inputs: Inputs<'_>) -> Result<Graph> {
    let mut builder = Builder::new();
    let mut names = HashMap::new();
    for (name, dtype, shape) in inputs {
        let id = builder.input(name, *dtype, shape)?;
        names.insert((*name).to_string(), id);
    }
    let mut parser = Parser { text, tokens: tokens(text)?, at: 0, depth: 0, builder, names };
    let outputs = parser.statements()?;
    let named: Vec<(&str, NodeId)> = outputs.iter().map(|(name, id)| (name.as_str(), *id)).collect();
    parser.builder.finish(&named)
}

fn constant(name: &str) -> Option<Scalar> {
    Some(match name {
        "true" | "True" => Scalar::Bool(true),
        "false" | "False" => Scalar::Bool(false),
        "inf" => Scalar::Float(f64::INFINITY),
        "nan" => Scalar::Float(f64::NAN),
        "pi" => Scalar::Float(std::f64::consts::PI),
        _ => return None,
    })
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    builder: Builder,
    names: HashMap<String, NodeId>,
}

/// Binary signs, those that bind least first.
const LEVELS: [&[&str]; 6] =
    [&["<", "<=", ">", ">=", "==", "!="], &["|"], &["^"], &["&"], &["+", "-"], &["*", "/"]];

impl Parser<'_> {
    fn peek(&self) -> &Kind {
        &self.tokens[self.at].kind
    }

    fn take(&mut self, sign: &str) -> bool {
        let found = matches!(self.peek(), Kind::Sign(found) if *found == sign);
        self.at += found as usize;
        found
    }

    fn expect(&mut self, sign: &str) -> Result<()> {
        if self.take(sign) {
            return Ok(());
        }
        Err(self.error(format!("expected `{sign}`, got {}", self.peek())))
    }

    fn error(&self, what: impl Into<String>) -> Error {
        error_at(self.text, self.tokens[self.at].at, what)
    }

    /// Adds the place to an error about a node.
    fn located<T>(&self, at: usize, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Node { node, what } => error_at(self.text, at, format!("`{node}`: {what}")),
            other => other,
        })
    }

    fn statements(&mut self) -> Result<Vec<(String, NodeId)>> {
        loop {
            let named = match (self.peek(), self.tokens.get(self.at + 1).map(|token| &token.kind)) {
                (Kind::Name(name), Some(Kind::Sign("="))) => Some(name.clone()),
                _ => None,
            };
            if named.is_some() {
                self.at += 2;
            }
            let mut results = vec![];
            loop {
                let before = self.at;
                let value = self.level(0)?;
                // An output that is a single name goes by it.
                let name = match (&self.tokens[before].kind, self.at - before) {
                    (Kind::Name(name), 1) => name.clone(),
                    _ => format!("out{}", results.len()),
                };
                results.push((name, value));
                if named.is_some() || !self.take(",") {
                    break;
                }
            }
            let ended = !self.take(";") || *self.peek() == Kind::End;
            if let Some(name) = named {
                let value = results[0].1;
                results[0].0.clone_from(&name);
                self.names.insert(name, value);
            } else if !ended {
                return Err(self.error("only the last statement may lack a name"));
            }
            if ended {
                return match self.peek() {
                    Kind::End => Ok(results),
                    other => Err(self.error(format!("expected a sign or the end, got {other}"))),
                };
            }
        }
    }

    fn level(&mut self, level: usize) -> Result<NodeId> {
        let Some(signs) = LEVELS.get(level) else { return self.prefix() };
        let mut left = self.level(level + 1)?;
        loop {
            let at = self.tokens[self.at].at;
            let Some(sign) = signs.iter().find(|sign| self.take(sign)) else { return Ok(left) };
            let right = self.level(level + 1)?;
            let f = Binary::ALL.iter().find(|f| f.symbol() == *sign).expect("every sign is a function's");
            let result = self.builder.binary(*f, left, right);
            left = self.located(at, result)?;
            let compared = signs.contains(&"<");
            if compared && matches!(self.peek(), Kind::Sign(next) if signs.contains(next)) {
                return Err(self.error("comparisons cannot be chained; use parentheses and `&`"));
            }
        }
    }

    fn prefix(&mut self) -> Result<NodeId> {
        let at = self.tokens[self.at].at;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error(format!("more than {MAX_DEPTH} operations inside each other")));
        }
        let result = if self.take("-") {
            let x = self.prefix()?;
            let negated = match self.builder.node(x).op {
                crate::op::Op::Scalar(Scalar::Int(i)) => self.builder.scalar(Scalar::Int(i.wrapping_neg())),
                crate::op::Op::Scalar(Scalar::Float(f)) => self.builder.scalar(Scalar::Float(-f)),
                _ => self.builder.unary(Unary::Neg, x),
            };
            self.located(at, negated)
        } else if self.take("+") {
            self.prefix()
        } else if self.take("~") {
            let x = self.prefix()?;
            let result = self.builder.unary(Unary::Not, x);
            self.located(at, result)
        } else {
            self.power()
        };
        self.depth -= 1;
        result
    }

    fn power(&mut self) -> Result<NodeId> {
        let base = self.atom()?;
        let at = self.tokens[self.at].at;
        if !self.take("**") {
            return Ok(base);
        }
        // To the right, as in Python: `2 ** -x ** 2`.
        let exponent = self.prefix()?;
        let result = self.builder.binary(Binary::Pow, base, exponent);
        self.located(at, result)
    }

    fn atom(&mut self) -> Result<NodeId> {
        let Token { kind, at } = self.tokens[self.at].clone();
        match kind {
            Kind::Int(i) => {
                self.at += 1;
                self.builder.scalar(Scalar::Int(i))
            }
            Kind::Float(x) => {
                self.at += 1;
                self.builder.scalar(Scalar::Float(x))
            }
            Kind::Sign("(") => {
                self.at += 1;
                let inner = self.level(0)?;
                self.expect(")")?;
                Ok(inner)
            }
            Kind::Name(name) => {
                self.at += 1;
                if self.take("(") {
                    return self.call(&name, at);
                }
                if let Some(&id) = self.names.get(&name) {
                    return Ok(id);
                }
                if let Some(value) = constant(&name) {
                    return self.builder.scalar(value);
                }
                let known = self.names.keys().map(String::as_str);
                let hint = match suggestion(&name, known) {
                    Some(other) => format!("; did you mean `{other}`?"),
                    None if functions::names().contains(&&*name) => {
                        "; it is a function: `(` is missing".into()
                    }
                    None => String::new(),
                };
                Err(error_at(self.text, at, format!("`{name}` is not defined{hint}")))
            }
            other => Err(self.error(format!("expected a value, got {other}"))),
        }
    }

    fn call(&mut self, name: &str, at: usize) -> Result<NodeId> {
        let (mut values, mut named) = (vec![], vec![]);
        while !self.take(")") {
            let keyword = match (self.peek(), self.tokens.get(self.at + 1).map(|token| &token.kind)) {
                (Kind::Name(word), Some(Kind::Sign("="))) => Some(word.clone()),
                _ => None,
            };
            match keyword {
                Some(word) => {
                    self.at += 2;
                    named.push((word, self.value()?));
                }
                None if !named.is_empty() => {
                    return Err(self.error("arguments without a name come before those with one"));
                }
                None => values.push(self.value()?),
            }
            if !self.take(",") {
                self.expect(")")?;
                break;
            }
        }
        let result = functions::call(&mut self.builder, name, &values, &named);
        self.located(at, result)
    }

    /// An argument of a call.
    fn value(&mut self) -> Result<Value> {
        if let Kind::Name(name) = self.peek()
            && !self.names.contains_key(name)
            && let Ok(dtype) = name.parse()
        {
            self.at += 1;
            return Ok(Value::Type(dtype));
        }
        if !self.take("[") {
            return Ok(Value::Node(self.level(0)?));
        }
        let mut shape = vec![];
        while !self.take("]") {
            let dim = match self.peek() {
                Kind::Int(size) => usize::try_from(*size).map(Dim::Fixed).ok(),
                Kind::Name(name) => Some(Dim::named(name)),
                _ => None,
            };
            shape.push(dim.ok_or_else(|| self.error(format!("expected a size, got {}", self.peek())))?);
            self.at += 1;
            if !self.take(",") {
                self.expect("]")?;
                break;
            }
        }
        Ok(Value::Shape(shape))
    }
}
