//! The fitted model: parameters of every family and of decode steps, with the errors on rows held back from the fit.

use crate::families::{self, FAMILIES, Family, Parts};
use crate::fit::{self, Parameter};
use crate::judge::{self, Errors};
use crate::machine::Machine;
use crate::step::Step;
use crate::work::Work;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use warpsmith::lab::evidence::Record;
use warpsmith::{Error, Result};

/// A call and the time that was measured.
#[derive(Debug, Clone)]
pub struct Row {
    /// The call.
    pub work: Work,
    /// Microseconds.
    pub us: f64,
    /// The least by the measured ceilings: the plain roofline.
    pub roofline_us: f64,
}

/// A family with its parameters and errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FittedFamily {
    /// Its name.
    pub name: String,
    /// In the order of [`Family::parameters`].
    pub parameters: Vec<f64>,
    /// Rows that it was fitted to.
    pub rows: usize,
    /// Groups of them that were held back together.
    pub groups: usize,
    /// On rows held back from the fit.
    pub held_out: Errors,
    /// Of the plain roofline on the same rows.
    pub roofline: Errors,
}

/// The model of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// The GPU, as measured.
    pub machine: Machine,
    /// In the order of [`FAMILIES`]; those without a row are left out.
    pub families: Vec<FittedFamily>,
    /// Decode steps: the one parameter is what a step takes over the sum of its ops.
    pub steps: Option<FittedFamily>,
    /// Recorded rows that no family takes, by op.
    pub without_family: BTreeMap<String, usize>,
}

/// A decode step and the time that was measured.
#[derive(Debug, Clone)]
pub struct MeasuredStep {
    /// The step.
    pub step: Step,
    /// Microseconds.
    pub us: f64,
}

/// What a step takes over the sum of its ops, but for the waits between them: clocks that fall in long runs, and caches that
/// others have filled.
const OVER_OPS: [Parameter; 1] = [Parameter { name: "over the sum of the ops", least: 0.8, most: 1.6 }];
/// The model of the H200, as `warpsmith whatif --fit --record` wrote it.
const FITTED: &str = include_str!("../fitted.json");
/// Digits of what is recorded.
const DIGITS: i32 = 4;

/// The rows of a record.
pub fn rows(record: &Record) -> Vec<Row> {
    let row =
        |timing| Row { work: Work::of(timing), us: timing.ms * 1e3, roofline_us: timing.limit_ms * 1e3 };
    record.timings.iter().map(row).collect()
}

impl Model {
    /// The model of the version that was built.
    pub fn built_in() -> Model {
        serde_json::from_str(FITTED).expect("a test reads the file")
    }

    /// Fits the families to the rows of a record and judges them.
    ///
    /// # Errors
    /// If the record is not that of a GPU with measured ceilings.
    pub fn fit(record: &Record) -> Result<Model> {
        let machine = Machine::of(record)?;
        let mut by_family: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
        let mut without_family: BTreeMap<String, usize> = BTreeMap::new();
        for row in rows(record) {
            match families::find(&row.work) {
                Some(family) => by_family.entry(family.name).or_default().push(row),
                None => *without_family.entry(row.work.op.clone()).or_default() += 1,
            }
        }
        let families = FAMILIES.iter().filter_map(|family| {
            let rows = by_family.get(family.name)?;
            Some(fit_family(family, rows, &machine))
        });
        Ok(Model { families: families.collect(), machine, steps: None, without_family })
    }

    /// The same with decode steps, each model held back in turn.
    ///
    /// # Errors
    /// If a step has an op without a family.
    pub fn with_steps(mut self, measured: &[MeasuredStep]) -> Result<Model> {
        let sums = measured
            .iter()
            .map(|m| Ok((m.step.layers.name.clone(), m.step.ops_time(&self, &self.machine, false)?, m.us)))
            .collect::<Result<Vec<_>>>()?;
        type Sum = (String, (f64, f64), f64);
        let error = |p: f64, (_, (ops, waits), us): &Sum| (p * ops + waits - us) / us;
        let best =
            |kept: &[&Sum]| fit::least(&OVER_OPS, |p| kept.iter().map(|row| error(p[0], row).abs()).sum())[0];
        let groups: BTreeSet<String> = sums.iter().map(|(name, ..)| name.clone()).collect();
        let held_out = judge::held_out(&groups, |out| {
            let (out, kept): (Vec<_>, Vec<_>) = sums.iter().partition(|row| out.contains(row.0.as_str()));
            let p = best(&kept);
            out.into_iter().map(|row| error(p, row)).collect()
        });
        let roofline = |m: &MeasuredStep| {
            let bytes: f64 = m.step.ops().iter().map(|op| op.times as f64 * op.work.bytes).sum();
            (self.machine.moving(bytes) - m.us) / m.us
        };
        self.steps = Some(rounded(FittedFamily {
            name: "decode steps".into(),
            parameters: vec![best(&sums.iter().collect::<Vec<_>>())],
            rows: sums.len(),
            groups: groups.len(),
            held_out,
            roofline: Errors::of(&measured.iter().map(roofline).collect::<Vec<_>>()),
        }));
        Ok(self)
    }

