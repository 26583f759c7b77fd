//! How much a random check does.

use crate::inputs::parse_duration;
use std::time::{Duration, Instant};
use warpsmith::{Error, Result};

/// A number of calls, or a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// So many kernels judged on a draw.
    Calls(usize),
    /// As many as fit.
    Time(Duration),
}

impl Amount {
    /// Reads `2000`, `60s`, `10m` or `2h`.
    pub fn parse(text: &str) -> Result<Amount> {
        let calls = text.parse().ok().map(Amount::Calls);
        let amount = calls.or_else(|| parse_duration(text).ok().map(Amount::Time));
        let some = |amount: &Amount| *amount != Amount::Calls(0) && *amount != Amount::Time(Duration::ZERO);
        let expected = "a number of calls, or a time such as 60s, 10m or 2h";
        amount.filter(some).ok_or_else(|| Error::parse("random", expected, text))
    }

    /// What [`parse`](Self::parse) reads.
    pub fn text(self) -> String {
        match self {
            Amount::Calls(calls) => calls.to_string(),
            Amount::Time(time) => format!("{}s", time.as_secs()),
        }
    }

    /// What each of `count` processes does.
    pub fn share(self, count: usize) -> Amount {
        match self {
            Amount::Calls(calls) => Amount::Calls(calls.div_ceil(count)),
            time => time,
        }
    }

    /// Whether `done` calls since `begun` are enough.
    pub fn is_reached(self, done: usize, begun: Instant) -> bool {
        match self {
            Amount::Calls(calls) => done >= calls,
            Amount::Time(time) => begun.elapsed() >= time,
        }
    }

    /// The length of a progress bar.
    pub fn length(self) -> usize {
        match self {
            Amount::Calls(calls) => calls,
            Amount::Time(time) => time.as_secs() as usize,
        }
    }

    /// How far that is.
    pub fn position(self, done: usize, begun: Instant) -> u64 {
        match self {
            Amount::Calls(_) => done as u64,
            Amount::Time(_) => begun.elapsed().as_secs(),
        }
    }

    /// Draws of an op at once, at most `most`: few where every one of `ops` must have its turn.
    pub fn together(self, ops: usize, most: usize) -> usize {
        match self {
            Amount::Calls(calls) => (calls / (8 * ops.max(1))).clamp(1, most),
            Amount::Time(_) => most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_calls_or_times() {
        let seconds = |seconds| Amount::Time(Duration::from_secs(seconds));
        for (text, expected) in
            [("2000", Amount::Calls(2000)), ("60s", seconds(60)), ("3m", seconds(180)), ("2h", seconds(7200))]
        {
            let amount = Amount::parse(text).unwrap();
            assert_eq!(amount, expected);
            assert_eq!(Amount::parse(&amount.text()).unwrap(), expected);
        }
        for bad in ["", "0", "0s", "-1", "s", "1d", "1.5m", "4000000000h"] {
            assert!(Amount::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares_are_together_no_less_than_the_whole() {
        assert_eq!(Amount::Calls(10).share(4), Amount::Calls(3));
        assert_eq!((Amount::Calls(100).together(33, 16), Amount::Calls(100_000).together(33, 16)), (1, 16));
    }
}
