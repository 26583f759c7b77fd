//! Each rule of the formats, broken alone: the error names the part, what was expected and what was there.

use crate::formats::{floats, safetensors};
use crate::mutate::{small_gguf, small_safetensors};
use std::path::Path;
use warpsmith::DType;
use warpsmith_engine::weights::{Checkpoint, gguf, safetensors as st};

/// The error of a GGUF file whose bytes at `find` are replaced by `put`.
fn gguf_with(find: &[u8], put: &[u8]) -> String {
    let mut bytes = small_gguf(3);
    let at = bytes.windows(find.len()).position(|window| window == find).unwrap();
    bytes.splice(at..at + find.len(), put.iter().copied());
    gguf::parse(&bytes, Path::new("m.gguf")).unwrap_err().to_string()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

#[test]
fn broken_gguf_headers_are_explained() {
    let parse = |bytes: &[u8]| gguf::parse(bytes, Path::new("m.gguf"));
    assert!(parse(&small_gguf(2)).is_ok() && parse(&small_gguf(3)).is_ok());
    let cases = [
        (parse(b"GGU").unwrap_err().to_string(), "m.gguf: magic bytes: expected 4 bytes at byte 0, got 3"),
        (gguf_with(b"GGUF", b"GGML"), "magic bytes: expected GGUF, got GGML"),
        (parse(&small_gguf(1)).unwrap_err().to_string(), "version: expected 2 or 3, got 1"),
        (parse(&small_gguf(3 << 24)).unwrap_err().to_string(), "byte order: expected little-endian"),
        (gguf_with(&[5, 0, 0, 0, 0, 0, 0, 0], &[0xFF; 8]), "got 18446744073709551615"),
        (gguf_with(&text("flag"), &text("name")), "key `name`: expected one value, got a second one"),
        (
            gguf_with(&[4, 0, 0, 0, 32, 0, 0, 0], &[4, 0, 0, 0, 48, 0, 0, 0]),
            "general.alignment`: expected a power of two as u32, got u32 48",
        ),
        (
            gguf_with(&[9, 0, 0, 0, 8, 0, 0, 0], &[9, 0, 0, 0, 9, 0, 0, 0]),
            "key `words`: expected an array of plain values, got an array of arrays",
        ),
        (gguf_with(&[7, 0, 0, 0, 1], &[7, 0, 0, 0, 2]), "key `flag`: expected a bool, 0 or 1, got 2"),
        (
            gguf_with("gr\u{fc}n".as_bytes(), b"gr\xffxn"),
            "key `name`: expected UTF-8, got an invalid byte at 2 of 5",
        ),
        (gguf_with(&text("k"), &text("w")), "tensor `w`: expected one of this name, got a second one"),
        (
            gguf_with(&[3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[21, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            "tensor `w`: its type IQ3_S (number 21) is not supported",
        ),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{expected}\n{error}");
    }
}

#[test]
fn gguf_tensors_must_fill_the_data_without_gaps() {
    // The second tensor: one dimension of 256, type 14, offset 64.
    let second = |size: u64, offset: u64| {
        let find =
            [&1u32.to_le_bytes()[..], &256u64.to_le_bytes(), &14u32.to_le_bytes(), &64u64.to_le_bytes()]
                .concat();
        let put = [&1u32.to_le_bytes()[..], &size.to_le_bytes(), &14u32.to_le_bytes(), &offset.to_le_bytes()]
            .concat();
        gguf_with(&find, &put)
    };
    assert!(second(256, 96).contains("tensor `k`: expected offset 64"), "{}", second(256, 96));
    assert!(second(256, 32).contains("expected offset 64"));
    assert!(second(255, 64).contains("tensor `k`: expected rows of whole blocks of 256 q6_k"));
    assert!(second(1 << 20, 64).contains("tensor `k`: expected its 860160 bytes"));
    assert!(second(1 << 62, 64).contains("expected its") || second(1 << 62, 64).contains("addressed"));
    assert!(second(1 << 63, 64).contains("expected sizes below 2^63, got 9223372036854775808"));
    assert!(second(u64::MAX, 64).contains("got 18446744073709551615"));
    let bytes = small_gguf(3);
    for len in 0..bytes.len() - 32 {
        assert!(gguf::parse(&bytes[..len], Path::new("m")).is_err(), "the first {len} bytes");
    }
}

#[test]
fn broken_safetensors_headers_are_explained() {
    let four = floats(&[1.0]);
    let with_header = |header: &str, data: usize| {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
        st::parse(&bytes, Path::new("m")).unwrap_err().to_string()
    };
    let tensor = |name: &str, dtype: &str, shape: &str, begin: usize, end: usize| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    };
    let one = |entry: String| format!("{{{entry}}}");
    let cases = [
        (with_header("[]", 0), "header: expected a JSON object"),
        (with_header("{", 0), "header: expected a JSON object"),
        (with_header(&one(tensor("a", "F32", "[1]", 4, 8)), 8), "tensor `a`: expected data from byte 0 on"),
        (
            with_header(&one(tensor("a", "F32", "[2]", 0, 4)), 4),
            "as many bytes as shape [2] of f32 has, got 4",
        ),
        (with_header(&one(tensor("a", "F32", "[1]", 0, 4)), 5), "data after the header: expected 4 bytes"),
        (with_header(&one(tensor("a", "F32", "[1]", 0, 4)), 3), "data that ends between 0 and 3"),
        (with_header(&one(tensor("a", "F32", "[1]", 4, 0)), 3), "tensor `a`"),
        (with_header(&one(tensor("a", "C64", "[1]", 0, 8)), 8), "tensor `a`: its type C64 is not supported"),
        (
            with_header(&one(tensor("a", "F32", "[4294967296,4294967296,4294967296]", 0, 0)), 0),
            "as many bytes",
        ),
        (with_header(&one(tensor("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4)), 4), "more than 8 sizes"),
        (with_header(&one(tensor("a", "F32", "[-1]", 0, 4)), 4), "tensor `a`: invalid value"),
        (with_header(r#"{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"more":1}}"#, 4), "more"),
        (with_header(r#"{"__metadata__":{"a":1}}"#, 0), "string"),
        (
            with_header(
                &one([tensor("a", "F32", "[1]", 0, 4), tensor("a", "F32", "[1]", 4, 8)].join(",")),
                8,
            ),
            "a second key",
        ),
        (
            with_header(
                &one([tensor("a", "F32", "[1]", 0, 4), tensor("b", "F32", "[1]", 0, 4)].join(",")),
                4,
            ),
            "tensor `b`: expected data from byte 4 on",
        ),
        (
            st::parse(&[1, 2], Path::new("m")).unwrap_err().to_string(),
            "length of the header: expected 8 bytes, got a file of 2",
        ),
        (
            st::parse(&[0xFF; 9], Path::new("m")).unwrap_err().to_string(),
            "length of the header: expected at most 1",
        ),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{expected}\n{error}");
    }
    let bytes = small_safetensors();
    assert!(st::parse(&bytes, Path::new("m")).is_ok());
    for len in 0..bytes.len() {
        assert!(st::parse(&bytes[..len], Path::new("m")).is_err(), "the first {len} bytes");
    }
    assert!(st::parse(&safetensors(&[("a", "F32", &[1], &four)]), Path::new("m")).is_ok());
}

#[test]
fn paths_that_are_no_models_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    assert!(open(folder.path()).contains("there is no file config.json"));
    assert!(open(&folder.path().join("none.gguf")).contains("none.gguf"));
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "hello").unwrap();
    assert!(
        open(&path).contains("expected GGUF, or a name that ends in .safetensors, got hell"),
        "{}",
        open(&path)
    );
    std::fs::write(&path, "").unwrap();
    assert!(open(&path).contains("first bytes"));
}

/// To read what is gone of a mapped file would end the process.
#[test]
fn a_file_that_has_become_shorter_is_refused_and_a_small_one_was_read() {
    let folder = tempfile::tempdir().unwrap();
    for elements in [5 << 20, 1000] {
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, safetensors(&[("a", "F32", &[elements], &vec![0; 4 * elements])])).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let tensor = checkpoint.tensor("a").unwrap();
        assert_eq!(tensor.to_tensor(DType::F32).unwrap().shape(), [elements]);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(500).unwrap();
        let mut out = vec![1.0; elements];
        let results = [
            tensor.raw().map(drop),
            tensor.to_tensor(DType::F32).map(drop),
            tensor.to_tensor(DType::BF16).map(drop),
            tensor.dequantize_into(&mut out),
        ];
        for result in results {
            match result {
                Ok(()) => assert_eq!(elements, 1000),
                Err(error) => assert!(error.to_string().contains("has become 500"), "{error}"),
            }
        }
        assert!(elements > 1000 || out.iter().all(|&x| x == 0.0));
    }
}
