//! Steps that give every sequence one token: a few shapes that repeat, in fixed memory.
//!
//! Rows are filled up to one of a few numbers, the buckets, and page tables to one of a few widths. Everything that
//! varies reaches the device in one copy. On a GPU a step of each form is captured the second time it comes: the first
//! time, which runs call by call, compiles kernels and makes their plans. From then on the host launches one graph and
//! waits for the tokens.
//!
//! Padding changes no bits: a row depends on its own sequence alone. Rows that only fill up have no keys and store
//! none.
//!
//! Two steps can be in flight. The second takes its tokens from the first on the device, so the host can launch it
//! without knowing them, and processes the first meanwhile.

mod replay;
mod rows;
pub(crate) mod sharing;

pub(crate) use rows::Row;

use crate::error::Result;
use crate::kv::KvCache;
use crate::models::Model;
use crate::settings::Cascade;
use replay::Replay;
use rows::{Form, Inputs};
use warpsmith::ops::Sample;
use warpsmith::{DType, Stream, Tensor, TensorView, TensorViewMut};

/// What the steps of one engine need.
pub(crate) struct Decode {
    stream: Stream,
    /// Tokens that exist.
    vocab: usize,
    buckets: Vec<usize>,
    /// The most pages of a sequence, and tokens of a page.
    max_pages: usize,
    page_size: usize,
    /// `[largest bucket, columns]`.
    logits: Tensor,
    /// `[largest bucket]`.
    tokens: Tensor,
    words: Vec<i32>,
    cascade: Cascade,
    /// Steps with shared prefixes.
    pub cascade_steps: u64,
    /// Of the last step.
    next: Ticket,
    /// On a GPU.
    replay: Option<Replay>,
    /// On the CPU, the tokens of the last two steps.
    host: [Vec<i32>; 2],
}

/// One of the two steps that can be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(usize);

/// Sizes that determine the memory of [`Decode`].
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// The most rows of a step.
    pub max_rows: usize,
    /// The most pages of a sequence.
    pub max_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Columns of the logits.
    pub columns: usize,
    /// Tokens that exist.
    pub vocab: usize,
    /// Where prefixes are shared.
    pub cascade: Cascade,
}

impl Decode {
    pub fn new(sizes: Sizes, stream: &Stream) -> Result<Decode> {
        let Sizes { max_rows, max_pages, page_size, columns, vocab, cascade } = sizes;
        let largest = Form { rows: max_rows, width: max_pages, groups: sharing::most_groups(max_rows) };
        let replay = match stream {
            Stream::Host => None,
            Stream::Cuda(cuda) => Some(Replay::new(cuda, largest, cascade == Cascade::Always)?),
        };
        Ok(Decode {
            stream: stream.clone(),
            vocab,
            buckets: buckets(max_rows),
            max_pages,
            page_size,
            logits: Tensor::empty_on(&[max_rows, columns], DType::F32, stream)?,
            tokens: Tensor::empty_on(&[max_rows], DType::I32, stream)?,
            words: Vec::new(),
            cascade,
            cascade_steps: 0,
            next: Ticket(0),
            replay,
            host: Default::default(),
        })
    }

