//! Threads for the CPU kernels: one loop, split into parts.
//!
//! Kernels here often run for a few microseconds, less than it takes to wake a thread. So workers watch for the next
//! loop for a moment after the last one and sleep after that; a caller works on its own loop and never waits for a
//! worker that has not begun.
//!
//! Each thread has a share of the loop and goes through it in order, so that what it has asked memory for ahead of one part
//! is there when it begins the next. Who is done with the own share takes from the end of another's.
//!
//! Loops of several callers at the same time have a lane each. A worker that finds no more parts in one goes to the next.

use super::scratch::{self, Need, Region};
use crate::env;
use crate::error::{Error, Result};
use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker, or a caller whose own share is done, watches before it sleeps.
const WATCH: Duration = Duration::from_micros(40);
/// Parts of a thread's share. The smaller, the less a thread that is slowed by others makes the rest wait; as long as many
/// are left, several are worked on as one.
const PARTS_PER_THREAD: usize = 8;
/// Bytes that the scratch of a thread is a multiple of, so that no two threads write to neighbouring lines.
const PAGE: usize = 4096;
/// More threads than this are refused as a mistake.
const MAX_THREADS: usize = 4096;

/// The number of threads asked for by [`env::NUM_THREADS`], else as many as the process may use.
///
/// # Errors
/// If the variable is not a number from 1 to 4096.
pub fn configured_threads() -> Result<usize> {
    match env::get(env::NUM_THREADS) {
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        Some(text) => match text.parse() {
            Ok(n) if (1..=MAX_THREADS).contains(&n) => Ok(n),
            _ => Err(Error::parse(env::NUM_THREADS, format!("a number from 1 to {MAX_THREADS}"), text)),
        },
    }
}

thread_local! {
    /// The size set by `with_threads`; 0 where none is.
    static OVERRIDE: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread is inside a part of a parallel loop.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The number of threads [`parallel_for`] uses when called from here.
///
/// [`configured_threads`], read once (an unreadable setting counts as none), unless inside [`with_threads`].
pub fn num_threads() -> usize {
    match OVERRIDE.get() {
        0 => default_threads(),
        n => n,
    }
}

fn default_threads() -> usize {
    static DEFAULT: OnceLock<usize> = OnceLock::new();
    *DEFAULT.get_or_init(|| {
        configured_threads().unwrap_or_else(|_| std::thread::available_parallelism().map_or(1, usize::from))
    })
}

/// Runs `f` with [`num_threads`] set to `n` (held to `1..=4096`) for calls made on this thread.
///
/// Threads that were started stay. However many sizes are used, there are about twice as many as the largest asks for.
pub fn with_threads<R>(n: usize, f: impl FnOnce() -> R) -> R {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            OVERRIDE.set(self.0);
        }
    }
    let _restore = Restore(OVERRIDE.replace(n.clamp(1, MAX_THREADS)));
    f()
}

/// Calls `f` on contiguous parts that together cover `0..len`, each once, on up to [`num_threads`] threads.
///
/// Parts hold at least `grain` indices (but for the last). With `len <= grain`, or inside another parallel loop,
/// `f(0..len)` runs on the calling thread alone. Loops of several threads at the same time share the workers. How `0..len`
/// is split is unspecified, so what `f` does for an index must not depend on the part it comes in.
///
/// # Panics
/// If `f` panics, with its payload, after every running part has ended.
// Inline, as `dispatch` is: a kernel is then compiled with its op, and not with all others in one unit of code generation.
#[inline]
pub fn parallel_for(len: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
    if len == 0 {
        return;
    }
    let threads = num_threads();
    if len <= grain || threads == 1 || INSIDE.get() {
        return f(0..len);
    }
    Pool::of_size(threads).run(threads, len, part_len(len, grain, threads), &|_, range| f(range));
}

