//! `bench --stdin`: cases that another program asks for, one JSON object per line.

use crate::commands::explain::imagine;
use crate::inputs::{find_args, find_op, parse_attrs, parse_sizes, plan_case};
use crate::kernels::{Variant, device_functions};
use crate::select::parse_arrangement;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use warpsmith::jit;
use warpsmith::lab::bench::{Bench, Ceilings, Measurement, Settings};
use warpsmith::lab::{AnyProvable, Arrangement, Case};
use warpsmith::op::Select;
use warpsmith::op::survey::Needed;
use warpsmith::{DType, Device, Error, Result};

/// A line of standard input.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Request {
    /// Time a case.
    Time(Asked),
    /// Time the last one once more.
    Again,
    /// Compile what a case needs, so that timing it does not wait. Takes no memory and launches nothing.
    Compile(Asked),
    /// Compile a device function, by its number, into the cache on disk.
    Build { function: usize, defines: Vec<(String, String)>, arch: String },
}

/// A case, in the words of the command line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    op: String,
    dtype: String,
    #[serde(default)]
    sizes: Vec<String>,
    #[serde(default)]
    options: Vec<String>,
    #[serde(default)]
    with: Vec<String>,
    #[serde(default)]
    layout: Option<String>,
    #[serde(default)]
    kv_lens: Vec<usize>,
}

/// The answer to a request.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Timed {
        #[serde(flatten)]
        measurement: Box<Measurement>,
        /// Copies of the tensors that calls rotate over, and bytes of one.
        sets: usize,
        tensor_bytes: usize,
    },
    Compiled {
        compiled: String,
    },
    Refused {
        error: String,
    },
}

/// Answers each line of `input` with one line of `output`, until either ends.
pub fn answer(device: Device, input: impl BufRead, mut output: impl Write) {
    let settings = Settings::brief(device);
    let mut ceilings = None;
    let mut last = None;
    for line in input.split(b'\n').map_while(std::result::Result::ok) {
        let answer = respond(&line, device, settings, &mut ceilings, &mut last);
        let answer = answer.unwrap_or_else(|error| Answer::Refused { error: error.to_string() });
        let text = serde_json::to_string(&answer).expect("answers are plain data");
        if writeln!(output, "{text}").and_then(|()| output.flush()).is_err() {
            break;
        }
    }
}

fn respond(
    line: &[u8],
    device: Device,
    settings: Settings,
    ceilings: &mut Option<Ceilings>,
    last: &mut Option<Bench>,
) -> Result<Answer> {
    let request: Request = serde_json::from_slice(line).map_err(|error| {
        Error::parse("request", "an object with `do`: time, again or compile", error.to_string())
    })?;
    match request {
        Request::Compile(asked) => {
            let (op, case) = asked.case()?;
            let call = imagine(op.spec(), &plan_case(op, &case)?, case.arrangement, device)?;
            let plan = op.prepare(&call, &case.attrs, &Select::default())?;
            return Ok(Answer::Compiled { compiled: plan.kernel().unwrap_or("nothing").into() });
        }
        Request::Build { function, defines, arch } => {
            let known = device_functions();
            let Some(kernel) = known.get(function).copied() else {
                let expected = format!("the number of a device function, below {}", known.len());
                return Err(Error::parse("function", expected, function.to_string()));
            };
            // Names live as long as the program. This one ends with its input.
            let defines = defines.into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
            let variant = Variant::from(Needed { kernel, defines });
            jit::get(&variant.request(arch.parse()?, jit::profile()))?;
            return Ok(Answer::Compiled { compiled: kernel.function.into() });
        }
        Request::Time(asked) => {
            let (op, case) = asked.case()?;
            plan_case(op, &case)?;
            // The memory of the last case may be needed.
            *last = None;
            let known = match ceilings {
                Some(known) => *known,
                None => *ceilings.insert(Ceilings::measure(device, &settings)?),
            };
            *last = Some(Bench::new(op, &case, device, known, settings)?);
        }
        Request::Again => {}
    }
    let Some(bench) = last else {
        return Err(Error::parse("request", "a case to time before `again`", "again"));
    };
    let measurement = Box::new(bench.measure(None)?);
    Ok(Answer::Timed { measurement, sets: bench.sets(), tensor_bytes: bench.tensor_bytes() })
}

