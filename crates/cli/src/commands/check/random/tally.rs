//! What a random check counts.

use crate::table;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use warpsmith::lab::proof::Outcome;

/// The counts of one op.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// The op's name.
    pub op: String,
    /// Cases that were drawn.
    pub draws: usize,
    /// Kernels that ran a draw and were judged.
    pub calls: usize,
    /// Draws that the op or all of its kernels refuse.
    pub refused: usize,
    /// Calls that failed.
    pub failures: usize,
    /// Largest error over what is allowed.
    pub worst: f64,
    /// How often each reason was given for a refusal.
    #[serde(skip)]
    pub reasons: BTreeMap<String, usize>,
}

impl Tally {
    pub fn new(op: &str) -> Tally {
        Tally { op: op.into(), ..Tally::default() }
    }

    pub fn count(&mut self, outcome: &Outcome) {
        self.calls += 1;
        self.failures += usize::from(!outcome.ok);
        self.worst = self.worst.max(outcome.worst);
    }

    pub fn refuse(&mut self, why: &str) {
        self.refused += 1;
        *self.reasons.entry(why.into()).or_default() += 1;
    }

    pub fn add(&mut self, other: &Tally) {
        self.draws += other.draws;
        self.calls += other.calls;
        self.refused += other.refused;
        self.failures += other.failures;
        self.worst = self.worst.max(other.worst);
    }

    pub fn total(tallies: &[Tally]) -> Tally {
        let mut total = Tally::new("all");
        tallies.iter().for_each(|tally| total.add(tally));
        total
    }

    fn words(&self) -> [String; 6] {
        let [draws, calls, refused, failures] =
            [self.draws, self.calls, self.refused, self.failures].map(|count| count.to_string());
        [self.op.clone(), draws, calls, refused, failures, format!("{:.2}", self.worst)]
    }
}

/// Prints the counts: as a table with the most frequent refusal of ops that refuse much, or as JSON.
pub fn print(tallies: &[Tally], json: bool) {
    if json {
        for tally in tallies {
            println!("{}", serde_json::json!(tally));
        }
        return;
    }
    let headings = ["op", "draws", "calls", "refused", "failures", "worst"].map(String::from);
    let mut table = table::new(&headings, 1);
    for tally in tallies {
        table.add_row(tally.words());
    }
    if tallies.len() > 1 {
        table.add_row(Tally::total(tallies).words());
    }
    println!("{table}");
    let legend = "calls: kernels judged on a draw; refused: draws that the op or all its kernels refuse";
    println!("{}", table::fit(legend, 2));
    for tally in tallies.iter().filter(|tally| 10 * tally.refused > tally.draws) {
        if let Some((why, count)) = tally.reasons.iter().max_by_key(|(_, count)| **count) {
            println!("{}", table::fit(&format!("{}: {count} draws were refused: {why}", tally.op), 2));
        }
    }
}
