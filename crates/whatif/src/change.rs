//! Changed hardware, and what it buys.

use crate::machine::{Card, Machine};
use crate::model::Model;
use crate::step::Step;
use crate::work::Work;
use serde::Serialize;
use warpsmith::{Error, Result};

/// One change of the hardware.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Times the rate of the memory.
    Memory(f64),
    /// Times the L2.
    Cache(f64),
    /// Times the multiprocessors, with their tensor cores and shared memory; the memory stays.
    Units(f64),
    /// Times the rate of the tensor cores.
    Tensor(f64),
    /// A store on the chip that holds this many bytes of keys and values of all layers.
    KeptKv(f64),
    /// Results go from op to op without memory.
    Streaming,
    /// Another GPU, with kernels that use it as well.
    Gpu(Card),
    /// Several at once.
    Together(Vec<Change>),
}

impl Change {
    /// As text.
    pub fn describe(&self) -> String {
        match self {
            Change::Memory(factor) => format!("memory bandwidth {factor}x"),
            Change::Cache(factor) => format!("L2 {factor}x"),
            Change::Units(factor) => format!("multiprocessors {factor}x"),
            Change::Tensor(factor) => format!("tensor cores {factor}x"),
            Change::KeptKv(bytes) => format!("{:.0} MB of keys and values on chip", bytes / 1e6),
            Change::Streaming => "streaming between ops".into(),
            Change::Gpu(card) => format!("{} in its place", card.name),
            Change::Together(changes) => match changes.len() {
                2 => "both together".into(),
                count => format!("all {count} together"),
            },
        }
    }

    /// The machine with this change, and whether ops stream.
    fn apply(&self, machine: &Machine, streams: bool) -> Result<(Machine, bool)> {
        let mut changed = machine.clone();
        match self {
            Change::Memory(factor) => changed.copy_gbps *= factor,
            Change::Cache(factor) => changed.l2_mib *= factor,
            Change::Units(factor) => {
                changed.units = (machine.units * factor).round().max(1.0);
                let more = changed.units / machine.units;
                changed.half_tflops *= more;
                changed.fp8_tflops *= more;
                changed.tf32_tflops *= more;
            }
            Change::Tensor(factor) => {
                changed.half_tflops *= factor;
                changed.fp8_tflops *= factor;
                changed.tf32_tflops *= factor;
            }
            Change::KeptKv(bytes) => changed.kv_on_chip += bytes,
            Change::Streaming => return Ok((changed, true)),
            Change::Gpu(card) => changed = machine.as_card(&Card::find(&machine.name)?, card),
            Change::Together(changes) => {
                // Another GPU first: the others change it.
                let (gpus, others): (Vec<&Change>, Vec<&Change>) =
                    changes.iter().partition(|change| matches!(change, Change::Gpu(_)));
                return gpus
                    .into_iter()
                    .chain(others)
                    .try_fold((changed, streams), |(machine, streams), change| {
                        change.apply(&machine, streams)
                    });
            }
        }
        Ok((changed, streams))
    }
}

/// Reads a factor such as `2x` or `1.5`.
///
/// # Errors
/// If it is no number, or not between a hundredth and a hundred.
pub fn parse_factor(text: &str) -> Result<f64> {
    let number = text.strip_suffix(['x', 'X']).unwrap_or(text).parse::<f64>();
    let factor = number.ok().filter(|factor| (0.01..=100.0).contains(factor));
    factor.ok_or_else(|| Error::parse("factor", "a factor from 0.01x to 100x, such as 2x", text))
}

/// Reads an amount such as `30MB` or `1.5GB`.
///
/// # Errors
/// If it is none, or more than a terabyte.
pub fn parse_bytes(text: &str) -> Result<f64> {
    let upper = text.to_ascii_uppercase();
    let units = [("KB", 1e3), ("MB", 1e6), ("GB", 1e9)];
    let found = units
        .iter()
        .find_map(|(unit, scale)| Some(upper.strip_suffix(unit)?.trim().parse::<f64>().ok()? * scale));
    let bytes = found.filter(|bytes| (1.0..=1e12).contains(bytes));
    bytes.ok_or_else(|| Error::parse("amount", "an amount such as 512KB, 30MB or 2GB", text))
}

/// What is shown when nothing else was asked for.
pub fn standard_changes() -> Vec<Change> {
    /// All shared memory of an H200: 132 times 227 KB.
    const SHARED: f64 = 30e6;
    let card = |name| Change::Gpu(Card::find(name).expect("the table has it"));
    vec![
        Change::Memory(2.0),
        Change::Cache(2.0),
        Change::Units(1.5),
        Change::Tensor(2.0),
        Change::KeptKv(SHARED),
        Change::Streaming,
        card("H100"),
        card("B200"),
    ]
}

