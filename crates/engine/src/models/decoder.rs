//! What Llama and its relatives have in common: layers of attention with rotated queries and keys and of a gated
//! feed-forward layer, with RMS norms. A family says in what [`Form`].

use super::experts::{Experts, Routing};
use super::layers::{Attention, Buffer, Norm, Rotaries, Selection, Sum, Table};
use super::loader::Loader;
use super::names::Part;
use super::products::{GatedMlp, Projection};
use super::{Config, Model};
use crate::batch::Batch;
use crate::error::Result;
use crate::kv::KvCache;
use warpsmith::ops::Copy;
use warpsmith::profile::{self, Kind};
use warpsmith::{Device, Stream, Tensor, TensorView, TensorViewMut};

/// What a family's layers have that a Llama's have not.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Form {
    pub norms: NormPlaces,
    pub query_key_norms: QueryKeyNorms,
    /// Queries, keys and values are one matrix in the file, and so are gate and up.
    pub has_joined_matrices: bool,
}

/// Where attention and the feed-forward layer have their norms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum NormPlaces {
    /// Of what they read.
    #[default]
    Before,
    /// Of what they add.
    After,
    /// Both.
    Around,
}

/// What is normalised of queries and keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum QueryKeyNorms {
    /// Nothing.
    #[default]
    None,
    /// Each head.
    Heads,
    /// All heads of a token together.
    Tokens,
}

/// A model of this form.
pub(super) struct Decoder {
    config: Config,
    embedding: Table,
    layers: Vec<Layer>,
    norm: Norm,
    head: Projection,
    stream: Stream,
    /// The residual stream.
    x: Buffer,
    selection: Selection,
    rooms: Rooms,
}

/// Room for the activations within a layer.
struct Rooms {
    normed: Buffer,
    qkv: Buffer,
    attended: Buffer,
    inner: Buffer,
    routing: Option<Routing>,
    /// What attention or the feed-forward layer adds, where it is normalised first.
    added: Option<Buffer>,
}

struct Layer {
    attention_norm: Option<Norm>,
    qkv: Projection,
    attention: Attention,
    out: Projection,
    attention_out_norm: Option<Norm>,
    mlp_norm: Option<Norm>,
    mlp: FeedForward,
    mlp_out_norm: Option<Norm>,
    /// Of what attention adds, and of what the feed-forward layer adds.
    sums: [Sum; 2],
}

/// The second half of a layer.
enum FeedForward {
    Gated(Box<GatedMlp>),
    Experts(Box<Experts>),
}

impl Decoder {
    pub(super) fn load(config: &Config, loader: &Loader<'_>, form: Form) -> Result<Decoder> {
        let rotaries = Rotaries::load(loader)?;
        let embedding = Table::load(loader, Part::Embedding, config.vocab_size, config.hidden_size)?;
        let layer = |i| Layer::load(config, loader, i, form, &rotaries);
        let buffer = |width| Buffer::of(loader, width);
        let queries = config.num_heads * config.head_dim;
        Ok(Decoder {
            embedding,
            layers: (0..config.num_layers).map(layer).collect::<Result<_>>()?,
            norm: Norm::load(loader, Part::FinalNorm, 0, config.hidden_size, config.norm_eps)?,
            head: Projection::head(loader)?,
            stream: loader.stream().clone(),
            selection: Selection::new(loader, config.hidden_size)?,
            x: buffer(config.hidden_size)?,
            rooms: Rooms {
                normed: buffer(config.hidden_size)?,
                qkv: buffer(queries + 2 * config.num_kv_heads * config.head_dim)?,
                attended: buffer(queries)?,
                inner: buffer(config.intermediate_size)?,
                routing: config.experts.as_ref().map(|experts| Routing::new(loader, experts)).transpose()?,
                added: match form.norms {
                    NormPlaces::Before => None,
                    NormPlaces::After | NormPlaces::Around => Some(buffer(config.hidden_size)?),
                },
            },
            config: config.clone(),
        })
    }

