//! Sweeps: how Warpsmith compares with the fastest peer on random shapes.

use super::significant;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One case of a sweep, as `bench/sweep.py` writes it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct SweepRow {
    seed: u64,
    family: String,
    op: String,
    case: String,
    dtype: String,
    /// What ran; nothing if the case was refused.
    device: Option<String>,
    kernel: Option<String>,
    source_hash: Option<String>,
    ms: Option<f64>,
    /// Milliseconds of other libraries.
    #[serde(default)]
    peers: BTreeMap<String, f64>,
}

impl SweepRow {
    /// Which types count together.
    fn types(&self) -> &'static str {
        if self.dtype == "f32" { "f32" } else { "16-bit" }
    }

    /// How many times as long the fastest peer took.
    fn speed_up(&self) -> Option<f64> {
        let fastest = self.peers.values().copied().min_by(f64::total_cmp)?;
        Some(fastest / self.ms?)
    }
}

/// All cases of a family of ops, of one class of types.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// The family.
    pub family: String,
    /// The class of types.
    pub types: String,
    /// The seeds of the cases.
    pub seeds: BTreeSet<u64>,
    /// Cases that were compared with a peer.
    pub compared: usize,
    /// Cases that no peer has.
    pub without_peer: usize,
    /// Cases that Warpsmith refused.
    pub refused: usize,
    /// Geometric mean of the speed-ups over the fastest peer; none if there is none.
    pub mean: Option<f64>,
    /// The least speed-up.
    pub worst: Option<f64>,
    /// Its case.
    pub worst_case: Option<String>,
    /// Cases with a speed-up below 1.
    pub below: usize,
    /// The source hash of each kernel that ran.
    pub kernels: BTreeMap<String, String>,
}

impl Sweep {
    fn of(family: &str, types: &str, rows: &[&SweepRow]) -> Sweep {
        let compared: Vec<(f64, &SweepRow)> =
            rows.iter().filter_map(|row| Some((row.speed_up()?, *row))).collect();
        let worst = compared.iter().min_by(|a, b| a.0.total_cmp(&b.0));
        let logs: f64 = compared.iter().map(|(speed_up, _)| speed_up.ln()).sum();
        let ran = rows.iter().filter_map(|row| Some((row.kernel.clone()?, row.source_hash.clone()?)));
        Sweep {
            family: family.into(),
            types: types.into(),
            seeds: rows.iter().map(|row| row.seed).collect(),
            compared: compared.len(),
            without_peer: rows.iter().filter(|row| row.ms.is_some() && row.peers.is_empty()).count(),
            refused: rows.iter().filter(|row| row.ms.is_none()).count(),
            mean: worst.map(|_| significant((logs / compared.len() as f64).exp(), 3)),
            worst: worst.map(|(speed_up, _)| significant(*speed_up, 3)),
            worst_case: worst.map(|(_, row)| format!("{} {} {}", row.op, row.case, row.dtype)),
            below: compared.iter().filter(|(speed_up, _)| *speed_up < 1.0).count(),
            kernels: ran.collect(),
        }
    }

    /// In a table: `1.31x (worst 0.84x, 12 % below 1)`.
    pub fn text(&self) -> String {
        let refused = if self.refused > 0 { format!(", {} refused", self.refused) } else { String::new() };
        match (self.mean, self.worst) {
            (Some(mean), Some(worst)) => {
                let below = 100.0 * self.below as f64 / self.compared as f64;
                format!("{mean:.2}x (worst {worst:.2}x, {below:.0} % below 1{refused})")
            }
            _ => format!("no peer{refused}"),
        }
    }
}

/// Reads the rows of sweeps of one device, and returns its name and a summary for each family and class of types.
pub fn read_sweeps(paths: &[impl AsRef<Path>]) -> Result<(String, Vec<Sweep>)> {
    let mut rows = Vec::new();
    for path in paths {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "reading", &e))?;
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let row: SweepRow = serde_json::from_str(line).map_err(|e| {
                let what = format!("{}:{}", path.display(), at + 1);
                Error::parse(what, "a row of bench/sweep.py", e.to_string())
            })?;
            rows.push(row);
        }
    }
    summarise(&rows)
}

