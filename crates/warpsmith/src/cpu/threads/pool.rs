//! The workers, and the loops they take part in.

use super::{INSIDE, default_threads};
use crate::profile::{self, Loop};
use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker, or a caller whose own share is done, spins before it sleeps.
const WATCH: Duration = Duration::from_micros(40);

/// The remaining parts of one thread: the first in the upper half, the end in the lower. On a cache line of its own.
#[repr(align(64))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, parts: Range<usize>) {
        self.0.store((parts.start as u64) << 32 | parts.end as u64, Ordering::Relaxed);
    }

    /// Takes half of what is left, at least one part, from the front or from the back.
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
    /// Called with the number of the thread within the loop, and a range.
    f: &'a (dyn Fn(usize, Range<usize>) + Sync),
    len: usize,
    part: usize,
    shares: &'a [Share],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// While a profile is recorded.
    recorded: Option<Loop>,
}

impl Job<'_> {
    /// Works on parts until none are left, those of share `own` first. A worker without a share has no part in the loop.
    fn work(&self, own: usize) {
        if own >= self.shares.len() {
            return;
        }
        let was_inside = INSIDE.replace(true);
        let mut began = None;
        while let Some(parts) = self.take(own) {
            if self.recorded.is_some() {
                began.get_or_insert_with(profile::now);
            }
            let range = parts.start * self.part..self.len.min(parts.end.saturating_mul(self.part));
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.f)(own, range))) {
                self.shares.iter().for_each(|share| share.set(0..0));
                lock(&self.panic).get_or_insert(payload);
            }
        }
        INSIDE.set(was_inside);
        if let (Some(recorded), Some(began)) = (self.recorded, began) {
            profile::part(recorded, began);
        }
    }

    fn take(&self, own: usize) -> Option<Range<usize>> {
        let others = self.shares[own + 1..].iter().chain(&self.shares[..own]);
        self.shares[own].take(true).or_else(|| others.into_iter().find_map(|share| share.take(false)))
    }
}

/// Locks, ignoring poison: no code that can panic runs under the locks of this file.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set in `gate` while workers may enter the loop.
const OPEN: u64 = 1 << 31;
/// The next loop number in `gate`; the low half counts the workers inside.
const ROUND: u64 = 1 << 32;
const INSIDE_COUNT: u64 = OPEN - 1;

/// Loops of one pool that can run at the same time. A caller that finds no free lane works alone.
pub(super) const LANES: usize = 4;

/// Workers for loops of up to so many threads; lives as long as the process.
pub(super) struct Pool {
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
    pub fn of_size(threads: usize) -> &'static Pool {
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

    pub(super) fn start(threads: usize) -> &'static Pool {
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
    pub fn run(&self, threads: usize, len: usize, part: usize, f: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let mut free = self.lanes.iter().filter_map(|lane| Some((lane, lane.caller.try_lock().ok()?)));
        let Some((lane, caller)) = free.next() else {
            return f(0, 0..len);
        };
        let (parts, shares) = (len.div_ceil(part), &lane.shares[..threads]);
        for (i, share) in shares.iter().enumerate() {
            share.set(parts * i / threads..parts * (i + 1) / threads);
        }
        let job = Job { f, len, part, shares, panic: Mutex::new(None), recorded: Loop::begin() };
        lane.open(&job);
        self.begun.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // Under the lock a worker is either not yet counted, and will see that a loop has begun, or already waiting.
            let _sleep = lock(&self.sleep);
            self.wake.notify_all();
        }
        job.work(0);
        lane.close();
        if let Some(recorded) = job.recorded {
            recorded.end(threads);
        }
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
            // Each worker starts at a different lane, so that concurrent loops all get some.
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

    /// Opens the lane to workers. Must be closed before the job goes out of scope.
    fn open(&self, job: &Job<'_>) {
        self.job.store((&raw const *job).cast_mut().cast(), Ordering::Relaxed);
        // The count is zero here: the previous caller waited for that.
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

    /// Works on this lane's loop as the worker with share `own`, unless it was `seen` before.
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
