//! GPT-2: layer norms with biases, learned positions, a feed-forward layer without a gate.

use super::layers::{Attention, Buffer, Norm, Rotaries, Selection, Table};
use super::loader::Loader;
use super::names::Part;
use super::products::Projection;
use super::{Config, Model};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use warpsmith::profile::{self, Kind};
use warpsmith::{Stream, TensorViewMut};

/// Loads a GPT-2.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let widths = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
    if widths != [config.hidden_size; 2] {
        let expected = format!("{}, the model's width, for queries and for keys", config.hidden_size);
        return Err(Error::config("num_heads * head_dim", expected, format!("{widths:?}")));
    }
    Ok(Box::new(Gpt2::load(config, loader)?))
}

struct Gpt2 {
    config: Config,
    embedding: Table,
    positions: Table,
    layers: Vec<Layer>,
    norm: Norm,
    head: Projection,
    stream: Stream,
    /// The residual stream.
    x: Buffer,
    selection: Selection,
    /// The vectors of tokens and of positions, before they are added.
    token_rows: Buffer,
    position_rows: Buffer,
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
    up: Projection,
    down: Projection,
}

impl Gpt2 {
    fn load(config: &Config, loader: &Loader<'_>) -> Result<Gpt2> {
        let hidden = config.hidden_size;
        let embedding = Table::load(loader, Part::Embedding, config.vocab_size, hidden)?;
        let buffer = |width| Buffer::of(loader, width);
        Ok(Gpt2 {
            positions: Table::load(loader, Part::Positions, config.max_positions, hidden)?,
            embedding,
            layers: (0..config.num_layers).map(|i| Layer::load(config, loader, i)).collect::<Result<_>>()?,
            norm: Norm::load(loader, Part::FinalNorm, 0, hidden, config.norm_eps)?,
            head: Projection::head(loader)?,
            stream: loader.stream().clone(),
            selection: Selection::new(loader, config.hidden_size)?,
            x: buffer(hidden)?,
            token_rows: buffer(hidden)?,
            position_rows: buffer(hidden)?,
            rooms: Rooms {
                normed: buffer(hidden)?,
                qkv: buffer(3 * hidden)?,
                attended: buffer(hidden)?,
                inner: buffer(config.intermediate_size)?,
            },
            config: config.clone(),
        })
    }

    /// The residual stream of all tokens after the last layer, in `x`.
    fn run_layers(&mut self, batch: &Batch, kv: &mut KvCache) -> Result<()> {
        let (tokens, stream) = (batch.num_tokens(), batch.stream());
        let mut token_rows = self.token_rows.write(tokens)?;
        let mut position_rows = self.position_rows.write(tokens)?;
        let embedding = profile::span(Kind::Layer, || "embedding".into());
        self.embedding.forward(&batch.ids, token_rows.reborrow(), stream)?;
        self.positions.forward(&batch.positions, position_rows.reborrow(), stream)?;
        drop(embedding);
        let mut x = self.x.write(tokens)?;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let _span = profile::span(Kind::Layer, || format!("layer {i}"));
            let normed = self.rooms.normed.write(tokens)?;
            match i {
                // The sum of the two is formed by the first norm.
                0 => {
                    let rows = [token_rows.as_view(), position_rows.as_view()];
                    layer.attention_norm.forward_sum(rows, normed, x.reborrow(), stream)?;
                }
                _ => layer.attention_norm.forward(x.as_view(), normed, stream)?,
            }
            layer.forward(x.reborrow(), &mut self.rooms, batch, kv.layer(i)?, stream)?;
        }
        Ok(())
    }
}

impl Model for Gpt2 {
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
        self.head.forward(normed.as_view(), logits, batch)
    }

    fn hidden(&mut self, batch: &Batch, kv: &mut KvCache, rows: TensorViewMut<'_>) -> Result<()> {
        self.run_layers(batch, kv)?;
        let last = self.selection.forward(self.x.read(batch.num_tokens()), batch)?;
        self.norm.forward(last, rows, batch.stream())
    }
}

impl Layer {
    fn load(config: &Config, loader: &Loader<'_>, layer: usize) -> Result<Layer> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.norm_eps);
        let one = |part, out, input| Projection::load(loader, &[(part, out)], layer, input);
        Ok(Layer {
            attention_norm: Norm::load(loader, Part::AttentionNorm, layer, hidden, eps)?,
            qkv: one(Part::QueryKeyValue, 3 * hidden, hidden)?,
            attention: Attention::load(config, loader, layer, &Rotaries::load(loader)?)?,
            out: one(Part::AttentionOut, hidden, hidden)?,
            mlp_norm: Norm::load(loader, Part::MlpNorm, layer, hidden, eps)?,
            up: one(Part::Up, inner, hidden)?.activation(config.activation),
            down: one(Part::Down, hidden, inner)?,
        })
    }

    /// The layer after its first norm, whose result is in `rooms`.
    fn forward(
        &mut self,
        mut x: TensorViewMut<'_>,
        rooms: &mut Rooms,
        batch: &Batch,
        pages: (TensorViewMut<'_>, TensorViewMut<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let tokens = batch.num_tokens();
        let (mut qkv, mut attended) = (rooms.qkv.write(tokens)?, rooms.attended.write(tokens)?);
        self.qkv.forward(rooms.normed.read(tokens), qkv.reborrow(), batch)?;
        self.attention.forward(qkv, attended.reborrow(), batch, pages, stream)?;
        self.out.add_to(attended.as_view(), x.reborrow(), batch)?;
        let (mut normed, mut inner) = (rooms.normed.write(tokens)?, rooms.inner.write(tokens)?);
        self.mlp_norm.forward(x.as_view(), normed.reborrow(), stream)?;
        self.up.forward(normed.as_view(), inner.reborrow(), batch)?;
        self.down.add_to(inner.as_view(), x, batch)
    }
}
