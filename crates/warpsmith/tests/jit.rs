//! The path from a request to code, with a stand-in for the compiler: races, damage, packs. Needs no NVRTC.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use warpsmith::jit::cache::{Cache, EntryId};
use warpsmith::jit::pack::{self, Pack};
use warpsmith::jit::{
    Arch, CompileEvent, Compiled, Compiler, Jit, Origin, Output, Request, Source, Toolchain,
    observe_compilation,
};
use warpsmith::{Error, Result};

static SOURCE: Source = Source { name: "scale", code: "extern \"C\" __global__ void scale() {}" };
const SM_80: Arch = Arch::new(8, 0, false);
const SM_90A: Arch = Arch::new(9, 0, true);
const VERSION: (i32, i32) = (13, 0);

/// Gives bytes made from the request, and leaves a file in a folder for each call.
struct Fake {
    calls: PathBuf,
    version: (i32, i32),
    takes: Duration,
}

impl Fake {
    fn new(calls: &Path) -> Arc<Fake> {
        fs::create_dir_all(calls).unwrap();
        Arc::new(Fake { calls: calls.into(), version: VERSION, takes: Duration::from_millis(5) })
    }

    fn calls(&self) -> usize {
        fs::read_dir(&self.calls).unwrap().count()
    }
}

impl Compiler for Fake {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, request: &Request) -> Result<Output> {
        static CALL: AtomicUsize = AtomicUsize::new(0);
        let call = CALL.fetch_add(1, Ordering::Relaxed);
        File::create_new(self.calls.join(format!("{}-{call}", std::process::id()))).unwrap();
        thread::sleep(self.takes);
        if request.source.name == "broken" {
            return Err(Error::Compile {
                kernel: "broken".into(),
                arch: request.arch.to_string(),
                log: "no".into(),
            });
        }
        Ok(Output { cubin: code_of(request), log: "used 8 registers\n".into() })
    }
}

fn code_of(request: &Request) -> Vec<u8> {
    request.key().to_string().repeat(100).into_bytes()
}

fn id_of(request: &Request) -> EntryId {
    EntryId { key: request.key(), arch: request.arch, nvrtc: VERSION }
}

