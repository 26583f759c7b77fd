//! Chats as transformers renders them, byte for byte.

use crate::json;
use serde_json::{Map, Value};
use warpsmith_engine::text::{Chat, ChatTemplate};

/// The chat of a recorded case.
pub fn chat(case: &Value) -> Chat {
    let chat = &case["chat"];
    Chat {
        tools: chat.get("tools").cloned(),
        add_generation_prompt: chat.get("add_generation_prompt").is_none_or(|value| value == true),
        ..Chat::new(chat["messages"].clone())
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let cases = json("chats.json");
    for case in cases.as_array().unwrap() {
        let tokens = Map::from_iter([("bos_token".to_owned(), Value::from("<s>"))]);
        let template = ChatTemplate::new(case["template"].as_str().unwrap(), tokens).unwrap();
        let rendered = template.render(&chat(case)).unwrap();
        assert_eq!(rendered, case["expected"].as_str().unwrap(), "{}", case["name"]);
    }
    assert!(cases.as_array().unwrap().len() >= 12);
}
