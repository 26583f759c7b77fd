//! Checkpoints of 8-bit weights with scales, as files, against the same model with weights that were expanded naively.

use super::*;
use serde_json::{Value, json};
use std::path::Path;
use warpsmith::tensor::F8E4M3;

/// A matrix of 8 bits: its bytes, its scales with their shape, and what they stand for.
struct Quantized {
    bytes: Vec<u8>,
    scales: Vec<f32>,
    scale_shape: Vec<usize>,
    exact: Vec<f32>,
}

/// Blocks of `block` rows and columns share a scale, which makes their largest number 448.
fn quantize(values: &[f32], [rows, columns]: [usize; 2], block: [usize; 2]) -> Quantized {
    let across = columns.div_ceil(block[1]);
    let scale_shape = vec![rows.div_ceil(block[0]), across];
    let mut scales = vec![0f32; scale_shape[0] * across];
    let scale_of = |at: usize| at / columns / block[0] * across + at % columns / block[1];
    values
        .iter()
        .enumerate()
        .for_each(|(at, x)| scales[scale_of(at)] = scales[scale_of(at)].max(x.abs() / 448.0));
    let numbers: Vec<F8E4M3> =
        values.iter().enumerate().map(|(at, x)| F8E4M3::from_f32(x / scales[scale_of(at)])).collect();
    let exact =
        numbers.iter().enumerate().map(|(at, number)| number.to_f32() * scales[scale_of(at)]).collect();
    Quantized { bytes: numbers.iter().map(|number| number.to_bits()).collect(), scales, scale_shape, exact }
}

/// A tensor of a file: name, type, shape, bytes.
type Stored = (String, &'static str, Vec<usize>, Vec<u8>);

fn write_folder(folder: &Path, config: &Value, tensors: &[Stored]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// How a checkpoint of 8 bits is written.
struct Form {
    quantization: Value,
    scale: &'static str,
    /// Rows and columns of a block; zero for all.
    block: [usize; 2],
    /// The form of the scales, from that by blocks.
    shape: fn(&[usize]) -> Vec<usize>,
}

fn forms() -> Vec<Form> {
    let group = |weights: Value| json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    let compressed = |strategy: &str| {
        let weights = json!({"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": true,
            "block_structure": if strategy == "block" { json!([16, 32]) } else { Value::Null }});
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": group(weights)})
    };
    let fp8 = |block: Value| json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block});
    vec![
        Form {
            quantization: fp8(json!([16, 32])),
            scale: "weight_scale_inv",
            block: [16, 32],
            shape: <[usize]>::to_vec,
        },
        Form {
            quantization: fp8(json!([128, 128])),
            scale: "weight_scale_inv",
            block: [128, 128],
            shape: <[usize]>::to_vec,
        },
        Form { quantization: fp8(Value::Null), scale: "weight_scale_inv", block: [0, 0], shape: |_| vec![] },
        Form {
            quantization: json!({"quant_method": "fp8", "activation_scheme": "static"}),
            scale: "weight_scale",
            block: [0, 0],
            shape: |_| vec![1],
        },
        Form {
            quantization: json!({"quant_method": "fbgemm_fp8"}),
            scale: "weight_scale",
            block: [1, 0],
            shape: <[usize]>::to_vec,
        },
        Form { quantization: compressed("tensor"), scale: "weight_scale", block: [0, 0], shape: |_| vec![1] },
        Form {
            quantization: compressed("channel"),
            scale: "weight_scale",
            block: [1, 0],
            shape: |shape| vec![shape[0]],
        },
        Form {
            quantization: compressed("block"),
            scale: "weight_scale",
            block: [16, 32],
            shape: <[usize]>::to_vec,
        },
    ]
}

