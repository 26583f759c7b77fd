//! What others claim of such kernels, as it was measured, with the most that the machine allows.

use super::print;
use warpsmith::lab::evidence::{self, Record, Timing};

/// A claim: what it says, the case it is about, and the peers that it can mean.
struct Claim {
    says: &'static str,
    op: &'static str,
    case: &'static str,
    peers: &'static [&'static str],
}

const CLAIMS: [Claim; 3] = [
    Claim {
        says: "2 to 5 times SDPA",
        op: "attention",
        case: "batch=8 q_len=2048 kv_len=2048 num_heads=16 num_kv_heads=16 head_dim=128",
        peers: &["torch (unfused)", "torch (flash)", "torch (cudnn)"],
    },
    Claim {
        says: "1.8 to 2.5 times, linear + GELU, small K",
        op: "linear",
        case: "m=16384 n=2048 k=512 batch=1 +bias act=gelu",
        peers: &["torch", "torch.compile", "cublaslt"],
    },
    Claim {
        says: "the same, large K",
        op: "linear",
        case: "m=8192 n=16384 k=4096 batch=1 +bias act=gelu",
        peers: &["torch", "torch.compile", "cublaslt"],
    },
];

/// Prints the claims as the records of the repository have them; outside of it, where they are.
pub fn show() {
    let records = evidence::folder(None).and_then(|folder| evidence::load(&folder)).unwrap_or_default();
    let lines: Vec<String> =
        records.iter().filter(|record| record.machine.is_gpu()).flat_map(lines).collect();
    println!();
    if lines.is_empty() {
        print("What was measured of well-known claims is in the repository: docs/claims.md.");
        return;
    }
    print("Claims, as measured (in brackets the most that the machine allows; docs/claims.md has more):");
    lines.iter().for_each(|line| print(line));
}

/// A line for each claim that a record has a time of.
fn lines(record: &Record) -> Vec<String> {
    CLAIMS.iter().filter_map(|claim| line(record, claim)).collect()
}

fn line(record: &Record, claim: &Claim) -> Option<String> {
    let of_claim =
        |timing: &&Timing| timing.op == claim.op && timing.case == claim.case && timing.dtype == "bf16";
    let timing = record.timings.iter().filter(of_claim).min_by(|a, b| a.ms.total_cmp(&b.ms))?;
    let ratio = |name: &&str| {
        let same = |peer: &&evidence::PeerTime| {
            peer.op == timing.op
                && peer.case == timing.case
                && peer.dtype == timing.dtype
                && peer.peer == **name
        };
        let peer = record.peers.iter().find(same)?;
        Some(format!("{name} {:.2}x ({:.2}x)", peer.ms / timing.ms, peer.ms / timing.limit_ms))
    };
    let ratios: Vec<String> = claim.peers.iter().filter_map(ratio).collect();
    (!ratios.is_empty())
        .then(|| format!("{} on {}: {}", claim.says, record.machine.device, ratios.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_claim_has_its_measurement_and_none_beats_the_machine() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
        let records = evidence::load(&folder).unwrap();
        let record = records.iter().find(|record| record.machine.is_gpu()).unwrap();
        let lines = lines(record);
        assert_eq!(lines.len(), CLAIMS.len(), "{lines:?}");
        assert!(lines[0].contains("unfused") && lines[0].contains("cudnn"), "{lines:?}");
        for line in &lines {
            let numbers = line
                .split(['(', ' ', ')', ','])
                .filter_map(|word| word.strip_suffix('x')?.parse::<f64>().ok());
            let numbers: Vec<f64> = numbers.collect();
            assert!(numbers.len() >= 2 && numbers.chunks(2).all(|pair| pair[0] <= pair[1]), "{line}");
        }
    }
}
