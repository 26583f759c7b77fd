//! How fast the host moves memory: the limit of kernels that do nothing else.
//!
//! A limit must be one that nothing exceeds. So of each kind of sweep the fastest is taken: with plain and with
//! non-temporal stores, on one thread and on all, and the best of all repetitions in the whole run, not their median. A slow
//! second of the machine makes kernels look slow, never the limit low.

use crate::cpu::{self, Simd, Task, Tier, dispatch, parallel_for, with_threads};
use crate::device::Device;
use crate::error::Result;
use crate::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The fastest sweeps seen, in GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Rates {
    /// Bytes read and bytes written.
    pub copy: f64,
    /// Bytes read, of a sweep that writes nothing.
    pub read: f64,
    /// Bytes written, of a sweep that reads nothing.
    pub write: f64,
}

impl Rates {
    fn fastest(self, other: Rates) -> Rates {
        Rates {
            copy: self.copy.max(other.copy),
            read: self.read.max(other.read),
            write: self.write.max(other.write),
        }
    }

    /// The least milliseconds in which these bytes can be moved: as much as is both read and written at the rate of a
    /// copy, the rest at that of a sweep in one direction.
    pub fn least_ms(&self, bytes: f64, written: f64) -> f64 {
        let written = written.clamp(0.0, bytes);
        let read = bytes - written;
        let both = 2.0 * read.min(written);
        let rest = bytes - both;
        let one_way = if read > written { self.read } else { self.write };
        // A copy is also a sweep in each direction.
        (both / self.copy + rest / one_way.max(self.copy)) / 1e6
    }
}

/// A sample lasts at least this long, so that reading the clock does not show in it.
const SAMPLE_SECONDS: f64 = 1e-4;

/// The fastest sweeps over two buffers of `bytes` bytes each, of `runs` more and of all before in this process. Buffers
/// that fit the caches stay there from one sweep to the next.
pub(super) fn rates(bytes: usize, runs: usize) -> Result<Rates> {
    static FASTEST: Mutex<BTreeMap<usize, Rates>> = Mutex::new(BTreeMap::new());
    /// Kept from the last size: large memory takes longer to allocate than to sweep.
    static BUFFERS: Mutex<Option<Buffers>> = Mutex::new(None);
    let mut held = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    let buffers = match held.take() {
        Some(buffers) if buffers.bytes == bytes => buffers,
        _ => Buffers::new(bytes)?,
    };
    let buffers = held.insert(buffers);
    let measured = buffers.measure(runs);
    let mut fastest = FASTEST.lock().unwrap_or_else(PoisonError::into_inner);
    let best = fastest.entry(bytes).or_default();
    *best = best.fastest(measured);
    Ok(*best)
}

struct Buffers {
    bytes: usize,
    len: usize,
    from: Tensor,
    to: Tensor,
}

#[derive(Clone, Copy)]
enum Sweep {
    Copy { stream: bool },
    Read,
    Write { stream: bool },
}

impl Buffers {
    fn new(bytes: usize) -> Result<Buffers> {
        let len = (bytes / size_of::<f32>()).max(1);
        let buffer = || Tensor::empty(&[len], DType::F32, Device::Cpu);
        let mut buffers = Buffers { bytes, len, from: buffer()?, to: buffer()? };
        // Pages are there before the clock starts.
        std::mem::swap(&mut buffers.from, &mut buffers.to);
        buffers.sweep(Sweep::Write { stream: false });
        std::mem::swap(&mut buffers.from, &mut buffers.to);
        buffers.sweep(Sweep::Write { stream: false });
        Ok(buffers)
    }

    fn measure(&mut self, runs: usize) -> Rates {
        let mut rates = Rates::default();
        let all = cpu::num_threads();
        for threads in if all > 1 { vec![all, 1] } else { vec![1] } {
            with_threads(threads, || {
                for stream in [false, true] {
                    rates.copy = rates.copy.max(2.0 * self.rate(Sweep::Copy { stream }, runs));
                    rates.write = rates.write.max(self.rate(Sweep::Write { stream }, runs));
                }
                rates.read = rates.read.max(self.rate(Sweep::Read, runs));
            });
            // One core is faster than several only for small sizes.
            if self.bytes > cpu::l2_bytes() {
                break;
            }
        }
        rates
    }