/// Writes the small Qwen3 with the matrices of its layers in 8 bits, and gives what its weights stand for.
fn write_model(folder: &Path, form: &Form, change: impl Fn(&mut Vec<Stored>)) -> HashMap<String, Tensor> {
    let checkpoint = Checkpoint::open(fixture("qwen3")).unwrap();
    let text = std::fs::read_to_string(fixture("qwen3").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"] = form.quantization.clone();
    let (mut stored, mut exact) = (Vec::new(), HashMap::new());
    for tensor in checkpoint.tensors() {
        let (name, shape) = (tensor.name().to_owned(), tensor.shape().to_vec());
        let mut values: Vec<f32> = tensor.to_tensor(DType::F32).unwrap().to_vec().unwrap();
        if let (&[rows, columns], true) = (&shape[..], name.contains("_proj")) {
            // Blocks of very different sizes, so that a scale in the wrong place shows.
            values
                .iter_mut()
                .enumerate()
                .for_each(|(at, x)| *x *= 1.0 + (at / columns / 16 + at % columns / 32) as f32);
            let whole = |size: usize, all: usize| if size == 0 { all } else { size };
            let block = [whole(form.block[0], rows), whole(form.block[1], columns)];
            let quantized = quantize(&values, [rows, columns], block);
            let scale_name = format!("{}.{}", name.strip_suffix(".weight").unwrap(), form.scale);
            stored.push((name.clone(), "F8_E4M3", shape.clone(), quantized.bytes));
            stored.push((scale_name, "F32", (form.shape)(&quantized.scale_shape), floats(&quantized.scales)));
            values = quantized.exact;
        } else {
            stored.push((name.clone(), "F32", shape.clone(), floats(&values)));
        }
        exact.insert(name, Tensor::from_slice(&values, &shape, Device::Cpu).unwrap());
    }
    change(&mut stored);
    write_folder(folder, &config, &stored);
    exact
}

#[test]
fn weights_of_8_bits_are_multiplied_by_their_scales() {
    let (ids, _) = expected("qwen3");
    for form in forms() {
        let folder = tempfile::tempdir().unwrap();
        // Scales of activations are no part of the weights.
        let exact = write_model(folder.path(), &form, |stored| {
            stored.push(("model.layers.0.mlp.up_proj.input_scale".into(), "F32", vec![1], floats(&[0.5])));
        });
        for dtype in [DType::F32, DType::BF16] {
            let mut read = model(folder.path().into(), dtype);
            let plain = Config { quantization: None, ..read.config().clone() };
            let options = LoadOptions { dtype, ..LoadOptions::default() };
            let mut expanded = load(&plain, &exact, options).unwrap();
            let got = logits(&mut *read, &ids, &[ids.len()], dtype);
            assert!(
                got == logits(&mut *expanded, &ids, &[ids.len()], dtype),
                "{dtype} {}",
                form.quantization
            );
            assert!(got.iter().all(|logit| logit.is_finite()));
        }
    }
}

#[test]
fn scales_that_are_missing_or_do_not_fit_are_refused_by_name_and_file() {
    let scale = "model.layers.1.mlp.down_proj.weight_scale_inv";
    let at = |stored: &[Stored]| stored.iter().position(|tensor| tensor.0 == scale).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Vec<Stored>);
    let cases: [(Change<'_>, &str); 6] = [
        (&|stored| drop(stored.remove(at(stored))), "no such tensor"),
        (
            &|stored| {
                let at = at(stored);
                stored[at].2 = vec![9];
                stored[at].3 = floats(&[1.0; 9])
            },
            "shape [9]",
        ),
        (
            &|stored| {
                let at = at(stored);
                stored[at].2 = vec![1, 9]
            },
            "shape [3, 3] for blocks, got shape [1, 9]",
        ),
        (
            &|stored| {
                let at = at(stored);
                stored[at].3[..4].copy_from_slice(&f32::NAN.to_le_bytes())
            },
            "got NaN",
        ),
        (
            &|stored| {
                let at = at(stored);
                stored[at].3[..4].copy_from_slice(&(-1f32).to_le_bytes())
            },
            "got -1",
        ),
        // A scale of a matrix that has none to be multiplied.
        (
            &|stored| stored.push(("model.norm.weight_scale".into(), "F32", vec![1], floats(&[1.0]))),
            "no use for",
        ),
    ];
    for (change, told) in cases {
        let folder = tempfile::tempdir().unwrap();
        // 48 rows in blocks of 16, of 80 numbers in blocks of 32: nine scales.
        write_model(folder.path(), &forms()[0], change);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let config = Config::from_checkpoint(&checkpoint).unwrap();
        let error = load(&config, &checkpoint, LoadOptions::default()).err().expect(told).to_string();
        assert!(error.contains(told), "{told}: {error}");
        assert!(error.contains(&*folder.path().to_string_lossy()), "the file is named: {error}");
    }
}
