//! Layers that models are built from. Each owns its weights and keeps the plans of its calls.

use super::config::{Config, RopeConfig, RopeScaling, Rotation};
use super::loader::Loader;
use super::matrix::Matrix;
use super::names::Part;
use super::source::quantization_of;
use crate::batch::Batch;
use crate::error::Result;
use warpsmith::op::Plan;
use warpsmith::ops::{Cast, Embedding, LayerNorm, PagedAttention, QkvStore, QuantFormat, RmsNorm};
use warpsmith::{DType, Device, Stream, Tensor, TensorView, TensorViewMut};

/// Rows of activations whose memory is used again in every pass. It grows to the largest batch. A captured pass keeps the
/// memory that it was captured with.
pub struct Buffer {
    memory: Tensor,
    stream: Stream,
}

impl Buffer {
    /// Rows of `width` elements, `rows` of them from the start, for work on `stream`.
    pub fn new(rows: usize, width: usize, dtype: DType, stream: &Stream) -> Result<Buffer> {
        Ok(Buffer { memory: Tensor::empty_on(&[rows, width], dtype, stream)?, stream: stream.clone() })
    }

    /// Room for activations of `width` elements a token, in the model's type.
    pub fn of(loader: &Loader<'_>, width: usize) -> Result<Buffer> {
        Buffer::new(loader.options.reserve_tokens, width, loader.options.dtype, loader.stream())
    }

    /// The first `rows` rows, to be written. What was in them is lost if they did not exist yet.
    pub fn write(&mut self, rows: usize) -> Result<TensorViewMut<'_>> {
        let width = self.memory.shape()[1];
        if self.memory.shape()[0] < rows {
            self.memory = Tensor::empty_on(&[rows, width], self.memory.dtype(), &self.stream)?;
        }
        Ok(self.memory.view_mut().narrow(0, 0, rows).expect("there are as many rows"))
    }

    /// The first `rows` rows, which were written before.
    pub fn read(&self, rows: usize) -> TensorView<'_> {
        self.memory.view().narrow(0, 0, rows).expect("the rows were written")
    }
}

/// An embedding table, of tokens or positions. On the CPU it stays in the file's form, and rows are converted when they
/// are looked up.
pub struct Table {
    weight: Matrix,
    /// What rows are multiplied by when they are looked up. On a GPU the table was multiplied when it was loaded.
    scale: Option<f32>,
    plan: Option<Plan>,
    cast_plan: Option<Plan>,
}

impl Table {
    /// A table of `rows` vectors, which may have more in the file.
    pub fn load(loader: &Loader<'_>, part: Part, rows: usize, width: usize) -> Result<Table> {
        let (weight, scale) = loader.table(part, rows, width)?;
        Ok(Table { weight, scale, plan: None, cast_plan: None })
    }

    /// The vectors that `ids` name.
    pub fn forward(&mut self, ids: &Tensor, out: TensorViewMut<'_>, stream: &Stream) -> Result<()> {
        let Table { weight, scale, plan, cast_plan } = self;
        let mut rows = match weight {
            Matrix::Plain(weight) if weight.dtype() == out.as_view().dtype() && scale.is_none() => {
                return Ok(Embedding::new(&*weight, ids).keep_plan(plan).run_into(out, stream)?);
            }
            Matrix::Plain(weight) => {
                let mut rows = Tensor::empty_on(out.shape(), weight.dtype(), stream)?;
                Embedding::new(&*weight, ids).keep_plan(plan).run_into(&mut rows, stream)?;
                rows
            }
            Matrix::Blocks(blocks, format) => dequantized_rows(blocks, *format, ids, out.shape())?,
        };
        if let Some(scale) = scale {
            let wide = if rows.dtype() == DType::F32 { rows } else { rows.to_dtype(DType::F32)? };
            let scaled: Vec<f32> = wide.to_vec::<f32>()?.iter().map(|x| x * *scale).collect();
            rows = Tensor::from_slice(&scaled, out.shape(), Device::Cpu)?;
        }
        Ok(Cast::new(&rows).keep_plan(cast_plan).run_into(out, stream)?)
    }
}

