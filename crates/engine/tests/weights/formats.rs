//! Every format against what gguf-py reads from the same file; safetensors, whole and in shards.

use std::path::{Path, PathBuf};
use warpsmith::DType;
use warpsmith_engine::weights::{Checkpoint, Encoding, Format, Metadata, Quantization, Strings, Value};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn every_gguf_format_equals_gguf_py_bit_for_bit() {
    let checkpoint = Checkpoint::open(fixture("formats.gguf")).unwrap();
    let expected = std::fs::read(fixture("formats.f32")).unwrap();
    let mut expected = expected.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()));
    let mut formats = Vec::new();
    for tensor in checkpoint.tensors() {
        let mut values = vec![0f32; tensor.numel()];
        tensor.dequantize_into(&mut values).unwrap();
        for (i, value) in values.iter().enumerate() {
            let bits = expected.next().unwrap();
            assert_eq!(
                value.to_bits(),
                bits,
                "{} at {i}: {value} for {}",
                tensor.name(),
                f32::from_bits(bits)
            );
        }
        let whole = tensor.to_tensor(DType::F32).unwrap();
        assert_eq!(whole.shape(), tensor.shape());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&whole.to_vec().unwrap()), bits(&values));
        for dtype in [DType::F16, DType::BF16] {
            let rounded = tensor.to_tensor(dtype).unwrap().to_f64().unwrap();
            let wanted: Vec<f64> = values.iter().map(|value| dtype.round(f64::from(*value))).collect();
            assert_eq!(rounded, wanted, "{} as {dtype}", tensor.name());
        }
        formats.extend(tensor.quantization());
        if let Some(quantization) = tensor.quantization() {
            assert_eq!(tensor.encoding(), Encoding::Quantized(quantization));
            let raw = tensor.raw().unwrap();
            assert_eq!(raw.to_vec::<u8>().unwrap(), tensor.bytes());
            assert_eq!(raw.shape()[0], tensor.shape()[0]);
            assert!(tensor.mapped().is_none());
        } else {
            assert!(tensor.mapped().is_some(), "GGUF aligns {}", tensor.name());
        }
    }
    assert_eq!((expected.next(), formats.len()), (None, Quantization::ALL.len()));
}

#[test]
fn keys_of_every_type_are_read() {
    let checkpoint = Checkpoint::open(fixture("formats.gguf")).unwrap();
    let Metadata::Gguf(keys) = checkpoint.metadata() else { panic!("it is a GGUF file") };
    assert_eq!(checkpoint.format(), Format::Gguf);
    assert_eq!(keys.require::<&str>("general.architecture").unwrap(), "fixture");
    let value = |name: &str| keys.value(&format!("fixture.{name}")).unwrap().clone();
    assert_eq!(value("u8"), Value::U8(200));
    assert_eq!(value("i8"), Value::I8(-100));
    assert_eq!(value("u16"), Value::U16(60000));
    assert_eq!(value("i16"), Value::I16(-30000));
    assert_eq!(value("u32"), Value::U32(4_000_000_000));
    assert_eq!(value("i32"), Value::I32(-2_000_000_000));
    assert_eq!(value("u64"), Value::U64(1 << 63));
    assert_eq!(value("i64"), Value::I64(-(1 << 62)));
    assert_eq!(value("f32"), Value::F32(1e-5));
    assert_eq!(value("f64"), Value::F64(0.1));
    assert_eq!(value("bool"), Value::Bool(true));
    assert_eq!(value("string"), Value::String("Größe <|end|> \n".into()));
    let words: Vec<&str> = keys.require::<&Strings>("fixture.strings").unwrap().iter().collect();
    assert_eq!(words, ["a", "", "ñ", "Ġthe"]);
    assert_eq!(keys.require::<&[i32]>("fixture.numbers").unwrap(), [1, -2, 3]);
    assert_eq!(keys.require::<&[f32]>("fixture.floats").unwrap(), [0.5, -1.5]);
    assert_eq!(value("bools").to_string(), "2 x bool: [true, false]");
    assert_eq!(keys.require::<usize>("fixture.u8").unwrap(), 200);
    assert_eq!(keys.get::<usize>("fixture.none").unwrap(), None);
    let error = keys.require::<u64>("fixture.i8").unwrap_err().to_string();
    assert!(error.ends_with("key `fixture.i8`: expected an integer of at least 0, got i8 -100"), "{error}");
    let error = keys.require::<bool>("fixture.none").unwrap_err().to_string();
    assert!(error.ends_with("there is no key `fixture.none`"), "{error}");
}

