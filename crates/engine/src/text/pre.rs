//! How text is cut into words before byte pairs are merged: what GGUF calls `tokenizer.ggml.pre`.

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;

/// A way to cut text, and what follows from its name alone.
pub struct Pre {
    words: Words,
    /// Whether a word that is a token is not merged from its bytes.
    pub ignore_merges: bool,
    /// Whether a prompt starts with the first token when the file does not say.
    pub add_bos: bool,
}

#[derive(Clone, Copy)]
enum Words {
    /// GPT-2's expression, which the library has built in.
    Gpt2,
    /// The same, after every numeric character was cut off by itself.
    SingleDigitsGpt2,
    /// An expression of its own.
    Pattern(&'static str),
}

/// Llama 3: letters with one character before them, numbers in groups of three.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2 and 3: the same with single digits.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The names that are understood.
pub const KNOWN: [&str; 12] = [
    "gpt-2",
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "qwen2",
    "deepseek-r1-qwen",
    "dbrx",
    "smaug-bpe",
];

impl Pre {
    pub fn named(name: &str) -> Option<Pre> {
        let (words, ignore_merges, add_bos) = match name {
            "gpt-2" => (Words::Gpt2, false, false),
            "smollm" | "starcoder" | "refact" | "command-r" => (Words::SingleDigitsGpt2, false, false),
            "llama-bpe" | "llama3" | "llama-v3" => (Words::Pattern(LLAMA_3), true, true),
            // What files of OLMo 2 and SmolLM3 say.
            "dbrx" | "smaug-bpe" => (Words::Pattern(LLAMA_3), false, false),
            "qwen2" | "deepseek-r1-qwen" => (Words::Pattern(QWEN_2), false, false),
            _ => return None,
        };
        Some(Pre { words, ignore_merges, add_bos })
    }

    /// Cuts text into words and writes their bytes as characters. No space is put in front of the text.
    pub fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
        Ok(match self.words {
            Words::Gpt2 => bytes(true),
            Words::SingleDigitsGpt2 => Sequence::new(vec![Digits::new(true).into(), bytes(true)]).into(),
            Words::Pattern(pattern) => {
                let pattern = SplitPattern::Regex(pattern.into());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
                Sequence::new(vec![split.into(), bytes(false)]).into()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_builds() {
        for name in KNOWN {
            Pre::named(name).unwrap().build().unwrap();
        }
        assert!(Pre::named("viking").is_none());
    }
}
