//! Which requests begin with the same pages, found on the host.

use super::problem::MOST_LEVELS;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorView};
use std::ops::Range;

/// Bytes that a multiprocessor reads in a microsecond of prefixes that other requests have brought to the cache.
const READ: f64 = 82e3;
/// The overhead of sharing in microseconds: the launches and merges of the first level, and of each further one.
const SHARING: f64 = 32.0;
const LEVEL: f64 = 10.0;

/// Groups of neighbouring requests that begin with the same pages, level by level, as
/// [`PagedAttention::cascade`](super::PagedAttention::cascade) takes them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedPrefixes {
    /// Of each level, the groups in order: their requests, and the keys that these share.
    levels: Vec<Vec<(Range<usize>, usize)>>,
}

impl SharedPrefixes {
    /// The groups of requests whose pages are `pages`. Of request `r`, the first `cached[r]` keys can be shared: those
    /// before its queries. Requests that share should be neighbours: sort them by their pages, or by their place in a
    /// radix tree.
    ///
    /// ```
    /// use warpsmith::ops::paged_attention::SharedPrefixes;
    /// // Three requests share two pages of 16 keys; two of them a third page.
    /// let pages: [&[i32]; 3] = [&[7, 1, 3, 9], &[7, 1, 3, 8], &[7, 1, 5]];
    /// let shared = SharedPrefixes::find(&pages, &[60, 50, 40], 16)?;
    /// assert_eq!(shared.levels(), 2);
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn find(pages: &[&[i32]], cached: &[usize], page_size: usize) -> Result<SharedPrefixes> {
        let wrong = |arg: &str, expected: String, got: usize| {
            Err(Error::argument("paged_attention", arg, expected, got.to_string()))
        };
        if cached.len() != pages.len() {
            return wrong("cached", format!("a length for each of {} requests", pages.len()), cached.len());
        }
        if page_size == 0 {
            return wrong("page_size", "at least one key a page".into(), page_size);
        }
        // Whole pages alone: the rest of a page is written by one request, and not for the others.
        let of_request = |r: usize| &pages[r][..pages[r].len().min(cached[r] / page_size)];
        let mut levels: Vec<Vec<(Range<usize>, usize)>> = Vec::new();
        // Neighbours with this many pages in common, and the level of what they share beyond those.
        let mut open = vec![(0..pages.len(), 0, 0)];
        while let Some((range, depth, level)) = open.pop() {
            if level == MOST_LEVELS {
                continue;
            }
            let mut start = range.start;
            for end in range.start + 1..=range.end {
                let next = |r: usize| of_request(r).get(depth);
                if end < range.end && next(end).is_some() && next(end) == next(start) {
                    continue;
                }
                let run = std::mem::replace(&mut start, end)..end;
                if run.len() < 2 || next(run.start).is_none() {
                    continue;
                }
                let same = |depth: &usize| {
                    let page = of_request(run.start).get(*depth);
                    page.is_some() && run.clone().all(|r| of_request(r).get(*depth) == page)
                };
                let common = (depth..).take_while(same).last().map_or(depth, |last| last + 1);
                levels.resize(levels.len().max(level + 1), Vec::new());
                levels[level].push((run.clone(), common * page_size));
                open.push((run, common, level + 1));
            }
        }
        levels.iter_mut().for_each(|groups| groups.sort_by_key(|(run, _)| run.start));
        Ok(SharedPrefixes { levels })
    }

    /// One level of groups that are known already: the requests of each, one group after the other, and the keys that they
    /// share.
    pub fn of_groups(groups: Vec<(Range<usize>, usize)>) -> SharedPrefixes {
        SharedPrefixes { levels: if groups.is_empty() { Vec::new() } else { vec![groups] } }
    }