/// [`parallel_for`] with scratch for each part, as much as `need` says. What is in it was left by others.
///
/// The memory is the calling thread's, for all threads: a call that was made before allocates nothing, whichever threads
/// take part.
///
/// # Panics
/// As [`parallel_for`].
#[inline]
pub fn parallel_for_with_scratch(
    len: usize,
    grain: usize,
    need: Need,
    f: impl Fn(Range<usize>, Region<'_>) + Sync,
) {
    if len == 0 {
        return;
    }
    let threads = num_threads();
    if len <= grain || threads == 1 || INSIDE.get() {
        return scratch::with(need, |region| f(0..len, region));
    }
    let all = need.times(threads, PAGE);
    scratch::with(all, |mut region| {
        let each = all.bytes() / threads;
        let all = AllScratch(region.slice::<u8>(all.bytes()).as_mut_ptr());
        Pool::of_size(threads).run(threads, len, part_len(len, grain, threads), &|thread, range| {
            // SAFETY: the memory has room for every thread, no two work on parts under the same number at a time, and the
            // loop ends before its scope does.
            f(range, unsafe { Region::new(all.of(thread, each), each) });
        });
    });
}

/// The scratch of all threads of a loop.
struct AllScratch(*mut u8);

// SAFETY: each thread uses its own part.
unsafe impl Sync for AllScratch {}

impl AllScratch {
    fn of(&self, thread: usize, each: usize) -> *mut u8 {
        self.0.wrapping_add(thread * each)
    }
}

/// Indices of a part.
fn part_len(len: usize, grain: usize, threads: usize) -> usize {
    grain.max(len.div_ceil(threads * PARTS_PER_THREAD))
}

/// What is left of the parts of one thread: the first in the upper half, the end in the lower. On a cache line of its own.
#[repr(align(64))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, parts: Range<usize>) {
        self.0.store((parts.start as u64) << 32 | parts.end as u64, Ordering::Relaxed);
    }

    /// Half of what is left, but one part at least: the first of it, or the last.
    fn take(&self, first: bool) -> Option<Range<usize>> {
        let mut taken = None;
        let keep = |left: u64| {
            let (start, end) = (left >> 32, left & u32::MAX as u64);
            if start == end {
                return None;
            }
            let half = (end - start).div_ceil(2);
            let (middle, rest) = match first {
                true => (start + half, start + half..end),
                false => (end - half, start..end - half),
            };
            taken = Some(if first { start as usize..middle as usize } else { middle as usize..end as usize });
            Some(rest.start << 32 | rest.end)
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, keep).ok().and(taken)
    }
}

/// One parallel loop, on its caller's stack.
struct Job<'a> {
    /// Is given the number of the thread among those of the loop, and a range.
    f: &'a (dyn Fn(usize, Range<usize>) + Sync),
    len: usize,
    part: usize,
    shares: &'a [Share],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Works on parts until none are left, those of share `own` first. A worker without a share has no part in the loop.
    fn work(&self, own: usize) {
        if own >= self.shares.len() {
            return;
        }
        let was_inside = INSIDE.replace(true);
        while let Some(parts) = self.take(own) {
            let range = parts.start * self.part..self.len.min(parts.end.saturating_mul(self.part));
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.f)(own, range))) {
                self.shares.iter().for_each(|share| share.set(0..0));
                lock(&self.panic).get_or_insert(payload);
            }
        }
        INSIDE.set(was_inside);
    }

    fn take(&self, own: usize) -> Option<Range<usize>> {
        let others = self.shares[own + 1..].iter().chain(&self.shares[..own]);
        self.shares[own].take(true).or_else(|| others.into_iter().find_map(|share| share.take(false)))
    }
}

/// Locks, poisoned or not: no code that can panic runs under the locks of this file.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set in `gate` while workers may enter the loop.
const OPEN: u64 = 1 << 31;
/// One loop further in `gate`; the low half counts the workers inside.
const ROUND: u64 = 1 << 32;
const INSIDE_COUNT: u64 = OPEN - 1;

/// Loops of one pool that can run at the same time. A caller that finds no free lane works alone.
const LANES: usize = 4;