    /// The residual stream of all tokens after the last layer, in `x`.
    fn run_layers(&mut self, batch: &Batch, kv: &mut KvCache) -> Result<()> {
        let stream = batch.stream();
        let mut x = self.x.write(batch.num_tokens())?;
        {
            let _span = profile::span(Kind::Layer, || "embedding".into());
            self.embedding.forward(&batch.ids, x.reborrow(), stream)?;
        }
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let _span = profile::span(Kind::Layer, || format!("layer {i}"));
            layer.forward(x.reborrow(), &mut self.rooms, batch, kv.layer(i)?, stream)?;
        }
        Ok(())
    }
}

impl Model for Decoder {
    fn config(&self) -> &Config {
        &self.config
    }

    fn stream(&self) -> Option<&Stream> {
        Some(&self.stream)
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, logits: TensorViewMut<'_>) -> Result<()> {
        self.run_layers(batch, kv)?;
        let _span = profile::span(Kind::Layer, || "head".into());
        let stream = batch.stream();
        let last = self.selection.forward(self.x.read(batch.num_tokens()), batch)?;
        let mut normed = self.rooms.normed.write(batch.num_logits())?;
        self.norm.forward(last, normed.reborrow(), stream)?;
        let mut logits = logits;
        self.head.forward(normed.as_view(), logits.reborrow(), batch)?;
        match self.config.logit_softcap {
            Some(cap) => cap_logits(logits, cap as f32, stream),
            None => Ok(()),
        }
    }

    fn hidden(&mut self, batch: &Batch, kv: &mut KvCache, rows: TensorViewMut<'_>) -> Result<()> {
        self.run_layers(batch, kv)?;
        let last = self.selection.forward(self.x.read(batch.num_tokens()), batch)?;
        self.norm.forward(last, rows, batch.stream())
    }
}

/// Logits become `cap * tanh(logit / cap)`. On the CPU: a GPU has no op for it, and models that need one are refused there.
fn cap_logits(logits: TensorViewMut<'_>, cap: f32, stream: &Stream) -> Result<()> {
    let mut capped = Tensor::empty(logits.shape(), logits.as_view().dtype(), Device::Cpu)?;
    Copy::new(logits.as_view()).run_into(&mut capped, stream)?;
    let numbers: Vec<f32> = capped.to_vec::<f32>()?.iter().map(|x| (x / cap).tanh() * cap).collect();
    Ok(Copy::new(TensorView::from_slice(&numbers, logits.shape())?).run_into(logits, stream)?)
}

impl Layer {
    fn load(
        config: &Config,
        loader: &Loader<'_>,
        layer: usize,
        form: Form,
        rotaries: &Rotaries,
    ) -> Result<Layer> {
        let (hidden, eps) = (config.hidden_size, config.norm_eps);
        let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let apart = [(Part::Query, queries), (Part::Key, keys), (Part::Value, keys)];
        let joined = [(Part::QueryKeyValue, queries + 2 * keys)];
        let parts = if form.has_joined_matrices { &joined[..] } else { &apart };
        let norm = |part, width| Norm::load(loader, part, layer, width, eps);
        let norm_at = |part, places: NormPlaces| {
            let is_there = [places, NormPlaces::Around].contains(&form.norms);
            is_there.then(|| norm(part, hidden)).transpose()
        };
        let attention = Attention::load(config, loader, layer, rotaries)?;
        let attention = match form.query_key_norms {
            QueryKeyNorms::None => attention,
            QueryKeyNorms::Heads => {
                let width = config.head_dim;
                attention.norms(norm(Part::QueryNorm, width)?, norm(Part::KeyNorm, width)?)
            }
            QueryKeyNorms::Tokens => {
                attention.wide_norms(norm(Part::QueryNorm, queries)?, norm(Part::KeyNorm, keys)?)
            }
        };
        Ok(Layer {
            attention_norm: norm_at(Part::AttentionNorm, NormPlaces::Before)?,
            qkv: Projection::load(loader, parts, layer, hidden)?,
            attention,
            out: Projection::load(loader, &[(Part::AttentionOut, hidden)], layer, queries)?,
            attention_out_norm: norm_at(Part::AttentionOutNorm, NormPlaces::After)?,
            mlp_norm: norm_at(Part::MlpNorm, NormPlaces::Before)?,
            mlp: FeedForward::load(config, loader, layer, form)?,
            mlp_out_norm: norm_at(Part::MlpOutNorm, NormPlaces::After)?,
            sums: Default::default(),
        })
    }