/// Looked-up rows of quantised blocks, as f32.
fn dequantized_rows(blocks: &Tensor, format: QuantFormat, ids: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let (count, width) = (blocks.shape()[0], shape[shape.len() - 1]);
    let mut values = vec![0f32; shape.iter().product()];
    for (id, values) in ids.to_vec::<i32>()?.into_iter().zip(values.chunks_mut(width.max(1))) {
        let row = usize::try_from(id).ok().and_then(|id| blocks.narrow(0, id, 1));
        let row = row.ok_or_else(|| {
            let expected = format!("numbers of rows, from 0 to {}", count.saturating_sub(1));
            warpsmith::Error::argument("embedding", "ids", expected, id.to_string())
        })?;
        quantization_of(format).dequantize(&row.to_vec::<u8>()?, values);
    }
    Ok(Tensor::from_slice(&values, shape, Device::Cpu)?)
}

/// The rows of a batch whose logits are wanted.
pub struct Selection {
    rows: Buffer,
    plan: Option<Plan>,
}

impl Selection {
    /// With room for rows of `width` elements.
    pub fn new(loader: &Loader<'_>, width: usize) -> Result<Selection> {
        Ok(Selection { rows: Buffer::of(loader, width)?, plan: None })
    }

    /// Of `x`, which has a row for each token: a copy of some of them, or `x` itself if all are wanted.
    pub fn forward<'a>(&'a mut self, x: TensorView<'a>, batch: &Batch) -> Result<TensorView<'a>> {
        let Some(wanted) = &batch.logit_rows else { return Ok(x) };
        let mut rows = self.rows.write(batch.num_logits())?;
        Embedding::new(x, wanted).keep_plan(&mut self.plan).run_into(rows.reborrow(), batch.stream())?;
        Ok(self.rows.read(batch.num_logits()))
    }
}

/// A norm of rows: RMS, or layer norm where the weights have a bias.
pub struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
    plan: Option<Plan>,
}

impl Norm {
    /// A norm over `width` elements.
    pub fn load(loader: &Loader<'_>, part: Part, layer: usize, width: usize, eps: f32) -> Result<Norm> {
        let (weight, bias) = (loader.vector(part, layer, width)?, loader.bias(part, layer, width)?);
        Ok(Norm { weight, bias, eps, plan: None })
    }

    /// Normalises `x` into `out`.
    pub fn forward(&mut self, x: TensorView<'_>, out: TensorViewMut<'_>, stream: &Stream) -> Result<()> {
        let Norm { weight, bias, eps, plan } = self;
        Ok(match bias {
            None => RmsNorm::new(x).weight(&*weight).eps(*eps).keep_plan(plan).run_into(out, stream),
            Some(bias) => {
                let call = LayerNorm::new(x).weight(&*weight).bias(&*bias).eps(*eps);
                call.keep_plan(plan).run_into(out, stream)
            }
        }?)
    }

    /// Normalises rows in place. For RMS norms.
    pub fn in_place(&mut self, x: TensorViewMut<'_>, stream: &Stream) -> Result<()> {
        let call = RmsNorm::in_place().weight(&self.weight).eps(self.eps);
        Ok(call.keep_plan(&mut self.plan).run_in_place(x, stream)?)
    }

    /// Adds `x` to `sum`, and normalises that into `out`. For RMS norms.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        sum: TensorViewMut<'_>,
        out: TensorViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let call = RmsNorm::new(x).weight(&self.weight).eps(self.eps);
        Ok(call.keep_plan(&mut self.plan).run_add_to(sum, out, stream)?)
    }

    /// Adds two tensors into `sum` and normalises that into `out`. For layer norms.
    pub fn forward_sum(
        &mut self,
        [a, b]: [TensorView<'_>; 2],
        out: TensorViewMut<'_>,
        sum: TensorViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let mut call = LayerNorm::new(a).weight(&self.weight).eps(self.eps);
        if let Some(bias) = &self.bias {
            call = call.bias(bias);
        }
        Ok(call.run_add_into(b, out, sum, stream)?)
    }
}