impl Asked {
    fn case(&self) -> Result<(&'static dyn AnyProvable, Case)> {
        let op = find_op(&self.op)?;
        let spec = op.spec();
        let dtype: DType = self.dtype.parse()?;
        let case = Case::new(spec, dtype).sizes(&parse_sizes(spec, &self.sizes)?).kv_lens(&self.kv_lens);
        let longest = spec.sizes.iter().position(|size| size.name == "kv_len").map(|at| case.sizes[at]);
        let has_lengths = spec.args.iter().any(|arg| arg.name == "kv_lens");
        if let Some(&keys) = self.kv_lens.iter().find(|&&keys| !has_lengths || longest < Some(keys)) {
            let expected = match longest.filter(|_| has_lengths) {
                Some(longest) => format!("numbers of keys up to kv_len, {longest}"),
                None => "nothing: the op has no lengths of requests".into(),
            };
            return Err(Error::parse(format!("{}: kv_lens", spec.name), expected, keys.to_string()));
        }
        let arrangement = self.layout.as_deref().map_or(Ok(Arrangement::Contiguous), parse_arrangement)?;
        let case = Case { attrs: parse_attrs(spec, &self.options)?, ..case.arranged(arrangement) };
        let given = find_args(spec, &self.with, |arg| arg.optional, "optional argument")?;
        Ok((op, given.iter().fold(case, |case, &index| case.give(index))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn answers(lines: &[&str]) -> Vec<Value> {
        answers_to(lines.join("\n").as_bytes())
    }

    fn answers_to(input: &[u8]) -> Vec<Value> {
        let mut output = Vec::new();
        answer(Device::Cpu, input, &mut output);
        let text = String::from_utf8(output).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn every_line_has_an_answer_and_a_refusal_does_not_end_it() {
        let told = answers(&[
            r#"{"do": "again"}"#,
            r#"{"do": "compile", "op": "rms_norm", "dtype": "f32", "sizes": ["num_tokens=3", "hidden=65"]}"#,
            r#"{"do": "time", "op": "rms_norm", "dtype": "f32", "sizes": ["num_tokens=3", "hidden=65"],
                "with": ["weight"], "options": ["eps=0.5"], "layout": "misaligned"}"#
                .replace('\n', " ")
                .as_str(),
            r#"{"do": "again"}"#,
            r#"{"do": "time", "op": "rms_norm", "dtype": "f32", "shape": []}"#,
            r#"{"do": "time", "op": "rms_norm", "dtype": "f32", "kv_lens": [3]}"#,
            "nonsense",
            r#"{"do": "build", "function": 100000, "defines": [["ELEM", "f32"]], "arch": "sm_90a"}"#,
        ]);
        assert_eq!(told.len(), 8);
        let error = |at: usize| told[at]["error"].as_str().unwrap();
        assert!(error(0).contains("again"), "{}", error(0));
        assert!(told[1]["compiled"].as_str().unwrap().starts_with("rms_norm_"), "{}", told[1]);
        for timed in &told[2..4] {
            assert_eq!(timed["case"], "num_tokens=3 hidden=65 +weight eps=0.5 misaligned");
            assert!(timed["median_ms"].as_f64().unwrap() > 0.0 && timed["sets"] == 1, "{timed}");
            assert_eq!(timed["tensor_bytes"], 2 * 3 * 65 * 4 + 65 * 4);
        }
        assert!(error(4).contains("shape"), "{}", error(4));
        assert!(error(5).contains("kv_lens"), "{}", error(5));
        assert!(error(6).contains("request"), "{}", error(6));
        assert!(error(7).contains("a device function"), "{}", error(7));
    }

    #[test]
    fn a_line_that_is_no_text_has_an_answer_too() {
        let told = answers_to(b"{\"do\": \"\xff\"}\n\xff\xfe\r\n{\"do\": \"again\"}\n");
        assert_eq!(told.len(), 3);
        for answer in &told {
            assert!(answer["error"].as_str().unwrap().contains("request"), "{answer}");
        }
        assert!(told[2]["error"].as_str().unwrap().contains("again"), "{}", told[2]);
    }

    #[test]
    fn requests_of_different_lengths_share_a_pool_of_their_own_size() {
        let ask = |lengths: &str| {
            format!(
                r#"{{"do": "time", "op": "paged_attention", "dtype": "f32", "kv_lens": {lengths}, "sizes": ["requests=5",
                "kv_len=40", "num_heads=2", "num_kv_heads=1", "head_dim=32", "page_size=16"]}}"#
            )
            .replace('\n', " ")
        };
        let (mixed, long) = (ask("[1, 40, 17]"), ask("[41]"));
        let told = answers(&[&mixed, &long]);
        assert!(told[0]["case"].as_str().unwrap().ends_with("kv_lens=1/40/17"), "{}", told[0]);
        // 1 + 3 + 2 + 1 + 3 pages and 3 that are not used; queries, results, the table and lengths.
        let pool = 2 * 13 * 16 * 32 * 4;
        assert_eq!(told[0]["tensor_bytes"], pool + 2 * 5 * 2 * 32 * 4 + 5 * 3 * 4 + 5 * 4);
        assert!(told[1]["error"].as_str().unwrap().contains("up to kv_len, 40"), "{}", told[1]);
    }
}
