//! The attribute `#[test]` for unit tests that are compiled into a library instead of a harness of their own.

use proc_macro::{Delimiter, TokenStream, TokenTree};

/// Makes a function a unit test: hands its name and the function itself to `crate::unit_tests`. Understands `#[ignore]`; like the
/// attribute of the standard library, it is put before the others.
///
/// ```ignore
/// #[test]
/// #[ignore = "takes a minute"]
/// fn one_and_one_is_two() {
///     assert_eq!(1 + 1, 2);
/// }
/// ```
#[proc_macro_attribute]
pub fn test(_: TokenStream, item: TokenStream) -> TokenStream {
    let mut conditions = String::new();
    let mut kept = TokenStream::new();
    let mut ignored = false;
    let mut name = None;
    let mut tokens = item.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let attribute = match (&token, tokens.peek()) {
            (TokenTree::Punct(hash), Some(TokenTree::Group(group)))
                if hash.as_char() == '#' && group.delimiter() == Delimiter::Bracket && name.is_none() =>
            {
                Some(group.stream())
            }
            _ => None,
        };
        if let Some(attribute) = attribute {
            let first = attribute.clone().into_iter().next().map(|word| word.to_string());
            match first.as_deref() {
                // The compiler knows this one of tests of its own alone.
                Some("ignore") => {
                    ignored = true;
                    tokens.next();
                    continue;
                }
                Some("should_panic") => return error("`should_panic` is not supported: catch the panic"),
                Some("cfg") => conditions += &format!("#[{attribute}]"),
                _ => {}
            }
        }
        if matches!(&token, TokenTree::Ident(word) if word.to_string() == "fn") && name.is_none() {
            name = tokens.peek().map(|name| name.to_string());
        }
        kept.extend([token]);
    }
    let Some(name) = name else { return error("only functions are tests") };
    let submitted =
        format!("{conditions} const _: () = {{ crate::unit_tests::submit!({name}, {ignored}); }};");
    kept.extend(submitted.parse::<TokenStream>().expect("an item"));
    kept
}

/// What the compiler shows where the attribute stands.
fn error(message: &str) -> TokenStream {
    format!("compile_error!({message:?});").parse().expect("an item")
}