/// Adds rows to others. The op that does so also normalises, into room that is not read.
#[derive(Default)]
pub struct Sum {
    plan: Option<Plan>,
}

impl Sum {
    /// Adds `x` to `sum`. What is in `room` is lost.
    pub fn add_to(
        &mut self,
        x: TensorView<'_>,
        sum: TensorViewMut<'_>,
        room: TensorViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        Ok(RmsNorm::new(x).keep_plan(&mut self.plan).run_add_to(sum, room, stream)?)
    }
}

/// How positions rotate queries and keys.
#[derive(Debug, Clone)]
pub struct Rotary {
    theta: f64,
    /// Multiplies positions.
    scale: f64,
    /// The first elements of a head, which are rotated; 0 for all.
    dim: usize,
    /// Cosine and sine, `[positions, elements that are rotated / 2]`, where the frequencies are not powers of theta.
    tables: Option<(Tensor, Tensor)>,
}

/// The rotations of a model.
pub struct Rotaries {
    main: Option<Rotary>,
    local: Option<Rotary>,
}

impl Rotaries {
    /// Those of a model, if it has any.
    pub fn load(loader: &Loader<'_>) -> Result<Rotaries> {
        let (config, device) = (&loader.config, loader.options.device);
        let rotary = |rope: RopeConfig| {
            Rotary::new(&rope, config.head_dim, config.rotary_dim, config.max_positions, device)
        };
        let local = config.local_rope.clone().map(rotary).transpose()?;
        Ok(Rotaries { main: loader.rope()?.map(rotary).transpose()?, local })
    }

    /// The one of a layer.
    fn of(&self, rotation: Rotation) -> Option<Rotary> {
        match rotation {
            Rotation::Main => self.main.clone(),
            Rotation::Local => self.local.clone(),
            Rotation::None => None,
        }
    }
}

impl Rotary {
    /// Tables are made for positions below `max_positions`, if there are any.
    pub fn new(
        rope: &RopeConfig,
        head_dim: usize,
        rotary_dim: Option<usize>,
        max_positions: usize,
        device: Device,
    ) -> Result<Rotary> {
        let dim = rotary_dim.unwrap_or(head_dim);
        let scale = if let RopeScaling::Linear(factor) = rope.scaling { 1.0 / factor } else { 1.0 };
        let mut tables = None;
        if let Some(divisors) = rope.divisors(dim, max_positions) {
            let (pairs, amplitude) = (dim / 2, rope.amplitude());
            let frequency = |pair: usize| rope.theta.powf(-2.0 * pair as f64 / dim as f64) / divisors[pair];
            let frequencies: Vec<f64> = (0..pairs).map(frequency).collect();
            // Angles are formed in f64: at far positions f32 would lose the fraction of a turn.
            let table = |function: fn(f64) -> f64| {
                let angle = |at: usize| (at / pairs) as f64 * frequencies[at % pairs];
                let values: Vec<f32> =
                    (0..max_positions * pairs).map(|at| (amplitude * function(angle(at))) as f32).collect();
                Tensor::from_slice(&values, &[max_positions, pairs], device)
            };
            tables = Some((table(f64::cos)?, table(f64::sin)?));
        }
        Ok(Rotary { theta: rope.theta, scale, dim: rotary_dim.unwrap_or(0), tables })
    }
}

/// Attention of a layer: rotates, stores keys and values, attends.
pub struct Attention {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary: Option<Rotary>,
    /// The factor of the scores, where it is not that of the head size.
    score_scale: Option<f32>,
    /// Keys before its own that a query sees, where it does not see all.
    window: Option<usize>,
    /// Norms of the heads of queries and keys, before they are rotated.
    norms: Option<(Norm, Norm)>,
    /// Norms of all queries and all keys of a token.
    wide_norms: Option<(Norm, Norm)>,
    /// What keys and values are divided by where they are stored in 8 bits; 1 without.
    scales: Option<(Tensor, Tensor)>,
    store_plan: Option<Plan>,
    attention_plan: Option<Plan>,
}

