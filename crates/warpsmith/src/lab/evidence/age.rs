//! How old the evidence is, and what it lacks.

use super::peers::UNKNOWN;
use super::{PresentCode, Record};
use crate::ops;

/// The tools of compute-sanitizer.
pub const SANITIZERS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// The evidence of one op on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Age {
    /// The op.
    pub op: &'static str,
    /// The day of the oldest proof.
    pub proven: String,
    /// Kernels that the device can run whose present code is not proven.
    pub unproven: Vec<&'static str>,
    /// The day of the oldest timing.
    pub timed: String,
    /// Rows that were timed.
    pub rows: usize,
    /// Rows that were timed with an earlier version of their kernel.
    pub stale: usize,
    /// Proven kernels that not every tool of compute-sanitizer has seen.
    pub unwatched: Vec<&'static str>,
}

impl Record {
    /// Whether a case was timed on some kernel with its present source.
    pub fn has_timing(&self, code: &PresentCode, op: &str, case: &str, dtype: &str) -> bool {
        let same = |t: &&super::Timing| [&*t.op, &*t.case, &*t.dtype] == [op, case, dtype];
        self.timings.iter().filter(same).any(|timing| code.is_of(timing))
    }

    /// The day on which a case was last timed: `Some(None)` if it is not known, `None` if it never was.
    pub fn last_timed(&self, op: &str, case: &str, dtype: &str) -> Option<Option<&str>> {
        let same = |t: &&super::Timing| [&*t.op, &*t.case, &*t.dtype] == [op, case, dtype];
        self.timings.iter().filter(same).map(|t| t.date.as_deref()).max()
    }

    /// The tools of compute-sanitizer that have not seen this code of a kernel; none if it is not proven at all, or is a
    /// library's.
    pub fn missing_sanitizers(&self, kernel: &crate::op::KernelInfo, source_hash: &str) -> Vec<&'static str> {
        let known = self.kernels.get(kernel.name).filter(|record| record.source_hash == source_hash);
        let Some(record) = known.filter(|_| kernel.cuda.is_some()) else { return Vec::new() };
        SANITIZERS.into_iter().filter(|tool| !record.sanitizer.contains_key(*tool)).collect()
    }

    /// How old the evidence of each op is.
    pub fn ages(&self) -> Vec<Age> {
        self.ages_of(&PresentCode::new())
    }

    fn ages_of(&self, present: &PresentCode) -> Vec<Age> {
        let age = |op: &&'static dyn crate::lab::AnyProvable| {
            let name = op.spec().name;
            let timings = || self.timings.iter().filter(|timing| timing.op == name);
            let mut age = Age {
                op: name,
                proven: oldest(self.kernels.values().filter(|k| k.op == name).map(|k| k.date.as_deref())),
                unproven: Vec::new(),
                timed: oldest(timings().map(|timing| timing.date.as_deref())),
                rows: timings().count(),
                stale: timings().filter(|timing| !present.is_of(timing)).count(),
                unwatched: Vec::new(),
            };
            for kernel in op.kernels().iter().filter(|kernel| self.machine.runs(kernel)) {
                let Some(hash) = present.hash(kernel.name) else { continue };
                if self.proves(kernel.name, hash).is_err() {
                    age.unproven.push(kernel.name);
                } else if !self.missing_sanitizers(kernel, hash).is_empty() {
                    age.unwatched.push(kernel.name);
                }
            }
            age
        };
        ops::PROVABLE.iter().map(age).collect()
    }
}

/// The first of some days. A day that is not known is before all others.
fn oldest<'a>(days: impl Iterator<Item = Option<&'a str>>) -> String {
    days.min().map_or("-", |day| day.unwrap_or(UNKNOWN)).into()
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::Timing;
    use super::super::report::tests::{record, timing};
    use super::*;

    #[test]
    fn an_age_says_what_is_old_and_what_is_missing() {
        let op = crate::lab::find("rms_norm").unwrap();
        let kernel = *op.kernels().iter().find(|kernel| kernel.cuda.is_some()).unwrap();
        let present = PresentCode::new();
        let hash = present.hash(kernel.name).unwrap();
        let mut record = record(kernel.name, hash, true);
        let row = |case: &str, hash: &str, date: Option<&str>| Timing {
            kernel: kernel.name.into(),
            source_hash: hash.into(),
            date: date.map(String::from),
            ..timing("rms_norm", case, "bf16", 1.0)
        };
        record.add_timing(row("n=1", hash, Some("2026-11-17")));
        record.add_timing(row("n=2", "old", Some("2026-11-18")));
        let age =
            |record: &Record| record.ages_of(&present).into_iter().find(|a| a.op == "rms_norm").unwrap();
        let first = age(&record);
        assert_eq!(
            (&*first.proven, &*first.timed, first.rows, first.stale),
            (&*super::super::today(), "2026-11-17", 2, 1)
        );
        assert!(!first.unproven.contains(&kernel.name) && first.unwatched == [kernel.name], "{first:?}");
        assert!(first.unproven.iter().all(|name| *name != kernel.name) && !first.unproven.is_empty());
        assert_eq!(record.missing_sanitizers(&kernel, hash), SANITIZERS);
        assert!(record.missing_sanitizers(&kernel, "old").is_empty());
        for tool in SANITIZERS {
            record.add_sanitizer(kernel.name, hash, tool, true);
        }
        record.add_timing(row("n=3", "old", None));
        let second = age(&record);
        assert_eq!((&*second.timed, second.rows, second.stale), (UNKNOWN, 3, 2));
        assert!(second.unwatched.is_empty());
        let softmax = record.ages_of(&present).into_iter().find(|a| a.op == "softmax").unwrap();
        assert_eq!((&*softmax.proven, &*softmax.timed, softmax.rows), ("-", "-", 0));
    }

    #[test]
    fn what_was_never_timed_or_at_an_unknown_time_is_the_most_stale() {
        let mut record = record("k", "h", true);
        for (case, date) in [("n=1", Some("2026-11-18")), ("n=2", None), ("n=3", Some("2026-11-17"))] {
            record.add_timing(Timing { date: date.map(String::from), ..timing("op", case, "bf16", 1.0) });
        }
        let mut cases = ["n=1", "n=2", "n=3", "n=4"];
        cases.sort_by_key(|case| record.last_timed("op", case, "bf16"));
        assert_eq!(cases, ["n=4", "n=2", "n=3", "n=1"]);
    }
}
