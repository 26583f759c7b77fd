//! Families by formats of weights: how far logits are from those of the same weights in f32, and how many greedy tokens are
//! the same. Weights in f32 are judged against transformers elsewhere; the formats' numbers against gguf-py, bit for bit.

use super::super::source::quantization_of;
use super::*;
use warpsmith::tensor::Random;

/// Elements of rows: whole blocks of every format.
const WIDTH: usize = 256;
/// Families whose matrices can be blocks. Those of GPT-2 are stored the other way round.
const IN_BLOCKS: [&str; 10] =
    ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "phi3", "smollm3", "olmo2"];

/// The last part of the name of a router, whose weights files keep whole.
const ROUTER: &str = "gate";

/// Random weights in a format, for a model like a family's fixture but wider.
struct RandomBlocks {
    format: QuantFormat,
    shapes: HashMap<String, Vec<usize>>,
}

impl RandomBlocks {
    fn new(family: &str, format: QuantFormat) -> (Config, RandomBlocks) {
        let checkpoint = Checkpoint::open(fixture(family)).unwrap();
        let mut config = Config::from_checkpoint(&checkpoint).unwrap();
        (config.hidden_size, config.intermediate_size) = (WIDTH, WIDTH);
        (config.num_heads, config.num_kv_heads) = (8, 2);
        if let Some(experts) = &mut config.experts {
            experts.intermediate_size = WIDTH;
            // Of the experts of a token, rounding may choose others: a step that says nothing of a format.
            experts.used = experts.count;
        }
        let experts = config.experts.as_ref().map_or(0, |experts| experts.count);
        config.embedding_scale = config.embedding_scale.map(|_| 16.0);
        let keys = config.num_kv_heads * config.head_dim;
        let shape = |name: &str| {
            let part = name.rsplit('.').nth(1).unwrap_or_default();
            let rows = match part {
                "embed_tokens" | "lm_head" => config.vocab_size,
                "k_proj" | "v_proj" => keys,
                "qkv_proj" => WIDTH + 2 * keys,
                "gate_up_proj" => 2 * WIDTH,
                ROUTER => experts,
                "q_norm" | "k_norm" if family != "olmo2" => config.head_dim,
                "k_norm" => keys,
                _ => WIDTH,
            };
            match name.ends_with(".bias") || part.ends_with("norm") {
                true => vec![rows],
                false => vec![rows, WIDTH],
            }
        };
        let shapes = checkpoint.tensors().map(|tensor| (tensor.name().to_owned(), shape(tensor.name())));
        let shapes = shapes.collect();
        (config, RandomBlocks { format, shapes })
    }

    /// A matrix whose weights are about as large as those of a model.
    fn bytes(&self, name: &str, shape: &[usize]) -> Vec<u8> {
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut random = Random::new(seed);
        let row = self.format.row_bytes(shape[1]).unwrap();
        let mut bytes: Vec<u8> = (0..shape[0] * row).map(|_| random.below(256) as u8).collect();
        // Where scales are, and how large the numbers get that they multiply.
        let (places, most): (&[usize], f64) = match self.format {
            QuantFormat::Q8_0 | QuantFormat::IQ4_NL => (&[0], 128.0),
            QuantFormat::Q4_0 => (&[0], 8.0),
            QuantFormat::Q4_1 => (&[0, 2], 8.0),
            QuantFormat::Q5_0 => (&[0], 16.0),
            QuantFormat::Q5_1 => (&[0, 2], 16.0),
            QuantFormat::Q4_K => (&[0, 2], 8.0 * 63.0),
            QuantFormat::Q5_K => (&[0, 2], 16.0 * 63.0),
            QuantFormat::Q6_K => (&[208], 32.0 * 128.0),
            QuantFormat::Q2_K => (&[80, 82], 2.0 * 15.0),
            QuantFormat::Q3_K => (&[108], 4.0 * 32.0),
            QuantFormat::IQ4_XS => (&[0], 128.0 * 32.0),
            QuantFormat::MXFP4 => (&[], 12.0),
        };
        for block in bytes.chunks_mut(self.format.block_bytes()) {
            let scale = (1.0 + random.uniform()) / (10.0 * most);
            // Minima move the weights so that they are about zero: they are added, or in super-blocks subtracted.
            let centre = match self.format {
                QuantFormat::Q4_1 => -7.5,
                QuantFormat::Q5_1 => -15.5,
                QuantFormat::Q4_K => 7.5,
                QuantFormat::Q5_K => 15.5,
                _ => 1.5,
            };
            for (&place, number) in places.iter().zip([scale, centre * scale]) {
                block[place..place + 2].copy_from_slice(&half::f16::from_f64(number).to_le_bytes());
            }
            if self.format == QuantFormat::MXFP4 {
                block[0] = 121 + random.below(2) as u8;
            }
        }
        bytes
    }
}