impl Attention {
    /// Attention of a layer, without norms of heads.
    pub fn load(
        config: &Config,
        loader: &Loader<'_>,
        layer: usize,
        rotaries: &Rotaries,
    ) -> Result<Attention> {
        let own = config.layer(layer);
        // A window that is wider than the context hides nothing.
        let window = own.window.filter(|window| *window < config.max_positions).map(|window| window - 1);
        Ok(Attention {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            rotary: rotaries.of(own.rotation),
            score_scale: config.score_scale(layer),
            window,
            norms: None,
            wide_norms: None,
            scales: loader.kv_scales(layer)?,
            store_plan: None,
            attention_plan: None,
        })
    }

    /// With norms of the heads of queries and keys.
    pub fn norms(self, queries: Norm, keys: Norm) -> Attention {
        Attention { norms: Some((queries, keys)), ..self }
    }

    /// With norms of all queries of a token, and of all its keys.
    pub fn wide_norms(self, queries: Norm, keys: Norm) -> Attention {
        Attention { wide_norms: Some((queries, keys)), ..self }
    }

    /// From `[tokens, heads of queries, keys and values together]` to `[tokens, heads of queries]`.
    pub fn forward(
        &mut self,
        mut qkv: TensorViewMut<'_>,
        out: TensorViewMut<'_>,
        batch: &Batch,
        (mut k_pages, mut v_pages): (TensorViewMut<'_>, TensorViewMut<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let (tokens, heads, kv_heads, dim) =
            (batch.num_tokens(), self.num_heads, self.num_kv_heads, self.head_dim);
        if let Some((queries, keys)) = &mut self.wide_norms {
            let mut part = |norm: &mut Norm, first: usize, count: usize| {
                let all = qkv.reborrow().narrow(1, first * dim, count * dim);
                norm.in_place(all.expect("heads of queries, then of keys"), stream)
            };
            part(queries, 0, heads)?;
            part(keys, heads, kv_heads)?;
        }
        let mut qkv = qkv.reshape(&[tokens, heads + 2 * kv_heads, dim]).expect("rows of whole heads");
        let mut store = QkvStore::new(&batch.slots);
        if let Some((queries, keys)) = &self.norms {
            store = store.norms(&queries.weight, &keys.weight).eps(queries.eps);
        }
        if let Some(rotary) = &self.rotary {
            store = store.rope(&batch.positions).theta(rotary.theta).position_scale(rotary.scale);
            store = store.rotary_dim(rotary.dim);
            if let Some((cos, sin)) = &rotary.tables {
                store = store.tables(cos, sin);
            }
        }
        let scales = self.scales.as_ref().filter(|_| k_pages.as_view().dtype().size() == 1);
        if let Some((k_scale, v_scale)) = scales {
            store = store.scales(k_scale, v_scale);
        }
        let store = store.keep_plan(&mut self.store_plan);
        store.run_into(qkv.reborrow(), k_pages.reborrow(), v_pages.reborrow(), stream)?;
        let q = qkv.narrow(1, 0, heads).expect("queries come first");
        let out = out.reshape(&[tokens, heads, dim]).expect("rows of whole heads");
        let (k_pages, v_pages) = (k_pages.as_view(), v_pages.as_view());
        let mut attend =
            PagedAttention::new(q.as_view(), k_pages, v_pages, &batch.page_table, &batch.kv_lens);
        if let Some((k_scale, v_scale)) = scales {
            attend = attend.scales(k_scale, v_scale);
        }
        if let Some(scale) = self.score_scale {
            attend = attend.scale(scale);
        }
        if let Some(q_starts) = &batch.q_starts {
            attend = attend.q_starts(q_starts);
        }
        if let Some(window) = self.window {
            attend = attend.window(window);
        } else if let Some(shared) = &batch.shared {
            attend = attend.cascade(&shared.group_starts, &shared.prefix_lens);
            if shared.always {
                attend = attend.always_share();
            }
        }
        Ok(attend.keep_plan(&mut self.attention_plan).run_into(out, stream)?)
    }
}
