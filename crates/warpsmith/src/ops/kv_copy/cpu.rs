//! `kv_copy` on the CPU, one source for all tiers.

use super::{CACHE, PAIRS, Problem};
use crate::cpu::rows::index_at;
use crate::cpu::scratch::{self, List};
use crate::cpu::{Need, Simd, Task, copy_bytes, dispatch, parallel_for, should_stream};
use crate::error::{Error, Result};
use crate::op::Launch;
use std::ops::Range;

/// The fewest bytes a thread copies: less does not pay for waking a thread.
const GRAIN: usize = 1 << 16;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    scratch::with(Need::of::<[usize; 2]>(p.num_pairs).and::<usize>(p.num_pairs), |mut region| {
        let (mut pairs, mut targets) = (region.list(p.num_pairs), region.list(p.num_pairs));
        check_pairs(launch, &mut pairs, &mut targets)?;
        let pairs = &pairs[..];
        let runs = pairs.len() * p.runs.len();
        let stream = should_stream(runs.saturating_mul(p.run_bytes()));
        parallel_for(runs, GRAIN.div_ceil(p.run_bytes().max(1)), |range| {
            dispatch(launch.tier, Copy { launch, pairs, range, stream });
        });
        Ok(())
    })
}

/// Adds the pairs that are not skipped to `pairs`, and their destinations in ascending order to `targets`.
fn check_pairs(
    launch: &Launch<'_, Problem>,
    pairs: &mut List<'_, [usize; 2]>,
    targets: &mut List<'_, usize>,
) -> Result<()> {
    let p = launch.problem;
    let wrong =
        |expected: &str, got: String| Err(Error::argument(launch.args.spec().name, "pairs", expected, got));
    for i in 0..p.num_pairs {
        let page = |side: usize| {
            let offset = i * p.pair_strides[0] as usize + side * p.pair_strides[1] as usize;
            // SAFETY: the offset of an element of the tensor.
            unsafe { index_at(launch.args.address(PAIRS), p.pair_dtype, offset) }
        };
        let pair = [page(0), page(1)];
        let in_range = |page: i64| (-1..p.num_pages as i64).contains(&page);
        if !pair.into_iter().all(in_range) {
            let expected = format!("pages from 0 to below num_pages={}, or -1", p.num_pages);
            return wrong(&expected, format!("{pair:?} as pair {i}"));
        }
        if !pair.contains(&-1) && pair[0] != pair[1] {
            pairs.push(pair.map(|page| page as usize));
        }
    }
    targets.extend(pairs.iter().map(|pair| pair[1]));
    targets.sort_unstable();
    if let Some(twice) = targets.windows(2).find(|two| two[0] == two[1]) {
        return wrong("destinations that differ", format!("page {} as that of two pairs", twice[0]));
    }
    if let Some(both) = pairs.iter().find(|pair| targets.binary_search(&pair[0]).is_ok()) {
        return wrong("sources that are no destinations", format!("page {} as both", both[0]));
    }
    Ok(())
}

/// Runs `range`, counted pair by pair for each start in a page.
struct Copy<'a> {
    launch: &'a Launch<'a, Problem>,
    pairs: &'a [[usize; 2]],
    range: Range<usize>,
    stream: bool,
}

impl Task for Copy<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let base = self.launch.args.address(CACHE) as *mut u8;
        for index in self.range {
            let (row, pair) = (index / self.pairs.len(), self.pairs[index % self.pairs.len()]);
            let start = p.runs.offsets(row)[0];
            let at = |page: usize| base.wrapping_add((start + page * p.page_stride as usize) * p.size);
            // SAFETY: the pages are in range, and `check` bound layout and runs to the cache. No page that is written is
            // read or written for another pair.
            unsafe { copy_bytes(s, at(pair[0]), at(pair[1]), p.run_bytes(), self.stream, false) };
        }
        if self.stream {
            s.fence();
        }
    }
}
