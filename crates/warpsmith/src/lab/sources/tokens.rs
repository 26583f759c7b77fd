//! Rust text as tokens: what is left of a source without comments, white space, tests and other backends.

use std::iter::Peekable;
use std::str::CharIndices;

/// The tokens of a source. Literals are one token each, and so is `::`.
pub(super) fn tokens(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text.char_indices().peekable();
    while let Some((start, first)) = rest.next() {
        let follows = |more: &str| text[start..].starts_with(more);
        if first.is_whitespace() {
            continue;
        } else if follows("//") {
            skip_while(&mut rest, |c| c != '\n');
            continue;
        } else if follows("/*") {
            skip_block_comment(&mut rest);
            continue;
        } else if let Some(hashes) = raw_string(&text[start..]) {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = text[start..].find('"').map_or(text.len(), |quote| start + quote + 1);
            let end = text[open..].find(&close).map_or(text.len(), |at| open + at + close.len());
            while rest.next_if(|&(at, _)| at < end).is_some() {}
        } else if first == '"' || follows("b\"") || follows("c\"") {
            if first != '"' {
                rest.next();
            }
            skip_quoted(&mut rest, '"');
        } else if first == '\'' {
            let mut ahead = text[start + 1..].chars();
            let is_char = ahead.next() == Some('\\') || ahead.next() == Some('\'');
            if is_char { skip_quoted(&mut rest, '\'') } else { skip_while(&mut rest, is_word) }
        } else if is_word(first) {
            skip_while(&mut rest, is_word);
        } else if follows("::") {
            rest.next();
        }
        let end = rest.peek().map_or(text.len(), |&(at, _)| at);
        found.push(&text[start..end]);
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn skip_while(rest: &mut Peekable<CharIndices<'_>>, skips: impl Fn(char) -> bool) {
    while rest.next_if(|&(_, c)| skips(c)).is_some() {}
}

/// To behind the closing quote.
fn skip_quoted(rest: &mut Peekable<CharIndices<'_>>, quote: char) {
    while let Some((_, c)) = rest.next() {
        if c == '\\' {
            rest.next();
        } else if c == quote {
            break;
        }
    }
}

/// Comments of this kind nest. The first slash has been read.
fn skip_block_comment(rest: &mut Peekable<CharIndices<'_>>) {
    rest.next();
    let mut depth = 1;
    while let Some((_, c)) = rest.next().filter(|_| depth > 0) {
        match (c, rest.peek().map(|&(_, next)| next)) {
            ('/', Some('*')) => depth += 1,
            ('*', Some('/')) => depth -= 1,
            _ => continue,
        }
        rest.next();
        if depth == 0 {
            break;
        }
    }
}

/// How many `#` a raw string that begins here has.
fn raw_string(text: &str) -> Option<usize> {
    let after = ["br", "cr", "r"].iter().find_map(|prefix| text.strip_prefix(prefix))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    after[hashes..].starts_with('"').then_some(hashes)
}

/// The tokens without items, fields and elements that only tests, the lab or CUDA builds have.
pub(super) fn of_the_cpu(tokens: &[&'static str]) -> Vec<&'static str> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        match attribute(&tokens[at..]) {
            Some(length) if is_elsewhere(&tokens[at + 2..at + length - 1]) => {
                at += length;
                while let Some(length) = attribute(&tokens[at..]) {
                    at += length;
                }
                at += item(&tokens[at..]);
            }
            _ => {
                kept.push(tokens[at]);
                at += 1;
            }
        }
    }
    kept
}

/// The length of the attribute that begins here.
fn attribute(tokens: &[&str]) -> Option<usize> {
    if !tokens.starts_with(&["#", "["]) {
        return None;
    }
    let mut depth = 0;
    for (at, &token) in tokens.iter().enumerate() {
        match token {
            "[" => depth += 1,
            "]" if depth == 1 => return Some(at + 1),
            "]" => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Whether an attribute says `cfg` of tests, the lab or CUDA. Of conditions that also hold elsewhere it is not known.
fn is_elsewhere(attribute: &[&str]) -> bool {
    let condition = |tokens: &[&str]| match tokens {
        ["test"] => true,
        ["feature", "=", feature] => ["\"cuda\"", "\"lab\"", "\"tests\""].contains(feature),
        _ => false,
    };
    match attribute {
        ["cfg", "(", "all", "(", inside @ .., ")", ")"] => inside.split(|&token| token == ",").any(condition),
        ["cfg", "(", inside @ .., ")"] => condition(inside),
        _ => false,
    }
}

/// The length of the item, field or element that begins here. Fields and elements end with a comma.
fn item(tokens: &[&str]) -> usize {
    const ITEMS: [&str; 13] = [
        "pub", "use", "mod", "fn", "const", "static", "struct", "enum", "impl", "trait", "type", "unsafe",
        "let",
    ];
    let has_commas = tokens.first().is_some_and(|first| ITEMS.contains(first));
    let mut depth = 0usize;
    for (at, &token) in tokens.iter().enumerate() {
        match token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => return at,
            "}" if depth == 1 => {
                let ends = matches!(tokens.get(at + 1), Some(&";") | Some(&","));
                return at + 1 + ends as usize;
            }
            ")" | "]" | "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            "," if depth == 0 && !has_commas => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn kept(text: &'static str) -> String {
        of_the_cpu(&tokens(text)).join(" ")
    }

    #[test]
    fn comments_and_white_space_are_no_tokens() {
        let plain = "fn f<'a>(x: &'a str) -> char { x.len() /2; '\\'' }";
        let noisy =
            "//! Doc.\nfn f<'a>( x : &'a str) /* /* nested */ */ ->char {\n// why\nx.len()/2; '\\''\n}\n";
        assert_eq!(tokens(plain), tokens(noisy));
        assert_eq!(tokens("a::b"), ["a", "::", "b"]);
    }

    #[test]
    fn literals_are_kept_as_they_are() {
        for literal in
            ["\"// no comment\"", "\"a \\\" b\"", "r#\"a \" b\"#", "br\"c\"", "b\"d\"", "'\"'", "' '"]
        {
            assert_eq!(tokens(&format!("x = {literal}; y")), ["x", "=", literal, ";", "y"], "{literal}");
        }
    }

    #[test]
    fn what_others_build_is_left_out() {
        assert_eq!(kept("a(); #[cfg(test)] mod tests { use super::*; fn t() {} } b();"), "a ( ) ; b ( ) ;");
        assert_eq!(kept("[#[cfg(feature = \"cuda\")] cuda::SM90, cpu::ALL]"), "[ cpu :: ALL ]");
        assert_eq!(kept("#[cfg(feature = \"lab\")] #[path = \"x.rs\"] mod x; mod y;"), "mod y ;");
        assert_eq!(kept("#[cfg(feature = \"tests\")] mod tests { fn t() {} } b"), "b");
        assert_eq!(kept("#[cfg(all(test, unix))] use a::{b, c}; d"), "d");
        assert_eq!(kept("#[cfg(feature = \"cuda\")] pub fn f<A, B>(a: A) -> B { {} } g"), "g");
        for stays in ["# [ inline ] fn f ( ) { }", "# [ cfg ( not ( test ) ) ] fn f ( ) { }"] {
            assert_eq!(kept(stays), stays);
        }
    }
}
