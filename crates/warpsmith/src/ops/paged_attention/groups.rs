//! Which requests begin with the same pages, found on the host.

use super::problem::MOST_LEVELS;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use std::ops::Range;

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
        // Neighbours that have so many pages in common, and the level that what they share beyond belongs to.
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

    /// How many levels there are; none if nothing is shared.
    pub fn levels(&self) -> usize {
        self.levels.len()
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

/// Starts and lengths of the groups of a level, with those between them that share nothing.
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

#[cfg(test)]
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

    #[test]
    fn deep_trees_end_at_the_last_level() {
        let all: Vec<i32> = (0..20).collect();
        let pages: Vec<&[i32]> = (1..=20).rev().map(|len| &all[..len]).collect();
        let cached: Vec<usize> = (1..=20).rev().map(|len| 4 * len).collect();
        assert_eq!(SharedPrefixes::find(&pages, &cached, 4).unwrap().levels(), MOST_LEVELS);
    }
}
