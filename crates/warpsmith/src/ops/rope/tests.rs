use super::*;
use crate::Tensor;
use crate::device::Device;
use crate::ops::FLOATS;
use crate::ops::devices;
use crate::tensor::{Layout, Shape};
use std::f64::consts::TAU;

fn positions(values: &[i64], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(values, shape, device).unwrap()
}

/// Every kernel of the device that can run here.
fn kernels(device: Device) -> Vec<&'static str> {
    let tiers = Tier::available();
    let here = |k: &crate::op::KernelInfo| match device {
        Device::Cpu => k.tier.is_some_and(|t| tiers.contains(&t)),
        Device::Cuda(_) => k.cuda.is_some(),
    };
    crate::op::AnyOp::kernels(&Forward).into_iter().filter(here).map(|k| k.name).collect()
}

#[test]
fn sine_and_cosine_are_good_to_two_units_at_any_position() {
    // Pairs of (1, 0) become (cos, sin).
    let dim = 64;
    let at: Vec<i64> = (0..300).chain((0..300).map(|i| 131_072 - 7 * i)).chain([-1, -77, 1 << 20]).collect();
    let ones: Vec<f64> = (0..at.len() * dim).map(|i| (i % dim < dim / 2) as u8 as f64).collect();
    for device in devices() {
        let x = Tensor::from_f64(&ones, &[at.len(), 1, dim], DType::F32, device).unwrap();
        let positions = positions(&at, &[at.len()], device);
        for kernel in kernels(device) {
            let out = Rope::new(&x, &positions).kernel(kernel).run().unwrap().to_f64().unwrap();
            for (token, &position) in at.iter().enumerate() {
                for i in 0..dim / 2 {
                    // The angle in f64 is off by as much as its last place, which shows where sine or cosine is small.
                    let angle = position as f64 * 10000f64.powf(-2.0 * i as f64 / dim as f64);
                    for (got, want) in
                        [(out[token * dim + i], angle.cos()), (out[token * dim + dim / 2 + i], angle.sin())]
                    {
                        let allowed =
                            2.0 * want.abs() * f32::EPSILON as f64 + 4.0 * angle.abs() * f64::EPSILON;
                        assert!((got - want).abs() <= allowed, "{kernel} {position} {i}: {got} {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn frequencies_drop_whole_turns() {
    assert_eq!(angles::frequency(0, 2, 1.0, TAU * 3.0), 0);
    assert_eq!(angles::frequency(0, 2, 1.0, TAU * 1.25), 1 << 62);
    assert_eq!(angles::frequency(0, 2, 1.0, -TAU * 0.25), 3 << 62);
}

/// `x` seen through other strides, and where the result goes, must not matter to a single bit.
#[test]
fn packed_permuted_and_batched_tensors_give_the_bits_of_dense_ones() {
    let (batch, tokens, heads, dim) = (2, 9, 4, 64);
    let shape = [batch, tokens, heads, dim];
    let at: Vec<i64> = (0..batch * tokens).map(|i| (i * i * 97) as i64).collect();
    for device in devices() {
        let positions = positions(&at, &[batch, tokens], device);
        let stream = device.default_stream().unwrap();
        for dtype in FLOATS {
            let dense = Tensor::randn(&shape, dtype, device, 5).unwrap();
            let values = dense.to_f64().unwrap();
            for kernel in kernels(device) {
                for interleaved in [false, true] {
                    let set = |call: Rope<'static>| match interleaved {
                        true => call.kernel(kernel).interleaved(),
                        false => call.kernel(kernel),
                    };
                    let bits = |t: &Tensor| t.view().to_bytes().unwrap();
                    // SAFETY: the views are used inside this iteration, while the tensors live.
                    let of = |t: &Tensor, layout: Layout, start: usize| unsafe {
                        let address = t.view().address() + start * dtype.size();
                        TensorView::<'static>::from_raw(address, dtype, layout, device)
                    };
                    let whole = |t: &Tensor| of(t, *t.layout(), 0);
                    // SAFETY: as above.
                    let at = unsafe {
                        let view = positions.view();
                        TensorView::<'static>::from_raw(view.address(), view.dtype(), *view.layout(), device)
                    };
                    let want = set(Rope::new(whole(&dense), at)).run().unwrap();

                    // Keys in the middle of [tokens, 3, heads, dim], rotated in place; the rest must stay.
                    let strides = [tokens * 3 * heads * dim, 3 * heads * dim, dim, 1].map(|s| s as isize);
                    let packed_layout = Layout::strided(Shape::new(&shape).unwrap(), &strides).unwrap();
                    let mut packed = vec![7.0; 3 * values.len()];
                    let start = heads * dim;
                    for (i, &v) in values.iter().enumerate() {
                        packed[start + packed_layout.offset_of(i)] = v;
                    }
                    let untouched = packed.clone();
                    let packed = Tensor::from_f64(&packed, &[packed.len()], dtype, device).unwrap();
                    let slice = of(&packed, packed_layout, start);
                    // SAFETY: nothing else uses the memory during the call.
                    let target =
                        unsafe { TensorViewMut::from_raw(slice.address(), dtype, packed_layout, device) };
                    set(Rope::in_place(at)).run_in_place(target, &stream).unwrap();
                    assert_eq!(slice.to_bytes().unwrap(), bits(&want), "{kernel} {dtype} packed");
                    let after = packed.to_f64().unwrap();
                    let inside = |i: usize| (i / (heads * dim)) % 3 == 1;
                    assert!((0..after.len()).all(|i| inside(i) || after[i] == untouched[i]));

                    // Heads before tokens in memory.
                    let swapped = Layout::contiguous(Shape::new(&[batch, heads, tokens, dim]).unwrap())
                        .permute(&[0, 2, 1, 3]);
                    let mut memory = vec![0.0; values.len()];
                    values.iter().enumerate().for_each(|(i, &v)| memory[swapped.offset_of(i)] = v);
                    let memory = Tensor::from_f64(&memory, &[memory.len()], dtype, device).unwrap();
                    let out = set(Rope::new(of(&memory, swapped, 0), at)).run().unwrap();
                    assert_eq!(bits(&out), bits(&want), "{kernel} {dtype} permuted");

                    // Element by element instead of in 16-byte pieces.
                    let mut misaligned = vec![0.0; 1];
                    misaligned.extend(&values);
                    let misaligned =
                        Tensor::from_f64(&misaligned, &[misaligned.len()], dtype, device).unwrap();
                    let out = set(Rope::new(of(&misaligned, *dense.layout(), 1), at)).run().unwrap();
                    assert_eq!(bits(&out), bits(&want), "{kernel} {dtype} misaligned");
                }
            }
        }
    }
}

#[test]
fn the_gradient_undoes_the_rotation() {
    let x = Tensor::randn(&[5, 3, 32], DType::F32, Device::Cpu, 1).unwrap();
    let at = positions(&[0, 5, -3, 131_071, 40], &[5], Device::Cpu);
    let there = Rope::new(&x, &at).interleaved().rotary_dim(20).run().unwrap();
    let back = RopeBackward::new(&there, &at).interleaved().rotary_dim(20).run().unwrap();
    for (a, b) in x.to_f64().unwrap().iter().zip(back.to_f64().unwrap()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn mistakes_are_named() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let x = tensor(&[3, 2, 8], DType::F32);
    let at = positions(&[0, 1, 4], &[3], Device::Cpu);
    let table = tensor(&[4, 4], DType::F32);
    let empty = tensor(&[0, 4], DType::F32);
    let narrow = tensor(&[4, 3], DType::F32);
    let odd = tensor(&[3, 2, 7], DType::F32);
    let bad = |result: Result<Tensor>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    bad(Rope::new(&odd, &at).run(), "`rotary_dim`: expected an even number up to head_dim=7, got 7");
    bad(Rope::new(&x, &at).rotary_dim(10).run(), "head_dim=8, got 10");
    bad(Rope::new(&x, &at).theta(0.0).run(), "`theta`");
    bad(Rope::new(&x, &at).scale(f64::NAN).run(), "`scale`");
    bad(Rope::new(&x, &x).run(), "`positions`: expected dtype i64 or i32");
    bad(Rope::new(&x, &positions(&[0, 1], &[2], Device::Cpu)).run(), "[num_tokens=3], got [2]");
    bad(Rope::new(&x, &at).tables(&narrow, &narrow).run(), "rotary_dim / 2=4], got [4, 3]");
    bad(Rope::new(&x, &at).tables(&empty, &empty).run(), "at least one row");
    bad(Rope::new(&x, &at).tables(&table, &table).run(), "below max_pos=4, got 4 for token 2");
    bad(RopeBackward::new(&x, &at).rotary_dim(3).run(), "rope_backward");
}

/// Many tokens go past the caches, on the CPU several side by side; each must have the bits it has alone.
#[test]
fn many_tokens_give_the_bits_of_each_alone() {
    let (tokens, heads, dim) = (149, 32, 128);
    let at: Vec<i64> = (0..tokens as i64).map(|token| token * 31 % 4096).collect();
    for device in devices() {
        for (dtype, interleaved) in
            [DType::BF16, DType::F32].into_iter().flat_map(|d| [(d, false), (d, true)])
        {
            let x = Tensor::randn(&[tokens, heads, dim], dtype, device, 5).unwrap();
            let positions = positions(&at, &[tokens], device);
            for kernel in kernels(device) {
                let rotate = |x: TensorView<'_>, positions: TensorView<'_>| {
                    let call = Rope::new(x, positions).kernel(kernel);
                    let call = if interleaved { call.interleaved() } else { call };
                    call.run().unwrap().view().to_bytes().unwrap()
                };
                let all = rotate(x.view(), positions.view());
                let size = all.len() / tokens;
                for token in (0..tokens).step_by(7).chain([tokens - 1]) {
                    let one = [x.view(), positions.view()].map(|t| t.narrow(0, token, 1).unwrap());
                    let [x, positions] = one;
                    let alone = rotate(x, positions);
                    assert!(alone == all[token * size..][..size], "{kernel} {dtype} {interleaved} {token}");
                }
            }
        }
    }
}
