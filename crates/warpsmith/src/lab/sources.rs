//! Hashes of the CPU kernels' sources, taken when the crate is built (see `build.rs`).

use crate::op::KernelInfo;

/// Identifies the code of a kernel: changes whenever its source, its headers or its parameters do. CPU kernels are
/// identified by the sources of their op and of the shared CPU parts.
pub fn source_hash(kernel: &KernelInfo, op: &str) -> String {
    if kernel.is_cuda() { kernel.identity() } else { cpu_hash(op) }
}

/// Identifies the code of an op's CPU kernels: the files of its folder and the shared CPU parts.
pub(crate) fn cpu_hash(op: &str) -> String {
    let folder = op.strip_suffix("_backward").unwrap_or(op);
    let found = CPU_HASHES.iter().find(|(name, _)| *name == folder);
    found.map(|(_, hash)| hash.to_string()).unwrap_or_default()
}

include!(concat!(env!("OUT_DIR"), "/cpu_hashes.rs"));

#[cfg(test)]
mod tests {
    #[test]
    fn every_op_has_a_hash() {
        for op in crate::ops::PROVABLE {
            assert_eq!(super::cpu_hash(op.spec().name).len(), 64, "{}", op.spec().name);
        }
    }
}
