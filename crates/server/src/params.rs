//! The options of a request that say how tokens are chosen.

use crate::bridge::Facts;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::Form;
use crate::options::Limits;
use serde_json::{Value, json};
use warpsmith_engine::SamplingParams;

/// Bytes of a stop text.
const MAX_STOP: usize = 256;
/// Tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Texts of which one must be answered.
const MAX_CHOICES: usize = 1024;

/// Options that all routes have.
///
/// # Errors
/// Names the first field that is wrong.
pub fn sampling(fields: &Fields<'_>, limits: &Limits, facts: &Facts) -> Result<SamplingParams> {
    let real = |name: &str, range, otherwise: f32| -> Result<f32> {
        Ok(fields.number(name, range)?.map_or(otherwise, |number| number as f32))
    };
    let top_p = real("top_p", 0.0..=1.0, 1.0)?;
    let mut params = SamplingParams {
        temperature: real("temperature", 0.0..=2.0, 1.0)?,
        // Zero leaves the most likely token, as the smallest number above it does.
        top_p: top_p.max(f32::MIN_POSITIVE),
        min_p: real("min_p", 0.0..=1.0, 0.0)?,
        repetition_penalty: real("repetition_penalty", 0.01..=100.0, 1.0)?,
        presence_penalty: real("presence_penalty", -2.0..=2.0, 0.0)?,
        frequency_penalty: real("frequency_penalty", -2.0..=2.0, 0.0)?,
        n: fields.size("n", 1..=limits.max_n as i64)?.unwrap_or(1),
        // vLLM's -1 is all tokens, as 0 is here.
        top_k: fields.count("top_k", -1..=facts.vocab_size as i64)?.unwrap_or(0).max(0) as usize,
        seed: fields.count("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..SamplingParams::default()
    };
    params.stop = stops(fields, limits)?;
    if !params.stop.is_empty() && facts.tokenizer.is_none() {
        return Err(fields.error("stop", "needs a model with a tokenizer"));
    }
    let vocab = facts.vocab_size as i64;
    for (i, value) in fields.list("stop_token_ids", 64)?.unwrap_or_default().iter().enumerate() {
        params.stop_ids.push(token(value, vocab, || format!("{}[{i}]", fields.path("stop_token_ids")))?);
    }
    if let Some(biases) = fields.object("logit_bias")? {
        let count = biases.names().count();
        if count > MAX_BIASES {
            let told = format!("expected at most {MAX_BIASES} tokens, got {count}");
            return Err(fields.error("logit_bias", told));
        }
        for name in biases.names() {
            let id = name.parse::<i32>().ok().filter(|id| i64::from(*id) < vocab && *id >= 0);
            let Some(id) = id else {
                let told = format!("expected tokens from 0 to below {vocab}, got {}", json!(name));
                return Err(fields.error("logit_bias", told));
            };
            if let Some(bias) = biases.number(name, -100.0..=100.0)? {
                params.logit_bias.push((id, bias as f32));
            }
        }
    }
    for (name, allowed) in [("min_tokens", 0), ("prompt_logprobs", 0), ("best_of", params.n as i64)] {
        if let Some(asked) = fields.count(name, 0..=i64::from(u32::MAX))?
            && asked != allowed
        {
            let told = format!("only {allowed} is supported here, got {asked}");
            return Err(fields.error(name, told).code("unsupported_parameter"));
        }
    }
    fields.refuse_unsupported(&["use_beam_search", "include_stop_str_in_output", "length_penalty"])?;
    if fields.flag("skip_special_tokens")? == Some(false) {
        return Err(fields
            .error("skip_special_tokens", "only true is supported")
            .code("unsupported_parameter"));
    }
    Ok(params)
}

fn stops(fields: &Fields<'_>, limits: &Limits) -> Result<Vec<String>> {
    let one = |value: &Value, path: String| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(path, "expected a text, got an empty one"))
        }
        Value::String(text) if text.len() > MAX_STOP => {
            Err(ApiError::field(path, format!("expected at most {MAX_STOP} bytes, got {}", text.len())))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(ApiError::value(path, "a string or a list of strings", other)),
    };
    match fields.get("stop") {
        None => Ok(Vec::new()),
        Some(Value::Array(_)) => {
            let list = fields.list("stop", limits.max_stops)?.unwrap_or_default();
            let path = |i| format!("{}[{i}]", fields.path("stop"));
            list.iter().enumerate().map(|(i, value)| one(value, path(i))).collect()
        }
        Some(value) => Ok(vec![one(value, fields.path("stop"))?]),
    }
}

/// A token.
pub fn token(value: &Value, vocab: i64, path: impl Fn() -> String) -> Result<i32> {
    match value.as_i64().filter(|id| (0..vocab).contains(id)) {
        Some(id) => Ok(id as i32),
        None => Err(ApiError::value(path(), format!("a token from 0 to below {vocab}"), value)),
    }
}