fn summarise(rows: &[SweepRow]) -> Result<(String, Vec<Sweep>)> {
    let devices: BTreeSet<&str> = rows.iter().filter_map(|row| row.device.as_deref()).collect();
    let devices: Vec<&str> = devices.into_iter().collect();
    let [device] = devices[..] else {
        return Err(Error::parse("sweep", "rows of one device", format!("{devices:?}")));
    };
    // Times of two versions say nothing about either.
    let mut versions: BTreeMap<&str, &str> = BTreeMap::new();
    for (kernel, hash) in rows.iter().filter_map(|row| row.kernel.as_deref().zip(row.source_hash.as_deref()))
    {
        if *versions.entry(kernel).or_insert(hash) != hash {
            let expected = format!("rows of one version of the code of {kernel}");
            let got = format!("{} and {hash}", versions[kernel]);
            return Err(Error::parse("sweep", expected, got));
        }
    }
    let mut groups: BTreeMap<(&str, &str), Vec<&SweepRow>> = BTreeMap::new();
    for row in rows {
        groups.entry((&row.family, row.types())).or_default().push(row);
    }
    let sweeps = groups.iter().map(|((family, types), rows)| Sweep::of(family, types, rows));
    Ok((device.into(), sweeps.collect()))
}

#[cfg(feature = "tests")]
pub(super) mod tests {
    use super::*;

    /// A sweep of a kernel `k` with source `h`.
    pub(in super::super) fn sweep(family: &str, types: &str, mean: f64) -> Sweep {
        Sweep {
            family: family.into(),
            types: types.into(),
            seeds: BTreeSet::from([1, 7]),
            compared: 8,
            without_peer: 1,
            refused: 0,
            mean: Some(mean),
            worst: Some(0.5),
            worst_case: Some("op n=1 bf16".into()),
            below: 2,
            kernels: BTreeMap::from([("k".into(), "h".into())]),
        }
    }

    fn row(dtype: &str, ms: Option<f64>, peers: &[f64]) -> SweepRow {
        let peers = peers.iter().enumerate().map(|(i, ms)| (format!("p{i}"), *ms)).collect();
        let ran = ms.map(|_| "k".to_string());
        SweepRow {
            seed: 3,
            family: "norms".into(),
            op: "rms_norm".into(),
            case: "n=1".into(),
            dtype: dtype.into(),
            device: ran.as_ref().map(|_| "GPU 9".into()),
            kernel: ran.clone(),
            source_hash: ran,
            ms,
            peers,
        }
    }

    #[test]
    fn the_fastest_peer_counts_and_what_is_refused_or_alone_is_told() {
        let rows = [
            row("bf16", Some(2.0), &[9.0, 4.0]),
            row("f16", Some(2.0), &[1.0]),
            row("bf16", Some(2.0), &[]),
            row("bf16", None, &[]),
            row("f32", Some(1.0), &[3.0]),
        ];
        let (device, sweeps) = summarise(&rows).unwrap();
        assert_eq!((device.as_str(), sweeps.len()), ("GPU 9", 2));
        let half = &sweeps[0];
        assert_eq!((half.compared, half.without_peer, half.refused, half.below), (2, 1, 1, 1));
        assert_eq!(half.worst_case.as_deref(), Some("rms_norm n=1 f16"));
        assert_eq!(half.text(), "1.00x (worst 0.50x, 50 % below 1, 1 refused)");
        assert_eq!(sweeps[1].text(), "3.00x (worst 3.00x, 0 % below 1)");
        let (_, alone) = summarise(&rows[2..4]).unwrap();
        assert_eq!(alone[0].text(), "no peer, 1 refused");
    }

    #[test]
    fn rows_of_several_devices_or_of_none_are_refused() {
        let mut rows = vec![row("bf16", None, &[])];
        assert!(matches!(summarise(&rows), Err(Error::Parse { .. })));
        rows.push(row("bf16", Some(1.0), &[1.0]));
        assert!(summarise(&rows).is_ok());
        rows.push(SweepRow { device: Some("CPU".into()), ..row("bf16", Some(1.0), &[1.0]) });
        assert!(summarise(&rows).unwrap_err().to_string().contains("GPU 9"));
    }

    #[test]
    fn rows_of_two_versions_of_a_kernel_are_refused() {
        let old = row("bf16", Some(1.0), &[1.0]);
        // In another group, too.
        let new = SweepRow { source_hash: Some("new".into()), ..row("f32", Some(1.0), &[1.0]) };
        let error = summarise(&[old.clone(), new.clone()]).unwrap_err();
        assert!(matches!(error, Error::Parse { .. }), "{error}");
        assert!(error.to_string().contains("k and new"), "{error}");
        let other = SweepRow { kernel: Some("other".into()), ..new };
        assert!(summarise(&[old, other]).is_ok());
    }

    #[test]
    fn a_line_that_is_no_row_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "\n{}\n").unwrap();
        let error = read_sweeps(&[&path]).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:2"), "{error}");
    }
}
