//! Which rows of a step begin with the same pages.
//!
//! If two sequences have the same page at the same position, everything before it is the same too. So comparing one
//! page number per row tells which sequences share a prefix.

use super::Row;
use crate::error::Result;
use crate::kv::KvCache;
use crate::settings::Cascade;
use std::collections::HashMap;
use warpsmith::ops::paged_attention::SharedPrefixes;

/// The fewest sequences, and shared tokens, that are worth grouping.
const LEAST_ROWS: usize = 4;
const LEAST_TOKENS: usize = 1024;

/// Groups of a step of this many rows: each has two rows at least, and between two of them may be rows that share nothing.
pub(super) fn most_groups(rows: usize) -> usize {
    rows / 2 + 1
}

impl Cascade {
    /// Sequences of a group, and pages that they share, at least; `None` if there are to be no groups.
    fn least(self, page_size: usize) -> Option<(usize, usize)> {
        match self {
            Cascade::Off => None,
            Cascade::WherePays => Some((LEAST_ROWS, LEAST_TOKENS.div_ceil(page_size))),
            Cascade::Always => Some((2, 1)),
        }
    }

    /// The page that tells which group a sequence belongs to, if all its tokens are known before `position`.
    fn mark(self, pages: &[i32], position: usize, page_size: usize) -> Option<i32> {
        let (_, least) = self.least(page_size)?;
        if position / page_size < least { None } else { pages.get(least - 1).copied() }
    }

    /// An order of sequences, given by their pages and the positions of their new tokens, in which those that share a prefix
    /// are neighbours, and which otherwise changes nothing; `None` if too few share one.
    pub(crate) fn order(self, sequences: &[(&[i32], usize)], page_size: usize) -> Option<Vec<usize>> {
        let (least, _) = self.least(page_size)?;
        let mut groups: HashMap<i32, (usize, usize)> = HashMap::new();
        let marks: Vec<Option<i32>> =
            sequences.iter().map(|&(pages, position)| self.mark(pages, position, page_size)).collect();
        for (i, mark) in marks.iter().enumerate().filter_map(|(i, mark)| Some((i, (*mark)?))) {
            groups.entry(mark).or_insert((i, 0)).1 += 1;
        }
        if groups.values().all(|&(_, count)| count < least) {
            return None;
        }
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        // Each group is where its first member was.
        order.sort_by_key(|&i| marks[i].and_then(|mark| groups.get(&mark)).map_or(i, |&(first, _)| first));
        Some(order)
    }
}

/// The groups of neighbouring rows, as numbers for `bucket` rows; `None` if none pays.
pub(super) fn groups(
    rows: &[Option<Row<'_>>],
    page_size: usize,
    cascade: Cascade,
    bucket: usize,
    kv: &mut KvCache,
) -> Result<Option<[Vec<i32>; 2]>> {
    let Some((least, _)) = cascade.least(page_size) else { return Ok(None) };
    let mark =
        |row: &Option<Row<'_>>| row.as_ref().and_then(|row| cascade.mark(row.pages, row.position, page_size));
    let mut groups = Vec::new();
    let mut start = 0;
    for run in rows.chunk_by(|a, b| mark(a).is_some() && mark(a) == mark(b)) {
        if run.len() >= least && mark(&run[0]).is_some() {
            groups.push((start..start + run.len(), common_pages(run, page_size) * page_size));
        }
        start += run.len();
    }
    if groups.is_empty() {
        return Ok(None);
    }
    let mut shared = SharedPrefixes::of_groups(groups);
    if cascade != Cascade::Always {
        shared = kv.that_pay(shared)?;
    }
    Ok(if shared.levels() == 0 { None } else { shared.one_level(most_groups(bucket)) })
}

/// Pages that rows have in common, of those that are full before their new tokens.
fn common_pages(rows: &[Option<Row<'_>>], page_size: usize) -> usize {
    let full = |row: &Row<'_>| row.position / page_size;
    let mut rows = rows.iter().flatten();
    let Some(first) = rows.next() else { return 0 };
    rows.fold(full(first), |common, row| {
        let pairs = first.pages.iter().zip(row.pages).take(common.min(full(row)));
        pairs.take_while(|(a, b)| a == b).count()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_share_a_prefix_become_neighbours() {
        let pages: [&[i32]; 6] = [&[1, 9], &[2, 8], &[1, 7], &[3], &[2, 6], &[1, 5]];
        let all = pages.map(|pages| (pages, 5));
        assert_eq!(Cascade::Always.order(&all, 4), Some(vec![0, 2, 5, 1, 4, 3]));
        assert_eq!(Cascade::Off.order(&all, 4), None);
        assert_eq!(Cascade::WherePays.order(&all, 4), None, "too short");
        assert_eq!(Cascade::Always.order(&all[..2], 4), None, "nothing is shared");
        let young = pages.map(|pages| (pages, 3));
        assert_eq!(Cascade::Always.order(&young, 4), None, "no page is full");
        let long: Vec<i32> = (0..64).collect();
        let mut many = vec![(&long[..], 1030); 4];
        many.insert(1, (pages[0], 5));
        assert_eq!(Cascade::WherePays.order(&many, 16), Some(vec![0, 2, 3, 4, 1]));
        assert_eq!(Cascade::WherePays.order(&many[..4], 16), None, "three are too few");
    }
}