/// The most tokens of an output, under any of these names.
///
/// # Errors
/// If a field is no count.
pub fn max_tokens(fields: &Fields<'_>, names: &[&'static str]) -> Result<Option<(usize, &'static str)>> {
    let mut found = None;
    for name in names {
        let asked = fields.size(name, 1..=i64::from(i32::MAX))?;
        found = found.or(asked.map(|asked| (asked, *name)));
    }
    Ok(found)
}

/// Checks that a prompt and its output fit, and sets how long the output may be.
///
/// # Errors
/// Names the prompt or the length.
pub fn fit(
    params: &mut SamplingParams,
    prompt: &[i32],
    field: &str,
    asked: Option<(usize, &'static str)>,
    facts: &Facts,
) -> Result<()> {
    let by = if facts.room == facts.context { "the context of the model" } else { "the memory for keys" };
    if prompt.is_empty() {
        return Err(ApiError::field(field, "is empty"));
    }
    if prompt.len() >= facts.room {
        let told = format!("has {} tokens; at most {} are possible by {by}", prompt.len(), facts.room - 1);
        return Err(ApiError::field(field, told).code("context_length_exceeded"));
    }
    let room = facts.room - prompt.len();
    if let Some((tokens, name)) = asked
        && tokens > room
    {
        let told = format!(
            "expected at most {room} after this prompt of {} tokens, by {by}, got {tokens}",
            prompt.len()
        );
        return Err(ApiError::field(name, told).code("context_length_exceeded"));
    }
    params.max_tokens = asked.map(|(tokens, _)| tokens);
    Ok(())
}

/// What the answer must look like, by any of the fields that say so, and the field.
///
/// # Errors
/// If a field is wrong, or there are several.
pub fn form(fields: &Fields<'_>, limits: &Limits) -> Result<Option<(Form, String)>> {
    let mut found: Vec<(Form, String)> = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        let kinds = ["text", "json_object", "json_schema", "regex", "grammar"];
        format.required("type")?;
        match format.choice("type", &kinds)? {
            Some("json_object") => found.push((Form::object(), format.path("type"))),
            Some("json_schema") => {
                let Some(schema) = format.object("json_schema")? else {
                    return Err(format.error("json_schema", "is missing"));
                };
                schema.text("name", 256)?;
                schema.flag("strict")?;
                let path = schema.path("schema");
                found.push((Form::Schema(schema.required("schema")?.clone()), path));
            }
            Some("regex") => found.extend(text(&format, "regex", limits, Form::Regex)?),
            Some("grammar") => found.extend(text(&format, "grammar", limits, Form::Lark)?),
            _ => {}
        }
    }
    extra_forms(fields, limits, "guided_", &mut found)?;
    if let Some(inner) = fields.object("structured_outputs")? {
        extra_forms(&inner, limits, "", &mut found)?;
    }
    found.extend(text(fields, "regex", limits, Form::Regex)?);
    if fields.get("ebnf").is_some() {
        return Err(fields.error("ebnf", "is not supported; use `response_format` with a grammar in Lark"));
    }
    if found.len() > 1 {
        return Err(ApiError::field(&found[1].1, format!("cannot be combined with `{}`", found[0].1)));
    }
    let found = found.pop();
    if let Some((form, path)) = &found {
        form.check(path, limits)?;
    }
    Ok(found)
}

/// The fields of vLLM, with a prefix.
fn extra_forms(
    fields: &Fields<'_>,
    limits: &Limits,
    prefix: &str,
    found: &mut Vec<(Form, String)>,
) -> Result<()> {
    let name = |name: &str| format!("{prefix}{name}");
    let json = name("json");
    match fields.get(&json) {
        None => {}
        Some(Value::String(text)) => {
            let parsed = serde_json::from_str(text)
                .map_err(|error| fields.error(&json, format_args!("is not JSON: {error}")))?;
            found.push((Form::Schema(parsed), fields.path(&json)));
        }
        Some(schema) => found.push((Form::Schema(schema.clone()), fields.path(&json))),
    }
    found.extend(text(fields, &name("regex"), limits, Form::Regex)?);
    found.extend(text(fields, &name("grammar"), limits, Form::Lark)?);
    let choice = name("choice");
    if let Some(choices) = fields.list(&choice, MAX_CHOICES)? {
        if choices.is_empty() {
            return Err(fields.error(&choice, "expected at least one choice"));
        }
        let quote = |(i, value): (usize, &Value)| match value {
            Value::String(text) => Ok(json!(text).to_string()),
            other => Err(ApiError::value(format!("{}[{i}]", fields.path(&choice)), "a string", other)),
        };
        let quoted = choices.iter().enumerate().map(quote).collect::<Result<Vec<_>>>()?;
        found.push((Form::Lark(format!("start: {}", quoted.join(" | "))), fields.path(&choice)));
    }
    if fields.flag(&name("json_object"))? == Some(true) {
        found.push((Form::object(), fields.path(&name("json_object"))));
    }
    Ok(())
}

fn text(
    fields: &Fields<'_>,
    name: &str,
    limits: &Limits,
    form: fn(String) -> Form,
) -> Result<Option<(Form, String)>> {
    let text = fields.text(name, limits.max_grammar)?;
    Ok(text.map(|text| (form(text.to_owned()), fields.path(name))))
}