/// A safetensors file from tensors in the order given.
pub fn safetensors(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            name.to_string(),
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }),
        );
        data.extend_from_slice(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_safetensors_file_is_read_where_it_lies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let numbers = floats(&[1.0, -2.0, 0.5, 4.0]);
    let bytes = safetensors(&[("w", "F32", &[2, 2], &numbers), ("ids", "I64", &[1], &7u64.to_le_bytes())]);
    std::fs::write(&path, &bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.format(), Format::Safetensors);
    let stored = checkpoint.tensor("w").unwrap();
    assert_eq!((stored.bytes(), stored.file()), (&numbers[..], path.as_path()));
    let wide = stored.to_tensor(DType::F32).unwrap();
    let again = stored.to_tensor(DType::F32).unwrap();
    // Whether the data is aligned depends on the length of the header.
    assert_eq!(wide.shares_memory_with(&again), stored.range().start.is_multiple_of(4));
    assert_eq!(wide.to_vec::<f32>().unwrap(), [1.0, -2.0, 0.5, 4.0]);
    assert_eq!(stored.to_tensor(DType::BF16).unwrap().to_f64().unwrap(), [1.0, -2.0, 0.5, 4.0]);
    let ids = checkpoint.tensor("ids").unwrap();
    assert_eq!(ids.to_tensor(DType::I64).unwrap().to_vec::<i64>().unwrap(), [7]);
    let error = ids.to_tensor(DType::F32).unwrap_err().to_string();
    assert!(error.contains("`ids`") && error.contains("i64"), "{error}");
    let error = stored.dequantize_into(&mut [0.0; 3]).unwrap_err().to_string();
    assert!(error.contains("`w`") && error.contains("4 elements, got 3"), "{error}");
    let error = checkpoint.tensor("v").unwrap_err().to_string();
    assert!(error.ends_with("there is no tensor `v`"), "{error}");
}

#[test]
fn shards_are_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("config.json", br#"{"model_type": "llama", "hidden_size": 4}"#);
    let missing = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(missing.contains("model.safetensors"), "{missing}");
    write("one.safetensors", &safetensors(&[("a", "F32", &[1], &floats(&[1.0]))]));
    write("two.safetensors", &safetensors(&[("b", "F32", &[1], &floats(&[2.0]))]));
    let index = "model.safetensors.index.json";
    write(index, br#"{"metadata": {}, "weight_map": {"b": "two.safetensors", "a": "one.safetensors"}}"#);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((checkpoint.tensors().len(), checkpoint.files().len()), (2, 2));
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!(b.to_tensor(DType::F32).unwrap().to_vec::<f32>().unwrap(), [2.0]);
    let Metadata::Config(config) = checkpoint.metadata() else { panic!("it has a config.json") };
    assert_eq!(config["model_type"], "llama");

    let refused = [
        (
            r#"{"weight_map": {"b": "one.safetensors", "a": "one.safetensors"}}"#,
            "tensor `b`: expected to be in one.safetensors",
        ),
        (r#"{"weight_map": {"a": "../one.safetensors"}}"#, "a name without folders"),
        (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "a name without folders"),
        (r#"{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}"#, "a second key `a`"),
        (r#"{"weight_map": {"a": "three.safetensors"}}"#, "three.safetensors"),
        ("[]", "weight_map"),
    ];
    for (text, expected) in refused {
        write(index, text.as_bytes());
        let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    write("two.safetensors", &safetensors(&[("a", "F32", &[1], &floats(&[2.0]))]));
    write(index, br#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#);
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tensor `a`: expected one of this name"), "{error}");
}
