//! The input of a forward pass: tokens, where their keys and values go, and which rows need logits.

use crate::error::Result;
use warpsmith::{DType, Stream, Tensor};

/// The new tokens of some sequences, one sequence after the other, as tensors on the device. Everything that varies from
/// step to step is in tensors, so that a captured step can be run again with other contents.
pub struct Batch {
    /// Token ids, `[tokens]`.
    pub ids: Tensor,
    /// The place of each token in its sequence, `[tokens]`.
    pub positions: Tensor,
    /// Where its key and value are stored, `page * page_size + place`, `[tokens]`; -1 for nowhere.
    pub slots: Tensor,
    /// The pages of each sequence, `[sequences, most pages]`.
    pub page_table: Tensor,
    /// Keys of each sequence, the new ones among them, `[sequences]`; zero for a row that only fills up the batch.
    pub kv_lens: Tensor,
    /// Where the tokens of each sequence begin, `[sequences + 1]`; `None` if each has one.
    pub q_starts: Option<Tensor>,
    /// Which sequences begin with the same pages, if prefixes are to be shared. Only where each has one token.
    pub shared: Option<Shared>,
    /// The rows whose logits are wanted, `[rows]`; `None` for all.
    pub logit_rows: Option<Tensor>,
    /// The tokens that have an adapter.
    pub adapted: Vec<Adapted>,
    /// The stream that the pass runs on.
    pub(crate) stream: Stream,
}

/// Groups of neighbouring sequences that begin with the same pages, as `paged_attention` takes them.
pub struct Shared {
    /// Where each group begins, `[1, groups + 1]`.
    pub group_starts: Tensor,
    /// Keys that all of a group have, `[1, groups]`.
    pub prefix_lens: Tensor,
    /// Whether groups are used even if that is not expected to be faster.
    pub always: bool,
}

/// Neighbouring tokens with the same adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adapted {
    /// The adapter's number.
    pub adapter: usize,
    /// The first of the tokens.
    pub first: usize,
    /// How many there are.
    pub count: usize,
}

impl Batch {
    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.ids.shape()[0]
    }

    /// Number of rows whose logits are wanted.
    pub fn num_logits(&self) -> usize {
        self.logit_rows.as_ref().map_or(self.num_tokens(), |rows| rows.shape()[0])
    }

    /// The stream that the pass runs on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

/// One sequence's share of a batch, as plain numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// The new tokens.
    pub tokens: &'a [i32],
    /// Tokens of the sequence before them, whose keys and values are stored already.
    pub start: usize,
    /// The pages of the sequence, enough for the new tokens too.
    pub pages: &'a [i32],
    /// Whether the logits of the last token are wanted.
    pub wants_logits: bool,
    /// The number of the sequence's adapter.
    pub adapter: Option<usize>,
}

/// Numbers for several tensors, one after the other, so that they reach the device in one copy.
#[derive(Default)]
struct Words {
    words: Vec<i32>,
    parts: Vec<(usize, usize)>,
}

impl Words {
    /// Tensors begin at multiples of 16 bytes, whatever is before them: kernels are chosen by alignment.
    const ALIGN: usize = 4;

    fn add(&mut self, part: &[i32]) {
        self.parts.push((self.words.len(), part.len()));
        self.words.extend_from_slice(part);
        self.words.resize(self.words.len().next_multiple_of(Self::ALIGN), 0);
    }

    fn upload(&self, stream: &Stream) -> Result<impl Iterator<Item = Tensor>> {
        let mut all = Tensor::empty_on(&[self.words.len()], DType::I32, stream)?;
        all.write(0, &self.words, stream)?;
        let part = move |&(start, len): &(usize, usize)| {
            all.narrow(0, start, len).expect("every part lies in the whole")
        };
        Ok(self.parts.iter().map(part))
    }
}

impl Batch {
    /// Puts chunks together.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn new(chunks: &[Chunk<'_>], page_size: usize, stream: &Stream) -> Result<Batch> {
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
                slots.push(slot(chunk.pages, position, page_size));
            }
            kv_lens.push(end as i32);
            q_starts.push(ids.len() as i32);
            if chunk.wants_logits {
                logit_rows.push(ids.len() as i32 - 1);
            }
        }
        let mut words = Words::default();
        for part in [&ids, &positions, &slots, &table, &kv_lens, &q_starts, &logit_rows] {
            words.add(part);
        }
        let mut tensors = words.upload(stream)?;
        let mut next = || tensors.next().expect("seven parts were added");
        let [ids, positions, slots, table, kv_lens, q_starts, logit_rows] = std::array::from_fn(|_| next());
        let one_each = tokens == chunks.len() && chunks.iter().all(|chunk| chunk.tokens.len() == 1);
        let all_wanted = logit_rows.shape()[0] == tokens;
        Ok(Batch {
            ids,
            positions,
            slots,
            page_table: table.reshape(&[chunks.len(), width]).expect("a row for each chunk"),
            kv_lens,
            q_starts: (!one_each).then_some(q_starts),
            shared: None,
            adapted: adapted(chunks),
            logit_rows: (!all_wanted).then_some(logit_rows),
            stream: stream.clone(),
        })
    }
}

/// The tokens of chunks with adapters. Neighbours with the same are together.
fn adapted(chunks: &[Chunk<'_>]) -> Vec<Adapted> {
    let mut all: Vec<Adapted> = Vec::new();
    let mut first = 0;
    for chunk in chunks {
        let count = chunk.tokens.len();
        if let Some(adapter) = chunk.adapter {
            match all.last_mut().filter(|last| last.adapter == adapter && last.first + last.count == first) {
                Some(last) => last.count += count,
                None => all.push(Adapted { adapter, first, count }),
            }
        }
        first += count;
    }
    all
}

/// Where the key and the value of a token are stored.
pub(crate) fn slot(pages: &[i32], position: usize, page_size: usize) -> i32 {
    pages[position / page_size] * page_size as i32 + (position % page_size) as i32
}
