//! The profile of a model: its prompts, and its decode steps.

use super::{Args, Measured, median, record};
use crate::source::Source;
use std::time::Instant;
use warpsmith::Device;
use warpsmith::profile::Records;
use warpsmith::tensor::Random;
use warpsmith_engine::{
    Engine, EngineOptions, Error, EventKind, FinishReason, Request, Result, SamplingParams,
};
use warpsmith_profile::text::amount;

/// What a run did: seconds and steps of both phases.
#[derive(Default)]
struct Run {
    seconds: [f64; 2],
    steps: [usize; 2],
}

pub fn measure(args: &Args, device: Device) -> Result<(String, Vec<Measured>)> {
    let source = Source::new(args.random.as_deref(), || args.model.path())?;
    let tokens = (args.prompt * args.batch).max(512);
    let options = EngineOptions {
        prefix_cache: false,
        max_batch_tokens: tokens,
        max_chunk: tokens,
        max_running: args.batch,
        ..EngineOptions::default()
    };
    let mut engine = source.open(&args.model, options.clone())?;
    let parameters = amount(source.parameters() as f64, "");
    let title = format!("{}, {parameters} parameters, on {device}", name(args, &source, &engine));
    // Kernels are compiled and graphs captured where there are any.
    for _ in 0..if device == Device::Cpu { 1 } else { 2 } {
        untraced(&mut engine, args)?;
    }
    // In turn, so that both see the machine in the same state.
    let (mut runs, mut traces) = (Vec::new(), Vec::new());
    for _ in 0..args.repetitions {
        runs.push(untraced(&mut engine, args)?);
        if device == Device::Cpu {
            traces.push(traced(&mut engine, args, device)?);
        }
    }
    if device != Device::Cpu {
        // A GPU keeps records of a graph only if it did when the graph was made, and to keep them takes time. If it cannot,
        // the profile says why.
        drop(engine);
        let _ = warpsmith::profile::prepare();
        engine = source.open(&args.model, options)?;
        for _ in 0..2 {
            untraced(&mut engine, args)?;
        }
        traces.push(traced(&mut engine, args, device)?);
    }
    let of_phase = |phase: usize| {
        let steps = |run: &Run| run.seconds[phase] / run.steps[phase].max(1) as f64;
        runs.iter().map(steps).collect::<Vec<f64>>()
    };
    let [prompt_steps, decode_steps] = runs.last().map_or([0; 2], |run| run.steps);
    let (prompts, decodes) = traces.into_iter().unzip();
    let (prompt, decode) = (median(prompts), median(decodes));
    let many = if args.batch == 1 { String::new() } else { format!("{} times ", args.batch) };
    let measured = vec![
        Measured {
            name: format!("prompt of {many}{} tokens", args.prompt),
            steps: prompt_steps,
            untraced: of_phase(0),
            records: prompt,
        },
        Measured {
            name: format!("decode of {}", args.batch),
            steps: decode_steps,
            untraced: of_phase(1),
            records: decode,
        },
    ];
    Ok((title, measured))
}

/// Requests with random prompts. Their first token comes with the prompt; the others are a step each.
fn add(engine: &mut Engine, args: &Args) -> Result<()> {
    let mut random = Random::new(0);
    let vocab = engine.vocab_size() as u64;
    for seed in 0..args.batch {
        let prompt = (0..args.prompt).map(|_| random.below(vocab) as i32).collect();
        let params = SamplingParams {
            max_tokens: Some(args.generate + 1),
            seed: Some(seed as u64),
            ignore_eos: true,
            ..SamplingParams::greedy()
        };
        engine.add_request(Request { prompt, params, ..Request::default() })?;
    }
    Ok(())
}

/// Steps until every request has a token.
fn prompts(engine: &mut Engine, args: &Args) -> Result<usize> {
    let (mut steps, mut answered) = (0, 0);
    while answered < args.batch && engine.has_work() {
        answered += step(engine)?;
        steps += 1;
    }
    Ok(steps)
}

/// Steps until all is done.
fn decode(engine: &mut Engine) -> Result<usize> {
    let mut steps = 0;
    while engine.has_work() {
        step(engine)?;
        steps += 1;
    }
    Ok(steps)
}

/// The model's file, or that its weights are random, and its family.
fn name(args: &Args, source: &Source, engine: &Engine) -> String {
    let family = source.name(engine);
    let path = args.model.path().ok().filter(|_| args.random.is_none());
    match path.as_deref().and_then(std::path::Path::file_name) {
        Some(file) => format!("{} ({family})", file.display()),
        None => family,
    }
}

/// The records of a prompt and of the steps after it.
fn traced(engine: &mut Engine, args: &Args, device: Device) -> Result<(Records, Records)> {
    add(engine, args)?;
    let (_, prompt) = record(device, || prompts(engine, args))?;
    let (_, decode) = record(device, || decode(engine))?;
    Ok((prompt, decode))
}

fn untraced(engine: &mut Engine, args: &Args) -> Result<Run> {
    let mut run = Run::default();
    add(engine, args)?;
    for phase in 0..2 {
        let start = Instant::now();
        run.steps[phase] = if phase == 0 { prompts(engine, args)? } else { decode(engine)? };
        run.seconds[phase] = start.elapsed().as_secs_f64();
    }
    Ok(run)
}

/// A step; the number of tokens that it brought. A failed request is an error, because its time would mean nothing.
fn step(engine: &mut Engine) -> Result<usize> {
    let mut tokens = 0;
    for event in engine.step()? {
        match event.kind {
            EventKind::Token { .. } => tokens += 1,
            EventKind::Finished { reason: FinishReason::Failed(why), .. } => return Err(Error::Broken(why)),
            EventKind::Finished { .. } => {}
        }
    }
    Ok(tokens)
}
