//! `bench --record`: results on their way to the evidence, and the cases that it lacks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use warpsmith::lab::bench::{Ceilings, Measurement, Peers};
use warpsmith::lab::evidence::{Machine, PresentCode, Record};
use warpsmith::lab::{AnyProvable, Case};
use warpsmith::{Device, Result};

/// How often results are recorded while others are measured. Writing the file takes as long as a few small cases.
const PAUSE: Duration = Duration::from_secs(5);

/// Cases with their ops.
pub type Cases = Vec<(&'static dyn AnyProvable, Case)>;

/// Where results go: nowhere without a folder.
pub struct Recorder<'a> {
    folder: Option<PathBuf>,
    peers: Option<&'a Path>,
    device: Device,
    machine: Machine,
    new: Vec<(Measurement, Ceilings)>,
    saved: Instant,
    path: Option<PathBuf>,
}

impl<'a> Recorder<'a> {
    pub fn new(folder: Option<PathBuf>, peers: Option<&'a Path>, device: Device) -> Result<Self> {
        let machine = Machine::of(device)?;
        Ok(Recorder { folder, peers, device, machine, new: Vec::new(), saved: Instant::now(), path: None })
    }

    /// What other libraries took, as far as it is known by now.
    pub fn peers(&self) -> Result<Peers> {
        Ok(self.peers.map(Peers::read).transpose()?.unwrap_or_default())
    }

    /// Adds a result with the ceilings of its run. An interrupted run loses those of a few seconds.
    pub fn add(&mut self, m: &Measurement, ceilings: Ceilings) -> Result<()> {
        self.new.push((m.clone(), ceilings));
        if self.saved.elapsed() >= PAUSE { self.save() } else { Ok(()) }
    }

    /// Records what was added.
    pub fn save(&mut self) -> Result<()> {
        let (Some(folder), Some((_, ceilings))) = (&self.folder, self.new.last()) else { return Ok(()) };
        let mut record = Record::open(folder, self.machine.clone())?;
        record.set_ceilings(*ceilings);
        let peers = self.peers()?;
        for (m, _) in &self.new {
            record.add_measured(m, &peers, &self.device.to_string());
        }
        self.path = Some(record.save(folder)?);
        self.new.clear();
        self.saved = Instant::now();
        Ok(())
    }

    /// The file that was written.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The cases without a timing of the present code, those first that were never timed or not for long.
    pub fn stale(&self, mut cases: Cases) -> Result<Cases> {
        let Some(folder) = &self.folder else { return Ok(cases) };
        let (record, code) = (Record::open(folder, self.machine.clone())?, PresentCode::new());
        cases.retain(|(op, case)| {
            !record.has_timing(&code, op.spec().name, &case.name(op.spec()), case.dtype.name())
        });
        cases.sort_by_cached_key(|(op, case)| {
            let day = record.last_timed(op.spec().name, &case.name(op.spec()), case.dtype.name());
            day.map(|day| day.map(String::from))
        });
        Ok(cases)
    }
}

/// Says how many cases of each op are left.
pub fn print_left(cases: &Cases) {
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    for (op, _) in cases {
        *left.entry(op.spec().name).or_default() += 1;
    }
    let ops: Vec<String> = left.iter().map(|(op, count)| format!("{op} {count}")).collect();
    if !ops.is_empty() {
        eprintln!("left to time: {} ({})", cases.len(), ops.join(", "));
    }
}
