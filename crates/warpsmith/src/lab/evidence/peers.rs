//! Times of other libraries. They are measured once and kept, because they take most of the time of a run while only our
//! code has changed. A few of them are measured again in each run: they tell whether the machine is as fast as it was.

use super::{Record, Timing, significant, today};
use crate::lab::bench::{Bound, Cache, Measurement, Peers};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// By how much a calibration may differ from the time that was kept.
const MOST_OFF: f64 = 0.02;
/// What stands for a date or a version that was not recorded.
pub const UNKNOWN: &str = "unknown";

/// One case timed with another library.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerTime {
    /// The op, by its name here.
    pub op: String,
    /// The case, by its name here.
    pub case: String,
    /// Its dtype.
    pub dtype: String,
    /// State of the cache.
    pub l2: Cache,
    /// How the other library was called.
    pub peer: String,
    /// The library and its version.
    pub version: String,
    /// The day.
    pub date: String,
    /// Milliseconds of one call.
    pub ms: f64,
}

/// What a [`PeerTime`] is found by, in the order of the file.
fn key(p: &PeerTime) -> (&str, &str, &str, Cache, &str) {
    (&p.op, &p.case, &p.dtype, p.l2, &p.peer)
}

impl Timing {
    /// Whether the run's calibration differs too much for the kept times of peers to be compared with.
    pub fn is_off(&self) -> bool {
        self.calibration.is_some_and(|ratio| (ratio - 1.0).abs() > MOST_OFF)
    }
}

impl Record {
    /// Keeps a peer's time, in place of an earlier one.
    pub fn keep_peer(&mut self, time: PeerTime) {
        match self.peers.binary_search_by(|old| key(old).cmp(&key(&time))) {
            Ok(at) => self.peers[at] = time,
            Err(at) => self.peers.insert(at, time),
        }
    }

    /// The times of peers on the same work.
    pub fn peers_of(&self, t: &Timing) -> impl Iterator<Item = &PeerTime> {
        let of = (&*t.op, &*t.case, &*t.dtype, t.l2);
        let first = self.peers.partition_point(|p| (&*p.op, &*p.case, &*p.dtype, p.l2) < of);
        self.peers[first..].iter().take_while(move |p| (&*p.op, &*p.case, &*p.dtype, p.l2) == of)
    }

    /// The fastest peer.
    pub fn best_peer(&self, t: &Timing) -> Option<&PeerTime> {
        self.peers_of(t).min_by(|a, b| a.ms.total_cmp(&b.ms))
    }

    /// Adds what was measured, and what `peers` has of the same case; `device` as `cpu` or `cuda:0`. If it has nothing of
    /// it, the kept times stand, and the calibration in `peers` tells whether they may.
    pub fn add_measured(&mut self, m: &Measurement, peers: &Peers, device: &str) {
        let mut alone = true;
        for peer in peers.on(&m.op, &m.case, &m.dtype, device) {
            alone = false;
            self.keep_peer(PeerTime {
                op: m.op.clone(),
                case: m.case.clone(),
                dtype: m.dtype.clone(),
                l2: m.l2,
                peer: peer.peer.clone(),
                version: peer.version.clone().unwrap_or_else(|| UNKNOWN.into()),
                date: today(),
                ms: significant(peer.ms, 4),
            });
        }
        let calibration = if alone { self.calibration(peers, device, m.bound) } else { None };
        self.add_timing(Timing::new(m, calibration));
    }

