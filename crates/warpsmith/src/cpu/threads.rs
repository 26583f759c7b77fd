//! Threads for the CPU kernels: one loop, split into parts.
//!
//! Kernels here often run for a few microseconds, less than it takes to wake a thread. So workers watch for the next
//! loop for a moment after the last one and sleep after that; a caller works on its own loop and never waits for a
//! worker that has not begun.
//!
//! Each thread has a share of the loop and goes through it in order, so that what it prefetched during one part is
//! there for the next. A thread that has finished its own share steals from the end of another's.
//!
//! Concurrent loops of several callers have a lane each. A worker that finds no more parts in one lane goes to the
//! next.

mod pool;
#[cfg(feature = "tests")]
mod tests;

use super::scratch::{self, Need, Region};
use crate::env;
use crate::error::{Error, Result};
use pool::Pool;
use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

/// Parts of a thread's share. Small parts limit how long the others wait for a thread that is slowed down; while many
/// are left, several are taken at once.
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
/// Threads that were started stay: however many sizes are used, at most about twice as many as the largest size.
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
// Inline, like `dispatch`, so that a kernel is compiled with its op and not with all others in one codegen unit.
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

/// [`parallel_for`] with scratch for each part, as much as `need` says, with unspecified contents. What is in it was
/// left by others.
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
