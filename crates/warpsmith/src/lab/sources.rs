//! Hashes of the kernels' sources, by which evidence says what code it is about.

use crate::op::KernelInfo;

/// Identifies the code of a kernel: changes whenever its source, its headers or its parameters do. CPU kernels are
/// identified by the sources of their op and of the shared CPU parts.
pub fn source_hash(kernel: &KernelInfo, op: &str) -> String {
    if kernel.is_cuda() { kernel.identity() } else { cpu_hash(op) }
}

/// Identifies the code of an op's CPU kernels: the files of its folder and the shared CPU parts.
pub(crate) fn cpu_hash(op: &str) -> String {
    let folder = format!("ops/{}/", op.strip_suffix("_backward").unwrap_or(op));
    let mut hasher = blake3::Hasher::new();
    for (name, text) in SOURCES {
        if name.starts_with("cpu/") || (name.starts_with(&folder) && !name.ends_with("cuda.rs")) {
            hasher.update(name.as_bytes());
            hasher.update(text.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
