//! Grouped products on the CPU: each is cut into tasks of about the same work, which the threads share. One group with all
//! rows is cut along its columns, then along its rows; many groups with few rows each are a task each. A task is a product
//! of `cpu::gemm` on one thread, whose sums do not depend on how the work is cut.

use crate::cpu::scratch::{self, Need};
use crate::cpu::{Tier, num_threads, parallel_for, with_threads};
use crate::ops::linear::cpu::multiply_columns;
use crate::ops::linear::problem::{Part, Problem};
use std::ops::Range;

/// Rows that are multiplied with one matrix.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Group {
    pub rows: usize,
    /// Which of the products it is, each of any number of rows and any k.
    pub product: usize,
    /// The k of this one.
    pub depth: usize,
    /// Where the first row of `x` and of the result are, and the matrix.
    pub part: Part,
}

/// Tasks for each thread: so many that the last ones end at about the same time.
const TASKS: usize = 8;
/// Rows whose products take as long as reading the matrix once: fewer take no less.
const READ: usize = 4;
/// Columns that a group is cut into multiples of: whole panels of the engine.
const PANEL: usize = 32;
/// The fewest columns of a task, for few rows and for many: rows are copied once for each task.
const FEW_COLUMNS: usize = 64;
const MANY_COLUMNS: usize = 128;
/// The most rows that count as few.
const FEW_ROWS: usize = 16;
/// The fewest rows of a task of a group that is cut along its rows: each such task packs the matrix.
const LEAST_ROWS: usize = 256;