    /// Drops groups that cost more than they save: where prefixes are short or groups small, every request reading its
    /// own keys is faster than launches for groups and merges. The op itself knows the shapes alone, and takes tables
    /// to be full; here the lengths are known. `k_pages` are those of the call. On the CPU nothing is left, because it
    /// never reads a prefix once for several requests.
    ///
    /// ```
    /// use warpsmith::{DType, Device, Tensor, ops::paged_attention::SharedPrefixes};
    /// let pages: [&[i32]; 2] = [&[7, 1], &[7, 2]];
    /// let k_pages = Tensor::zeros(&[8, 16, 2, 64], DType::F32, Device::Cpu)?;
    /// let shared = SharedPrefixes::find(&pages, &[30, 30], 16)?.that_pay(&k_pages)?;
    /// assert_eq!(shared.levels(), 0);
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn that_pay<'a>(self, k_pages: impl Into<TensorView<'a>>) -> Result<SharedPrefixes> {
        let pages = k_pages.into();
        let &[_, _, num_kv_heads, head_dim] = pages.shape() else {
            let expected = "[num_pages, page_size, num_kv_heads, head_dim]".to_string();
            let got = format!("{:?}", pages.shape());
            return Err(Error::argument("paged_attention", "k_pages", expected, got));
        };
        if pages.device() == Device::Cpu {
            return Ok(SharedPrefixes { levels: Vec::new() });
        }
        // Of a key and a value.
        let bytes = 2 * num_kv_heads * head_dim * pages.dtype().size();
        Ok(self.worth(bytes, pages.device().info()?.units))
    }

    /// The levels that pay where a key and its value take `bytes`, with so many multiprocessors.
    fn worth(mut self, bytes: usize, units: usize) -> SharedPrefixes {
        let saved = |keys: usize| keys as f64 * bytes as f64 / (units as f64 * READ);
        let mut keys: Vec<usize> = (0..self.levels.len()).map(|level| self.saved_keys(level)).collect();
        while keys.len() > 1 && saved(keys[keys.len() - 1]) < LEVEL {
            keys.pop();
        }
        if saved(keys.iter().sum()) < SHARING + LEVEL * keys.len().saturating_sub(1) as f64 {
            keys.clear();
        }
        self.levels.truncate(keys.len());
        self
    }

    /// Keys that need not be read again by the groups of a level, beyond those of the level before.
    fn saved_keys(&self, level: usize) -> usize {
        let outer = |run: &Range<usize>| {
            let before = level.checked_sub(1).map_or(&[][..], |level| &self.levels[level]);
            before.iter().find(|(outer, _)| outer.contains(&run.start)).map_or(0, |(_, len)| *len)
        };
        self.levels[level].iter().map(|(run, len)| (run.len() - 1) * (len - outer(run))).sum()
    }

    /// How many levels there are; none if nothing is shared.
    pub fn levels(&self) -> usize {
        self.levels.len()
    }

    /// The numbers of one level's `group_starts` and `prefix_lens`, filled up to `width` groups with empty ones: for calls whose
    /// shapes are fixed. `None` if there is more than one level, or more groups.
    pub fn one_level(&self, width: usize) -> Option<[Vec<i32>; 2]> {
        let (mut starts, mut lens) = match &self.levels[..] {
            [] => (vec![0], Vec::new()),
            [groups] => row(groups),
            _ => return None,
        };
        if lens.len() > width {
            return None;
        }
        starts.resize(width + 1, starts[starts.len() - 1]);
        lens.resize(width, 0);
        Some([starts, lens])
    }

    /// `group_starts` and `prefix_lens` on a device: runs of requests that share nothing are groups without keys.
    pub fn tensors(&self, device: Device) -> Result<[Tensor; 2]> {
        let rows: Vec<(Vec<i32>, Vec<i32>)> = self.levels.iter().map(|groups| row(groups)).collect();
        let width = rows.iter().map(|(_, lens)| lens.len()).max().unwrap_or(0);
        let (mut starts, mut lens) = (Vec::new(), Vec::new());
        for (row_starts, row_lens) in &rows {
            let last = row_starts[row_starts.len() - 1];
            starts.extend(row_starts.iter().copied().chain(std::iter::repeat(last)).take(width + 1));
            lens.extend(row_lens.iter().copied().chain(std::iter::repeat(0)).take(width));
        }
        Ok([
            Tensor::from_slice(&starts, &[rows.len(), width + 1], device)?,
            Tensor::from_slice(&lens, &[rows.len(), width], device)?,
        ])
    }
}

