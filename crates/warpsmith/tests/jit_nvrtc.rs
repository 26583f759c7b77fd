//! Compilation with the real NVRTC, no GPU needed. `WARPSMITH_TEST_NVRTC13` and `WARPSMITH_TEST_NVRTC12` name the
//! libraries; without them the one of this machine is used, and without any the tests say that they were skipped.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::thread;

use warpsmith::Error;
use warpsmith::jit::cache::Cache;
use warpsmith::jit::nvrtc::{self, Nvrtc};
use warpsmith::jit::{Arch, Jit, Origin, Profile, Request, Source, Toolchain, inspect, pack};

/// One kernel with static shared memory, one with a stack, one that must spill.
static SOURCE: Source = Source {
    name: "sample",
    code: r#"#include "warpsmith/base.cuh"
using namespace warpsmith;
static_assert(sizeof(SampleParams) == 16, "prelude comes first");

#if __CUDA_ARCH__ >= 700
#define GRID_CONSTANT __grid_constant__
#else
#define GRID_CONSTANT
#endif

f32 twice(f32 x) { return x * f32(FACTOR); }

extern "C" __global__ void __launch_bounds__(128) sample_shared(const GRID_CONSTANT SampleParams p) {
    __shared__ f32 tile[128];
    tile[threadIdx.x] = p.x[threadIdx.x];
    __syncthreads();
    p.x[threadIdx.x] = twice(tile[127 - threadIdx.x]) / (1.0f + tile[threadIdx.x]);
}

extern "C" __global__ void sample_stack(f32* x, i32 n) {
    f32 a[64];
    for (i32 i = 0; i < 64; ++i) a[i] = x[i];
    for (i32 i = 0; i < n; ++i) a[(i * 7) & 63] += twice(a[i & 63]);
    f32 sum = 0;
    for (i32 i = 0; i < 64; ++i) sum += a[i];
    x[0] = sum;
}

extern "C" __global__ void __launch_bounds__(1024, 2) sample_spills(f32* x, i32 n) {
    f32 a[80];
#pragma unroll
    for (i32 i = 0; i < 80; ++i) a[i] = x[i * 1024 + threadIdx.x];
    for (i32 k = 0; k < n; ++k) {
#pragma unroll
        for (i32 i = 0; i < 80; ++i) a[i] = a[i] * a[(i + 1) % 80] + f32(k);
    }
#pragma unroll
    for (i32 i = 0; i < 80; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
"#,
};
const PRELUDE: &str = "struct SampleParams { float* x; int n; };";
const SM_90A: Arch = Arch::new(9, 0, true);

fn factor() -> [(&'static str, String); 1] {
    [("FACTOR", "2".to_string())]
}

fn request<'a>(defines: &'a [(&'a str, String)], arch: Arch) -> Request<'a> {
    Request { prelude: PRELUDE, defines, ..Request::new(&SOURCE, arch) }
}

/// The NVRTC of this major version, if the machine has it.
fn nvrtc(major: i32) -> Option<Nvrtc> {
    if let Some(path) = std::env::var_os(format!("WARPSMITH_TEST_NVRTC{major}")) {
        // A library that was named must load.
        return Some(nvrtc::open(Path::new(&path)).unwrap());
    }
    let found = nvrtc::find().ok().filter(|nvrtc| nvrtc.version().0 == major);
    if found.is_none() {
        println!("skipped: no NVRTC {major}");
    }
    Some(nvrtc::open(found?.path()).unwrap())
}

fn any_nvrtc() -> Option<Nvrtc> {
    nvrtc(13).or_else(|| nvrtc(12))
}

fn archs(nvrtc: &Nvrtc) -> Vec<Arch> {
    let wanted =
        ["60", "70", "75", "80", "86", "89", "90a", "100a", "120a"].map(|name| name.parse::<Arch>().unwrap());
    wanted.into_iter().filter(|arch| nvrtc.supported_archs().contains(&arch.number())).collect()
}

#[test]
fn compiles_for_every_architecture_and_reads_resources() {
    let mut compared = 0;
    for nvrtc in [nvrtc(13), nvrtc(12)].into_iter().flatten() {
        let archs = archs(&nvrtc);
        assert!(archs.len() >= 5, "{nvrtc:?}: {archs:?}");
        for arch in archs {
            let defines = factor();
            let output = nvrtc.compile_with(&request(&defines, arch)).unwrap();
            let resources = inspect::resources(&output.cubin).unwrap();
            let [shared, spills, stack] = &resources[..] else { panic!("{resources:?}") };
            assert_eq!((shared.function.as_str(), shared.stack_bytes), ("sample_shared", 0), "{arch}");
            assert!([512, 1536].contains(&shared.shared_bytes), "{arch}: {shared:?}");
            assert_eq!((stack.function.as_str(), stack.stack_bytes), ("sample_stack", 256), "{arch}");
            assert!(spills.registers <= 64 && spills.stack_bytes > 0, "{arch}: {spills:?}");

            // The compiler's own report says the same.
            let reported = inspect::spills(&output.log);
            assert_eq!(reported.len(), 3, "{arch}: {}", output.log);
            for report in &reported {
                let resource = resources.iter().find(|found| found.function == report.function).unwrap();
                assert_eq!(resource.stack_bytes, report.stack_bytes, "{arch}");
                assert_eq!(report.store_bytes > 0, report.function == "sample_spills", "{arch}");
            }
            compared += compare_with_cuobjdump(&nvrtc, &output.cubin, &resources).unwrap_or(0);
        }
    }
    println!("compared {compared} functions with cuobjdump");
}

/// Compares with the toolkit's own reading; the number of functions, or `None` where it is not installed.
fn compare_with_cuobjdump(nvrtc: &Nvrtc, cubin: &[u8], resources: &[inspect::Resources]) -> Option<usize> {
    let beside = nvrtc.path().with_file_name("../bin/cuobjdump");
    let tool = Some(beside).filter(|path| path.exists()).or_else(|| inspect::tool("cuobjdump"))?;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), cubin).unwrap();
    let output = Command::new(tool).arg("-res-usage").arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut function = "";
    let mut seen = 0;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Function ") {
            function = name.trim_end_matches(':');
        } else if line.starts_with("REG:") {
            let fields: BTreeMap<&str, u64> = line
                .split_whitespace()
                .filter_map(|field| field.split_once(':'))
                .map(|(name, value)| (name, value.parse().unwrap()))
                .collect();
            let found = resources.iter().find(|resource| resource.function == function).unwrap();
            let ours = [found.registers.into(), found.stack_bytes.into(), found.shared_bytes];
            assert_eq!(ours, ["REG", "STACK", "SHARED"].map(|name| fields[name]), "{function}");
            seen += 1;
        }
    }
    assert_eq!(seen, resources.len(), "{text}");
    Some(seen)
}

#[test]
fn damaged_cubins_are_read_without_harm() {
    let Some(nvrtc) = any_nvrtc() else { return };
    let defines = factor();
    let cubin = nvrtc.compile_with(&request(&defines, SM_90A)).unwrap().cubin;
    for length in (0..cubin.len()).step_by(7) {
        let _ = inspect::resources(&cubin[..length]);
    }
    for at in 0..cubin.len() {
        let mut damaged = cubin.clone();
        damaged[at] ^= 0xff;
        let _ = inspect::resources(&damaged);
    }
    assert!(inspect::resources(&cubin[..cubin.len() / 2]).is_err());
}

#[test]
fn each_architecture_gets_a_compiler_that_knows_it() {
    let Ok(first) = nvrtc::find() else { return };
    let old: Arch = "60".parse().unwrap();
    assert!(std::ptr::eq(nvrtc::find_for(&[SM_90A]).unwrap(), first));
    // The environment of the tests has NVRTC 12 beside 13; elsewhere there may be no other.
    let found = nvrtc::find_for(&[old, SM_90A]).unwrap();
    let installed = nvrtc(12).is_some_and(|other| {
        std::env::var_os("VIRTUAL_ENV").is_some_and(|environment| other.path().starts_with(environment))
    });
    assert!(found.compiles_for(SM_90A) && (found.compiles_for(old) || !installed), "{found:?}");
}

#[test]
fn two_versions_work_side_by_side() {
    let (Some(new), Some(old)) = (nvrtc(13), nvrtc(12)) else { return };
    assert_eq!((new.version().0, old.version().0), (13, 12));
    let defines = factor();
    thread::scope(|scope| {
        for nvrtc in [&new, &old, &new, &old] {
            let request = request(&defines, SM_90A);
            scope.spawn(move || assert!(nvrtc.compile_with(&request).unwrap().cubin.starts_with(b"\x7fELF")));
        }
    });
    let volta = Arch::new(7, 0, false);
    assert!(old.compile_with(&request(&defines, volta)).is_ok());
    let error = new.compile_with(&request(&defines, volta)).unwrap_err();
    assert!(matches!(&error, Error::Unavailable { why, .. } if why.contains("75")), "{error}");
}

#[test]
fn options_reach_the_compiler() {
    let Some(nvrtc) = any_nvrtc() else { return };
    let defines = factor();
    let base = request(&defines, SM_90A);
    let precise = nvrtc.ptx_with(&base).unwrap();
    assert!(precise.contains(".target sm_90a") && precise.contains("div.rn.f32"), "{precise}");
    let fast = nvrtc.ptx_with(&Request { fast_math: true, ..base.clone() }).unwrap();
    assert!(fast.contains("div.approx.ftz.f32"), "{fast}");

    let code = |profile| nvrtc.compile_with(&Request { profile, ..base.clone() }).unwrap().cubin;
    let has = |cubin: &[u8], name: &str| cubin.windows(name.len()).any(|window| window == name.as_bytes());
    let [release, lines, debug] = [Profile::Release, Profile::LineInfo, Profile::Debug].map(code);
    assert!(!has(&release, ".debug_line") && has(&lines, ".debug_line") && has(&lines, "sample.cu"));
    assert!(!has(&lines, ".debug_info") && has(&debug, ".debug_info"));
    assert!(release == code(Profile::Release), "equal requests give equal code, also after a debug build");
}

#[test]
fn errors_name_the_line_of_the_source() {
    let Some(nvrtc) = any_nvrtc() else { return };
    let cases = [
        ("int a;\nint b = undefined_name;\n", "bad.cu(2)"),
        ("#include \"warpsmith/missing.cuh\"\n", "warpsmith/missing.cuh"),
        ("#include <cuda_fp16.h>\n", "cuda_fp16.h"),
    ];
    for (code, expected) in cases {
        let source = Source { name: "bad", code };
        let error =
            nvrtc.compile_with(&Request { prelude: "\n\n\n", ..Request::new(&source, SM_90A) }).unwrap_err();
        assert!(
            matches!(&error, Error::Compile { kernel, arch, log }
            if kernel == "bad" && arch == "sm_90a" && log.contains(expected)),
            "{error}"
        );
    }
    let defines = [("FACTOR -DX", "2".to_string())];
    assert!(matches!(nvrtc.compile_with(&request(&defines, SM_90A)), Err(Error::Parse { .. })));
}

#[test]
fn caches_and_packs_what_nvrtc_makes() {
    let Some(nvrtc) = any_nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let defines = factor();
    let requests = [request(&defines, SM_90A), request(&defines, Arch::new(8, 0, false))];
    let built = pack::build_with(&nvrtc, &requests, &folder.path().join("pack"), &|_| {}).unwrap();
    assert_eq!(built.nvrtc_version(), nvrtc.version());
    built.verify().unwrap();

    let toolchain = Toolchain::Given(std::sync::Arc::new(nvrtc));
    let cache = || Cache::at(folder.path().join("cache"));
    let compiled = Jit::new(Vec::new(), cache(), toolchain.clone()).get(&requests[0]).unwrap();
    assert!(matches!(compiled.origin, Origin::Built { .. }));
    let again = Jit::new(Vec::new(), cache(), toolchain).get(&requests[0]).unwrap();
    assert!(matches!(again.origin, Origin::Disk(_)));
    assert!(again.cubin == compiled.cubin && again.log == compiled.log);

    let packed = Jit::new(vec![built], Cache::at(folder.path().join("none")), Toolchain::Off);
    assert!(packed.get(&requests[0]).unwrap().cubin == compiled.cubin);
    let ada = packed.get(&request(&defines, Arch::new(8, 9, false))).unwrap();
    assert!(ada.cubin == packed.get(&requests[1]).unwrap().cubin);
}

#[test]
fn disassembles_where_a_tool_is_installed() {
    let Some(nvrtc) = any_nvrtc() else { return };
    let defines = factor();
    let cubin = nvrtc.compile_with(&request(&defines, SM_90A)).unwrap().cubin;
    match inspect::sass(&cubin) {
        Ok(text) => assert!(text.contains("sample_shared") && text.contains("EXIT"), "{text}"),
        Err(Error::Unavailable { fix, .. }) => assert!(fix.contains("pip install"), "{fix}"),
        Err(error) => panic!("{error}"),
    }
}