    /// The time of a peer in this run over the one that was kept, of those rows that the same ceiling limits: the ratio
    /// farthest from 1. None without such a row.
    fn calibration(&self, peers: &Peers, device: &str, bound: Bound) -> Option<f64> {
        let ratios = peers.calibration(device).filter_map(|now| {
            let same =
                |op: &str, case: &str, dtype: &str| [op, case, dtype] == [&now.op, &now.case, &now.dtype];
            let limited = |t: &&Timing| t.bound == bound && same(&t.op, &t.case, &t.dtype);
            let timing = self.timings.iter().find(limited)?;
            let kept = self.peers_of(timing).find(|kept| kept.peer == now.peer)?;
            Some(significant(now.ms / kept.ms, 4))
        });
        ratios.max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))
    }

    /// Keeps the times of peers that files of format 1 had in each timing.
    pub(super) fn keep_peers_of_format_1(&mut self, file: &[u8]) -> serde_json::Result<()> {
        #[derive(Deserialize)]
        struct Old {
            timings: Vec<OldTiming>,
        }
        #[derive(Deserialize)]
        struct OldTiming {
            op: String,
            case: String,
            dtype: String,
            l2: Cache,
            #[serde(default)]
            peers: BTreeMap<String, f64>,
        }
        let old: Old = serde_json::from_slice(file)?;
        for OldTiming { op, case, dtype, l2, peers } in old.timings {
            for (peer, ms) in peers {
                // All of them were measured with these versions.
                let version =
                    if peer.starts_with("flashinfer") { "flashinfer 0.6.3" } else { "torch 2.11.0" };
                let (op, case, dtype) = (op.clone(), case.clone(), dtype.clone());
                let (version, date) = (version.into(), UNKNOWN.into());
                self.keep_peer(PeerTime { op, case, dtype, l2, peer, version, date, ms });
            }
        }
        Ok(())
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::report::tests::timing;
    use super::super::{Machine, load};
    use super::*;
    use crate::lab::bench::Peer;

    fn record() -> Record {
        Record::new(Machine { device: "GPU".into(), ..Machine::default() })
    }

    fn measured(op: &str, case: &str, median_ms: f64, bound: Bound) -> Measurement {
        let numbers = serde_json::json!({
            "op": op, "case": case, "dtype": "bf16", "device": "GPU", "kernel": "k", "config": "", "source_hash": "h",
            "median_ms": median_ms, "best_ms": median_ms, "p10_ms": median_ms, "p90_ms": median_ms, "runs": 1, "bytes": 1.0,
            "flops": 1.0, "gbps": 1.0, "tflops": 1.0, "limit_ms": 1.0, "percent_of_ceiling": 50.0, "l2": "cold",
            "bound": bound,
        });
        serde_json::from_value(numbers).unwrap()
    }

    fn peer(op: &str, case: &str, name: &str, ms: f64, calibration: bool) -> Peer {
        Peer {
            op: op.into(),
            case: case.into(),
            dtype: "bf16".into(),
            device: "cuda".into(),
            peer: name.into(),
            ms,
            version: Some("torch 9".into()),
            calibration,
        }
    }

    #[test]
    fn a_peer_is_kept_until_it_is_measured_again() {
        let mut record = record();
        let now = [peer("op", "n=1", "torch", 3.0, false), peer("op", "n=1", "other", 2.0, false)];
        record.add_measured(
            &measured("op", "n=1", 1.0, Bound::Memory),
            &Peers::of_rows(now.to_vec()),
            "cuda:0",
        );
        // The next run has none, and those of another case are not taken.
        record.add_measured(&measured("op", "n=1", 0.5, Bound::Memory), &Peers::default(), "cuda:0");
        record.add_measured(&measured("op", "n=2", 0.5, Bound::Memory), &Peers::default(), "cuda:0");
        let [first, second] = &record.timings[..] else { panic!("{:?}", record.timings) };
        assert_eq!((first.ms, first.date.clone()), (0.5, Some(today())));
        let best = record.best_peer(first).unwrap();
        assert_eq!((&*best.peer, best.ms, &*best.version, &*best.date), ("other", 2.0, "torch 9", &*today()));
        assert_eq!(record.peers_of(first).count(), 2);
        assert_eq!(record.best_peer(second), None);
        let warm = Timing { l2: Cache::Warm, ..first.clone() };
        assert_eq!(record.best_peer(&warm), None, "that was other work");
        let faster = Peers::of_rows(vec![peer("op", "n=1", "torch", 1.5, false)]);
        record.add_measured(&measured("op", "n=1", 1.0, Bound::Memory), &faster, "cuda:0");
        assert_eq!(record.best_peer(&record.timings[0]).map(|p| p.ms), Some(1.5));
        assert_eq!(record.peers.len(), 2);
    }

    #[test]
    fn rows_are_off_where_the_calibration_of_their_kind_is() {
        let mut record = record();
        for (op, bound) in
            [("norm", Bound::Memory), ("linear", Bound::Products), ("attention", Bound::Products)]
        {
            let peers = Peers::of_rows(vec![peer(op, "n=1", "torch", 2.0, false)]);
            record.add_measured(&measured(op, "n=1", 1.0, bound), &peers, "cuda:0");
        }
        assert!(record.timings.iter().all(|t| t.calibration.is_none()), "peers of the same run need none");
        let now = vec![
            peer("norm", "n=1", "torch", 2.02, true),
            peer("linear", "n=1", "torch", 2.01, true),
            peer("attention", "n=1", "torch", 1.9, true),
            peer("attention", "n=1", "unknown", 9.0, true),
        ];
        let now = Peers::of_rows(now);
        record.add_measured(&measured("norm", "n=2", 1.0, Bound::Memory), &now, "cuda:0");
        record.add_measured(&measured("linear", "n=2", 1.0, Bound::Products), &now, "cuda:0");
        let of = |op: &str| {
            let found = record.timings.iter().find(|t| (&*t.op, &*t.case) == (op, "n=2")).unwrap();
            (found.calibration, found.is_off())
        };
        assert_eq!(of("norm"), (Some(1.01), false));
        assert_eq!(of("linear"), (Some(0.95), true));
        assert_eq!(
            record.peers.iter().map(|p| p.ms).collect::<Vec<_>>(),
            [2.0; 3],
            "a calibration is not kept"
        );
    }

    #[test]
    fn peers_of_the_first_format_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut old = record();
        old.add_timing(timing("rms_norm", "n=1", "bf16", 1.0));
        let text = std::fs::read_to_string(old.save(folder.path()).unwrap()).unwrap();
        let text = text.replace("\"format\": 2", "\"format\": 1");
        let peers = "\"l2\": \"cold\", \"peers\": {\"torch.compile\": 2.0, \"flashinfer\": 3.0}";
        let text = text.replace("\"l2\": \"cold\"", peers);
        std::fs::write(folder.path().join("gpu.json"), text).unwrap();
        let read = load(folder.path()).unwrap().remove(0);
        let kept: Vec<_> = read.peers.iter().map(|p| (&*p.peer, &*p.version, &*p.date, p.ms)).collect();
        let expected = [
            ("flashinfer", "flashinfer 0.6.3", UNKNOWN, 3.0),
            ("torch.compile", "torch 2.11.0", UNKNOWN, 2.0),
        ];
        assert_eq!(kept, expected);
        assert_eq!(read.best_peer(&read.timings[0]).map(|p| p.ms), Some(2.0));
        read.save(folder.path()).unwrap();
        assert_eq!(load(folder.path()).unwrap(), [read]);
    }
}
