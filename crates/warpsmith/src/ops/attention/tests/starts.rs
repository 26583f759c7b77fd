//! Where packed requests begin: wrong starts, and arbitrary values next to requests.

use super::bits::Setting;
use super::*;
use std::ops::Range;

fn starts(values: &[i32], device: Device) -> Tensor {
    Tensor::from_slice(values, &[values.len()], device).unwrap()
}

#[test]
fn starts_must_ascend_inside_the_tensors() {
    let Tensors { q, k, v } = tensors(DType::F32, 10, 10);
    let starts = |values: &[i32]| starts(values, Device::Cpu);
    let good = starts(&[0, 4, 10]);
    for bad in [&[0, 11, 10][..], &[0, 5, 4], &[-1, 5, 10], &[0, 5, i32::MAX]] {
        let bad = starts(bad);
        for (q_starts, kv_starts, blamed) in [(&bad, &good, "q_starts"), (&good, &bad, "kv_starts")] {
            let mut out = Tensor::zeros(q.shape(), DType::F32, Device::Cpu).unwrap();
            let call = Attention::new(&q, &k, &v).starts(q_starts, kv_starts);
            let error = call.run_into(&mut out, &Device::Cpu.default_stream().unwrap()).unwrap_err();
            assert!(matches!(error, Error::Argument { ref arg, .. } if *arg == blamed), "{error}");
            assert!(out.to_f64().unwrap().iter().all(|x| *x == 0.0), "nothing is written");
        }
    }
    // Rows of no request are left alone.
    let mut out = Tensor::from_f64(&vec![7.0; 10 * HEADS * DIM], q.shape(), DType::F32, Device::Cpu).unwrap();
    let some = starts(&[2, 4, 8]);
    let call = Attention::new(&q, &k, &v).starts(&some, &some);
    call.run_into(&mut out, &Device::Cpu.default_stream().unwrap()).unwrap();
    let rows: Vec<bool> = out.to_f64().unwrap().chunks(HEADS * DIM).map(|row| row[0] == 7.0).collect();
    assert_eq!(rows, [true, true, false, false, false, false, false, false, true, true]);
}

/// Tokens of the requests that wrong starts are given to, and where they begin.
const TOKENS: usize = 500;
const RIGHT: [i32; 5] = [0, 70, 200, 330, TOKENS as i32];
/// Tokens before and after the results that nothing may write.
const GUARD: usize = 40;

/// The results of so many tokens, the same number everywhere.
fn filled(setting: &Setting, tokens: usize, out: f64, lse: f64) -> (Tensor, Tensor) {
    let full = |value: f64, shape: &[usize], dtype: DType| {
        Tensor::from_f64(&vec![value; shape.iter().product()], shape, dtype, setting.device).unwrap()
    };
    (full(out, &[1, tokens, HEADS, setting.dim], setting.dtype), full(lse, &[1, HEADS, tokens], DType::F32))
}

/// Those that no kernel has written.
fn untouched(setting: &Setting, tokens: usize) -> (Tensor, Tensor) {
    filled(setting, tokens, 7.0, 7.0)
}

/// All rows of a call with these starts, after asserting that nothing was written around them.
fn run_guarded(setting: &Setting, tensors: &Tensors, q_starts: &[i32], kv_starts: &[i32]) -> Vec<Vec<u8>> {
    let device = setting.device;
    let Tensors { q, k, v } = tensors;
    let (q_starts, kv_starts) = (starts(q_starts, device), starts(kv_starts, device));
    let (mut out, mut lse) = untouched(setting, TOKENS + 2 * GUARD);
    let call = Attention::new(q, k, v).starts(&q_starts, &kv_starts).causal().kernel(setting.kernel);
    let out_inside = out.view_mut().narrow(1, GUARD, TOKENS).unwrap();
    let lse_inside = lse.view_mut().narrow(2, GUARD, TOKENS).unwrap();
    call.run_into_with_lse(out_inside, lse_inside, &device.default_stream().unwrap()).unwrap();
    device.synchronize().unwrap();
    let (all, before) = (rows((out, lse)), rows(untouched(setting, 1)));
    let mut around = all[..GUARD].iter().chain(&all[GUARD + TOKENS..]);
    assert!(around.all(|row| *row == before[0]), "{setting}: writes around the results");
    all[GUARD..][..TOKENS].to_vec()
}

/// Where a device takes a request to be: each start is moved into the tensor, each end to its start or after it.
fn moved(starts: &[i32], request: usize) -> Range<usize> {
    let len = TOKENS as i32;
    let first = starts[request].clamp(0, len);
    first as usize..starts[request + 1].clamp(first, len) as usize
}