    fn forward(
        &mut self,
        mut x: TensorViewMut<'_>,
        rooms: &mut Rooms,
        batch: &Batch,
        pages: (TensorViewMut<'_>, TensorViewMut<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let tokens = batch.num_tokens();
        let mut normed = rooms.normed.write(tokens)?;
        let (mut qkv, mut attended) = (rooms.qkv.write(tokens)?, rooms.attended.write(tokens)?);
        let mut added = rooms.added.as_mut().map(|added| added.write(tokens)).transpose()?;
        let read = normed_or_same(&mut self.attention_norm, &x, &mut normed, stream)?;
        self.qkv.forward(read, qkv.reborrow(), batch)?;
        self.attention.forward(qkv, attended.reborrow(), batch, pages, stream)?;
        match (&mut self.attention_out_norm, &mut added) {
            (Some(norm), Some(added)) => {
                self.out.forward(attended.as_view(), added.reborrow(), batch)?;
                norm.in_place(added.reborrow(), stream)?;
                // The next norm adds it, where there is one.
                match &mut self.mlp_norm {
                    Some(norm) => norm.add_to(added.as_view(), x.reborrow(), normed.reborrow(), stream)?,
                    None => {
                        self.sums[0].add_to(added.as_view(), x.reborrow(), normed.reborrow(), stream)?;
                    }
                }
            }
            _ => {
                self.out.add_to(attended.as_view(), x.reborrow(), batch)?;
                normed_or_same(&mut self.mlp_norm, &x, &mut normed, stream)?;
            }
        }
        let read = if self.mlp_norm.is_some() { normed.as_view() } else { x.as_view() };
        match (&mut self.mlp, &mut self.mlp_out_norm, &mut added) {
            (FeedForward::Gated(mlp), Some(norm), Some(added)) => {
                mlp.forward(read, rooms.inner.write(tokens)?, added.reborrow(), batch)?;
                norm.in_place(added.reborrow(), stream)?;
                self.sums[1].add_to(added.as_view(), x, normed, stream)
            }
            (FeedForward::Gated(mlp), ..) => {
                mlp.add_to(normed.as_view(), rooms.inner.write(tokens)?, x, batch)
            }
            (FeedForward::Experts(experts), ..) => {
                let routing = rooms.routing.as_mut().expect("a model with experts has room for routing");
                experts.add_to(normed.as_view(), routing, x, batch)
            }
        }
    }
}

impl FeedForward {
    fn load(config: &Config, loader: &Loader<'_>, layer: usize, form: Form) -> Result<FeedForward> {
        Ok(match config.experts.as_ref().filter(|experts| experts.are_in(layer)) {
            Some(experts) => FeedForward::Experts(Box::new(Experts::load(loader, layer, config, experts)?)),
            None => {
                let mlp = GatedMlp::load(loader, layer, config, form.has_joined_matrices)?;
                FeedForward::Gated(Box::new(mlp))
            }
        })
    }
}

/// What a layer reads: `x` normalised into `normed`, or `x` itself without a norm.
fn normed_or_same<'a>(
    norm: &mut Option<Norm>,
    x: &'a TensorViewMut<'_>,
    normed: &'a mut TensorViewMut<'_>,
    stream: &Stream,
) -> Result<TensorView<'a>> {
    let Some(norm) = norm else { return Ok(x.as_view()) };
    norm.forward(x.as_view(), normed.reborrow(), stream)?;
    Ok(normed.as_view())
}
