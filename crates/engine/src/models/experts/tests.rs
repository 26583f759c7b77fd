//! Quantised experts beside the same experts expanded to f32.

use super::*;
use crate::models::Config;
use crate::models::loader::LoadOptions;
use crate::models::source::WeightSource;
use crate::weights::Checkpoint;
use std::path::Path;
use warpsmith::ops::QuantFormat;
use warpsmith::tensor::Random;

const HIDDEN: usize = 64;
const INNER: usize = 96;
const COUNT: usize = 5;
const USED: usize = 2;
const TOKENS: usize = 23;

/// The fixture's configuration with other sizes.
fn config() -> Config {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3_moe");
    let mut config = Config::from_checkpoint(&Checkpoint::open(path).unwrap()).unwrap();
    let experts = config.experts.as_mut().unwrap();
    (experts.count, experts.used, experts.intermediate_size) = (COUNT, USED, INNER);
    config.hidden_size = HIDDEN;
    config
}

/// Random blocks of q8_0 under the names of GGUF, and of q4_0 for the second products, which may have a format of their own.
struct Source;

impl Source {
    fn bytes(name: &str) -> (Vec<u8>, QuantFormat, [usize; 2]) {
        let is_down = name.contains("down");
        let (format, shape) = match is_down {
            true => (QuantFormat::Q4_0, [COUNT * HIDDEN, INNER]),
            false => (QuantFormat::Q8_0, [COUNT * INNER, HIDDEN]),
        };
        let mut random = Random::new(name.len() as u64 * 7 + u64::from(name.contains("up")));
        let row = format.row_bytes(shape[1]).unwrap();
        let mut bytes: Vec<u8> = (0..shape[0] * row).map(|_| random.below(256) as u8).collect();
        let scale = half::f16::from_f64(if is_down { 0.03 } else { 0.002 });
        bytes
            .chunks_mut(format.block_bytes())
            .for_each(|block| block[..2].copy_from_slice(&scale.to_le_bytes()));
        (bytes, format, shape)
    }
}

impl WeightSource for Source {
    fn naming(&self) -> Naming {
        Naming::Gguf
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(match name {
            _ if name.contains("gate_inp") => vec![COUNT, HIDDEN],
            _ if name.contains("down") => vec![COUNT, HIDDEN, INNER],
            _ => vec![COUNT, INNER, HIDDEN],
        })
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn stored_dtype(&self, _: &str) -> Option<DType> {
        None
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        if name.contains("gate_inp") {
            return Ok(None);
        }
        let (bytes, format, [rows, _]) = Source::bytes(name);
        Ok(Some((Tensor::from_slice(&bytes, &[rows, bytes.len() / rows], Device::Cpu)?, format)))
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let shape = self.shape(name).unwrap();
        if shape.len() == 2 {
            return Ok(Tensor::randn(&shape, dtype, Device::Cpu, 9)?);
        }
        let (bytes, format, _) = Source::bytes(name);
        let mut numbers = vec![0f32; shape.iter().product()];
        crate::models::source::quantization_of(format).dequantize(&bytes, &mut numbers);
        Ok(Tensor::from_slice(&numbers, &shape, Device::Cpu)?.to_dtype(dtype)?)
    }
}

fn experts(quantized: bool) -> (Experts, Routing) {
    let config = config();
    let options = LoadOptions { quantized, ..LoadOptions::default() };
    let loader = Loader::new(&Source, &config, options).unwrap();
    let of = config.experts.as_ref().unwrap();
    (Experts::load(&loader, 0, &config, of).unwrap(), Routing::new(&loader, of).unwrap())
}

/// What it adds to, as numbers.
fn base() -> Vec<f32> {
    Tensor::randn(&[TOKENS, HIDDEN], DType::F32, Device::Cpu, 5).unwrap().to_vec().unwrap()
}

fn run_on((experts, routing): &mut (Experts, Routing), x: &Tensor, base: &[f32]) -> Vec<f32> {
    let mut out = Tensor::from_slice(base, x.shape(), Device::Cpu).unwrap();
    let batch = Batch::new(&[], 8, &Stream::Host).unwrap();
    experts.add_to(x.view(), routing, out.view_mut(), &batch).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn quantised_experts_differ_by_the_rounding_of_activations() {
    let (mut blocks, mut plain) = (experts(true), experts(false));
    assert!(matches!(blocks.0.weights, Weights::Blocks(_)) && matches!(plain.0.weights, Weights::Plain(_)));
    let x = Tensor::randn(&[TOKENS, HIDDEN], DType::F32, Device::Cpu, 1).unwrap();
    let base = base();
    let (got, exact) = (run_on(&mut blocks, &x, &base), run_on(&mut plain, &x, &base));
    let largest = exact.iter().zip(&base).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    let apart = got.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(largest > 0.5 && apart > 0.0 && apart < 0.02 * largest, "{apart} of {largest}");
    // A token alone has the same bits.
    for token in [0, 11, 22] {
        let at = token * HIDDEN;
        let alone = run_on(&mut blocks, &x.narrow(0, token, 1).unwrap(), &base[at..][..HIDDEN]);
        assert_eq!(alone, got[at..][..HIDDEN], "{token}");
    }
}
