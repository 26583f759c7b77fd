//! Distribution of an op's cases over several processes.

use warpsmith::{Error, Result};

/// Exit status of a process for whose cases there is no kernel, which is normal for some of several processes.
pub const NOTHING_LAUNCHED: u8 = 98;

/// Every `step`-th case, beginning with number `first`. Neighbouring cases are similar, so every part gets some of
/// the long ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    first: usize,
    step: usize,
}

impl Default for Part {
    /// The whole.
    fn default() -> Self {
        Self { first: 0, step: 1 }
    }
}

impl Part {
    /// All parts; together they cover every case once.
    pub fn all(count: usize) -> impl Iterator<Item = Self> {
        (0..count).map(move |first| Self { first, step: count })
    }

    pub fn parse(text: &str) -> Result<Self> {
        let numbers =
            text.split_once('/').and_then(|(first, step)| Some((first.parse().ok()?, step.parse().ok()?)));
        match numbers {
            Some((first, step)) if first < step => Ok(Self { first, step }),
            _ => Err(Error::parse("part", "I/N with I below N", text)),
        }
    }

    /// Number of parts.
    pub fn count(self) -> usize {
        self.step
    }

    /// The number among all of this part's item `at`.
    pub fn number(self, at: u64) -> u64 {
        self.first as u64 + at * self.step as u64
    }

    /// The arguments that [`parse`](Self::parse) reads; none for a part that covers everything.
    pub fn words(self) -> Vec<String> {
        if self.step == 1 {
            Vec::new()
        } else {
            vec!["--part".into(), format!("{}/{}", self.first, self.step)]
        }
    }

    pub fn of<T>(self, cases: Vec<T>) -> Vec<T> {
        cases.into_iter().skip(self.first).step_by(self.step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_every_case_once() {
        for count in 1..9 {
            let mut seen: Vec<u32> = Part::all(count).flat_map(|part| part.of((0..7).collect())).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..7).collect::<Vec<_>>(), "{count} parts");
            let mut numbers: Vec<u64> =
                Part::all(count).flat_map(|part| (0..3).map(move |at| part.number(at))).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..3 * count as u64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn words_of_a_part_are_read_back() {
        for part in Part::all(3) {
            assert_eq!(Part::parse(&part.words()[1]).unwrap(), part);
        }
        assert!(Part::all(1).all(|part| part.words().is_empty()));
        for wrong in ["", "1", "3/3", "0/0", "-1/2", "1/2/3"] {
            assert!(Part::parse(wrong).is_err(), "{wrong}");
        }
    }
}