/// Requests that differ in a define.
fn defines(count: usize) -> Vec<[(&'static str, String); 1]> {
    (0..count).map(|value| [("N", value.to_string())]).collect()
}

struct Bench {
    folder: tempfile::TempDir,
    compiler: Arc<Fake>,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let compiler = Fake::new(&folder.path().join("calls"));
        Bench { folder, compiler }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn cache(&self) -> Cache {
        Cache::at(self.path("cache"))
    }

    /// A process that starts anew: nothing in memory.
    fn fresh(&self) -> Jit {
        Jit::new(Vec::new(), self.cache(), Toolchain::Given(self.compiler.clone()))
    }

    /// Runs [`worker`] in another process.
    fn spawn(&self, job: &str) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--nocapture"])
            .env("WARPSMITH_TEST_JOB", job)
            .env("WARPSMITH_TEST_FOLDER", self.folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

fn is_built(compiled: &Compiled) -> bool {
    matches!(compiled.origin, Origin::Built { .. })
}

/// What other processes do in the tests below; by itself it does nothing.
#[test]
fn worker() {
    let (Ok(job), Some(folder)) =
        (std::env::var("WARPSMITH_TEST_JOB"), std::env::var_os("WARPSMITH_TEST_FOLDER"))
    else {
        return;
    };
    let folder = PathBuf::from(folder);
    let calls = folder.join("calls");
    let jit = |takes| {
        let compiler = Fake { calls: calls.clone(), version: VERSION, takes };
        Jit::new(Vec::new(), Cache::at(folder.join("cache")), Toolchain::Given(Arc::new(compiler)))
    };
    match job.as_str() {
        "race" => race(&jit(Duration::from_millis(5))),
        "hold the lock" => drop(jit(Duration::from_secs(3600)).get(&Request::new(&SOURCE, SM_80))),
        "write" => {
            let cache = Cache::at(folder.join("cache"));
            for defines in defines(500) {
                let request = Request { defines: &defines, ..Request::new(&SOURCE, SM_80) };
                cache.put(&id_of(&request), "scale", &vec![7; 1 << 20], "").unwrap();
            }
        }
        "environment" => {
            let found = warpsmith::jit::get(&Request::new(&SOURCE, SM_90A)).unwrap();
            assert!(matches!(found.origin, Origin::Pack(_)), "{:?}", found.origin);
            let missing =
                warpsmith::jit::get(&Request::new(&SOURCE, Arch::new(7, 5, false))).unwrap_err().to_string();
            assert!(missing.contains("WARPSMITH_DISABLE_JIT"), "{missing}");
        }
        "missing pack" => {
            let error = warpsmith::jit::get(&Request::new(&SOURCE, SM_90A)).unwrap_err();
            assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("index.json")), "{error}");
        }
        other => panic!("no job is named {other}"),
    }
}

const RACE_KEYS: usize = 4;

/// Sixteen threads ask for the same kernels at once.
fn race(jit: &Jit) {
    let defines = defines(RACE_KEYS);
    thread::scope(|scope| {
        for start in 0..16 {
            let defines = &defines;
            scope.spawn(move || {
                for step in 0..RACE_KEYS {
                    let defines = &defines[(start + step) % RACE_KEYS];
                    let request = Request { defines, ..Request::new(&SOURCE, SM_80) };
                    assert_eq!(*jit.get(&request).unwrap().cubin, code_of(&request));
                }
            });
        }
    });
}

#[test]
fn threads_compile_each_kernel_once() {
    let bench = Bench::new();
    race(&bench.fresh());
    assert_eq!(bench.compiler.calls(), RACE_KEYS);
}

#[test]
fn threads_compile_each_kernel_once_without_a_cache() {
    let bench = Bench::new();
    fs::write(bench.path("file"), "").unwrap();
    let jit =
        Jit::new(Vec::new(), Cache::at(bench.path("file/cache")), Toolchain::Given(bench.compiler.clone()));
    race(&jit);
    assert_eq!(bench.compiler.calls(), RACE_KEYS);
    assert!(jit.cache().warning().unwrap().contains("cache not used"), "{:?}", jit.cache().warning());
}

#[test]
fn processes_compile_each_kernel_once() {
    for _ in 0..3 {
        let bench = Bench::new();
        let children: Vec<Child> = (0..8).map(|_| bench.spawn("race")).collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(bench.compiler.calls(), RACE_KEYS);
        assert_eq!(bench.cache().entries().len(), RACE_KEYS);
        let locks = fs::read_dir(bench.path("cache/kernels/locks")).unwrap().count();
        assert_eq!(locks, 0, "locks are removed when released");
    }
}

#[test]
fn a_killed_holder_blocks_nobody() {
    let bench = Bench::new();
    let mut child = bench.spawn("hold the lock");
    while bench.compiler.calls() == 0 {
        thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_built(&bench.fresh().get(&Request::new(&SOURCE, SM_80)).unwrap()));
}

#[test]
fn a_killed_writer_leaves_no_bad_entry() {
    let bench = Bench::new();
    let folder = bench.path("cache/kernels/sm_80");
    let names =
        || fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    for round in 1..=5 {
        let mut child = bench.spawn("write");
        while !folder.exists() || names().count() < round {
            thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let listed = names().filter(|name| name.ends_with(".cubin")).count();
        assert_eq!(bench.cache().entries().len(), listed);
    }

    // What a killed writer leaves is not an entry, and goes when it is old.
    let left = folder.join(".aside-1-0-0");
    fs::write(&left, "half an entry").unwrap();
    let request = Request::new(&SOURCE, SM_80);
    bench.fresh().get(&request).unwrap();
    assert!(left.exists(), "a young file may still be written to");
    File::options().write(true).open(&left).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    bench.cache().put(&id_of(&request), "scale", b"code", "").unwrap();
    assert!(!left.exists());
}

#[test]
fn answers_from_memory_then_disk() {
    let bench = Bench::new();
    let request = Request::new(&SOURCE, SM_80);
    let jit = bench.fresh();
    let first = jit.get(&request).unwrap();
    assert!(is_built(&first));
    assert!(Arc::ptr_eq(&first, &jit.get(&request).unwrap()));

    let second = bench.fresh().get(&request).unwrap();
    assert!(matches!(&second.origin, Origin::Disk(path) if path.exists()), "{:?}", second.origin);
    assert_eq!((&second.cubin, &second.log, second.key), (&first.cubin, &first.log, first.key));
    assert_eq!(bench.compiler.calls(), 1);

    // Another compiler's code is not taken, unless there is no compiler at all.
    let newer = Fake { calls: bench.path("calls"), version: (13, 1), takes: Duration::ZERO };
    let jit = Jit::new(Vec::new(), bench.cache(), Toolchain::Given(Arc::new(newer)));
    assert!(is_built(&jit.get(&request).unwrap()));
    let off = Jit::new(Vec::new(), bench.cache(), Toolchain::Off).get(&request).unwrap();
    assert!(matches!(&off.origin, Origin::Disk(path) if path.to_str().unwrap().contains("nvrtc13.1")));
}

#[test]
fn compilations_are_told_about_and_nothing_else() {
    static EVENTS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    // Other tests compile meanwhile.
    assert!(observe_compilation(|event| match event {
        CompileEvent::Started { kernel: "watched" } => EVENTS.lock().unwrap().push("started".into()),
        CompileEvent::Ended { kernel: "watched", ms } => EVENTS.lock().unwrap().push(format!("{}", ms >= 5)),
        _ => {}
    }));
    assert!(!observe_compilation(|_| ()), "there is one already");
    let bench = Bench::new();
    let watched = Source { name: "watched", code: SOURCE.code };
    let jit = bench.fresh();
    for jit in [&jit, &jit, &bench.fresh()] {
        jit.get(&Request::new(&watched, SM_80)).unwrap();
        assert_eq!(*EVENTS.lock().unwrap(), ["started", "true"], "once, then from memory and from disk");
    }
}

#[test]
fn a_kernel_that_does_not_compile_is_tried_once() {
    let bench = Bench::new();
    let broken = Source { name: "broken", code: "?" };
    let jit = bench.fresh();
    for _ in 0..2 {
        assert!(matches!(jit.get(&Request::new(&broken, SM_80)), Err(Error::Compile { .. })));
    }
    assert_eq!(bench.compiler.calls(), 1);
    assert!(bench.cache().entries().is_empty());
}

#[test]
fn damaged_entries_are_rebuilt() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 12] = [
        ("empty", |path| fs::write(path, "").unwrap()),
        ("garbage", |path| fs::write(path, vec![0xa5; 5000]).unwrap()),
        ("truncated", |path| {
            let length = path.metadata().unwrap().len();
            File::options().write(true).open(path).unwrap().set_len(length - 1).unwrap();
        }),
        ("cut in the prefix", |path| File::options().write(true).open(path).unwrap().set_len(20).unwrap()),
        ("longer", |path| {
            let bytes = [fs::read(path).unwrap(), vec![0]].concat();
            fs::write(path, bytes).unwrap();
        }),
        ("bit flipped in the code", |path| flip(path, |length| length - 1)),
        ("bit flipped in the description", |path| flip(path, |_| 60)),
        ("bit flipped in the checksum", |path| flip(path, |_| 10)),
        ("link to a good entry", |path| {
            let real = path.with_extension("real");
            fs::rename(path, &real).unwrap();
            symlink(real, path).unwrap();
        }),
        ("writable by the group", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o620)).unwrap()
        }),
        ("writable by all", |path| fs::set_permissions(path, fs::Permissions::from_mode(0o602)).unwrap()),
        ("entry of another key", |path| {
            let defines = [("OTHER", String::new())];
            let other = Request { defines: &defines, ..Request::new(&SOURCE, SM_80) };
            let cache = Cache::at(path.ancestors().nth(3).unwrap());
            fs::rename(cache.put(&id_of(&other), "scale", b"other code", "").unwrap(), path).unwrap();
        }),
    ];
    for (name, damage) in damages {
        let bench = Bench::new();
        let request = Request::new(&SOURCE, SM_80);
        bench.fresh().get(&request).unwrap();
        let path = bench.cache().entries().remove(0).path;
        damage(&path);
        assert!(bench.cache().get(&id_of(&request)).is_none(), "{name}");
        assert!(bench.cache().entries().is_empty(), "{name}");
        let rebuilt = bench.fresh().get(&request).unwrap();
        assert!(is_built(&rebuilt), "{name}");
        assert_eq!(*rebuilt.cubin, code_of(&request), "{name}");
        assert!(
            matches!(bench.fresh().get(&request).unwrap().origin, Origin::Disk(_)),
            "{name}: stored again"
        );
    }
}

