//! Which parts of an array have changed since it was last copied.

use std::ops::Range;

/// Elements that are copied together or not at all: small enough to copy little too much, large enough that a table
/// of millions has few parts.
const PART: usize = 64;
const BITS: usize = u64::BITS as usize;

/// A bit for every part of an array.
#[derive(Debug, Clone, Default)]
pub(super) struct Dirty {
    words: Vec<u64>,
}

impl Dirty {
    /// Elements `range` have changed.
    pub fn mark(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (range.start / PART, (range.end - 1) / PART);
        if self.words.len() <= last / BITS {
            self.words.resize(last / BITS + 1, 0);
        }
        for part in first..=last {
            self.words[part / BITS] |= 1 << (part % BITS);
        }
    }

    /// The ranges that cover all changes to an array of `len` elements, in order and apart from each other. Nothing
    /// is dirty afterwards.
    pub fn take(&mut self, len: usize) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (word, bits) in self.words.iter_mut().enumerate() {
            let mut rest = std::mem::take(bits);
            while rest != 0 {
                let start = (word * BITS + rest.trailing_zeros() as usize) * PART;
                rest &= rest - 1;
                match ranges.last_mut().filter(|last| last.end == start) {
                    Some(last) => last.end += PART,
                    None => ranges.push(start..start + PART),
                }
            }
        }
        // Parts may reach past the end, or lie behind it where the array has shrunk.
        ranges.iter_mut().for_each(|range| range.end = range.end.min(len));
        ranges.retain(|range| range.start < range.end);
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_parts_join_and_the_end_is_cut() {
        let mut dirty = Dirty::default();
        dirty.mark(5..5);
        assert!(dirty.take(1000).is_empty());
        dirty.mark(130..131);
        dirty.mark(0..65);
        dirty.mark(70 * PART..70 * PART + 1);
        assert_eq!(dirty.take(70 * PART + 7), [0..3 * PART, 70 * PART..70 * PART + 7]);
        assert!(dirty.take(1000).is_empty());
        dirty.mark(0..100_000);
        assert!(matches!(&dirty.take(300)[..], [all] if *all == (0..300)));
    }
}
