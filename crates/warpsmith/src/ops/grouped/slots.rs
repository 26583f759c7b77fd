//! Slots: the experts a token is sent to. Sorted by expert they are the rows of grouped products.

use crate::cpu::scratch::{Need, Region};

/// In place of the expert of a slot that is dropped, and of its place.
pub(in crate::ops) const DROPPED: usize = usize::MAX;

/// Some slots, sorted by expert, those of one expert in their order.
pub(in crate::ops) struct Sorted<'a> {
    /// Where the rows of each expert begin, and the last one's end.
    pub starts: &'a [usize],
    /// The row of each slot, or [`DROPPED`].
    pub places: &'a [usize],
    /// The slot of each row.
    pub slots: &'a [usize],
}

impl<'a> Sorted<'a> {
    /// Scratch for [`Sorted::new`].
    pub fn need(slots: usize, experts: usize) -> Need {
        Need::of::<usize>(experts + 2).and::<usize>(slots).and::<usize>(slots)
    }

    /// Sorts slots by `experts`, each below `count` or [`DROPPED`].
    pub fn new(region: &mut Region<'a>, experts: &[usize], count: usize) -> Sorted<'a> {
        // One more than there are: while rows are dealt out, the start of an expert is kept in the place of the next one.
        let starts = region.filled(count + 2, 0usize);
        let (places, slots) = (region.slice(experts.len()), region.slice(experts.len()));
        let kept = || experts.iter().enumerate().filter(|(_, expert)| **expert != DROPPED);
        kept().for_each(|(_, &expert)| starts[expert + 2] += 1);
        (2..count + 2).for_each(|i| starts[i] += starts[i - 1]);
        places.fill(DROPPED);
        for (slot, &expert) in kept() {
            let place = starts[expert + 1];
            starts[expert + 1] += 1;
            (places[slot], slots[place]) = (place, slot);
        }
        Sorted { starts: &starts[..count + 1], places, slots: &slots[..starts[count]] }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::scratch;

    fn sorted(experts: &[usize], count: usize) -> (Vec<usize>, Vec<usize>, Vec<usize>) {
        scratch::with(Sorted::need(experts.len(), count), |mut region| {
            let Sorted { starts, places, slots } = Sorted::new(&mut region, experts, count);
            (starts.to_vec(), places.to_vec(), slots.to_vec())
        })
    }

    #[test]
    fn slots_are_sorted_and_stable() {
        let (starts, places, slots) = sorted(&[2, 0, DROPPED, 2, 0, 3], 5);
        assert_eq!(starts, [0, 2, 2, 4, 5, 5]);
        assert_eq!(slots, [1, 4, 0, 3, 5]);
        assert_eq!(places, [2, 0, DROPPED, 3, 1, 4]);
        assert_eq!(sorted(&[], 3), (vec![0; 4], vec![], vec![]));
        assert_eq!(sorted(&[DROPPED], 0), (vec![0], vec![DROPPED], vec![]));
        assert_eq!(sorted(&[0, 0, 0], 1), (vec![0, 3], vec![0, 1, 2], vec![0, 1, 2]));
    }
}
