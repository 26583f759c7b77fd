//! The forms of requests and answers.

use crate::harness::{Running, Setup, user};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_chat_has_the_parts_of_the_whole_one() {
    let server = Running::start(Setup::default()).await;
    let body = json!({
        "model": "alias", "messages": user("hello"), "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 2,
    });
    let whole = server.ask(CHAT, body.clone()).await;
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("alias")));
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["role"]),
        (&json!("length"), &json!("assistant"))
    );
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    assert_eq!(usage["total_tokens"].as_u64(), usage["prompt_tokens"].as_u64().map(|prompt| prompt + 12));
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), 12);
    for entry in entries {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"], "greedy takes the likeliest");
        assert!(entry["logprob"].as_f64().unwrap() < 0.0 && entry["bytes"].is_array());
    }

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let events = server.events(CHAT, streamed).await;
    assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert!(
        events
            .iter()
            .all(|event| event["id"] == events[0]["id"] && event["object"] == "chat.completion.chunk")
    );
    let last = events.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 12);
    assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
    let content: String = choices.iter().map(|choice| text(&choice["delta"]["content"])).collect();
    assert_eq!(content, text(&choice["message"]["content"]));
    let finishes: Vec<&Value> =
        choices.iter().map(|c| &c["finish_reason"]).filter(|f| !f.is_null()).collect();
    assert_eq!(finishes, [&json!("length")]);
    let logprobs: Vec<Value> = choices
        .iter()
        .flat_map(|c| c["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(&logprobs, entries);
    // The same again finds its beginning in the cache.
    let again = server.ask(CHAT, body).await;
    assert_eq!(again["choices"][0]["message"], whole["choices"][0]["message"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_take_texts_and_tokens_and_several_of_them() {
    let server = Running::start(Setup::default()).await;
    let tokens = server.ask("/tokenize", json!({ "prompt": "one two" })).await["tokens"].clone();
    let back = server.ask("/detokenize", json!({ "tokens": tokens })).await;
    assert_eq!(back["prompt"], "one two");
    let ask = |prompt: Value| json!({ "model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true });
    let single = server.ask(COMPLETIONS, ask(json!("one two"))).await;
    assert_eq!(single["object"], "text_completion");
    let expected = single["choices"][0]["text"].clone();
    for prompt in [tokens.clone(), json!(["one two"]), json!([tokens])] {
        let answer = server.ask(COMPLETIONS, ask(prompt)).await;
        assert_eq!(answer["choices"][0]["text"], expected);
    }
    // Two prompts with two outputs each: prompts first.
    let mut body = ask(json!(["one two", "three"]));
    body["n"] = json!(2);
    body["echo"] = json!(true);
    let answer = server.ask(COMPLETIONS, body.clone()).await;
    let texts: Vec<String> = answer["choices"].as_array().unwrap().iter().map(|c| text(&c["text"])).collect();
    assert!(texts.len() == 4 && texts[0] == texts[1] && texts[0] == format!("one two{}", text(&expected)));
    assert!(texts[2].starts_with("three"));
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    body["stream"] = json!(true);
    let events = server.events(COMPLETIONS, body).await;
    for (index, expected) in texts.iter().enumerate() {
        let parts = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        let joined: String = parts.filter(|c| c["index"] == index).map(|c| text(&c["text"])).collect();
        assert_eq!(joined, *expected);
    }
    // Arrays of log-probabilities.
    let mut body = ask(json!("one two"));
    body["logprobs"] = json!(2);
    let answer = server.ask(COMPLETIONS, body).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[name].as_array().unwrap().len(), 6, "{name}");
    }
    assert_eq!(logprobs["text_offset"][0], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_stops_and_biases_do_what_they_say() {
    let server = Running::start(Setup::default()).await;
    let base = json!({ "model": "tiny", "prompt": "abc", "max_tokens": 24, "temperature": 1.0, "ignore_eos": true, "seed": 7 });
    let with = |name: &str, value: Value| {
        let mut body = base.clone();
        body[name] = value;
        body
    };
    let answer = async |body: Value| text(&server.ask(COMPLETIONS, body).await["choices"][0]["text"]);
    let whole = answer(base.clone()).await;
    assert_eq!(answer(base.clone()).await, whole);
    assert_ne!(answer(with("seed", json!(8))).await, whole);
    // A text of ASCII from inside the answer.
    let letters: Vec<char> = whole.chars().collect();
    let at = (8..20).find(|&at| letters[at..at + 2].iter().all(char::is_ascii)).unwrap_or(10);
    let stop: String = letters[at..at + 2].iter().collect();
    let stopped = server.ask(COMPLETIONS, with("stop", json!(stop))).await;
    let until = &whole[..whole.find(&stop).unwrap()];
    assert_eq!(stopped["choices"][0]["text"], until);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // One token that always wins.
    let id = server.ask("/tokenize", json!({ "prompt": "q" })).await["tokens"][0].clone();
    let mut biased = with("logit_bias", json!({ id.to_string(): 100 }));
    biased["max_tokens"] = json!(5);
    assert_eq!(answer(biased).await, "qqqqq");
    let mut n = with("n", json!(3));
    n["seed"] = json!(11);
    let several = server.ask(COMPLETIONS, n).await;
    let texts: std::collections::BTreeSet<String> =
        several["choices"].as_array().unwrap().iter().map(|choice| text(&choice["text"])).collect();
    assert_eq!(texts.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_and_grammars_are_kept_to() {
    let server = Running::start(Setup::default()).await;
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["colour", "even"],
        "properties": { "colour": { "enum": ["red", "green"] }, "even": { "type": "boolean" } },
    });
    let chat = |format: Value, seed: u64| {
        json!({
            "model": "tiny", "messages": user("x"), "max_tokens": 120, "seed": seed, "response_format": format,
            "chat_template_kwargs": { "enable_thinking": false },
        })
    };
    for seed in 0..5 {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema, "strict": true } });
        let answer = server.ask(CHAT, chat(format, seed)).await;
        let message = &answer["choices"][0]["message"];
        let value: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
        assert!(["red", "green"].contains(&value["colour"].as_str().unwrap()) && value["even"].is_boolean());
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let answer =
            server.ask(CHAT, chat(json!({ "type": "regex", "regex": "[ab]{3}-[0-9]{2}" }), seed)).await;
        let content = text(&answer["choices"][0]["message"]["content"]);
        let (letters, digits) = content.split_once('-').unwrap();
        assert!(letters.len() == 3 && letters.bytes().all(|b| b == b'a' || b == b'b'), "{content}");
        assert!(digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit()), "{content}");
        let grammar = json!({ "type": "grammar", "grammar": "start: \"yes\" | \"no\"" });
        let content = text(&server.ask(CHAT, chat(grammar, seed)).await["choices"][0]["message"]["content"]);
        assert!(["yes", "no"].contains(&content.as_str()), "{content}");
        let mut choice = chat(json!(null), seed);
        choice["guided_choice"] = json!(["left \"x\"", "right"]);
        let content = text(&server.ask(CHAT, choice).await["choices"][0]["message"]["content"]);
        assert!(["left \"x\"", "right"].contains(&content.as_str()), "{content}");
    }
    // Several outputs, each in a grammar of its own, in a stream.
    let mut body = chat(json!({ "type": "regex", "regex": "[0-9]{8}" }), 3);
    body["n"] = json!(4);
    body["stream"] = json!(true);
    let events = server.events(CHAT, body).await;
    for index in 0..4 {
        let mine = events.iter().filter(|event| event["choices"][0]["index"] == index);
        let content: String = mine.map(|event| text(&event["choices"][0]["delta"]["content"])).collect();
        assert!(content.len() == 8 && content.bytes().all(|b| b.is_ascii_digit()), "{content}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tools_that_must_be_called_are_called() {
    let server = Running::start(Setup::default()).await;
    let tool = |name: &str| {
        json!({ "type": "function", "function": { "name": name, "description": "d", "parameters": {
            "type": "object", "additionalProperties": false, "required": ["on"],
            "properties": { "on": { "type": "boolean" } } } } })
    };
    let mut body = json!({
        "model": "tiny", "messages": user("x"), "max_tokens": 200, "seed": 1, "tools": [tool("lamp"), tool("door")],
        "tool_choice": { "type": "function", "function": { "name": "door" } },
        "chat_template_kwargs": { "enable_thinking": false },
    });
    let answer = server.ask(CHAT, body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert!(choice["message"]["content"].is_null());
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("door")));
    let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["on"].is_boolean());

    body["stream"] = json!(true);
    body["tool_choice"] = json!("required");
    body["parallel_tool_calls"] = json!(false);
    let events = server.events(CHAT, body.clone()).await;
    let pieces: Vec<&Value> =
        events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]).filter(|p| !p.is_null()).collect();
    assert!(pieces[0]["id"].as_str().unwrap().starts_with("call_") && pieces[0]["type"] == "function");
    assert_eq!(pieces[0]["function"]["arguments"], "");
    assert!(["lamp", "door"].contains(&pieces[0]["function"]["name"].as_str().unwrap()));
    for piece in &pieces[1..] {
        assert_eq!(piece["index"], 0);
        // Left out, not null: null overwrites names in clients.
        assert!(piece.get("id").is_none() && piece["function"].get("name").is_none());
    }
    let joined: String = pieces.iter().map(|piece| text(&piece["function"]["arguments"])).collect();
    assert!(serde_json::from_str::<Value>(&joined).unwrap()["on"].is_boolean(), "{joined}");
    // The answer to a call goes back.
    body["stream"] = json!(false);
    body["messages"] = json!([
        { "role": "user", "content": "x" },
        { "role": "assistant", "content": null, "tool_calls": [
            { "id": "call_1", "type": "function", "function": { "name": "lamp", "arguments": "{\"on\": true}" } }] },
        { "role": "tool", "tool_call_id": "call_1", "content": "done" },
    ]);
    server.ask(CHAT, body).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn further_calls_are_left_out_where_there_may_be_one() {
    let mut setup = Setup::default();
    setup.options.tools = warpsmith_server::Parser::Named("hermes".into());
    let server = Running::start(setup).await;
    let call =
        |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
    let tool = |name: &str| json!({ "type": "function", "name": name });
    let calls = [call("lamp"), call("door")].join("\n");
    let body = |several: Option<bool>| {
        json!({
            "messages": user("x"), "input": "x", "max_tokens": 300, "parallel_tool_calls": several,
            "tools": [tool("lamp"), tool("door")], "chat_template_kwargs": { "enable_thinking": false },
            "guided_choice": [calls],
        })
    };
    for (several, expected) in [(None, &["lamp", "door"][..]), (Some(false), &["lamp"])] {
        let answer = server.ask(CHAT, body(several)).await;
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        let names: Vec<&str> = calls.iter().map(|call| call["function"]["name"].as_str().unwrap()).collect();
        assert_eq!((&names[..], choice["finish_reason"].as_str()), (expected, Some("tool_calls")));
        let items = server.ask(RESPONSES, body(several)).await["output"].clone();
        let names: Vec<&str> =
            items.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap()).collect();
        assert_eq!(names, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_a_response_come_in_order_and_make_what_the_whole_has() {
    let server = Running::start(Setup::default()).await;
    let tool = json!({ "type": "function", "name": "lamp", "description": "d", "parameters": {
        "type": "object", "additionalProperties": false, "required": ["on"],
        "properties": { "on": { "type": "boolean" } } } });
    let base = json!({
        "input": "x", "max_output_tokens": 60, "temperature": 0, "stream": true, "ignore_eos": true,
        "chat_template_kwargs": { "enable_thinking": false },
    });
    let mut called = base.clone();
    (called["tools"], called["tool_choice"]) = (json!([tool]), json!("required"));
    called["parallel_tool_calls"] = json!(false);
    called["max_output_tokens"] = json!(200);
    for (body, kind, last) in
        [(base, "message", "response.incomplete"), (called, "function_call", "response.completed")]
    {
        let mut events: Vec<Value> = Vec::new();
        let answer = server.target.stream(RESPONSES, &body, |data| {
            events.push(serde_json::from_str(data).unwrap());
            true
        });
        assert_eq!(answer.await.unwrap().status, 200);
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        let mut types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        // The parts of a text are one step.
        types.dedup();
        let (delta, around): (&str, [&[&str]; 2]) = match kind {
            "message" => (
                "response.output_text.delta",
                [
                    &["response.content_part.added"],
                    &["response.output_text.done", "response.content_part.done"],
                ],
            ),
            _ => {
                ("response.function_call_arguments.delta", [&[], &["response.function_call_arguments.done"]])
            }
        };
        let expected = [
            &["response.created", "response.in_progress", "response.output_item.added"],
            around[0],
            &[delta],
            around[1],
            &["response.output_item.done", last],
        ]
        .concat();
        assert_eq!(types, expected);
        let made: String =
            events.iter().filter(|event| event["type"] == delta).map(|event| text(&event["delta"])).collect();
        let whole = &events.last().unwrap()["response"];
        let item = &whole["output"][0];
        assert_eq!((item["type"].as_str().unwrap(), whole["output"].as_array().unwrap().len()), (kind, 1));
        match kind {
            "message" => assert_eq!(item["content"][0]["text"], made),
            _ => assert!(
                serde_json::from_str::<Value>(&made).unwrap()["on"].is_boolean() && item["arguments"] == made
            ),
        }
        assert!(events.iter().all(|event| event.get("item_id").is_none_or(|id| *id == item["id"])));
        let [input, output, total] = ["input", "output", "total"]
            .map(|part| whole["usage"][format!("{part}_tokens")].as_u64().unwrap());
        assert!(input > 0 && output > 0 && input + output == total, "{}", whole["usage"]);
        assert_eq!(whole["tools"].as_array().unwrap().len(), usize::from(kind == "function_call"));
        // At once it says the same.
        let mut body = body;
        body["stream"] = json!(false);
        let again = server.ask(RESPONSES, body).await;
        assert_eq!(again["output"][0]["content"], item["content"]);
        assert_eq!(
            (&again["status"], &again["output"][0]["arguments"]),
            (&whole["status"], &item["arguments"])
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_is_apart_from_the_answer() {
    let mut setup = Setup { template: "{{ messages[0].content }}<think>\n", ..Setup::default() };
    setup.options.reasoning = warpsmith_server::Parser::Named("qwen3".into());
    let server = Running::start(setup).await;
    let think = server.ask("/tokenize", json!({ "prompt": "x" })).await["tokens"][0].clone();
    // One letter for ever: it never ends its reasoning.
    let body = json!({
        "model": "tiny", "messages": user("a"), "max_tokens": 4, "logit_bias": { think.to_string(): 100 },
        "response_format": { "type": "json_object" },
    });
    let answer = server.ask(CHAT, body.clone()).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning"]), (&json!(""), &json!("xxxx")));
    assert_eq!(message["reasoning_content"], "xxxx");
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 4);
}