impl WeightSource for RandomBlocks {
    fn naming(&self) -> Naming {
        Naming::Transformers
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn stored_dtype(&self, _: &str) -> Option<DType> {
        None
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        let shape = &self.shapes[name];
        if shape.len() == 1 || name.rsplit('.').nth(1) == Some(ROUTER) {
            return Ok(None);
        }
        let bytes = self.bytes(name, shape);
        let row = bytes.len() / shape[0];
        Ok(Some((Tensor::from_slice(&bytes, &[shape[0], row], Device::Cpu)?, self.format)))
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let shape = &self.shapes[name];
        let mut numbers = vec![0.5f32; shape.iter().product()];
        if shape.len() == 2 {
            quantization_of(self.format).dequantize(&self.bytes(name, shape), &mut numbers);
        }
        Ok(Tensor::from_slice(&numbers, shape, Device::Cpu)?.to_dtype(dtype)?)
    }
}

/// How far the logits are from those of expanded weights, relative to the largest, and which part of the greedy tokens is
/// the same. The rounding of activations to eight bits is all that differs.
fn compared(family: &str, format: QuantFormat) -> (f32, f32) {
    let (ids, _) = expected(family);
    let (config, weights) = RandomBlocks::new(family, format);
    let of = |quantized| {
        let mut model = load(&config, &weights, LoadOptions { quantized, ..LoadOptions::default() }).unwrap();
        logits(&mut *model, &ids, &[ids.len()], DType::F32)
    };
    let (got, exact) = (of(true), of(false));
    let scale = exact.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    let [ours, theirs] = [&got, &exact].map(|logits| most_likely(logits, config.vocab_size));
    let same = ours.iter().zip(&theirs).filter(|(a, b)| a == b).count();
    (largest_difference(&got, &exact) / scale, same as f32 / ours.len() as f32)
}

/// What the rounding of activations may do; a weight that is read wrongly does far more.
fn judge(family: &str, format: QuantFormat) -> (f32, f32) {
    let (difference, same) = compared(family, format);
    assert!(difference > 0.0 && difference < 0.1, "{family} {format:?}: {difference}");
    assert!(same >= 0.8, "{family} {format:?}: {same} of the greedy tokens");
    (difference, same)
}

#[test]
fn every_format_runs_in_some_family_and_every_family_in_some_format() {
    for (i, format) in QuantFormat::ALL.into_iter().enumerate() {
        judge(IN_BLOCKS[i % IN_BLOCKS.len()], format);
    }
}

/// Makes the table of `docs/engine.md`: `cargo test --release -p warpsmith-engine table -- --ignored --nocapture`.
#[test]
#[ignore = "makes the table of docs/engine.md, which takes a minute"]
fn families_by_formats() {
    let line = |cells: &[String]| println!("| {} |", cells.join(" | "));
    let formats = QuantFormat::ALL.map(|format| format.name().to_owned());
    line(&[&["family".to_owned(), "f32".to_owned()][..], &formats].concat());
    line(&vec!["---".to_owned(); formats.len() + 2]);
    for family in FAMILIES {
        let (ids, expected) = expected(family);
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let mut model = model(fixture(family), DType::F32);
        let got = logits(&mut *model, &ids, &[ids.len()], DType::F32);
        let vocab = model.config().vocab_size;
        let difference = largest_difference(&got, &expected) / scale;
        let [ours, theirs] = [&got, &expected].map(|logits| most_likely(logits, vocab));
        let same = ours.iter().zip(&theirs).filter(|(a, b)| a == b).count();
        let mut cells = vec![family.to_owned(), format!("{difference:.0e}, {}", 100 * same / ours.len())];
        for format in QuantFormat::ALL {
            cells.push(match IN_BLOCKS.contains(&family) {
                true => {
                    let (difference, same) = judge(family, format);
                    format!("{:.1}, {:.0}", 100.0 * difference, 100.0 * same)
                }
                false => "".into(),
            });
        }
        line(&cells);
    }
}
