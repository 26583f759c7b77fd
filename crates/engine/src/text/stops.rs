//! Strings at which generation stops.

use super::error::{Error, Result};

/// Looks for strings in text that arrives in pieces. Text that may be the start of one is held back, so nothing of it is sent
/// before it is known that it is none.
///
/// The string that completes first wins. If several complete with the same byte, it is the longest: nothing of any is sent.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<Stop>,
    /// Text that was not sent yet: the longest end of the text that starts a stop.
    held: String,
    found: bool,
}

/// One string, searched byte by byte (Knuth, Morris, Pratt).
#[derive(Debug, Clone)]
struct Stop {
    bytes: Vec<u8>,
    /// For each length of a match, the length of the next shorter one that ends at the same byte.
    shorter: Vec<usize>,
    /// How many bytes of it end the text so far.
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Stop {
        let bytes = text.as_bytes().to_vec();
        let mut shorter = vec![0; bytes.len() + 1];
        let mut matched = 0;
        for i in 1..bytes.len() {
            while matched > 0 && bytes[i] != bytes[matched] {
                matched = shorter[matched];
            }
            matched += usize::from(bytes[i] == bytes[matched]);
            shorter[i + 1] = matched;
        }
        Stop { bytes, shorter, matched: 0 }
    }

    /// Takes the next byte of the text; whether the string is complete with it.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

impl StopStrings {
    /// A search for these strings.
    ///
    /// # Errors
    /// If one of them is empty: it would stop before the first token.
    pub fn new(stops: &[String]) -> Result<StopStrings> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            let (expected, got) = ("strings with at least one character", format!("an empty one at {index}"));
            return Err(Error::Argument { what: "stop", expected: expected.into(), got });
        }
        let stops = stops.iter().map(|stop| Stop::new(stop)).collect();
        Ok(StopStrings { stops, held: String::new(), found: false })
    }

    /// Takes more text and appends to `out` what can be sent. Returns the index of the stop that is complete with it; then
    /// later bytes are ignored.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.found {
            return None;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let mut complete: Option<(usize, usize)> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                let longer = complete.is_none_or(|(_, len)| stop.bytes.len() > len);
                if stop.step(byte) && longer {
                    complete = Some((index, stop.bytes.len()));
                }
            }
            if let Some((index, len)) = complete {
                // A stop starts at the start of a character, so the text can be cut there.
                out.push_str(&self.held[..before + i + 1 - len]);
                self.held.clear();
                self.found = true;
                return Some(index);
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let sent = self.held.len() - keep;
        out.push_str(&self.held[..sent]);
        self.held.drain(..sent);
        None
    }

    /// Appends to `out` what is held back, when no more text comes.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The text that is sent, and the stop that was found, for text in pieces.
    fn sent(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let (mut search, mut out) = (StopStrings::new(&stops).unwrap(), String::new());
        for piece in pieces {
            let found = search.push(piece, &mut out);
            assert!(stops.iter().all(|stop| !out.contains(stop)));
            if found.is_some() {
                assert_eq!(search.push("more", &mut out), None);
                search.finish(&mut out);
                return (out, found);
            }
        }
        search.finish(&mut out);
        (out, None)
    }

    #[test]
    fn the_stop_that_completes_first_wins() {
        assert_eq!(sent(&["STOP"], &["go S", "T", "OP on"]), ("go ".into(), Some(0)));
        assert_eq!(sent(&["long stop", "stop"], &["a long st", "op"]), ("a ".into(), Some(0)), "the longest");
        assert_eq!(sent(&["abcd", "bc"], &["abcd"]), ("a".into(), Some(1)), "the first to complete");
        assert_eq!(sent(&["aab"], &["a", "a", "a", "b", "c"]), ("a".into(), Some(0)));
        assert_eq!(sent(&["aab"], &["aaaa"]), ("aaaa".into(), None));
        assert_eq!(sent(&["é!"], &["caf", "é"]), ("café".into(), None));
        assert_eq!(sent(&["\n\n"], &["a\n", "b\n", "\nc"]), ("a\nb".into(), Some(0)));
        assert_eq!(sent(&[], &["a", "b"]), ("ab".into(), None));
        assert!(StopStrings::new(&[String::new()]).is_err());
    }

    #[test]
    fn only_what_may_start_a_stop_is_held_back() {
        let (mut search, mut out) =
            (StopStrings::new(&["</end>".into(), "<x".into()]).unwrap(), String::new());
        search.push("abc</e", &mut out);
        assert_eq!(out, "abc");
        search.push("<", &mut out);
        assert_eq!(out, "abc</e");
        search.push("b", &mut out);
        assert_eq!(out, "abc</e<b");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter_and_the_rule_holds(
            text in "[abé]{0,14}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            piece in 1usize..5,
        ) {
            let chars: Vec<String> = text.chars().collect::<Vec<_>>().chunks(piece).map(|c| c.iter().collect()).collect();
            let pieces: Vec<&str> = chars.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            // The rule as it is stated: the least end, then the least start.
            let first = stops
                .iter()
                .filter_map(|stop| (0..=text.len()).filter(|&end| text.is_char_boundary(end) && text[..end].ends_with(stop)).min().map(|end| (end, end - stop.len())))
                .min();
            let expected = first.map_or(&text[..], |(_, start)| &text[..start]);
            let (out, found) = sent(&stops, &pieces);
            prop_assert_eq!(out, expected);
            prop_assert_eq!(found.is_some(), first.is_some());
        }
    }
}
