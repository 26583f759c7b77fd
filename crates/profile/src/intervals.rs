//! Intervals of time: how long their union is, and what lies in what.

/// An interval: start and end.
pub type Interval = (u64, u64);

/// How long the union of intervals is, inside of `within`. Intervals may overlap and come in any order.
pub fn union(intervals: impl IntoIterator<Item = Interval>, within: Interval) -> u64 {
    let clip = |(start, end): Interval| (start.max(within.0), end.min(within.1));
    let mut all: Vec<Interval> = intervals.into_iter().map(clip).filter(|(start, end)| start < end).collect();
    all.sort_unstable();
    let (mut covered, mut reached) = (0, 0);
    for (start, end) in all {
        covered += end.saturating_sub(start.max(reached));
        reached = reached.max(end);
    }
    covered
}

/// For intervals that nest, by their start and the longest first: how long each is without those inside of it.
pub fn own(intervals: &[Interval]) -> Vec<u64> {
    let mut own: Vec<u64> = intervals.iter().map(|(start, end)| end.saturating_sub(*start)).collect();
    let mut open: Vec<usize> = Vec::new();
    for (at, &(start, end)) in intervals.iter().enumerate() {
        while open.last().is_some_and(|&outer| intervals[outer].1 <= start) {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            let inside = end.min(intervals[outer].1).saturating_sub(start);
            own[outer] = own[outer].saturating_sub(inside);
        }
        open.push(at);
    }
    own
}

/// The lane of each interval, such that those in a lane nest: none overlaps another in part. The intervals must be
/// sorted by start and the longest first.
pub fn lanes(intervals: &[Interval]) -> Vec<usize> {
    // The ends of the intervals that are open in each lane, the innermost last.
    let mut open: Vec<Vec<u64>> = Vec::new();
    let place = |&(start, end): &Interval| {
        for (number, lane) in open.iter_mut().enumerate() {
            while lane.last().is_some_and(|&outer| outer <= start) {
                lane.pop();
            }
            if lane.last().is_none_or(|&outer| end <= outer) {
                lane.push(end);
                return number;
            }
        }
        open.push(vec![end]);
        open.len() - 1
    };
    intervals.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_counts_once_and_what_is_outside_not_at_all() {
        assert_eq!(union([], (0, 100)), 0);
        assert_eq!(union([(20, 30), (0, 10), (5, 12), (25, 26)], (0, 100)), 22);
        assert_eq!(union([(0, 50), (40, 200)], (10, 100)), 90);
        assert_eq!(union([(7, 7), (9, 3)], (0, 100)), 0);
        // Two streams that overlap, as in a sum of 14 that is a union of 11.
        assert_eq!(union([(0, 8), (5, 11)], (0, 11)), 11);
    }

    #[test]
    fn the_time_of_what_is_inside_is_not_counted_twice() {
        assert_eq!(own(&[(0, 10), (2, 5), (3, 4), (6, 8), (10, 12)]), [5, 2, 1, 2, 2]);
        // What is neither inside nor outside takes what it covers.
        assert_eq!(own(&[(0, 10), (5, 15)]), [5, 10]);
        assert!(own(&[]).is_empty());
    }

    #[test]
    fn intervals_in_a_lane_nest() {
        assert_eq!(lanes(&[(0, 10), (2, 5), (5, 10), (10, 11)]), [0, 0, 0, 0]);
        assert_eq!(lanes(&[(0, 10), (5, 15), (12, 14), (15, 20)]), [0, 1, 0, 0]);
        assert_eq!(lanes(&[(0, 10), (5, 15), (6, 16), (7, 9)]), [0, 1, 2, 0]);
    }
}
