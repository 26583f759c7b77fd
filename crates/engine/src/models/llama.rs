//! The Llama family: RMS norms before attention and a gated feed-forward layer, rotated queries and keys.

use super::layers::{Attention, Buffer, Norm, Selection, Table};
use super::names::{Loader, Part};
use super::products::{GatedMlp, Projection};
use super::{Config, Model};
use crate::batch::Batch;
use crate::error::Result;
use crate::kv::KvCache;
use warpsmith::{Stream, TensorViewMut};

/// Loads a Llama.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, |_, attention| Ok(attention))?))
}

/// A model of this form. Families that only change the attention of a layer use it too.
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
}

struct Layer {
    attention_norm: Norm,
    qkv: Projection,
    attention: Attention,
    out: Projection,
    mlp_norm: Norm,
    mlp: GatedMlp,
}

impl Decoder {
    /// `adapt` changes the attention of each layer.
    pub(super) fn load(
        config: &Config,
        loader: &Loader<'_>,
        adapt: impl Fn(usize, Attention) -> Result<Attention>,
    ) -> Result<Decoder> {
        let rotary = loader.rotary()?;
        let embedding = Table::load(loader, Part::Embedding, config.vocab_size, config.hidden_size)?;
        let attention = |i| adapt(i, Attention::load(config, loader, i, rotary.clone())?);
        let layer = |i| Layer::load(config, loader, i, attention(i)?);
        let buffer = |width| loader.buffer(width);
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
            },
            config: config.clone(),
        })
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
        let (tokens, stream) = (batch.num_tokens(), batch.stream());
        let mut x = self.x.write(tokens)?;
        self.embedding.forward(&batch.ids, x.reborrow(), stream)?;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            layer.forward(x.reborrow(), &mut self.rooms, batch, kv.layer(i)?, stream)?;
        }
        let last = self.selection.forward(x.as_view(), batch)?;
        let mut normed = self.rooms.normed.write(batch.num_logits())?;
        self.norm.forward(last, normed.reborrow(), stream)?;
        self.head.forward(normed.as_view(), logits, stream)
    }
}

impl Layer {
    fn load(config: &Config, loader: &Loader<'_>, layer: usize, attention: Attention) -> Result<Layer> {
        let (hidden, eps) = (config.hidden_size, config.norm_eps);
        let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let parts = [(Part::Query, queries), (Part::Key, keys), (Part::Value, keys)];
        Ok(Layer {
            attention_norm: Norm::load(loader, Part::AttentionNorm, layer, hidden, eps)?,
            qkv: Projection::load(loader, &parts, layer, hidden)?,
            attention,
            out: Projection::load(loader, &[(Part::AttentionOut, hidden)], layer, queries)?,
            mlp_norm: Norm::load(loader, Part::MlpNorm, layer, hidden, eps)?,
            mlp: GatedMlp::load(loader, layer, config)?,
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
        self.attention_norm.forward(x.as_view(), normed.reborrow(), stream)?;
        self.qkv.forward(normed.as_view(), qkv.reborrow(), stream)?;
        self.attention.forward(qkv, attended.reborrow(), batch, pages, stream)?;
        self.out.add_to(attended.as_view(), x.reborrow(), stream)?;
        self.mlp_norm.forward(x.as_view(), normed.reborrow(), stream)?;
        self.mlp.add_to(normed.as_view(), rooms.inner.write(tokens)?, x, stream)
    }
}
