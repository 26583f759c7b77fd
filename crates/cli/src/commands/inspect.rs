//! `warpsmith inspect`: the contents of a file of weights.

use crate::model::resolve;
use crate::table;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith_engine::Result;
use warpsmith_engine::weights::{Array, Checkpoint, Format, Metadata, StoredTensor, Value as KeyValue};

/// Show the tensors, types, sizes and metadata of a model's file
///
/// Reads GGUF files, safetensors files, and folders with config.json and safetensors, whole or in shards. Only the
/// headers are read, so it is quick for files of any size. A damaged file is refused with the reason. A model from the
/// Hugging Face hub is downloaded unless it is in the cache.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A .gguf or .safetensors file, a folder with config.json, or a name on the Hugging Face hub: owner/name, or
    /// owner/name:file.gguf
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Print JSON: all values in full
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith inspect model.gguf
  warpsmith inspect Qwen3-0.6B/
  warpsmith inspect Qwen/Qwen3-0.6B
  warpsmith inspect model.gguf --json \\
      | jq '.tensors[] | select(.type == \"q8_0\") | .name'";

pub fn run(args: &Args) -> Result<ExitCode> {
    let checkpoint = Checkpoint::open(resolve(args.model.clone())?)?;
    if args.json {
        println!("{:#}", describe(&checkpoint));
    } else {
        show(&checkpoint);
    }
    Ok(ExitCode::SUCCESS)
}

fn format_name(format: Format) -> &'static str {
    match format {
        Format::Gguf => "gguf",
        Format::Safetensors => "safetensors",
    }
}

fn show(checkpoint: &Checkpoint) {
    let bytes: usize = checkpoint.tensors().map(|tensor| tensor.range().len()).sum();
    let weights: usize = checkpoint.tensors().map(|tensor| tensor.numel()).sum();
    println!(
        "{}: {}, {} tensors, {} parameters, {}",
        checkpoint.path().display(),
        format_name(checkpoint.format()),
        checkpoint.tensors().len(),
        table::amount(weights as f64, ""),
        table::amount(bytes as f64, "B")
    );
    let entries: Vec<(String, String)> = match checkpoint.metadata() {
        Metadata::Gguf(keys) => keys.iter().map(|(key, value)| (key.into(), value.to_string())).collect(),
        Metadata::Config(config) => {
            config.iter().map(|(key, value)| (key.clone(), value.to_string())).collect()
        }
    };
    if !entries.is_empty() {
        println!("\nmetadata:");
        let rows: Vec<Vec<String>> =
            entries.into_iter().map(|(key, value)| vec![visible(&key), value]).collect();
        println!("{}", table::columns(&rows, 2).join("\n"));
    }
    println!("\ntensors:");
    println!("{}", tensor_table(checkpoint));
    println!("\ntypes:");
    println!("{}", type_table(checkpoint));
}

/// Text from a file without characters that would move the cursor.
fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn tensor_table(checkpoint: &Checkpoint) -> table::Table {
    let sharded = checkpoint.files().len() > 1;
    let mut names = vec!["name", "type", "shape", "bytes"];
    names.extend(sharded.then_some("file"));
    let mut table = table::new(&headings(&names), 2);
    for tensor in checkpoint.tensors() {
        let mut row = vec![
            visible(tensor.name()),
            tensor.encoding().to_string(),
            shape_text(&tensor),
            tensor.range().len().to_string(),
        ];
        row.extend(sharded.then(|| file_name(tensor.file())));
        table.add_row(row);
    }
    table
}

fn type_table(checkpoint: &Checkpoint) -> table::Table {
    // Types in the order in which they appear first.
    let mut types: Vec<(&str, usize, usize, usize)> = Vec::new();
    for tensor in checkpoint.tensors() {
        let name = tensor.encoding().name();
        let index = types.iter().position(|entry| entry.0 == name).unwrap_or_else(|| {
            types.push((name, 0, 0, 0));
            types.len() - 1
        });
        let entry = &mut types[index];
        *entry = (name, entry.1 + 1, entry.2 + tensor.numel(), entry.3 + tensor.range().len());
    }
    let mut table = table::new(&headings(&["type", "tensors", "parameters", "bytes"]), 1);
    for (name, tensors, parameters, bytes) in types {
        table.add_row([name.into(), tensors.to_string(), parameters.to_string(), bytes.to_string()]);
    }
    table
}

/// Headings as the tables take them.
fn headings(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn shape_text(tensor: &StoredTensor<'_>) -> String {
    let sizes: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn describe(checkpoint: &Checkpoint) -> Value {
    let tensors = checkpoint.tensors().map(|tensor| {
        json!({
            "name": tensor.name(),
            "type": tensor.encoding().name(),
            "shape": tensor.shape(),
            "offset": tensor.range().start,
            "bytes": tensor.range().len(),
            "file": tensor.file().to_string_lossy(),
        })
    });
    let metadata: Map<String, Value> = match checkpoint.metadata() {
        Metadata::Gguf(keys) => keys.iter().map(|(key, value)| (key.to_owned(), to_json(value))).collect(),
        Metadata::Config(config) => config.clone(),
    };
    json!({
        "path": checkpoint.path().to_string_lossy(),
        "format": format_name(checkpoint.format()),
        "files": checkpoint.files().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
        "metadata": metadata,
        "tensors": tensors.collect::<Value>(),
    })
}

fn to_json(value: &KeyValue) -> Value {
    match value {
        KeyValue::U8(n) => (*n).into(),
        KeyValue::I8(n) => (*n).into(),
        KeyValue::U16(n) => (*n).into(),
        KeyValue::I16(n) => (*n).into(),
        KeyValue::U32(n) => (*n).into(),
        KeyValue::I32(n) => (*n).into(),
        KeyValue::U64(n) => (*n).into(),
        KeyValue::I64(n) => (*n).into(),
        // The digits of the f32 itself, not those of the nearest f64.
        KeyValue::F32(n) => n.to_string().parse::<f64>().map_or(Value::Null, Value::from),
        KeyValue::F64(n) => (*n).into(),
        KeyValue::Bool(value) => (*value).into(),
        KeyValue::String(text) => text.as_str().into(),
        KeyValue::Array(Array::String(strings)) => strings.iter().collect(),
        KeyValue::Array(array) => (0..array.len()).filter_map(|i| Some(to_json(&array.get(i)?))).collect(),
    }
}