fn flip(path: &Path, position: fn(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = position(bytes.len());
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn entries_and_folders_of_others_are_not_used() {
    let bench = Bench::new();
    let request = Request::new(&SOURCE, SM_80);
    bench.fresh().get(&request).unwrap();
    let path = bench.cache().entries().remove(0).path;
    if std::os::unix::fs::chown(&path, Some(12345), None).is_err() {
        println!("skipped: only root can give files away");
        return;
    }
    assert!(is_built(&bench.fresh().get(&request).unwrap()));
    for folder in ["cache/kernels/sm_80", "cache/kernels", "cache"] {
        std::os::unix::fs::chown(bench.path(folder), Some(12345), None).unwrap();
        let jit = bench.fresh();
        assert!(is_built(&jit.get(&request).unwrap()), "{folder}");
        assert!(jit.cache().warning().unwrap().contains("another user"), "{:?}", jit.cache().warning());
        std::os::unix::fs::chown(bench.path(folder), Some(0), None).unwrap();
    }
    assert!(matches!(bench.fresh().get(&request).unwrap().origin, Origin::Disk(_)));
}

#[test]
fn folders_are_private_and_open_ones_are_not_used() {
    let bench = Bench::new();
    let request = Request::new(&SOURCE, SM_80);
    bench.fresh().get(&request).unwrap();
    for folder in ["cache", "cache/kernels", "cache/kernels/sm_80"] {
        assert_eq!(bench.path(folder).metadata().unwrap().permissions().mode() & 0o777, 0o700, "{folder}");
    }
    fs::set_permissions(bench.path("cache/kernels"), fs::Permissions::from_mode(0o777)).unwrap();
    let jit = bench.fresh();
    assert!(is_built(&jit.get(&request).unwrap()));
    assert!(jit.cache().warning().unwrap().contains("written by other users"), "{:?}", jit.cache().warning());
}

#[test]
fn lists_and_clears_entries_alone() {
    let bench = Bench::new();
    let jit = bench.fresh();
    for arch in [SM_90A, SM_80] {
        jit.get(&Request::new(&SOURCE, arch)).unwrap();
    }
    let cache = bench.cache();
    let entries = cache.entries();
    let seen: Vec<(&str, Arch)> =
        entries.iter().map(|entry| (entry.kernel.as_str(), entry.id.arch)).collect();
    assert_eq!(seen, [("scale", SM_80), ("scale", SM_90A)]);
    assert!(
        entries.iter().all(|entry| entry.bytes > 6400 && entry.modified.elapsed().unwrap().as_secs() < 60)
    );

    fs::write(bench.path("cache/kernels/sm_80/notes.txt"), "mine").unwrap();
    let cleared = cache.clear().unwrap();
    assert_eq!((cleared.files, cleared.bytes), (2, entries.iter().map(|entry| entry.bytes).sum()));
    assert!(cache.entries().is_empty());
    assert!(bench.path("cache/kernels/sm_80/notes.txt").exists());
    assert_eq!(Cache::at(bench.path("never made")).clear().unwrap().files, 0);
    assert!(!bench.path("never made").exists(), "looking creates nothing");
}

#[test]
fn packs_work_without_a_compiler_and_on_later_minors() {
    let bench = Bench::new();
    let defines = [("N", "3".to_string())];
    let special = Request { defines: &defines, ..Request::new(&SOURCE, SM_80) };
    let requests =
        [Request::new(&SOURCE, SM_80), Request::new(&SOURCE, SM_90A), special, Request::new(&SOURCE, SM_80)];
    let seen = AtomicUsize::new(0);
    let out = bench.path("packs/mine");
    let progress = |progress: pack::Progress| {
        assert_eq!(progress.total, 3, "equal requests are compiled once");
        seen.fetch_max(progress.done, Ordering::Relaxed);
    };
    let built = pack::build_with(&*bench.compiler, &requests, &out, &progress).unwrap();
    assert_eq!((seen.into_inner(), built.entries().len(), built.nvrtc_version()), (3, 3, VERSION));
    built.verify().unwrap();

    let open = || vec![Pack::open(&out).unwrap()];
    let jit = Jit::new(open(), Cache::at(bench.path("none")), Toolchain::Off);
    for request in &requests {
        let found = jit.get(request).unwrap();
        assert!(matches!(&found.origin, Origin::Pack(path) if path.starts_with(&out)));
        assert_eq!(*found.cubin, code_of(request));
    }
    // A cubin also runs on later minors of its major, and on nothing else.
    let on = |major, minor, accel| jit.get(&Request::new(&SOURCE, Arch::new(major, minor, accel)));
    for minor in [6, 9] {
        assert_eq!(*on(8, minor, false).unwrap().cubin, code_of(&requests[0]));
    }
    for (major, minor, accel) in [(7, 5, false), (8, 7, false), (9, 0, false), (10, 0, true)] {
        let error = on(major, minor, accel).unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }
    let other = Source { code: "changed", ..SOURCE };
    assert!(jit.get(&Request::new(&other, SM_80)).is_err());

    // The same through the environment, in a process of its own.
    for (job, pack) in [("environment", out.clone()), ("missing pack", bench.path("nowhere"))] {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker"])
            .envs([("WARPSMITH_TEST_JOB", job), ("WARPSMITH_DISABLE_JIT", "1")])
            .env("WARPSMITH_TEST_FOLDER", bench.folder.path())
            .env("WARPSMITH_KERNEL_PACK", pack)
            .env("WARPSMITH_CACHE_DIR", bench.path("none"))
            .status();
        assert!(status.unwrap().success(), "{job}");
    }
}

#[test]
fn packs_are_replaced_whole_or_not_at_all() {
    let bench = Bench::new();
    let out = bench.path("pack");
    let quiet = |_: pack::Progress| {};
    let build = |requests: &[Request]| pack::build_with(&*bench.compiler, requests, &out, &quiet);
    build(&[Request::new(&SOURCE, SM_80)]).unwrap();
    let index = fs::read(out.join("index.json")).unwrap();

    let broken = Source { name: "broken", code: "?" };
    assert!(matches!(
        build(&[Request::new(&SOURCE, SM_90A), Request::new(&broken, SM_80)]),
        Err(Error::Compile { .. })
    ));
    assert_eq!(fs::read(out.join("index.json")).unwrap(), index);
    assert_eq!(build(&[Request::new(&SOURCE, SM_90A)]).unwrap().entries()[0].arch, SM_90A);
    build(&[Request::new(&SOURCE, SM_80)]).unwrap();
    assert_eq!(fs::read(out.join("index.json")).unwrap(), index, "equal input, equal pack");
    let rest: Vec<_> =
        fs::read_dir(bench.folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(rest.len(), 2, "nothing is left beside the pack: {rest:?}");

    let foreign = bench.path("documents");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("thesis.txt"), "years of work").unwrap();
    let refused = pack::build_with(&*bench.compiler, &[], &foreign, &quiet).unwrap_err();
    assert!(refused.to_string().contains("left alone"), "{refused}");
    assert!(foreign.join("thesis.txt").exists());
}

#[test]
fn folders_with_more_than_a_pack_are_left_alone() {
    let bench = Bench::new();
    let build = |out: &Path| {
        let built = pack::build_with(&*bench.compiler, &[Request::new(&SOURCE, SM_80)], out, &|_| {});
        built.map(drop).map_err(|error| error.to_string())
    };
    // Others have an index.json too.
    let foreign = bench.path("site");
    fs::create_dir(&foreign).unwrap();
    for index in ["{}", "not JSON", r#"{"format": 1}"#, r#"{"entries": [{"file": "page.html"}]}"#] {
        fs::write(foreign.join("index.json"), index).unwrap();
        assert!(build(&foreign).unwrap_err().contains("left alone"), "{index}");
        assert_eq!(fs::read_to_string(foreign.join("index.json")).unwrap(), index);
    }
    let out = bench.path("pack");
    build(&out).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    assert!(build(&out).unwrap_err().contains("left alone"));
    assert!(out.join("notes.txt").exists());
    fs::remove_file(out.join("notes.txt")).unwrap();
    // A pack of another version is one.
    let index = fs::read_to_string(out.join("index.json")).unwrap();
    fs::write(out.join("index.json"), index.replace("\"format\": 1", "\"format\": 7")).unwrap();
    assert!(pack::Pack::open(&out).is_err());
    build(&out).unwrap();
    assert_eq!(fs::read_to_string(out.join("index.json")).unwrap(), index);
}

#[test]
fn damaged_packs_are_refused() {
    let bench = Bench::new();
    let request = Request::new(&SOURCE, SM_80);
    let out = bench.path("pack");
    let rebuild =
        || pack::build_with(&*bench.compiler, std::slice::from_ref(&request), &out, &|_| {}).unwrap();
    let cubin = out.join(&rebuild().entries()[0].file);
    let index = fs::read_to_string(out.join("index.json")).unwrap();
    let file = cubin.file_name().unwrap().to_str().unwrap();

    flip(&cubin, |length| length / 2);
    let pack = Pack::open(&out).unwrap();
    assert!(pack.verify().is_err());
    let jit = Jit::new(vec![pack], bench.cache(), Toolchain::Given(bench.compiler.clone()));
    assert!(matches!(jit.get(&request), Err(Error::Io { path, .. }) if path == cubin));

    rebuild();
    fs::write(out.join("../escape"), fs::read(&cubin).unwrap()).unwrap();
    let edits = [
        index.replace("\"format\": 1", "\"format\": 2"),
        index.replace(file, "../escape"),
        index.replace(file, "missing.cubin"),
        index.replace("\"bytes\": ", "\"bytes\": 1"),
        index.replace("sm_80\"", "sm_8x\""),
        index[..index.len() / 2].to_string(),
        String::new(),
    ];
    for edit in edits {
        assert_ne!(edit, index);
        fs::write(out.join("index.json"), &edit).unwrap();
        assert!(matches!(Pack::open(&out), Err(Error::Io { .. })), "{edit}");
    }
}
