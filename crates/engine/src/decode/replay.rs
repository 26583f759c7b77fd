//! Steps on a GPU: one copy to the device, one launch of a graph, one copy back.

use super::rows::{Form, Inputs};
use super::{Graphs, Step, Ticket};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;
use warpsmith::cuda::{self, DeviceBuffer, Event, Graph, GraphExec, PinnedBuffer};
use warpsmith::tensor::{Foreign, Layout, Shape};
use warpsmith::{Device, Stream, Tensor};

/// The graphs of one engine and the memory that they share. Their workspace is the stream's.
pub(super) struct Replay {
    raw: cuda::Stream,
    stream: Stream,
    /// The packed numbers on the device. Every form has its tensors in it.
    inputs: Arc<DeviceBuffer>,
    host: [HostSide; 2],
    steps: HashMap<Form, (Inputs, State)>,
    /// Whether attention is told to share prefixes at any cost.
    always_share: bool,
    pub graphs: Graphs,
}

/// The host's memory for a step in flight.
struct HostSide {
    /// The packed numbers, and the tokens that come back.
    upload: PinnedBuffer,
    download: PinnedBuffer,
    /// Reached when the device no longer needs either of them.
    done: Event,
    /// Rows whose tokens come back.
    rows: usize,
}

impl HostSide {
    fn new(context: &'static cuda::Context, largest: Form) -> Result<HostSide> {
        Ok(HostSide {
            upload: PinnedBuffer::alloc(context, 4 * largest.words())?,
            download: PinnedBuffer::alloc(context, 4 * largest.rows)?,
            done: Event::new(context, false)?,
            rows: 0,
        })
    }
}

/// The state of a form of steps.
enum State {
    New,
    /// It ran once: kernels are compiled, and there is room for everything.
    Warm,
    Captured(GraphExec),
}

impl Replay {
    /// For steps of at most this form.
    pub fn new(stream: &cuda::Stream, largest: Form, always_share: bool) -> Result<Replay> {
        let context = stream.context();
        Ok(Replay {
            raw: stream.clone(),
            stream: Stream::Cuda(stream.clone()),
            inputs: Arc::new(DeviceBuffer::alloc(stream, 4 * largest.words())?),
            host: [HostSide::new(context, largest)?, HostSide::new(context, largest)?],
            steps: HashMap::new(),
            always_share,
            graphs: Graphs::default(),
        })
    }

    /// Gives a step to the device, whose first `rows` rows are wanted. If it is `fed`, they take the tokens of the step before.
    pub fn launch(
        &mut self,
        ticket: Ticket,
        form: Form,
        words: &[i32],
        rows: usize,
        fed: bool,
        step: &mut Step<'_>,
    ) -> Result<()> {
        let (bytes, tokens) = (4 * words.len(), step.tokens.as_view().address() as u64);
        let host = &mut self.host[ticket.0];
        // A step that failed, or was never waited for, may still use the host's memory.
        host.done.synchronize()?;
        host.rows = rows;
        for (place, word) in host.upload.as_mut_slice()[..bytes].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        // SAFETY: the buffer was made for the largest form, all work with it is on this stream, and the host's memory is not
        // written again before `done`.
        unsafe { cuda::upload_async(&self.raw, self.inputs.ptr(), &host.upload, 0..bytes) }?;
        let ids = self.inputs.ptr() + 4 * form.ids() as u64;
        let mut given = Ok(());
        if fed {
            // SAFETY: both have a number for each row of the form, do not overlap, and are used on this stream only.
            given = unsafe { cuda::copy_d2d(&self.raw, ids, tokens, 4 * rows) }.map_err(Error::from);
        }
        given = given.and_then(|()| self.give(form, step));
        let host = &mut self.host[ticket.0];
        if given.is_ok() {
            // SAFETY: the tokens of the form's rows, at least `rows`, lie there and are written on this stream; the host's
            // memory is not read before `done`.
            let copied = unsafe { cuda::download_async(&self.raw, tokens, &host.download, 0..4 * rows) };
            given = copied.map_err(Error::from);
        }
        host.done.record(&self.raw)?;
        given
    }

    /// Waits for the tokens of a step.
    pub fn collect(&mut self, ticket: Ticket) -> Result<Vec<i32>> {
        let host = &self.host[ticket.0];
        host.done.synchronize()?;
        let tokens = host.download.as_slice()[..4 * host.rows].chunks_exact(4);
        Ok(tokens.map(|word| i32::from_ne_bytes(word.try_into().expect("four bytes"))).collect())
    }

    /// Gives the step to the stream, as a graph if there is one or one can be made now.
    fn give(&mut self, form: Form, step: &mut Step<'_>) -> Result<()> {
        if !self.steps.contains_key(&form) {
            let inputs = inputs(form, self.always_share, &self.inputs, &self.stream)?;
            self.steps.insert(form, (inputs, State::New));
        }
        let (inputs, state) = self.steps.get_mut(&form).expect("it was just added");
        if matches!(state, State::Warm) && self.graphs.failure.is_none() {
            match capture(&self.raw, || step.run(inputs, &self.stream)) {
                Ok(graph) => {
                    self.graphs.captured += 1;
                    *state = State::Captured(graph);
                }
                Err(error) => self.graphs.failure = Some(error.to_string()),
            }
        }
        match state {
            State::Captured(graph) => {
                self.graphs.launches += 1;
                Ok(graph.launch(&self.raw)?)
            }
            State::New | State::Warm => {
                step.run(inputs, &self.stream)?;
                *state = State::Warm;
                Ok(())
            }
        }
    }
}

/// The tensors of a form, which lie in `memory`.
fn inputs(form: Form, always_share: bool, memory: &Arc<DeviceBuffer>, stream: &Stream) -> Result<Inputs> {
    Inputs::new(form, always_share, stream, |start, shape, dtype| {
        let layout = Layout::contiguous(Shape::new(shape)?);
        let end = 4 * start + layout.span() * dtype.size();
        assert!(end <= memory.len(), "the memory is for the largest form");
        let part = Foreign {
            address: memory.ptr() as usize + 4 * start,
            dtype,
            layout,
            device: Device::Cuda(memory.context().ordinal()),
            stream: Some(stream.clone()),
            read_only: false,
        };
        let keeps = memory.clone();
        // SAFETY: the part lies in the buffer, which lives until the deleter drops its handle, and is written on `stream` only.
        Ok(unsafe { Tensor::from_foreign(part, move || drop(keeps)) }?)
    })
}

/// Records work as a graph.
fn capture(stream: &cuda::Stream, mut work: impl FnMut() -> Result<()>) -> Result<GraphExec> {
    let mut own = None;
    let graph = Graph::capture(stream, |_| {
        work().map_err(|error| match error {
            Error::Library(error) => error,
            other => {
                let told = warpsmith::Error::argument(
                    "decode",
                    "step",
                    "work that can be captured",
                    other.to_string(),
                );
                own = Some(other);
                told
            }
        })
    });
    match own {
        Some(error) => Err(error),
        None => Ok(graph?.instantiate()?),
    }
}