/// A piece of a group's product.
struct Task {
    group: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Group {
    /// Multiplications, at least as many as take the time of reading the matrix.
    fn work(&self, p: &Problem) -> f64 {
        self.rows.max(READ) as f64 * p.weight_rows() as f64 * self.depth.max(1) as f64
    }

    /// Into how many pieces to cut rows and columns, for `tasks` tasks or fewer.
    fn pieces(&self, p: &Problem, tasks: usize) -> (usize, usize) {
        let least = if self.rows <= FEW_ROWS { FEW_COLUMNS } else { MANY_COLUMNS };
        let across = (p.n / least).clamp(1, tasks);
        let down = tasks.div_ceil(across).min(self.rows / LEAST_ROWS).max(1);
        (down, across)
    }
}

/// Part `index` of `0..len` in `pieces`, each a multiple of `step` long but for the last.
fn share(len: usize, step: usize, index: usize, pieces: usize) -> Range<usize> {
    let steps = len.div_ceil(step);
    (index * steps / pieces * step).min(len)..((index + 1) * steps / pieces * step).min(len)
}

/// Computes the products of all groups that have rows, on all threads. Matrices of the others are not read.
///
/// # Safety
/// The parts must hold the tensors of their products. Results must not overlap each other, nor anything that is read, except
/// that a residual may be the result itself.
pub(in crate::ops) unsafe fn multiply(products: &[Problem], groups: &[Group], tier: Tier) {
    let with_results = || {
        let all = groups.iter().map(|group| (group, &products[group.product]));
        all.enumerate().filter(|(_, (group, p))| group.rows > 0 && p.n > 0)
    };
    let threads = num_threads();
    if threads == 1 {
        for (_, (group, p)) in with_results() {
            let p = Problem { m: group.rows, k: group.depth, ..*p };
            // SAFETY: passed on.
            unsafe { multiply_columns(&p, &group.part, 0..p.n, tier) };
        }
        return;
    }
    let all: f64 = with_results().map(|(_, (group, p))| group.work(p)).sum();
    let each = all / (threads * TASKS) as f64;
    // A group has at most twice as many tasks as its share of the work, rounded up.
    let most = 2 * (threads * TASKS + groups.len());
    scratch::with(Need::of::<Task>(most), |mut region| {
        let mut tasks = region.list::<Task>(most);
        for (index, (group, p)) in with_results() {
            let (down, across) = group.pieces(p, (group.work(p) / each).ceil() as usize);
            for piece in 0..down * across {
                tasks.push(Task {
                    group: index,
                    rows: share(group.rows, 1, piece / across, down),
                    columns: share(p.n, PANEL, piece % across, across),
                });
            }
        }
        let tasks = &*tasks;
        parallel_for(tasks.len(), 1, |range| {
            for task in &tasks[range] {
                let group = &groups[task.group];
                // SAFETY: passed on; tasks are disjoint parts of the results.
                with_threads(1, || unsafe { compute(&products[group.product], group, task, tier) });
            }
        });
    });
}

/// Computes a task.
///
/// # Safety
/// As for [`multiply`].
unsafe fn compute(p: &Problem, group: &Group, task: &Task, tier: Tier) {
    let p = Problem { m: task.rows.len(), k: group.depth, ..*p };
    let skip = |base: usize, row: isize, size: usize| {
        base.wrapping_add_signed(task.rows.start as isize * row * size as isize)
    };
    let part = Part {
        x: skip(group.part.x, p.x.row, p.x_dtype.size()),
        out: skip(group.part.out, p.out.row, p.out_dtype.size()),
        residual: skip(group.part.residual, p.residual.row, p.out_dtype.size()),
        ..group.part
    };
    // SAFETY: passed on; the rows are inside the group.
    unsafe { multiply_columns(&p, &part, task.columns.clone(), tier) };
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::ops::linear::problem::Matrix;
    use crate::tensor::DType;

    fn dense(columns: usize) -> Matrix {
        Matrix { row: columns as isize, col: 1, aligned: true }
    }

    /// Pieces cover a range in order, and all but the last are whole steps.
    #[test]
    fn shares_cover_the_range() {
        for (len, step, pieces) in [(0, 32, 1), (1, 32, 1), (100, 32, 3), (4096, 32, 7), (1000, 1, 3)] {
            let all: Vec<_> = (0..pieces).map(|index| share(len, step, index, pieces)).collect();
            assert_eq!((all[0].start, all[pieces - 1].end), (0, len));
            for pair in all.windows(2) {
                assert!(pair[0].end == pair[1].start && pair[0].end.is_multiple_of(step), "{all:?}");
            }
        }
    }

    /// Every way to cut a product gives the bits of the whole.
    #[test]
    fn bits_do_not_depend_on_the_tasks() {
        let (rows, n, k) = ([0, 300, 1, 17, 0, 513], 200, 70);
        let all: usize = rows.iter().sum();
        let value = |i: usize| ((i * 7919 % 1013) as f32 - 506.0) / 300.0;
        let x: Vec<f32> = (0..all * k).map(value).collect();
        let w: Vec<f32> = (0..rows.len() * n * k).map(|i| value(i + 5)).collect();
        let p = Problem::product(DType::F32, false, [1, n, k], [dense(k), dense(k), dense(n)]);
        let run = |threads: usize| {
            let mut out = vec![0f32; all * n];
            let mut first = 0;
            let groups: Vec<Group> = rows
                .iter()
                .enumerate()
                .map(|(group, &rows)| {
                    let at = |base: usize, row: usize, len: usize| base + row * len * size_of::<f32>();
                    let part = Part::product(
                        at(x.as_ptr() as usize, first, k),
                        at(w.as_ptr() as usize, group * n, k),
                        at(out.as_mut_ptr() as usize, first, n),
                    );
                    first += rows;
                    Group { rows, product: 0, depth: k, part }
                })
                .collect();
            // SAFETY: the parts are rows of the vectors.
            with_threads(threads, || unsafe { multiply(&[p], &groups, Tier::best()) });
            out
        };
        let one = run(1);
        for threads in [2, 3, 64] {
            assert!(run(threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads}");
        }
        let (row, column) = (305, 77);
        let sum: f64 =
            (0..k).map(|i| f64::from(x[row * k + i]) * f64::from(w[(3 * n + column) * k + i])).sum();
        assert!((f64::from(one[row * n + column]) - sum).abs() < 1e-4);
    }
}
