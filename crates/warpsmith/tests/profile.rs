//! What a profile records, and that nothing is recorded without.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use warpsmith::cpu::{parallel_for, with_threads};
use warpsmith::ops::{RmsNorm, Softmax};
use warpsmith::profile::{Call, Kind, LoopPart, Session, SpanRecord, emit, is_on, span};
use warpsmith::{DType, Device, Tensor};

/// There is one session at a time, and tests run at the same time.
static ONE: Mutex<()> = Mutex::new(());

fn one() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn calls_loops_spans_and_memory_are_recorded_only_in_a_session() {
    let _one = one();
    let x = Tensor::randn(&[512, 512], DType::F32, Device::Cpu, 0).unwrap();
    let call = || with_threads(2, || RmsNorm::new(&x).run().unwrap());
    call();
    assert!(!is_on());
    let mut evaluated = false;
    drop(span(Kind::User, || {
        evaluated = true;
        String::new()
    }));
    assert!(!evaluated, "a name was made although nobody listens");
    let session = Session::start().unwrap();
    let refused = Session::start().err().unwrap().to_string();
    assert!(refused.contains("profile") && refused.contains("not ended"), "{refused}");
    let outer = span(Kind::Step, || "step".into());
    for _ in 0..3 {
        let _layer = span(Kind::Layer, || "layer".into());
        call();
    }
    drop(outer);
    emit(Kind::Request, "queue".into(), 7, 5, 9);
    let records = session.stop();
    assert!(!is_on());
    call();

    let calls: Vec<&Call> = records.calls.iter().collect();
    assert_eq!(calls.len(), 3, "{:?}", records.calls);
    let (first, form) = (calls[0], &calls[0].form);
    assert_eq!((form.op, form.device.as_str()), ("rms_norm", "cpu"));
    assert!(form.kernel.starts_with("rms_norm_"), "{form:?}");
    assert_eq!((form.bytes, form.written), (2.0 * 512.0 * 512.0 * 4.0, 512.0 * 512.0 * 4.0));
    assert!(Arc::ptr_eq(form, &calls[1].form), "the same plan twice");
    assert!(first.start >= records.start && first.end > first.start && records.end >= first.end);
    let steps: Vec<&SpanRecord> = records.spans.iter().filter(|span| span.name == "step").collect();
    assert_eq!((steps.len(), steps[0].kind, steps[0].thread), (1, Kind::Step, first.thread));
    assert!(calls.iter().all(|call| call.start >= steps[0].start && call.end <= steps[0].end));
    assert_eq!(records.spans.iter().filter(|span| span.name == "layer").count(), 3);
    let request = records.spans.iter().find(|span| span.name == "queue").unwrap();
    assert_eq!((request.track, request.start, request.end), (Some(7), 5, 9));
    // What was allocated for the results was freed again.
    let of = |sign: i64| records.memory.iter().filter(|e| e.bytes == sign * (512 * 512 * 4)).count();
    assert!(of(1) >= 3 && of(-1) >= 3, "{:?}", records.memory);
}

#[test]
fn the_time_of_each_thread_in_a_loop_is_recorded() {
    let _one = one();
    let session = Session::start().unwrap();
    let sleep = |_| std::thread::sleep(std::time::Duration::from_millis(4));
    with_threads(3, || parallel_for(3, 1, sleep));
    let records = session.stop();
    let [of_mine] = &records.loops[..] else { panic!("{:?}", records.loops) };
    assert_eq!(of_mine.threads, 3);
    let parts: Vec<&LoopPart> = records.parts.iter().filter(|part| part.id == of_mine.id).collect();
    assert!((1..=3).contains(&parts.len()), "{parts:?}");
    assert!(parts.iter().all(|part| part.start >= of_mine.start && part.end <= of_mine.end));
    let worked: u64 = parts.iter().map(|part| part.end - part.start).sum();
    assert!(worked >= 12_000_000, "three parts of 4 ms took {worked} ns");
    assert!(!records.threads[of_mine.thread as usize].is_empty());
}

#[test]
fn a_session_that_is_dropped_ends_and_the_next_begins_empty() {
    let _one = one();
    let x = Tensor::randn(&[3, 5], DType::F32, Device::Cpu, 0).unwrap();
    let session = Session::start().unwrap();
    Softmax::new(&x).run().unwrap();
    drop(session);
    assert!(!is_on());
    let records = Session::start().unwrap().stop();
    assert!(records.calls.is_empty() && records.memory.is_empty(), "{records:?}");
}
