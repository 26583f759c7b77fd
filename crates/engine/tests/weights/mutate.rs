//! Files of weights with random damage: in their fields, their lengths, their JSON.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use warpsmith_engine::weights::{Encoding, TensorInfo, gguf, safetensors};

/// Random numbers that depend on the seed alone (SplitMix64).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not 0.
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// The formats that are attacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Gguf,
    Safetensors,
}

/// How many inputs were taken for files, and how many were refused.
#[derive(Debug, Default)]
pub struct Outcome {
    pub accepted: u64,
    pub refused: u64,
}

/// Parses `count` damaged files and reads the tensors of those that pass.
///
/// # Errors
/// The first input that makes the parser panic.
pub fn attack(target: Target, seed: u64, count: u64) -> Result<Outcome, Vec<u8>> {
    let originals = match target {
        Target::Gguf => vec![small_gguf(3), small_gguf(2)],
        Target::Safetensors => vec![small_safetensors()],
    };
    let mut outcome = Outcome::default();
    let mut input = Vec::new();
    let mut values = Vec::new();
    for i in 0..count {
        // Every input can be made again from the seed and its number.
        let mut random = Random(seed ^ i.wrapping_mul(0xD134_2543_DE82_EF95));
        input.clear();
        input.extend_from_slice(&originals[random.below(originals.len())]);
        damage(target, &mut input, &mut random);
        match catch_unwind(AssertUnwindSafe(|| read_all(target, &input, &mut values))) {
            Ok(true) => outcome.accepted += 1,
            Ok(false) => outcome.refused += 1,
            Err(_) => return Err(input),
        }
    }
    Ok(outcome)
}

/// Whether the input is taken for a file. Then all its tensors are read.
fn read_all(target: Target, input: &[u8], values: &mut Vec<f32>) -> bool {
    let file = Path::new("damaged");
    let tensors: Vec<TensorInfo> = match target {
        Target::Gguf => match gguf::parse(input, file) {
            Ok(header) => header.tensors,
            Err(error) => return error.to_string().is_empty(),
        },
        Target::Safetensors => match safetensors::parse(input, file) {
            Ok(header) => header.tensors,
            Err(error) => return error.to_string().is_empty(),
        },
    };
    for tensor in &tensors {
        let bytes = &input[tensor.range()];
        assert_eq!(tensor.encoding().bytes_of(tensor.shape()), Some(bytes.len()));
        if let Encoding::Quantized(quantization) = tensor.encoding() {
            values.resize(tensor.numel(), 0.0);
            quantization.dequantize(bytes, values);
        }
    }
    true
}

/// Numbers at which arithmetic breaks.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    4,
    31,
    32,
    255,
    256,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 62) + 1,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];

/// Pieces that mean something in a header of safetensors.
const WORDS: [&str; 20] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "0",
    "-1",
    "1e9",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "\"shape\":[0,9]",
    "\"dtype\":\"I64\"",
    "\"__metadata__\":{}",
    "\"a\":{}",
    "\u{e9}",
    "[[[[[[[[",
];

fn damage(target: Target, input: &mut Vec<u8>, random: &mut Random) {
    // Most damage lies in the header, so that it is found in the first bytes more often than in the data.
    for _ in 0..1 + random.below(6) {
        let len = input.len();
        if len == 0 {
            return;
        }
        let at = random.below(len);
        let span = (1 + random.below(24)).min(len - at);
        match random.below(10) {
            0 => input[at] ^= 1 << random.below(8),
            1 => input[at] = random.next() as u8,
            2 | 3 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                let width = [1, 4, 8][random.below(3)].min(len - at);
                input[at..at + width].copy_from_slice(&edge[..width]);
            }
            4 => input[at] = input[at].wrapping_add(1),
            5 => input.truncate(at),
            6 => drop(input.drain(at..at + span)),
            7 => {
                let copy = input[at..at + span].to_vec();
                let to = random.below(len);
                input.splice(to..to, copy);
            }
            8 => {
                let to = random.below(len - span + 1);
                input.copy_within(at..at + span, to);
            }
            _ if target == Target::Safetensors => {
                let word = WORDS[random.below(WORDS.len())].bytes();
                input.splice(at..at + span.min(random.below(8)), word);
            }
            _ => input.extend((0..span).map(|i| i as u8)),
        }
    }
    if target == Target::Safetensors && random.below(4) > 0 {
        mend_length(input);
    }
}

/// Sets the length of a safetensors header to where its object ends, so that damage inside of it is reached.
fn mend_length(input: &mut [u8]) {
    let Some(end) = input.windows(2).rposition(|pair| pair == b"}}") else { return };
    if let Some((length, _)) = input.split_first_chunk_mut::<8>().filter(|_| end >= 8) {
        *length = ((end + 2 - 8) as u64).to_le_bytes();
    }
}

/// A GGUF file with values of many types and tensors of five.
pub fn small_gguf(version: u32) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let tensors: [(&str, u32, &[u64], usize); 5] = [
        ("w", 3, &[32, 3], 60),
        ("k", 14, &[256], 210),
        ("n", 0, &[3], 12),
        ("h", 1, &[2, 2, 2], 16),
        ("b", 30, &[], 2),
    ];
    bytes.extend(version.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend(6u64.to_le_bytes());
    text(&mut bytes, "general.alignment");
    bytes.extend([4u32, 32].map(u32::to_le_bytes).concat());
    text(&mut bytes, "name");
    bytes.extend(8u32.to_le_bytes());
    text(&mut bytes, "gr\u{fc}n");
    text(&mut bytes, "flag");
    bytes.extend(7u32.to_le_bytes());
    bytes.push(1);
    text(&mut bytes, "words");
    bytes.extend([9u32, 8].map(u32::to_le_bytes).concat());
    bytes.extend(2u64.to_le_bytes());
    text(&mut bytes, "a");
    text(&mut bytes, "");
    text(&mut bytes, "scores");
    bytes.extend([9u32, 6].map(u32::to_le_bytes).concat());
    bytes.extend(2u64.to_le_bytes());
    bytes.extend([0.5f32, -1.0].map(f32::to_le_bytes).concat());
    text(&mut bytes, "eps");
    bytes.extend(12u32.to_le_bytes());
    bytes.extend(1e-5f64.to_le_bytes());
    let mut offset = 0;
    for (name, kind, sizes, size) in tensors {
        text(&mut bytes, name);
        bytes.extend((sizes.len() as u32).to_le_bytes());
        sizes.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend((offset as u64).to_le_bytes());
        offset = (offset + size).next_multiple_of(32);
    }
    bytes.resize(bytes.len().next_multiple_of(32) + offset, 0x3C);
    bytes
}

/// A safetensors file with four tensors, one of them empty.
pub fn small_safetensors() -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},"none":{"dtype":"F16","shape":[0,7],"data_offsets":[30,30]},"#,
        r#""c":{"dtype":"U8","shape":[],"data_offsets":[30,31]}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(0..31);
    bytes
}
