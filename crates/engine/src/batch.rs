//! What a forward pass is told: tokens, where their keys and values go, and which rows need logits.

use crate::error::Result;
use warpsmith::{Device, Stream, Tensor};

/// The new tokens of some sequences, one sequence after the other, as tensors on the device. Everything that varies from
/// step to step is in tensors, so that a captured step can be run again with other contents.
#[derive(Debug)]
pub struct Batch {
    /// Token ids, `[tokens]`.
    pub ids: Tensor,
    /// The place of each token in its sequence, `[tokens]`.
    pub positions: Tensor,
    /// Where its key and value are stored, `page * page_size + place`, `[tokens]`; -1 for nowhere.
    pub slots: Tensor,
    /// The pages of each sequence, `[sequences, most pages]`.
    pub page_table: Tensor,
    /// Keys of each sequence, the new ones among them, `[sequences]`.
    pub kv_lens: Tensor,
    /// Where the tokens of each sequence begin, `[sequences + 1]`; `None` if each has one.
    pub q_starts: Option<Tensor>,
    /// The rows whose logits are wanted, `[rows]`.
    pub logit_rows: Tensor,
}

impl Batch {
    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.ids.shape()[0]
    }

    /// Number of rows whose logits are wanted.
    pub fn num_logits(&self) -> usize {
        self.logit_rows.shape()[0]
    }

    /// The stream that the pass runs on.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn stream(&self) -> Result<Stream> {
        Ok(self.ids.device().default_stream()?)
    }
}

/// One sequence's share of a batch, in plain numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// The new tokens.
    pub tokens: &'a [i32],
    /// Tokens of the sequence before them, whose keys and values are stored already.
    pub start: usize,
    /// The pages of the sequence, enough for the new tokens too.
    pub pages: &'a [i32],
    /// Whether the logits of the last token are wanted.
    pub wants_logits: bool,
}

impl Batch {
    /// Puts chunks together.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn new(chunks: &[Chunk<'_>], page_size: usize, device: Device) -> Result<Batch> {
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let width = chunks.iter().map(|chunk| chunk.pages.len()).max().unwrap_or(0).max(1);
        let (mut ids, mut positions) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let (mut slots, mut logit_rows) = (Vec::with_capacity(tokens), Vec::new());
        let (mut table, mut kv_lens) = (vec![-1i32; chunks.len() * width], Vec::with_capacity(chunks.len()));
        let mut q_starts = vec![0i32];
        for (row, chunk) in table.chunks_exact_mut(width).zip(chunks) {
            row[..chunk.pages.len()].copy_from_slice(chunk.pages);
            let end = chunk.start + chunk.tokens.len();
            ids.extend_from_slice(chunk.tokens);
            for position in chunk.start..end {
                positions.push(position as i32);
                slots.push(
                    chunk.pages[position / page_size] * page_size as i32 + (position % page_size) as i32,
                );
            }
            kv_lens.push(end as i32);
            q_starts.push(ids.len() as i32);
            if chunk.wants_logits {
                logit_rows.push(ids.len() as i32 - 1);
            }
        }
        let one_each = chunks.iter().all(|chunk| chunk.tokens.len() == 1);
        let ints = |values: &[i32], shape: &[usize]| Tensor::from_slice(values, shape, device);
        Ok(Batch {
            ids: ints(&ids, &[tokens])?,
            positions: ints(&positions, &[tokens])?,
            slots: ints(&slots, &[tokens])?,
            page_table: ints(&table, &[chunks.len(), width])?,
            kv_lens: ints(&kv_lens, &[chunks.len()])?,
            q_starts: if one_each { None } else { Some(ints(&q_starts, &[chunks.len() + 1])?) },
            logit_rows: ints(&logit_rows, &[logit_rows.len()])?,
        })
    }
}