/// Starts and lengths of the groups of a level, including the requests between them that share nothing.
fn row(groups: &[(Range<usize>, usize)]) -> (Vec<i32>, Vec<i32>) {
    let (mut starts, mut lens) = (vec![groups[0].0.start as i32], Vec::new());
    for (run, len) in groups {
        if starts[starts.len() - 1] < run.start as i32 {
            starts.push(run.start as i32);
            lens.push(0);
        }
        starts.push(run.end as i32);
        lens.push(*len as i32);
    }
    (starts, lens)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn found(pages: &[&[i32]], cached: &[usize]) -> [Vec<f64>; 2] {
        let shared = SharedPrefixes::find(pages, cached, 4).unwrap();
        shared.tensors(Device::Cpu).unwrap().map(|tensor| tensor.to_f64().unwrap())
    }

    #[test]
    fn trees_of_pages_become_levels() {
        let a: &[i32] = &[1, 2, 3];
        let pages = [&[9, 9][..], a, &[1, 2, 3, 4], &[1, 2, 5], &[1, 2, 5], &[8], &[7, 6], &[7, 6]];
        let [starts, lens] = found(&pages, &[8, 12, 16, 12, 12, 4, 8, 7]);
        // The group {1, 2, 3, 4} shares two pages, {6, 7} one, because the second of request 7 is not full.
        assert_eq!(starts[..4], [1.0, 5.0, 6.0, 8.0]);
        assert_eq!(lens[..3], [8.0, 0.0, 4.0]);
        // Inside the first, {1, 2} and {3, 4} share a third page.
        assert_eq!(starts[4..], [1.0, 3.0, 5.0, 5.0]);
        assert_eq!(lens[3..], [12.0, 12.0, 0.0]);
    }

    #[test]
    fn known_groups_fill_a_fixed_shape() {
        let shared = SharedPrefixes::of_groups(vec![(1..3, 8), (5..9, 16)]);
        assert_eq!(shared.one_level(5), Some([vec![1, 3, 5, 9, 9, 9], vec![8, 0, 16, 0, 0]]));
        assert_eq!(shared.one_level(3), Some([vec![1, 3, 5, 9], vec![8, 0, 16]]));
        assert_eq!(shared.one_level(2), None, "with the gap they are three");
        let none = SharedPrefixes::of_groups(Vec::new());
        assert_eq!((none.levels(), none.one_level(2)), (0, Some([vec![0; 3], vec![0; 2]])));
        let pages: [&[i32]; 3] = [&[1, 2], &[1, 2], &[1, 3]];
        assert_eq!(SharedPrefixes::find(&pages, &[8, 8, 8], 4).unwrap().one_level(9), None, "two levels");
    }

    #[test]
    fn nothing_shared_is_no_level() {
        let shared = SharedPrefixes::find(&[&[1, 2], &[2, 2], &[3]], &[8, 8, 4], 4).unwrap();
        assert_eq!(shared.levels(), 0);
        let shapes = shared.tensors(Device::Cpu).unwrap().map(|tensor| tensor.shape().to_vec());
        assert_eq!(shapes, [[0, 1], [0, 0]]);
        assert_eq!(SharedPrefixes::find(&[&[1], &[1]], &[3, 3], 4).unwrap().levels(), 0, "no page is full");
        assert_eq!(SharedPrefixes::find(&[], &[], 4).unwrap().levels(), 0);
        assert!(SharedPrefixes::find(&[&[1]], &[], 4).unwrap_err().to_string().contains("cached"));
        assert!(SharedPrefixes::find(&[&[1]], &[4], 0).unwrap_err().to_string().contains("page_size"));
    }

    /// Requests with 4096 bytes a key on 132 multiprocessors, as they were timed: 128 keys of their own after a prefix.
    #[test]
    fn what_takes_longer_than_it_saves_is_left_out() {
        let pays = |requests: usize, prefix: usize| {
            let pages: Vec<Vec<i32>> = (0..requests)
                .map(|r| {
                    (0..prefix / 16).chain(10_000 + 8 * r..10_008 + 8 * r).map(|page| page as i32).collect()
                })
                .collect();
            let pages: Vec<&[i32]> = pages.iter().map(Vec::as_slice).collect();
            SharedPrefixes::find(&pages, &vec![prefix; requests], 16).unwrap().worth(4096, 132).levels()
        };
        let slower =
            [(4, 128), (4, 4096), (4, 8192), (16, 128), (16, 1024), (16, 2048), (64, 128), (64, 1024)];
        for (requests, prefix) in slower {
            assert_eq!(pays(requests, prefix), 0, "{requests} requests with {prefix} keys in common");
        }
        for (requests, prefix) in [(16, 8192), (64, 2048), (64, 4096), (64, 8192)] {
            assert_eq!(pays(requests, prefix), 1, "{requests} requests with {prefix} keys in common");
        }
        assert_eq!(SharedPrefixes { levels: Vec::new() }.worth(4096, 132).levels(), 0);
    }

    #[test]
    fn short_levels_are_left_out_and_the_others_stay() {
        let levels = vec![vec![(0..64, 8192)], vec![(0..32, 12_288), (32..64, 8208)], vec![(0..2, 12_304)]];
        assert_eq!(SharedPrefixes { levels: levels.clone() }.worth(4096, 132).levels(), 2);
        assert_eq!(SharedPrefixes { levels }.worth(64, 132).levels(), 0, "so small a cache is read at once");
    }

    #[test]
    fn deep_trees_end_at_the_last_level() {
        let all: Vec<i32> = (0..20).collect();
        let pages: Vec<&[i32]> = (1..=20).rev().map(|len| &all[..len]).collect();
        let cached: Vec<usize> = (1..=20).rev().map(|len| 4 * len).collect();
        assert_eq!(SharedPrefixes::find(&pages, &cached, 4).unwrap().levels(), MOST_LEVELS);
    }
}