    /// GB/s of the fastest of `runs` samples, counting one buffer.
    fn rate(&mut self, sweep: Sweep, runs: usize) -> f64 {
        self.sweep(sweep);
        let start = Instant::now();
        self.sweep(sweep);
        let once = start.elapsed().as_secs_f64();
        let sweeps = (SAMPLE_SECONDS / once.max(1e-9)).ceil().clamp(1.0, 1e5) as usize;
        let mut best = once;
        for _ in 0..runs {
            let start = Instant::now();
            (0..sweeps).for_each(|_| self.sweep(sweep));
            best = best.min(start.elapsed().as_secs_f64() / sweeps as f64);
        }
        (self.len * size_of::<f32>()) as f64 / best.max(1e-12) / 1e9
    }

    fn sweep(&mut self, sweep: Sweep) {
        let (from, to) = (self.from.view().address(), self.to.view_mut().as_view().address());
        parallel_for(self.len, 1 << 14, |part| {
            let at = part.start * size_of::<f32>();
            let task = Part { sweep, from: (from + at) as _, to: (to + at) as _, len: part.len() };
            dispatch(Tier::best(), task);
        });
    }
}

/// What one thread does of a sweep.
struct Part {
    sweep: Sweep,
    from: *const f32,
    to: *mut f32,
    len: usize,
}

impl Task for Part {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { sweep, from, to, len } = self;
        // SAFETY: `from` and `to` are this thread's parts, `len` elements each, of two buffers that are held while the loop
        // runs, and no other thread has them. A vector is read or written only where `S::N` elements are left.
        unsafe {
            match sweep {
                Sweep::Copy { stream: true } => {
                    cpu::copy_bytes(s, from.cast(), to.cast(), 4 * len, true, false)
                }
                Sweep::Copy { stream: false } => std::ptr::copy_nonoverlapping(from, to, len),
                Sweep::Read => {
                    let mut sums = [s.splat(0.0); 8];
                    for at in (0..len / (8 * S::N)).map(|block| block * 8 * S::N) {
                        for (lane, sum) in sums.iter_mut().enumerate() {
                            *sum = s.max(*sum, s.load(from.add(at + lane * S::N)));
                        }
                    }
                    for at in len / (8 * S::N) * (8 * S::N)..len {
                        black_box(*from.add(at));
                    }
                    black_box(sums);
                }
                Sweep::Write { stream } => {
                    // Streamed stores must be aligned.
                    let head = to.align_offset(S::N * size_of::<f32>()).min(len);
                    let vectors = (len - head) / S::N;
                    let one = s.splat(1.0);
                    (0..head).for_each(|at| *to.add(at) = 1.0);
                    for at in (0..vectors).map(|vector| head + vector * S::N) {
                        if stream { s.stream(to.add(at), one) } else { s.store(to.add(at), one) }
                    }
                    (head + vectors * S::N..len).for_each(|at| *to.add(at) = 1.0);
                }
            }
        }
        s.fence();
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_a_run_stays() {
        let first = rates(3 << 20, 1).unwrap();
        assert!(
            [first.copy, first.read, first.write].iter().all(|&rate| rate > 0.0 && rate < 1e5),
            "{first:?}"
        );
        let second = rates(3 << 20, 2).unwrap();
        assert!(second.copy >= first.copy && second.read >= first.read && second.write >= first.write);
        // Less than a vector, and nothing at all.
        assert!(rates(20, 1).unwrap().copy > 0.0 && rates(0, 1).unwrap().copy > 0.0);
    }

    #[test]
    fn every_sweep_covers_its_buffers() {
        let mut buffers = Buffers::new(4 * 40_003).unwrap();
        let value = |x: f32| vec![x; 40_003];
        assert_eq!(buffers.from.to_vec::<f32>().unwrap(), value(1.0));
        for stream in [false, true] {
            buffers.to.write(0, &value(2.0), &crate::Stream::Host).unwrap();
            buffers.sweep(Sweep::Copy { stream });
            assert_eq!(buffers.to.to_vec::<f32>().unwrap(), value(1.0));
            buffers.to.write(0, &value(2.0), &crate::Stream::Host).unwrap();
            buffers.sweep(Sweep::Write { stream });
            assert_eq!(buffers.to.to_vec::<f32>().unwrap(), value(1.0));
        }
    }

    #[test]
    fn what_is_only_read_is_moved_at_the_rate_of_reading() {
        let rates = Rates { copy: 10.0, read: 20.0, write: 5.0 };
        assert_eq!(rates.least_ms(2e7, 1e7), 2.0);
        assert_eq!(rates.least_ms(2e7, 0.0), 1.0);
        assert_eq!(rates.least_ms(3e7, 1e7), 2.5);
        // Written no slower than a copy writes.
        assert_eq!(rates.least_ms(2e7, 2e7), 2.0);
        assert_eq!(rates.least_ms(2e7, 5e7), 2.0);
    }
}
