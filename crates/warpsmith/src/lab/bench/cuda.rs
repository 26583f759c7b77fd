//! Timing on a GPU: replays of a captured graph between events.

use super::{Samples, Settings};
use crate::cuda::{Context, Event, Graph, Stream};
use crate::device;
use crate::error::Result;

/// A replay should last at least this long, so that the gap between two graphs does not show in it.
const REPLAY_MS: f64 = 1.0;
/// Most calls in one graph. Each keeps its workspace while the graph lives.
const MAX_CALLS: usize = 200;
/// Most replays that are timed.
const MAX_SAMPLES: usize = 400;

/// Times `call`, which is given the number of the set of tensors to use, rotating over all `sets`.
pub fn sample(
    context: &'static Context,
    sets: usize,
    settings: &Settings,
    mut call: impl FnMut(usize, &device::Stream) -> Result<()>,
) -> Result<Samples> {
    let stream = Stream::new(context)?;
    let ordered = device::Stream::Cuda(stream.clone());
    // Compiles and loads the kernels before the capture.
    for set in 0..sets {
        call(set, &ordered)?;
    }
    stream.synchronize()?;
    let mut record = |rounds: usize| {
        let graph =
            Graph::capture(&stream, |_| (0..rounds * sets).try_for_each(|i| call(i % sets, &ordered)))?;
        let graph = graph.instantiate()?;
        graph.upload(&stream)?;
        Ok::<_, crate::Error>(graph)
    };
    let replay = |graph: &crate::cuda::GraphExec, times: usize| -> Result<Vec<f64>> {
        let marks = (0..=times).map(|_| Event::new(context, true)).collect::<Result<Vec<_>>>()?;
        marks[0].record(&stream)?;
        for mark in &marks[1..] {
            graph.launch(&stream)?;
            mark.record(&stream)?;
        }
        stream.synchronize()?;
        marks.windows(2).map(|pair| Ok(f64::from(Event::elapsed_ms(&pair[0], &pair[1])?))).collect()
    };
    let one = record(1)?;
    // The first replay warms up, the second shows how long a round takes.
    let round_ms = replay(&one, 2)?[1].max(1e-4);
    let rounds = ((REPLAY_MS / round_ms).ceil() as usize).clamp(1, (MAX_CALLS / sets).max(1));
    let graph = if rounds == 1 { one } else { record(rounds)? };
    let replay_ms = round_ms * rounds as f64;
    let burst = ((settings.seconds * 1e3 / replay_ms) as usize).clamp(1, MAX_SAMPLES);
    let calls = rounds * sets;
    let mut ms = Vec::new();
    while ms.len() < settings.samples {
        std::thread::sleep(std::time::Duration::from_secs_f64(settings.rest));
        // Warm up with a fifth as many replays, because clocks rise under load.
        replay(&graph, burst.div_ceil(5))?;
        ms.extend(replay(&graph, burst)?.into_iter().map(|ms| ms / calls as f64));
    }
    let runs = ms.len() * calls;
    Ok(Samples::new(ms, runs))
}
