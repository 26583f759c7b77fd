//! UTF-8 that arrives in pieces.

/// Turns bytes that arrive in pieces into text. A character that is not complete yet is held back; bytes that are no
/// character become U+FFFD. Together the pieces give what [`String::from_utf8_lossy`] gives for all bytes at once.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The start of a character: at most three bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `out` all text that is complete with `bytes`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest = if self.held.is_empty() {
            bytes
        } else {
            joined = [&self.held[..], bytes].concat();
            self.held.clear();
            &joined[..]
        };
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => return out.push_str(text),
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(valid).expect("it is valid up to here"));
                    let Some(wrong) = error.error_len() else {
                        self.held.extend_from_slice(after);
                        return;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[wrong..];
                }
            }
        }
    }

    /// Appends to `out` what is held back, when no more bytes come.
    pub fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn in_pieces(bytes: &[u8], piece: usize) -> String {
        let (mut stream, mut out) = (Utf8Stream::default(), String::new());
        bytes.chunks(piece).for_each(|piece| stream.push(piece, &mut out));
        stream.finish(&mut out);
        out
    }

    #[test]
    fn incomplete_characters_wait_and_invalid_ones_do_not() {
        let (mut stream, mut out) = (Utf8Stream::default(), String::new());
        stream.push(b"a\xF0\x9F", &mut out);
        assert_eq!(out, "a");
        stream.push(b"\x98\x80", &mut out);
        assert_eq!(out, "a😀");
        stream.push(b"\xC3(", &mut out);
        assert_eq!(out, "a😀\u{FFFD}(");
        stream.push(b"\xE2\x82", &mut out);
        assert_eq!(out, "a😀\u{FFFD}(");
        stream.finish(&mut out);
        assert_eq!(out, "a😀\u{FFFD}(\u{FFFD}");
    }

    proptest! {
        #[test]
        fn pieces_give_the_text_of_the_whole(
            parts in prop::collection::vec(
                prop_oneof![
                    any::<char>().prop_map(|c| c.to_string().into_bytes()),
                    prop::collection::vec(any::<u8>(), 0..3),
                    prop::sample::select(vec![vec![0xC0], vec![0xF0, 0x9F], vec![0xED, 0xA0], vec![0xE2, 0x82]]),
                ],
                0..12,
            ),
            piece in 1usize..7,
        ) {
            let bytes = parts.concat();
            prop_assert_eq!(in_pieces(&bytes, piece), String::from_utf8_lossy(&bytes));
        }
    }
}