/// Workers for loops of up to so many threads; lives as long as the process.
struct Pool {
    lanes: [Lane; LANES],
    /// Loops begun so far, in all lanes: what idle workers watch.
    begun: AtomicU64,
    /// Workers asleep, or about to be; changed under `sleep`.
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// Where one loop at a time runs.
#[repr(align(64))]
struct Lane {
    /// Held by the caller whose loop runs.
    caller: Mutex<()>,
    /// Loop number, `OPEN` flag and number of workers inside, in one word: a worker enters only by an exchange that
    /// finds the gate open, so once the caller has closed it and the count is zero, nobody holds the job.
    gate: AtomicU64,
    job: AtomicPtr<()>,
    /// Of the loop that runs: the caller's, then one for each worker.
    shares: Box<[Share]>,
    /// For a caller that sleeps until the workers inside have left.
    leave: Mutex<()>,
    left: Condvar,
}

impl Pool {
    /// A pool with at least so many threads. There are few: one of the default size, and for all others those of the powers
    /// of two, of which a loop uses a part.
    fn of_size(threads: usize) -> &'static Pool {
        static POOLS: OnceLock<Mutex<HashMap<usize, &'static Pool>>> = OnceLock::new();
        thread_local! {
            static RECENT: Cell<Option<(usize, &'static Pool)>> = const { Cell::new(None) };
        }
        if let Some((size, pool)) = RECENT.get()
            && size == threads
        {
            return pool;
        }
        let size = if threads == default_threads() { threads } else { threads.next_power_of_two() };
        let pool =
            *lock(POOLS.get_or_init(Default::default)).entry(size).or_insert_with(|| Pool::start(size));
        RECENT.set(Some((threads, pool)));
        pool
    }

    fn start(threads: usize) -> &'static Pool {
        let pool: &'static Pool = Box::leak(Box::new(Pool {
            lanes: std::array::from_fn(|_| Lane::new(threads)),
            begun: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        }));
        for i in 1..threads {
            // A system out of threads leaves the pool smaller; the callers do the work of those missing.
            let name = format!("warpsmith-{threads}-{i}");
            if std::thread::Builder::new().name(name).spawn(move || pool.serve(i)).is_err() {
                break;
            }
        }
        pool
    }

    /// Runs a loop on the caller and `threads - 1` workers, the first of the pool.
    fn run(&self, threads: usize, len: usize, part: usize, f: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let mut free = self.lanes.iter().filter_map(|lane| Some((lane, lane.caller.try_lock().ok()?)));
        let Some((lane, caller)) = free.next() else {
            return f(0, 0..len);
        };
        let (parts, shares) = (len.div_ceil(part), &lane.shares[..threads]);
        for (i, share) in shares.iter().enumerate() {
            share.set(parts * i / threads..parts * (i + 1) / threads);
        }
        let job = Job { f, len, part, shares, panic: Mutex::new(None) };
        lane.open(&job);
        self.begun.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // Under the lock a worker is either not yet counted, and will see that a loop has begun, or already waiting.
            let _sleep = lock(&self.sleep);
            self.wake.notify_all();
        }
        job.work(0);
        lane.close();
        if let Some(payload) = lock(&job.panic).take() {
            drop(caller);
            resume_unwind(payload);
        }
    }

    /// The life of the worker that has share `own`.
    fn serve(&self, own: usize) -> ! {
        let mut begun = 0;
        let mut seen = [0; LANES];
        loop {
            let unchanged = || self.begun.load(Ordering::SeqCst) == begun;
            if watch_while(unchanged) {
                let mut guard = lock(&self.sleep);
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                while unchanged() {
                    guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
            }
            begun = self.begun.load(Ordering::Acquire);
            // Each worker begins elsewhere, so that loops that run at the same time all get some.
            for at in (0..LANES).map(|i| (own + i) % LANES) {
                self.lanes[at].help(own, &mut seen[at]);
            }
        }
    }
}

impl Lane {
    fn new(threads: usize) -> Lane {
        Lane {
            caller: Mutex::new(()),
            gate: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            shares: (0..threads).map(|_| Share(AtomicU64::new(0))).collect(),
            leave: Mutex::new(()),
            left: Condvar::new(),
        }
    }

