//! GPT-2's way to write bytes as characters: printable ones stand for themselves, the others for characters from U+0100 on.

/// The byte a character stands for.
pub fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        // The bytes that are not printable, in order: 00-20, 7F-A0, AD.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The bytes of a token; `None` if it holds a character that stands for none.
pub fn bytes_of(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let characters: Vec<char> =
            (0..0x200).filter_map(char::from_u32).filter(|&c| byte_of(c).is_some()).collect();
        let mut bytes: Vec<u8> = characters.iter().filter_map(|&c| byte_of(c)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(bytes_of("Ġthe").unwrap(), b" the");
        assert_eq!(bytes_of("Ċ").unwrap(), b"\n");
        assert_eq!(bytes_of("日"), None);
    }
}
