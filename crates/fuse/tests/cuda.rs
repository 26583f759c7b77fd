//! Sources of fused kernels compile, without spills or stack.

use warpsmith::jit::{self, Arch};
use warpsmith::{DType, Error};
use warpsmith_fuse::cuda::{CudaSource, Variant};
use warpsmith_fuse::plan::Plan;
use warpsmith_fuse::{Dim, parse};

const FORMULAS: &[(&str, usize)] = &[
    ("x * sigmoid(1.702 * x)", 4096),
    ("rms_norm(x + r) * w", 4096),
    ("softmax(x + r) * w", 1024),
    ("layer_norm(x, w, w)", 65536),
    ("log_softmax(x), max(x), min(r)", 100),
    ("gelu(x) * r + where(x > r, w, 0.5)", 4096),
    ("gather(t, i) * x + cast(x, i32)", 512),
    ("rotate_half(x * r) * w + x", 128),
    ("sum_to(gelu_tanh(x) * r, [4096])", 4096),
    ("sum_to(x * rms_norm(r), [2048])", 2048),
    ("cast(i, f32) * 2 + i, tanh(x) + exp(r) + log(w) + erf(x) + floor(x)", 4096),
];

#[test]
fn sources_compile_without_spills() {
    match jit::nvrtc::find() {
        Err(Error::Unavailable { .. }) if std::env::var_os("WARPSMITH_REQUIRE_NVRTC").is_none() => {
            return eprintln!("no NVRTC: nothing is compiled");
        }
        found => found.unwrap(),
    };
    let mut compiled = 0;
    for &(formula, columns) in FORMULAS {
        let dtype = if compiled % 2 == 0 { DType::F32 } else { DType::BF16 };
        let (rows, one) = (Dim::named("rows"), Dim::Fixed(columns));
        let matrix = [rows.clone(), one.clone()];
        let table = [Dim::named("entries"), one.clone()];
        let is_mixed = formula.contains("cast(i");
        let index: &[Dim] = if is_mixed { &matrix } else { &matrix[..1] };
        let graph = parse(
            formula,
            &[
                ("x", dtype, &matrix),
                ("r", dtype, &matrix),
                ("w", dtype, &matrix[1..]),
                ("t", dtype, &table),
                ("i", DType::I64, index),
            ],
        )
        .unwrap_or_else(|error| panic!("{error}"));
        for kernel in &Plan::new(&graph).kernels {
            // Types, architectures and alignments in turn.
            compiled += 1;
            let (dense, arch) = (compiled % 3 != 0, if compiled / 2 % 2 == 0 { "80" } else { "90a" });
            let source = CudaSource::new(&graph, kernel, &Variant::plain(columns, dense)).unwrap();
            let arch: Arch = arch.parse().unwrap();
            let found = source.with_request(arch, jit::get);
            let found = found.unwrap_or_else(|error| panic!("{formula}: {error}\n{}", source.code));
            for used in jit::inspect::resources(&found.cubin).unwrap() {
                assert_eq!(used.stack_bytes, 0, "{formula} {dtype} {arch} {:?}: {used:?}", source.config);
            }
            for spills in jit::inspect::spills(&found.log) {
                let bytes = (spills.store_bytes, spills.load_bytes);
                assert_eq!(bytes, (0, 0), "{formula} {dtype} {arch}: {spills:?}");
            }
        }
    }
    assert!(compiled >= FORMULAS.len());
}
