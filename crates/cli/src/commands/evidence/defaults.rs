//! Default kernels that another kernel of ours beats on a recorded case: a kernel is the default because it wins.

use crate::commands::explain::imagine;
use warpsmith::Result;
use warpsmith::device::DeviceInfo;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::evidence::{Record, Timing};
use warpsmith::op::Select;
use warpsmith_whatif::Card;

/// The part of its time by which another must be faster: less is within what times vary by.
const LEAST_GAIN: f64 = 0.03;

/// A line for each case of a GPU on which the default loses. GPUs that the library cannot imagine are left out, and so are
/// cases of which one kernel alone was timed.
pub fn losing(records: &[Record]) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for record in records.iter().filter(|record| record.machine.is_gpu()) {
        let Ok(card) = Card::find(&record.machine.device) else { continue };
        let info = card.info();
        for op in warpsmith::ops::provable() {
            lines.extend(losing_op(record, op, &info)?);
        }
    }
    Ok(lines)
}

fn losing_op(record: &Record, op: &'static dyn AnyProvable, info: &DeviceInfo) -> Result<Vec<String>> {
    let spec = op.spec();
    // Kernels whose rows depend on the batch are no defaults: they are chosen for callers that allow them.
    let invariant =
        |name: &str| op.kernels().iter().any(|kernel| kernel.name == name && kernel.batch_invariant);
    let mut lines = Vec::new();
    for case in op.bench_cases() {
        let name = case.name(spec);
        let timed: Vec<&Timing> = record
            .timings
            .iter()
            .filter(|t| {
                t.op == spec.name && t.case == name && t.dtype == case.dtype.name() && invariant(&t.kernel)
            })
            .collect();
        if timed.len() < 2 {
            continue;
        }
        let call = imagine(spec, &op.plan(&case), case.arrangement, info.device)?;
        // What no kernel takes any longer has no default.
        let Ok(chosen) = op.explain(&call, &case.attrs, info, &Select::default()) else { continue };
        lines.extend(
            verdict(&timed, chosen.kernel).map(|told| {
                format!("{}: {} [{name} {}]: {told}", record.machine.device, spec.name, case.dtype)
            }),
        );
    }
    Ok(lines)
}

/// What beats the default, if something does.
fn verdict(timed: &[&Timing], default: &str) -> Option<String> {
    let own = timed.iter().find(|t| t.kernel == default)?;
    let best = timed.iter().min_by(|a, b| a.ms.total_cmp(&b.ms))?;
    (best.ms < (1.0 - LEAST_GAIN) * own.ms)
        .then(|| format!("the default {default} takes {:.2}x the time of {}", own.ms / best.ms, best.kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use warpsmith::lab::evidence;

    #[test]
    fn a_default_that_loses_by_more_than_noise_is_named() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
        let records = evidence::load(&folder).unwrap();
        let gpu = records.iter().find(|record| record.machine.is_gpu()).unwrap();
        let mut slow = gpu.timings[0].clone();
        let mut fast = slow.clone();
        (slow.kernel, slow.ms) = ("slow".into(), 1.0);
        (fast.kernel, fast.ms) = ("fast".into(), 0.5);
        assert_eq!(
            verdict(&[&slow, &fast], "slow").unwrap(),
            "the default slow takes 2.00x the time of fast"
        );
        assert_eq!(verdict(&[&slow, &fast], "fast"), None);
        assert_eq!(verdict(&[&slow, &fast], "another"), None);
        fast.ms = 0.98;
        assert_eq!(verdict(&[&slow, &fast], "slow"), None);
    }

    #[test]
    fn the_records_are_gone_through() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
        let lines = losing(&evidence::load(&folder).unwrap()).unwrap();
        assert!(lines.iter().all(|line| line.contains("the default")), "{lines:?}");
    }
}