    /// Launches a step. If it is `fed`, its rows take the tokens that the rows of the step before choose.
    pub fn launch(
        &mut self,
        model: &mut dyn Model,
        kv: &mut KvCache,
        rows: &[Option<Row<'_>>],
        fed: bool,
    ) -> Result<Ticket> {
        let bucket = self.buckets.iter().copied().find(|&bucket| bucket >= rows.len());
        let longest = rows.iter().flatten().map(|row| row.pages.len()).max().unwrap_or(0);
        let width = width(longest, self.page_size, self.max_pages);
        let bucket = bucket.expect("no step has more rows than may run");
        let shared = sharing::groups(rows, self.page_size, self.cascade, bucket, kv)?;
        let groups = if shared.is_some() { sharing::most_groups(bucket) } else { 0 };
        self.cascade_steps += u64::from(shared.is_some());
        let form = Form { rows: bucket, width, groups };
        form.pack(rows, self.page_size, shared.as_ref(), &mut self.words);
        self.next = Ticket(1 - self.next.0);
        let ticket = self.next;
        let logits = self.logits.view_mut().narrow(0, 0, form.rows).expect("room for every bucket");
        let tokens = self.tokens.view_mut().narrow(0, 0, form.rows).expect("room for every bucket");
        let mut step = Step { model, kv, logits, tokens, vocab: self.vocab };
        match &mut self.replay {
            Some(replay) => replay.launch(ticket, form, &self.words, rows.len(), fed, &mut step)?,
            None => {
                if fed {
                    for (i, &token) in self.host[1 - ticket.0].iter().enumerate() {
                        // A row without a token is not used again. On a GPU it is computed with zeros.
                        self.words[form.ids() + i] = token.max(0);
                    }
                }
                let always = self.cascade == Cascade::Always;
                step.run(&Inputs::on_host(form, always, &self.words)?, &self.stream)?;
                let mut tokens: Vec<i32> = step.tokens.as_view().to_vec()?;
                tokens.truncate(rows.len());
                self.host[ticket.0] = tokens;
            }
        }
        Ok(ticket)
    }

    /// Runs a step of every form, call by call, on the host.
    pub fn run_forms(&mut self, model: &mut dyn Model, kv: &mut KvCache) -> Result<()> {
        for rows in self.buckets.clone() {
            for width in widths(self.page_size, self.max_pages) {
                for groups in [0, sharing::most_groups(rows)] {
                    let form = Form { rows, width, groups };
                    form.pack(&[], self.page_size, None, &mut self.words);
                    let logits = self.logits.view_mut().narrow(0, 0, rows).expect("room for every bucket");
                    let tokens = self.tokens.view_mut().narrow(0, 0, rows).expect("room for every bucket");
                    let mut step = Step { model, kv, logits, tokens, vocab: self.vocab };
                    step.run(&Inputs::on_host(form, false, &self.words)?, &self.stream)?;
                }
            }
        }
        Ok(())
    }

    /// On a GPU, captures steps of all forms but those with shared prefixes, which are captured when they come the second time.
    /// Calls `tick` with how many are done and how many there are. Stops where capturing fails.
    pub fn capture_forms(
        &mut self,
        model: &mut dyn Model,
        kv: &mut KvCache,
        tick: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        let widths: Vec<usize> = widths(self.page_size, self.max_pages).collect();
        // The largest first, so that memory that grows does so once.
        let shapes = self.buckets.iter().rev().flat_map(|&rows| widths.iter().rev().map(move |&w| (rows, w)));
        let forms: Vec<Form> = shapes.map(|(rows, width)| Form { rows, width, groups: 0 }).collect();
        let Some(replay) = &mut self.replay else { return Ok(()) };
        for (done, &form) in forms.iter().enumerate() {
            tick(done, forms.len());
            form.pack(&[], self.page_size, None, &mut self.words);
            // It is captured the second time.
            for _ in 0..2 {
                self.next = Ticket(1 - self.next.0);
                let logits = self.logits.view_mut().narrow(0, 0, form.rows).expect("room for every bucket");
                let tokens = self.tokens.view_mut().narrow(0, 0, form.rows).expect("room for every bucket");
                let mut step = Step { model, kv, logits, tokens, vocab: self.vocab };
                replay.launch(self.next, form, &self.words, form.rows, false, &mut step)?;
                replay.collect(self.next)?;
            }
            if replay.graphs.failure.is_some() {
                break;
            }
        }
        replay.graphs.launches = 0;
        tick(forms.len(), forms.len());
        Ok(())
    }

    /// Waits for a step. Returns the tokens that `sample` chooses by the rows' own columns, -1 where there is none. If no
    /// step came after it, [`logits`](Self::logits) has what they were chosen from.
    pub fn collect(&mut self, ticket: Ticket) -> Result<Vec<i32>> {
        match &mut self.replay {
            Some(replay) => replay.collect(ticket),
            None => Ok(self.host[ticket.0].clone()),
        }
    }

    /// The logits of the first rows of the last step.
    pub fn logits(&self, rows: usize) -> TensorView<'_> {
        self.logits.view().narrow(0, 0, rows).expect("the step had as many rows")
    }