    /// Lets workers into a loop. To be closed before the job goes.
    fn open(&self, job: &Job<'_>) {
        self.job.store((&raw const *job).cast_mut().cast(), Ordering::Relaxed);
        // The count is zero here: the caller before waited for that.
        let round = (self.gate.load(Ordering::Relaxed) & !(ROUND - 1)).wrapping_add(ROUND);
        self.gate.store(round | OPEN, Ordering::SeqCst);
    }

    /// Lets no more workers in, and waits for those inside.
    fn close(&self) {
        if self.gate.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE_COUNT == 0 {
            return;
        }
        let occupied = || self.gate.load(Ordering::Acquire) & INSIDE_COUNT > 0;
        if watch_while(occupied) {
            let mut guard = lock(&self.leave);
            while occupied() {
                guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Works on the loop of this lane as the worker that has share `own`, unless it was `seen` before.
    fn help(&self, own: usize, seen: &mut u64) {
        let mut gate = self.gate.load(Ordering::Acquire);
        let round = gate & !(ROUND - 1);
        if round == std::mem::replace(seen, round) {
            return;
        }
        while gate & OPEN != 0 && gate & !(ROUND - 1) == round {
            match self.gate.compare_exchange_weak(gate, gate + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: this worker is counted in the gate, so the caller, whose stack holds the job,
                    // stays in `run` until the count drops below. The store of `job` happened before the gate
                    // opened. The lifetime is only used inside this block.
                    unsafe { &*self.job.load(Ordering::Relaxed).cast::<Job<'_>>() }.work(own);
                    return self.depart();
                }
                Err(now) => gate = now,
            }
        }
    }

    /// Leaves the gate, and wakes the caller if this was the last worker it waits for.
    fn depart(&self) {
        let before = self.gate.fetch_sub(1, Ordering::AcqRel);
        if before & OPEN == 0 && before & INSIDE_COUNT == 1 {
            // The lock orders this after the caller's last look at the count, so it cannot sleep through.
            let _leave = lock(&self.leave);
            self.left.notify_one();
        }
    }
}

/// Spins while `condition` holds, at most for `WATCH`; tells whether it still holds.
fn watch_while(condition: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..64 {
            if !condition() {
                return false;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() >= WATCH {
            return condition();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_index_is_visited_once() {
        for threads in [1, 2, 3, 7] {
            with_threads(threads, || {
                assert_eq!(num_threads(), threads);
                for (len, grain) in [(0, 1), (1, 1), (5, 10), (1000, 1), (1000, 7), (1001, 300), (3, 0)] {
                    let seen: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
                    parallel_for(len, grain, |range| {
                        assert!(range.len() >= grain.min(len) || range.end == len, "{range:?} of {len}");
                        for i in range {
                            seen[i].fetch_add(1, Ordering::Relaxed);
                        }
                    });
                    assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} {len} {grain}");
                }
            });
        }
    }

    #[test]
    fn threads_have_scratch_of_their_own() {
        for threads in [1, 3] {
            with_threads(threads, || {
                for (len, grain) in [(1, 1), (64, 1), (100, 7)] {
                    let visited = AtomicUsize::new(0);
                    parallel_for_with_scratch(len, grain, Need::of::<usize>(700), |range, mut region| {
                        let mine = region.filled(700, range.start);
                        for i in range.clone() {
                            std::thread::yield_now();
                            assert!(mine.iter().all(|&x| x == range.start), "{i} of {len}");
                        }
                        visited.fetch_add(range.len(), Ordering::Relaxed);
                    });
                    assert_eq!(visited.into_inner(), len);
                }
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        with_threads(3, || {
            for round in 0..50 {
                let result = catch_unwind(|| {
                    parallel_for(100, 1, |range| assert!(!range.contains(&37), "part with 37"));
                });
                let payload = result.unwrap_err();
                let text = payload
                    .downcast_ref::<&str>()
                    .map(|s| s.to_string())
                    .or_else(|| payload.downcast_ref::<String>().cloned());
                assert!(text.unwrap().contains("part with 37"), "round {round}");
                let sum = AtomicUsize::new(0);
                parallel_for(100, 1, |range| {
                    sum.fetch_add(range.sum::<usize>(), Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), 4950);
            }
        });
    }

    #[test]
    fn loops_nest_and_run_from_many_threads_at_once() {
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    with_threads(3, || {
                        for _ in 0..200 {
                            parallel_for(16, 1, |outer| {
                                parallel_for(outer.len() * 8, 1, |inner| {
                                    total.fetch_add(inner.len(), Ordering::Relaxed);
                                });
                            });
                        }
                    });
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 200 * 16 * 8);
    }

    #[test]
    fn sleeping_workers_wake_up() {
        // A pool of its own: the barrier needs the worker, which other tests could occupy.
        let pool = Pool::start(2);
        for _ in 0..20 {
            // Longer than WATCH: the worker is asleep when the loop starts, and the loop needs both threads.
            std::thread::sleep(Duration::from_micros(500));
            let barrier = std::sync::Barrier::new(2);
            let parts = AtomicUsize::new(0);
            pool.run(2, 2, 1, &|_, _| {
                parts.fetch_add(1, Ordering::Relaxed);
                barrier.wait();
            });
            assert_eq!(parts.into_inner(), 2);
        }
    }

    #[test]
    fn loops_of_two_callers_share_the_workers() {
        // Two parts each, which wait for each other: the second loop must get a worker while the first has one.
        let pool = Pool::start(4);
        let waiting = AtomicUsize::new(0);
        let all_met = AtomicUsize::new(0);
        let meet = |_: usize, _: Range<usize>| {
            waiting.fetch_add(1, Ordering::SeqCst);
            let start = Instant::now();
            while waiting.load(Ordering::SeqCst) < 4 && start.elapsed() < Duration::from_secs(20) {
                std::thread::yield_now();
            }
            all_met.fetch_add((waiting.load(Ordering::SeqCst) == 4) as usize, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| pool.run(4, 2, 1, &meet));
            }
        });
        assert_eq!(all_met.into_inner(), 4);
    }

    #[test]
    fn more_callers_than_lanes_are_served_too() {
        let (pool, total) = (Pool::start(3), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 * LANES {
                scope.spawn(|| {
                    for _ in 0..300 {
                        pool.run(3, 40, 3, &|_, range| {
                            total.fetch_add(range.len(), Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 2 * LANES * 300 * 40);
    }

    #[test]
    fn a_loop_uses_no_more_threads_than_it_was_given_and_pools_are_few() {
        let ours = || {
            let names = std::fs::read_dir("/proc/self/task").unwrap();
            let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
            let names = names.filter_map(|task| name(task.ok()?));
            names.filter(|name| name.starts_with("warpsmith-")).count()
        };
        for threads in 2..=100 {
            with_threads(threads, || {
                let (most, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
                parallel_for_numbered(1000, |thread, range| {
                    most.fetch_max(thread, Ordering::Relaxed);
                    seen.fetch_add(range.len(), Ordering::Relaxed);
                });
                assert!(most.into_inner() < threads);
                assert_eq!(seen.into_inner(), 1000);
            });
        }
        // Sizes of 2, 4, ... 128, the default one, and those that other tests of this file start.
        let limit = 256 + default_threads() + 16;
        assert!(ours() <= limit, "{} threads", ours());
    }

    fn parallel_for_numbered(len: usize, f: impl Fn(usize, Range<usize>) + Sync) {
        let threads = num_threads();
        Pool::of_size(threads).run(threads, len, 1, &f);
    }

    #[test]
    fn with_threads_is_undone_even_by_a_panic() {
        let before = num_threads();
        let result = catch_unwind(|| with_threads(before + 1, || panic!("out")));
        assert!(result.is_err());
        assert_eq!(num_threads(), before);
    }
}