    /// As text, for the file that is built in.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a model is plain data") + "\n"
    }

    /// The fitted family of a call.
    ///
    /// # Errors
    /// If none takes it: the error says which ops are modelled.
    pub fn family(&self, work: &Work) -> Result<(&'static Family, &FittedFamily)> {
        let family = families::find(work).ok_or_else(|| self.refuse(work))?;
        let fitted = self.families.iter().find(|fitted| fitted.name == family.name);
        Ok((family, fitted.ok_or_else(|| self.refuse(work))?))
    }

    fn refuse(&self, work: &Work) -> Error {
        let names: Vec<&str> = self.families.iter().map(|family| family.name.as_str()).collect();
        let rows = self.without_family.get(&work.op).copied().unwrap_or(0);
        Error::Unavailable {
            what: format!("a model of {} by {} in {}", work.op, work.kernel, work.dtype),
            why: format!(
                "{rows} recorded rows are too few, or nothing like it was timed on {}",
                self.machine.name
            ),
            fix: format!("These are modelled: {}", names.join("; ")),
        }
    }

    /// Where the time of a call goes on a machine.
    ///
    /// # Errors
    /// If no family takes it.
    pub fn parts(&self, work: &Work, machine: &Machine) -> Result<Parts> {
        let (family, fitted) = self.family(work)?;
        Ok((family.time)(work, machine, &fitted.parameters))
    }

    /// The microseconds of a step, with what it takes over its ops.
    ///
    /// # Errors
    /// If one of its ops has no family.
    pub fn step_time(&self, step: &Step, machine: &Machine, streaming: bool) -> Result<f64> {
        let over = self.steps.as_ref().and_then(|steps| steps.parameters.first()).copied().unwrap_or(1.0);
        let (ops, waits) = step.ops_time(self, machine, streaming)?;
        Ok(over * ops + waits)
    }
}

fn fit_family(family: &Family, rows: &[Row], machine: &Machine) -> FittedFamily {
    let group: Vec<String> = rows.iter().map(|row| (family.group)(&row.work)).collect();
    let groups: BTreeSet<String> = group.iter().cloned().collect();
    let error = |p: &[f64], row: &Row| (family.time)(&row.work, machine, p).total() / row.us - 1.0;
    let best =
        |kept: &[&Row]| fit::least(family.parameters, |p| kept.iter().map(|row| error(p, row).abs()).sum());
    let held_out = judge::held_out(&groups, |out| {
        let is_out = |at: usize| out.contains(group[at].as_str());
        let kept: Vec<&Row> = (0..rows.len()).filter(|at| !is_out(*at)).map(|at| &rows[at]).collect();
        let p = best(&kept);
        (0..rows.len()).filter(|at| is_out(*at)).map(|at| error(&p, &rows[at])).collect()
    });
    let roofline: Vec<f64> = rows.iter().map(|row| row.roofline_us / row.us - 1.0).collect();
    rounded(FittedFamily {
        name: family.name.into(),
        parameters: best(&rows.iter().collect::<Vec<_>>()),
        rows: rows.len(),
        groups: groups.len(),
        held_out,
        roofline: Errors::of(&roofline),
    })
}

/// With as many digits as mean something.
fn rounded(family: FittedFamily) -> FittedFamily {
    let digits = |x: f64| {
        let scale = 10f64.powi(DIGITS - 1 - if x == 0.0 { 0 } else { x.abs().log10().floor() as i32 });
        (x * scale).round() / scale
    };
    let errors = |e: Errors| Errors {
        median: digits(e.median),
        ninth: digits(e.ninth),
        worst: digits(e.worst),
        bias: digits(e.bias),
    };
    FittedFamily {
        parameters: family.parameters.iter().map(|p| digits(*p)).collect(),
        held_out: errors(family.held_out),
        roofline: errors(family.roofline),
        ..family
    }
}
