//! The text of a request, from the bytes of its tokens to what is sent.

use super::error::Result;
use super::{StopStrings, Utf8Stream};

/// What a token adds to the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delta {
    /// Text that can be sent now.
    pub text: String,
    /// The index of the stop string that is complete; the text ends before it.
    pub stop: Option<usize>,
}

/// Turns the bytes of tokens into text that can be sent at once. Incomplete characters and possible starts of stop strings are
/// held back.
#[derive(Debug, Clone)]
pub struct TextStream {
    utf8: Utf8Stream,
    stops: StopStrings,
}

impl TextStream {
    /// A stream that ends at the first of these strings.
    ///
    /// # Errors
    /// If one of them is empty.
    pub fn new(stops: &[String]) -> Result<TextStream> {
        Ok(TextStream { utf8: Utf8Stream::default(), stops: StopStrings::new(stops)? })
    }

    /// Takes the bytes of the next token.
    pub fn push(&mut self, bytes: &[u8]) -> Delta {
        let (mut decoded, mut delta) = (String::new(), Delta::default());
        self.utf8.push(bytes, &mut decoded);
        delta.stop = self.stops.push(&decoded, &mut delta.text);
        delta
    }

    /// The text that is still held back. To be called at every end but a stop string, after which it gives nothing.
    pub fn finish(&mut self) -> String {
        let (mut decoded, mut text) = (String::new(), String::new());
        self.utf8.finish(&mut decoded);
        // A stop that ends in U+FFFD can still become complete here.
        self.stops.push(&decoded, &mut text);
        self.stops.finish(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_stop_cut_by_tokens_and_characters_is_found() {
        let mut stream = TextStream::new(&["\u{20AC}!".into()]).unwrap();
        let mut text = String::new();
        for bytes in [&b"5 \xE2\x82"[..], b"\xAC", b"?", b"\xE2", b"\x82\xAC"] {
            text += &stream.push(bytes).text;
        }
        assert_eq!(text, "5 \u{20AC}?");
        let last = stream.push(b"! more");
        assert_eq!((last.stop, last.text.as_str(), stream.finish().as_str()), (Some(0), "", ""));
    }

    proptest! {
        #[test]
        fn deltas_join_to_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..24), piece in 1usize..5) {
            let mut stream = TextStream::new(&["stop".into(), "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}x".into()]).unwrap();
            let mut text = String::new();
            let mut stopped = false;
            for piece in bytes.chunks(piece) {
                let delta = stream.push(piece);
                text += &delta.text;
                stopped |= delta.stop.is_some();
            }
            text += &stream.finish();
            if !stopped {
                prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
            }
        }
    }
}