#[test]
fn wrong_starts_are_moved_into_the_tensors_on_a_device() {
    let on_devices = |setting: &Setting| setting.device != Device::Cpu;
    if !Setting::packed().iter().any(on_devices) {
        return eprintln!("skipped: no GPU");
    }
    for setting in Setting::packed().iter().filter(|setting| on_devices(setting)) {
        let tensors = setting.tensors([1, TOKENS, TOKENS]);
        let Tensors { q, k, v } = &tensors;
        let want = run_guarded(setting, &tensors, &RIGHT, &RIGHT);
        // Ends of the tensors that are too far away.
        for ends in [[-1, TOKENS as i32 + 1], [i32::MIN, i32::MAX]] {
            let far = [ends[0], RIGHT[1], RIGHT[2], RIGHT[3], ends[1]];
            for (q_starts, kv_starts) in [(far, RIGHT), (RIGHT, far), (far, far)] {
                let rows = run_guarded(setting, &tensors, &q_starts, &kv_starts);
                assert!(rows == want, "{setting}: {q_starts:?} and {kv_starts:?}");
            }
        }
        // Requests without queries.
        let before = rows(untouched(setting, TOKENS));
        let empty = [[500, 400, 300, 200, 100], [-5, -4, -3, -2, -1], [i32::MAX; 5], [i32::MIN; 5]];
        for q_starts in empty {
            let rows = run_guarded(setting, &tensors, &q_starts, &RIGHT);
            assert!(rows == before, "{setting}: writes rows of no request, {q_starts:?}");
        }
        // One whose queries become those of its neighbours as well: what is not shared keeps its bits.
        let rows_of_either = run_guarded(setting, &tensors, &[0, 70, 40, 330, 500], &RIGHT);
        for own in [0..40, 330..500] {
            assert!(rows_of_either[own.clone()] == want[own.clone()], "{setting}: rows {own:?}");
        }
        // Keys that descend or leave the tensor are those that the text of the op says.
        let nothing = &rows(filled(setting, 1, 0.0, f64::NEG_INFINITY))[0];
        let others = [[0, 70, 40, 330, 500], [0, 70, i32::MIN, 330, 500], [0, i32::MAX, 200, 330, 500]];
        for kv_starts in others.into_iter().chain(empty) {
            let all = run_guarded(setting, &tensors, &RIGHT, &kv_starts);
            for request in 0..RIGHT.len() - 1 {
                let (queries, keys) = (moved(&RIGHT, request), moved(&kv_starts, request));
                let same = if keys.is_empty() {
                    all[queries].iter().all(|row| row == nothing)
                } else {
                    let own = [cut(q, queries.clone()), cut(k, keys.clone()), cut(v, keys)];
                    all[queries] == setting.alone(own)
                };
                assert!(same, "{setting}: request {request}, keys {kv_starts:?}");
            }
        }
    }
}

#[test]
fn what_neighbours_hold_does_not_reach_a_request() {
    // Tokens of every second request, and those before the first and after the last, hold what is no number.
    const STARTS: [i32; 10] = [20, 85, 86, 86, 150, 213, 342, 469, 470, 600];
    const LEN: usize = 640;
    let requests = || STARTS.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
    let clean_requests = || requests().step_by(2);
    for setting in Setting::packed() {
        let starts = starts(&STARTS, setting.device);
        let clean = setting.tensors([1, LEN, LEN]);
        let poisoned = |tensor: &Tensor| {
            let mut values = tensor.to_f64().unwrap();
            let width = values.len() / LEN;
            for (i, value) in values.iter_mut().enumerate() {
                let token = i / width;
                if clean_requests().any(|tokens| tokens.contains(&token)) {
                    continue;
                }
                // And what makes scores larger than sums can hold.
                *value = match token % 2 {
                    0 => [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][i % 3],
                    _ => *value * 1e4,
                };
            }
            Tensor::from_f64(&values, tensor.shape(), setting.dtype, setting.device).unwrap()
        };
        let run = |Tensors { q, k, v }: &Tensors| {
            let call = Attention::new(q, k, v).starts(&starts, &starts).causal().kernel(setting.kernel);
            rows(call.run_with_lse().unwrap())
        };
        let all = run(&Tensors { q: poisoned(&clean.q), k: poisoned(&clean.k), v: poisoned(&clean.v) });
        let want = run(&clean);
        for tokens in clean_requests() {
            assert!(all[tokens.clone()] == want[tokens.clone()], "{setting}: tokens {tokens:?}");
        }
    }
}
