//! The default model's own tokenizer and template. Needs the file: WARPSMITH_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf.

use crate::chats::chat;
use crate::{check, json};
use warpsmith_engine::text::{ChatTemplate, Tokenizer};
use warpsmith_engine::weights::Checkpoint;

#[test]
#[ignore = "needs WARPSMITH_MODEL, the path of SmolLM2-135M-Instruct.Q4_1.gguf"]
fn the_default_model_gives_the_recorded_ids_and_chats() {
    let path = std::env::var("WARPSMITH_MODEL").expect("WARPSMITH_MODEL is the path of the model");
    let checkpoint = Checkpoint::open(path).unwrap();
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let recorded = json("smollm2.json");
    check(&tokenizer, &recorded["texts"]);
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap().unwrap();
    for case in recorded["chats"].as_array().unwrap() {
        assert_eq!(template.render(&chat(case)).unwrap(), case["expected"].as_str().unwrap());
    }
    assert_eq!((tokenizer.len(), tokenizer.first()), (49152, None));
    assert_eq!(tokenizer.final_ids().iter().copied().collect::<Vec<_>>(), [0, 2]);
}

/// Vocabularies with recorded ids, as llama.cpp keeps them: `NAME.gguf` with `NAME.gguf.inp` and `NAME.gguf.out`.
#[test]
#[ignore = "needs WARPSMITH_VOCABULARIES, a folder with llama.cpp's ggml-vocab-*.gguf, .inp and .out files"]
fn vocabularies_of_llama_cpp_give_their_recorded_ids() {
    let folder = std::env::var("WARPSMITH_VOCABULARIES").expect("WARPSMITH_VOCABULARIES is a folder");
    let mut checked = Vec::new();
    for name in ["gpt-2", "llama-bpe", "qwen2", "starcoder", "refact", "command-r", "llama-spm", "phi-3"] {
        let path = std::path::Path::new(&folder).join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = Tokenizer::from_checkpoint(&Checkpoint::open(&path).unwrap()).unwrap();
        let beside = |end: &str| std::fs::read_to_string(path.with_extension(format!("gguf.{end}"))).unwrap();
        let texts = beside("inp");
        let expected = beside("out");
        let end = "\n__ggml_vocab_test__\n";
        let texts: Vec<&str> = texts.trim_end_matches(end).split(end).collect();
        assert_eq!(texts.len(), expected.lines().count(), "{name}");
        for (text, line) in texts.iter().zip(expected.lines()) {
            let wanted: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text).unwrap(), wanted, "{name}: {text:?}");
        }
        checked.push((name, texts.len()));
    }
    println!("{checked:?}");
}
