//! Change tracking: when each part of an array last changed.

use std::ops::Range;

/// Elements of a part, which is copied as a whole: few enough that little is copied in excess, many enough that a
/// table of millions has few parts.
const PART: usize = 64;
/// Parts of a group, which is skipped as a whole if none of its parts has changed.
const GROUP: usize = 64;

/// The change that last wrote to each part of an array. Queries do not reset anything, so any number of copies, each
/// at a different version, can ask what they are missing.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// The current change.
    now: u64,
    parts: Vec<u64>,
    /// The last change to each group of parts.
    groups: Vec<u64>,
}

impl Marks {
    /// Begins a change, which comes after all others; later marks belong to it.
    pub fn begin(&mut self, change: u64) {
        debug_assert!(change > self.now);
        self.now = change;
    }

    /// Marks the elements of `range` as changed.
    pub fn mark(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (range.start / PART, (range.end - 1) / PART);
        if self.parts.len() <= last {
            self.parts.resize(last + 1, 0);
            self.groups.resize(last / GROUP + 1, 0);
        }
        self.parts[first..=last].fill(self.now);
        self.groups[first / GROUP..=last / GROUP].fill(self.now);
    }

    /// Ranges that cover all changes after `change` to an array of `len` elements, sorted and disjoint.
    pub fn since(&self, change: u64, len: usize) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let groups = self.parts.chunks(GROUP).zip(&self.groups).enumerate();
        for (group, (parts, _)) in groups.filter(|(_, (_, last))| **last > change) {
            for (part, _) in parts.iter().enumerate().filter(|(_, last)| **last > change) {
                let start = (group * GROUP + part) * PART;
                match ranges.last_mut().filter(|last| last.end == start) {
                    Some(last) => last.end += PART,
                    None => ranges.push(start..start + PART),
                }
            }
        }
        // Parts may reach past the end, or lie behind it if the array has shrunk.
        ranges.iter_mut().for_each(|range| range.end = range.end.min(len));
        ranges.retain(|range| range.start < range.end);
        ranges
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_parts_join_and_the_end_is_cut() {
        let mut marks = Marks::default();
        marks.begin(1);
        marks.mark(5..5);
        assert!(marks.since(0, 1000).is_empty());
        marks.mark(130..131);
        marks.mark(0..65);
        marks.mark(70 * PART..70 * PART + 1);
        assert_eq!(marks.since(0, 70 * PART + 7), [0..3 * PART, 70 * PART..70 * PART + 7]);
        assert!(marks.since(1, 1000).is_empty());
        marks.begin(2);
        marks.mark(0..100_000);
        assert!(matches!(&marks.since(1, 300)[..], [all] if *all == (0..300)));
    }

    #[test]
    fn everybody_learns_what_came_after_the_change_they_know() {
        let mut marks = Marks::default();
        for change in 1..=5000 {
            marks.begin(change);
            marks.mark((change as usize - 1) * PART..change as usize * PART);
        }
        for known in [0, 1, 63, 64, 65, 4095, 4999] {
            let later = known as usize * PART..5000 * PART;
            for _ in 0..2 {
                assert!(matches!(&marks.since(known, usize::MAX)[..], [all] if *all == later), "{known}");
            }
        }
        assert!(marks.since(5000, usize::MAX).is_empty());
        marks.begin(5001);
        marks.mark(3 * PART..3 * PART + 1);
        assert_eq!(marks.since(4999, usize::MAX), [3 * PART..4 * PART, 4999 * PART..5000 * PART]);
    }
}
