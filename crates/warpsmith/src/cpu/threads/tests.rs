//! Loops on pools of several sizes.

use super::pool::LANES;
use super::*;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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
