//! JSON that reads well in a diff: what fits on a line stays on one.

use serde_json::Value;

/// Longest line, indentation included, before a list or map is broken up.
const WIDTH: usize = 220;

/// The text of a file.
pub fn pretty(value: &Value) -> String {
    let mut out = String::new();
    // The outermost level is always broken up.
    write(value, 0, 0, &mut out);
    out.push('\n');
    out
}

fn write(value: &Value, indent: usize, width: usize, out: &mut String) {
    let line = inline(value);
    let children: Vec<(Option<&str>, &Value)> = match value {
        Value::Array(items) => items.iter().map(|item| (None, item)).collect(),
        Value::Object(map) => map.iter().map(|(key, item)| (Some(key.as_str()), item)).collect(),
        _ => Vec::new(),
    };
    if children.is_empty() || indent + line.len() <= width {
        return out.push_str(&line);
    }
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    out.push(open);
    for (number, (key, child)) in children.iter().enumerate() {
        out.push_str(if number == 0 { "\n" } else { ",\n" });
        out.push_str(&" ".repeat(indent + 2));
        if let Some(key) = key {
            out.push_str(&format!("{}: ", Value::from(*key)));
        }
        write(child, indent + 2, WIDTH, out);
    }
    out.push('\n');
    out.push_str(&" ".repeat(indent));
    out.push(close);
}

fn inline(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let fields =
                map.iter().map(|(key, item)| format!("{}: {}", Value::from(key.as_str()), inline(item)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn short_parts_stay_on_a_line_and_the_text_reads_back() {
        let long = "x".repeat(WIDTH);
        let value = serde_json::json!({"a": {"b": [1, 2.5, null]}, "long": [long, "\"quoted\""], "none": []});
        let text = pretty(&value);
        assert!(text.starts_with("{\n  \"a\": {\"b\": [1, 2.5, null]},\n  \"long\": [\n    \"xxx"), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
