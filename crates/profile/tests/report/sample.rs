//! Profiles that look like those of real runs, for tests.

use crate::{
    About, Bound, Call, Ceilings, Clock, Form, Loop, Memory, Part, Phase, Profile, Span, SpanKind, Step, Work,
};

/// A small model on two threads of a CPU: a prompt, then decode steps. One name wants to break out of its page.
pub fn sample() -> Profile {
    Profile {
        about: About {
            title: "llama, random </script><script>window.hacked = 1</script>".into(),
            command: "warpsmith profile --random llama-3.2-1b --report \"a b.html\"".into(),
            program: "warpsmith 0.1.0".into(),
            machine: vec![("processor".into(), "A Processor".into()), ("threads".into(), "2".into())],
            ceilings: Ceilings {
                copy_gbps: 20.0,
                read_gbps: Some(25.0),
                products: vec![("f32".into(), 0.1), ("bf16".into(), 0.2)],
            },
        },
        phases: vec![phase("prompt", 1_000, 1), phase("decode", 3_000_000, 4)],
    }
}

fn forms() -> Vec<Form> {
    let form = |op: &str, args: &str, bytes: f64, flops: f64, limit: f64| Form {
        op: op.into(),
        kernel: format!("{op}_avx2"),
        device: "cpu".into(),
        args: args.into(),
        bytes,
        flops,
        limit_ns: Some(limit),
        ..Form::default()
    };
    vec![
        Form { in_cache: true, ..form("rms_norm", "x=f32[4,64] out=f32[4,64]", 2048.0, 1024.0, 200.0) },
        Form {
            products: Some("f32".into()),
            bound: Bound::Products,
            ..form("linear", "x=f32[4,64] w=f32[64,64]", 18432.0, 32768.0, 60_000.0)
        },
        form("copy", "x=f32[4,64]", 2048.0, 0.0, 100.0),
    ]
}

fn phase(name: &str, start: u64, steps: u64) -> Phase {
    let mut phase = Phase {
        name: name.into(),
        start,
        threads: vec!["main".into(), "warpsmith-2-1".into()],
        forms: forms(),
        ..Phase::default()
    };
    let span = |kind, name: String, start, end| Span { kind, name, track: None, thread: 0, start, end };
    let mut at = start;
    for step in 0..steps {
        let begin = at;
        at += 2_000;
        for layer in 0..3 {
            let first = at;
            for (form, time) in [(0, 5_000), (1, 100_000), (2, 1_000)] {
                let id = phase.calls.len() as u64 + 1;
                phase.calls.push(Call { id, form, thread: 0, start: at, end: at + time });
                if form == 1 {
                    phase.loops.push(Loop {
                        id,
                        threads: 2,
                        thread: 0,
                        start: at + 100,
                        end: at + time - 100,
                    });
                    phase.parts.push(Part { id, thread: 0, start: at + 200, end: at + time - 1_000 });
                    phase.parts.push(Part { id, thread: 1, start: at + 5_000, end: at + time - 300 });
                }
                at += time + 500;
            }
            phase.spans.push(span(SpanKind::Layer, format!("layer {layer}"), first, at));
        }
        phase.memory.push(Memory { address: step, bytes: 4096, at, ..Memory::default() });
        at += 2_000;
        phase.spans.push(span(SpanKind::Step, format!("{name} {step}"), begin, at));
    }
    let request =
        |name: &str, start, end| Span { track: Some(0), ..span(SpanKind::Request, name.into(), start, end) };
    phase.spans.push(request("request 0", start, at));
    phase.spans.push(request("prompt", start + 10, at));
    phase.end = at + 300;
    let traced_ns = (phase.end - start) as f64 / steps as f64;
    phase.step = Some(Step { count: steps as usize, traced_ns, untraced_ns: 0.98 * traced_ns, runs: 5 });
    phase
}

/// A GPU whose kernels overlap on one stream, one of them of a graph that no call is known for.
pub fn overlapping() -> Profile {
    let work = |name: &str, call, start, end| Work {
        name: name.into(),
        call,
        form: call.map(|_| 0),
        stream: 7,
        start,
        end,
        ..Work::default()
    };
    let phase = Phase {
        name: "decode".into(),
        end: 20_000,
        threads: vec!["main".into()],
        forms: vec![Form {
            op: "linear".into(),
            kernel: "linear_sm90".into(),
            device: "cuda:0".into(),
            bytes: 1e6,
            limit_ns: Some(1_000.0),
            ..Form::default()
        }],
        calls: vec![
            Call { id: 4, form: 0, thread: 0, start: 100, end: 900 },
            Call { id: 5, form: 0, thread: 0, start: 1_000, end: 1_900 },
        ],
        work: vec![
            work("linear_kernel", Some(4), 2_000, 8_000),
            work("linear_kernel", Some(5), 5_000, 11_000),
            work("sample_kernel", None, 11_000, 12_000),
        ],
        clock: Clock::Activity,
        ..Phase::default()
    };
    Profile { about: About { title: "qwen3".into(), ..About::default() }, phases: vec![phase] }
}
