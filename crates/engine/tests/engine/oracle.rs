//! Models for tests: one that cannot be fooled, and a small real one.

use std::collections::HashMap;
use warpsmith::ops::{self, KvStore};
use warpsmith::{DType, Device, Tensor, TensorViewMut};
use warpsmith_engine::models::{Config, LoadOptions, Model, RopeConfig, RopeScaling, load};
use warpsmith_engine::{Batch, KvCache, Result};

pub const VOCAB: usize = 40;
/// Of the oracle alone.
pub const HEAD_DIM: usize = 2;

/// A model whose next token is a function of all tokens before, as they are read back through the page table. Whatever
/// goes wrong with pages changes its output: a slot that is overwritten, a copy that is missing, a page of somebody else.
pub(crate) struct Oracle {
    config: Config,
    page_size: usize,
}

pub fn config() -> Config {
    Config {
        architecture: "llama".into(),
        vocab_size: VOCAB,
        hidden_size: 32,
        intermediate_size: 32,
        num_layers: 1,
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 32,
        max_positions: 512,
        norm_eps: 1e-5,
        rope: Some(RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }),
        ..Config::default()
    }
}

impl Oracle {
    pub fn new(page_size: usize) -> Oracle {
        // A key is two numbers: the token and its position. They lie in the pages, so that copies of pages count too.
        let config = Config { head_dim: HEAD_DIM, ..config() };
        Oracle { config, page_size }
    }

    /// The token that comes after these.
    pub fn next(tokens: impl Iterator<Item = i32>) -> i32 {
        let hash = tokens.fold(0xcbf2_9ce4_8422_2325u64, |hash, token| {
            (hash ^ (token as u64 + 1)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
        });
        ((hash >> 32) % VOCAB as u64) as i32
    }

    /// The output of a prompt.
    pub fn output(prompt: &[i32], count: usize) -> Vec<i32> {
        let mut tokens = prompt.to_vec();
        (0..count).for_each(|_| tokens.push(Self::next(tokens.iter().copied())));
        tokens.split_off(prompt.len())
    }
}

impl Model for Oracle {
    fn config(&self) -> &Config {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, out: TensorViewMut<'_>) -> Result<()> {
        // On a GPU this cannot be captured: the engine must do without graphs.
        let read = |tensor: &Tensor| tensor.to_vec::<i32>();
        let (ids, positions, slots) = (read(&batch.ids)?, read(&batch.positions)?, read(&batch.slots)?);
        let (table, kv_lens) = (read(&batch.page_table)?, read(&batch.kv_lens)?);
        let (device, stream) = (batch.ids.device(), batch.stream());
        let width = batch.page_table.shape()[1];
        let count = kv_lens.len();
        let starts = match &batch.q_starts {
            Some(starts) => read(starts)?,
            None => (0..=count as i32).collect(),
        };
        let (mut keys, _) = kv.layer(0)?;
        // Write all new tokens, as the real kernels do, before anything is read.
        let stored: Vec<f32> =
            ids.iter().zip(&positions).flat_map(|(&id, &at)| [id as f32, at as f32]).collect();
        let stored = Tensor::from_slice(&stored, &[ids.len(), 1, 2], device)?;
        let mut values = Tensor::zeros(keys.shape(), DType::F32, device)?;
        KvStore::new(&stored, &stored, &batch.slots).run_into(keys.reborrow(), &mut values, stream)?;
        let held = keys.as_view().to_f64()?;
        let rows = batch.logit_rows.as_ref().map_or_else(|| Ok((0..ids.len() as i32).collect()), read)?;
        let mut wanted = rows.into_iter().peekable();
        let mut logits = Vec::new();
        for r in 0..count {
            let (len, row) = (kv_lens[r] as usize, &table[r * width..(r + 1) * width]);
            if len == 0 {
                assert_eq!(slots[starts[r] as usize], -1, "a row that fills up stores nothing");
                wanted.next();
                logits.extend([0.0; VOCAB]);
                continue;
            }
            assert_eq!(positions[starts[r + 1] as usize - 1] as usize, len - 1);
            if wanted.peek() != Some(&(starts[r + 1] - 1)) {
                continue;
            }
            wanted.next();
            let token = |at: usize| {
                let slot = row[at / self.page_size] as usize * self.page_size + at % self.page_size;
                assert_eq!(held[2 * slot + 1], at as f64, "slot {slot} holds another position");
                held[2 * slot] as i32
            };
            let next = Oracle::next((0..len).map(token));
            logits.extend((0..VOCAB as i32).map(|id| if id == next { 5.0 } else { 0.0 }));
        }
        assert_eq!(wanted.next(), None, "a row belongs to no sequence's end");
        let logits = Tensor::from_slice(&logits, &[logits.len() / VOCAB, VOCAB], device)?;
        Ok(ops::Copy::new(&logits).run_into(out, stream)?)
    }
}

/// A Llama with random weights, small enough for thousands of steps a second.
pub fn tiny_llama() -> Box<dyn Model> {
    let config = Config { num_layers: 2, num_heads: 2, hidden_size: 64, intermediate_size: 64, ..config() };
    let mut weights = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let seed =
            name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte)) & 0xffff_ffff;
        let values = Tensor::randn(shape, DType::F32, Device::Cpu, seed).unwrap().to_f64().unwrap();
        let scaled: Vec<f64> =
            values.iter().map(|v| if shape.len() == 1 { 1.0 + 0.1 * v } else { 0.3 * v }).collect();
        weights.insert(name, Tensor::from_f64(&scaled, shape, DType::F32, Device::Cpu).unwrap());
    };
    let (hidden, inner, q, kv) = (64, 64, 64, 32);
    add("model.embed_tokens.weight".into(), &[VOCAB, hidden]);
    add("model.norm.weight".into(), &[hidden]);
    for layer in 0..2 {
        let mut layer_part =
            |part: &str, shape: &[usize]| add(format!("model.layers.{layer}.{part}.weight"), shape);
        layer_part("input_layernorm", &[hidden]);
        layer_part("post_attention_layernorm", &[hidden]);
        layer_part("self_attn.q_proj", &[q, hidden]);
        layer_part("self_attn.k_proj", &[kv, hidden]);
        layer_part("self_attn.v_proj", &[kv, hidden]);
        layer_part("self_attn.o_proj", &[hidden, q]);
        layer_part("mlp.gate_proj", &[inner, hidden]);
        layer_part("mlp.up_proj", &[inner, hidden]);
        layer_part("mlp.down_proj", &[hidden, inner]);
    }
    let (device, dtype) = (crate::test_device(), crate::test_dtype());
    load(&config, &weights, LoadOptions { device, dtype, ..LoadOptions::default() }).unwrap()
}
