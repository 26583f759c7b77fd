//! The cases of an op shared out to several processes.

use warpsmith::{Error, Result};

/// What a process exits with whose cases no kernel takes. Of several, some may have none.
pub const NOTHING_LAUNCHED: u8 = 98;

/// Each `of`-th case, from number `first` on: neighbours are alike, so that every part has some of the long ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    first: usize,
    of: usize,
}

impl Part {
    /// All parts, which together have every case once.
    pub fn all(of: usize) -> impl Iterator<Item = Self> {
        (0..of).map(move |first| Self { first, of })
    }

    pub fn parse(text: &str) -> Result<Self> {
        let numbers =
            text.split_once('/').and_then(|(first, of)| Some((first.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((first, of)) if first < of => Ok(Self { first, of }),
            _ => Err(Error::parse("part", "I/N with I below N", text)),
        }
    }

    /// The words that [`parse`](Self::parse) reads, none for a part that is everything.
    pub fn words(self) -> Vec<String> {
        if self.of == 1 { Vec::new() } else { vec!["--part".into(), format!("{}/{}", self.first, self.of)] }
    }

    pub fn of<T>(self, cases: Vec<T>) -> Vec<T> {
        cases.into_iter().skip(self.first).step_by(self.of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_every_case_once() {
        for of in 1..9 {
            let mut seen: Vec<u32> = Part::all(of).flat_map(|part| part.of((0..7).collect())).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..7).collect::<Vec<_>>(), "{of} parts");
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