/// What is asked about.
#[derive(Debug, Clone)]
pub enum Target {
    /// One call of an op.
    Op(Work),
    /// A decode step.
    Step(Step),
}

/// What one change does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The change.
    pub change: String,
    /// Microseconds with it.
    pub us: f64,
    /// How many times as fast; `None` if the difference is smaller than the model's error.
    pub faster: Option<f64>,
}

/// Times now and with changes, with the model's own error.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The family whose error it is.
    pub family: String,
    /// Microseconds now.
    pub now_us: f64,
    /// Where they go.
    pub parts: Vec<(String, f64)>,
    /// The family's errors on rows held back from the fit.
    pub held_out: crate::judge::Errors,
    /// A smaller difference means nothing.
    pub least_difference: f64,
    /// Change by change.
    pub outcomes: Vec<Outcome>,
}

/// Compares the time of a target now with that under each change.
///
/// # Errors
/// If no family takes the op, or one of a step.
pub fn compare(model: &Model, target: &Target, changes: &[Change]) -> Result<Comparison> {
    let time = |machine: &Machine, streams: bool| match target {
        Target::Op(work) => Ok(model.parts(work, machine)?.total()),
        Target::Step(step) => model.step_time(step, machine, streams),
    };
    let now_us = time(&model.machine, false)?;
    let (family, held_out, parts) = match target {
        Target::Op(work) => {
            let (_, fitted) = model.family(work)?;
            let parts = model.parts(work, &model.machine)?;
            let named = [
                ("launch", parts.launch),
                ("memory", parts.memory),
                ("arithmetic", parts.math),
                ("waiting", parts.serial),
            ];
            let named = named.iter().filter(|(_, us)| *us > 0.0);
            (fitted.name.clone(), fitted.held_out, named.map(|(name, us)| (name.to_string(), *us)).collect())
        }
        Target::Step(step) => {
            let over = model.steps.as_ref().ok_or_else(no_steps)?;
            let shares = step.shares(model, &model.machine)?;
            let named =
                shares.into_iter().map(|(name, times, us)| (format!("{name} x {times}"), times as f64 * us));
            (over.name.clone(), over.held_out, named.collect())
        }
    };
    let least_difference = held_out.median;
    let outcomes = changes.iter().map(|change| {
        let (machine, streams) = change.apply(&model.machine, false)?;
        let us = time(&machine, streams)?;
        let faster = now_us / us;
        let means_something = faster.max(1.0 / faster) - 1.0 > least_difference;
        Ok(Outcome { change: change.describe(), us, faster: means_something.then_some(faster) })
    });
    let outcomes = outcomes.collect::<Result<Vec<_>>>()?;
    Ok(Comparison { family, now_us, parts, held_out, least_difference, outcomes })
}

fn no_steps() -> Error {
    Error::Unavailable {
        what: "a model of decode steps".into(),
        why: "no step of a model is on record".into(),
        fix: "Record some with bench/models.py, then run `warpsmith whatif --fit --record`".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::h200;

    #[test]
    fn factors_and_amounts_are_read_and_others_refused() {
        assert_eq!(["2x", "1.5", "0.5X"].map(|text| parse_factor(text).unwrap()), [2.0, 1.5, 0.5]);
        for text in ["", "x", "0", "-2x", "1000x", "nan", "inf"] {
            assert!(parse_factor(text).is_err(), "{text}");
        }
        assert_eq!(["512kb", "30MB", "1.5 GB"].map(|text| parse_bytes(text).unwrap()), [512e3, 30e6, 1.5e9]);
        for text in ["", "30", "MB", "-1MB", "2TB", "9999GB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn changes_add_up_and_another_gpu_comes_first() {
        let card = Card::find("B200").unwrap();
        let all = Change::Together(vec![Change::Memory(2.0), Change::Gpu(card), Change::Streaming]);
        let (machine, streams) = all.apply(&h200(), false).unwrap();
        assert!(streams && (machine.copy_gbps - 2.0 * 4300.0 * 8000.0 / 4800.0).abs() < 1e-6, "{machine:?}");
        let (more, _) = Change::Units(1.5).apply(&h200(), false).unwrap();
        assert_eq!((more.units, more.half_tflops, more.copy_gbps), (198.0, 1425.0, 4300.0));
    }
}