    /// The state of the graphs.
    pub fn graphs(&self) -> Graphs {
        self.replay.as_ref().map(|replay| replay.graphs.clone()).unwrap_or_default()
    }
}

/// The state of the graphs of an engine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Graphs {
    /// How many were captured.
    pub captured: usize,
    /// Steps that were launches of one.
    pub launches: u64,
    /// Why no more are captured.
    pub failure: Option<String>,
}

/// A step with all its memory except the inputs.
struct Step<'a> {
    model: &'a mut dyn Model,
    kv: &'a mut KvCache,
    logits: TensorViewMut<'a>,
    tokens: TensorViewMut<'a>,
    vocab: usize,
}

impl Step<'_> {
    /// Gives the work to the stream.
    fn run(&mut self, inputs: &Inputs, stream: &Stream) -> Result<()> {
        self.model.forward(&inputs.batch, self.kv, self.logits.reborrow())?;
        Sample::new(self.logits.as_view(), &inputs.seed, &inputs.place)
            .temperature(&inputs.temperature)
            .top_k(&inputs.top_k)
            .top_p(&inputs.top_p)
            .min_p(&inputs.min_p)
            .vocab(self.vocab)
            .run_into(self.tokens.reborrow(), None, stream)?;
        Ok(())
    }
}

/// Numbers of rows: 1, 2, 4, then by 8 to 256, then by 16, up to the most that can be needed.
fn buckets(most: usize) -> Vec<usize> {
    let all = [1, 2, 4].into_iter().chain((8..=256).step_by(8)).chain((272..).step_by(16));
    let mut buckets: Vec<usize> = all.take_while(|&bucket| bucket < most).collect();
    buckets.push(most);
    buckets
}

/// Pages of a row of the table: for 1024 tokens, 4096 and so on, as few as are enough. Attention divides its work by
/// the width, so a single width would slow short sequences down, and more widths would need more graphs.
fn width(pages: usize, page_size: usize, most: usize) -> usize {
    let mut tokens = 1024usize;
    while tokens.div_ceil(page_size) < pages {
        tokens *= 4;
    }
    tokens.div_ceil(page_size).min(most)
}

/// All widths that tables can have.
pub(crate) fn widths(page_size: usize, most: usize) -> impl Iterator<Item = usize> {
    let next = move |&last: &usize| (last < most).then(|| width(last + 1, page_size, most));
    std::iter::successors(Some(width(1, page_size, most)), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_end_with_the_most_rows() {
        assert_eq!(buckets(1), [1]);
        assert_eq!(buckets(5), [1, 2, 4, 5]);
        assert_eq!(buckets(20), [1, 2, 4, 8, 16, 20]);
        let many = buckets(300);
        assert_eq!(many[many.len() - 4..], [256, 272, 288, 300]);
        assert_eq!(many.len(), 3 + 32 + 3);
    }

    #[test]
    fn widths_are_few_and_enough() {
        assert_eq!(width(1, 64, 640), 16);
        assert_eq!(width(16, 64, 640), 16);
        assert_eq!(width(17, 64, 640), 64);
        assert_eq!(width(65, 64, 640), 256);
        assert_eq!(width(640, 64, 640), 640);
        assert_eq!(width(3, 256, 3), 3);
        assert!(widths(64, 640).eq([16, 64, 256, 640]));
        assert!(widths(256, 3).eq([3]) && widths(64, 64).eq([16, 64]));
    }
}
