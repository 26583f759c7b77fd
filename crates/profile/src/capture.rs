//! Profiles from the library's records.

use crate::model::{
    About, Bound, Call, Ceilings, Clock, Form, Loop, Memory, Part, Phase, Profile, Span, SpanKind, Work,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use warpsmith::lab::bench::{self, Settings};
use warpsmith::op::{Cost, Products};
use warpsmith::profile::{CallForm, DeviceWork, Kind, Records};
use warpsmith::{Device, Result, cpu};

/// The measured limits of the devices that a profile is about.
pub struct Limits {
    device: Device,
    ceilings: bench::Ceilings,
    cache_bytes: usize,
}

impl Limits {
    /// Measures a device: some tenths of a second on the CPU.
    ///
    /// # Errors
    /// If the device cannot be used, or has no memory to spare.
    pub fn measure(device: Device) -> Result<Limits> {
        let info = device.info()?;
        let ceilings = bench::Ceilings::measure(device, &Settings::quick(device))?;
        // As benchmarks judge it: so much fits into the caches easily.
        let cache_bytes = match device {
            Device::Cpu => info.cache_bytes * info.units / 2,
            Device::Cuda(_) => info.cache_bytes / 8,
        };
        Ok(Limits { device, ceilings, cache_bytes })
    }

    /// The rates, for reports.
    pub fn ceilings(&self) -> Ceilings {
        let rate = |products: Products| Some((products.name().to_owned(), self.ceilings.tflops(products)?));
        Ceilings {
            copy_gbps: self.ceilings.copy_gbps,
            read_gbps: self.ceilings.read_gbps,
            products: Products::ALL.into_iter().filter_map(rate).collect(),
        }
    }

    /// What is known of calls of a form, whose tensors were `sets` different ones: those of few bytes in all are in the
    /// caches when they are used again.
    fn form(&self, form: &CallForm, sets: usize, caches: &mut BTreeMap<usize, bench::Ceilings>) -> Form {
        let is_here = form.device == self.device.to_string();
        let products =
            form.products.and_then(|name| Products::ALL.into_iter().find(|one| one.name() == name));
        let cost = Cost { bytes: form.bytes, flops: form.flops, products };
        let in_cache = form.tensor_bytes * (sets as f64) < self.cache_bytes as f64;
        let mut ceilings = self.ceilings;
        if is_here && in_cache && self.device == Device::Cpu {
            // Sizes alike share a measurement.
            let size = (form.tensor_bytes as usize).max(4096).next_power_of_two();
            ceilings =
                *caches.entry(size).or_insert_with(|| self.ceilings.in_cache(size).unwrap_or(self.ceilings));
        }
        // Operations that are no products were not measured: where they would take longest, no limit is known.
        let computing_ms = |rate: f64| form.flops / (rate * 1e9);
        let is_unknown = |moving_ms: f64| {
            let rate = self.ceilings.tflops(Products::F32);
            products.is_none() && rate.is_some_and(|rate| computing_ms(rate) > moving_ms)
        };
        let limit = (is_here && form.bytes > 0.0).then(|| ceilings.limit_ms(&cost, form.written));
        let limit = limit.filter(|(ms, _)| !is_unknown(*ms));
        Form {
            op: form.op.into(),
            kernel: form.kernel.into(),
            device: form.device.clone(),
            args: form.args.clone(),
            bytes: form.bytes,
            flops: form.flops,
            products: form.products.map(str::to_owned),
            limit_ns: limit.map(|(ms, _)| ms * 1e6),
            bound: match limit {
                Some((_, bench::Bound::Products)) => Bound::Products,
                _ => Bound::Memory,
            },
            in_cache,
        }
    }
}

/// What ran, and the machine that it ran on.
pub fn about(title: String, command: String, limits: &Limits) -> About {
    let mut machine = Vec::new();
    if let Device::Cuda(_) = limits.device
        && let Ok(info) = limits.device.info()
    {
        machine.push((limits.device.to_string(), info.name));
    }
    machine.push(("processor".into(), cpu::cpu_name().into()));
    machine.push(("threads".into(), cpu::num_threads().to_string()));
    machine.push(("instructions".into(), cpu::Tier::best().to_string()));
    About {
        title,
        command,
        program: format!("warpsmith {}", env!("CARGO_PKG_VERSION")),
        machine,
        ceilings: limits.ceilings(),
    }
}

/// A phase from the records of a session. `origin` is the time that all times are counted from.
pub fn phase(name: &str, records: Records, origin: u64, limits: &Limits) -> Phase {
    let since = |time: u64| time.saturating_sub(origin);
    let mut forms: Vec<Form> = Vec::new();
    let mut places: HashMap<*const CallForm, usize> = HashMap::new();
    let mut sets: HashMap<*const CallForm, HashSet<u64>> = HashMap::new();
    let ran_in_graphs = || records.device.iter().filter_map(|work| work.recorded.as_ref());
    let uses = records.calls.iter().map(|call| (&call.form, call.data));
    for (form, data) in uses.chain(ran_in_graphs().map(|recorded| (&recorded.form, recorded.data))) {
        sets.entry(Arc::as_ptr(form)).or_default().insert(data);
    }
    let mut caches = BTreeMap::new();
    let mut ran = Vec::new();
    let mut forms_of_calls: HashMap<u64, usize> = HashMap::new();
    let mut captured = 0usize;
    let mut place = |form: &Arc<CallForm>| {
        *places.entry(Arc::as_ptr(form)).or_insert_with(|| {
            forms.push(limits.form(form, sets[&Arc::as_ptr(form)].len(), &mut caches));
            forms.len() - 1
        })
    };
    for call in &records.calls {
        let form = place(&call.form);
        forms_of_calls.insert(call.id, form);
        captured += usize::from(call.captured);
        ran.push(Call {
            id: call.id,
            form,
            thread: call.thread,
            start: since(call.start),
            end: since(call.end),
        });
    }
    let clock = match records.clock {
        warpsmith::profile::Clock::None => Clock::Host,
        warpsmith::profile::Clock::Events => Clock::Events,
        warpsmith::profile::Clock::Activity => Clock::Activity,
    };
    let mut notes: Vec<String> = records.clock_note.into_iter().collect();
    if records.dropped > 0 {
        notes.push(format!("{} records found no room and are missing", records.dropped));
    }
    if captured > 0 {
        notes.push(format!("{captured} calls were recorded into graphs and did not run"));
    }
    let mut form_of = |work: &DeviceWork| match &work.recorded {
        Some(recorded) => Some(place(&recorded.form)),
        None => work.call.and_then(|call| forms_of_calls.get(&call).copied()),
    };
    let work = records.device.into_iter().map(|work| Work {
        form: form_of(&work),
        name: work.name,
        call: work.call,
        device: work.device,
        stream: work.stream,
        start: since(work.start),
        end: since(work.end).max(since(work.start)),
        registers: work.registers,
        shared_bytes: work.shared_bytes,
        blocks: work.blocks,
        block_threads: work.threads,
        correlation: work.correlation,
        graph_node: work.graph_node,
    });
    let work: Vec<Work> = work.collect();
    Phase {
        name: name.into(),
        start: since(records.start),
        end: since(records.end),
        step: None,
        threads: records.threads,
        cpu_threads: cpu::num_threads(),
        forms,
        calls: ran,
        work,
        clock,
        loops: records
            .loops
            .iter()
            .map(|one| Loop {
                id: one.id,
                threads: one.threads,
                thread: one.thread,
                start: since(one.start),
                end: since(one.end),
            })
            .collect(),
        parts: records
            .parts
            .iter()
            .map(|part| Part {
                id: part.id,
                thread: part.thread,
                start: since(part.start),
                end: since(part.end),
            })
            .collect(),
        spans: records
            .spans
            .into_iter()
            .map(|span| Span {
                kind: match span.kind {
                    Kind::Request => SpanKind::Request,
                    Kind::Step => SpanKind::Step,
                    Kind::Layer => SpanKind::Layer,
                    Kind::Host => SpanKind::Host,
                    Kind::User => SpanKind::User,
                },
                name: span.name,
                track: span.track,
                thread: span.thread,
                start: since(span.start),
                end: since(span.end),
            })
            .collect(),
        memory: records
            .memory
            .iter()
            .map(|event| Memory {
                device: event.device,
                address: event.address,
                bytes: event.bytes,
                thread: event.thread,
                at: since(event.at),
            })
            .collect(),
        notes,
    }
}

/// A profile of one phase.
pub fn single(about: About, name: &str, records: Records, limits: &Limits) -> Profile {
    let origin = records.start;
    Profile { about, phases: vec![phase(name, records, origin, limits)] }
}
