use super::*;
use crate::tensor::{Layout, Shape};
use crate::{Device, Tensor};

fn tensor(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(shape, dtype, Device::Cpu, shape.len() as u64).unwrap()
}

fn message(result: Result<Tensor>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn wrong_shapes_and_types_are_named() {
    let f32 = |shape: &[usize]| tensor(shape, DType::F32);
    let (x, w) = (f32(&[3, 8]), f32(&[5, 8]));
    assert_eq!(
        message(Linear::new(&x, &f32(&[5, 7])).run()),
        "linear: argument `w`: expected shape [rows, k=8], got [5, 7]"
    );
    assert_eq!(
        message(Linear::new(&f32(&[2, 3, 8]), &f32(&[3, 5, 8])).run()),
        "linear: argument `w`: expected shape [rows, k=8] or [2, rows, k=8], got [3, 5, 8]"
    );
    let gated = Linear::new(&x, &w).gated(Gate::Halves, Activation::Silu).run();
    assert!(message(gated).contains("an even number of rows"));
    let bias = Linear::new(&x, &w).bias(&f32(&[4])).run();
    assert_eq!(message(bias), "linear: argument `bias`: expected shape [rows=5], got [4]");
    let residual = Linear::new(&x, &w).residual(&f32(&[3, 8])).run();
    assert_eq!(message(residual), "linear: argument `residual`: expected shape [3, n=5], got [3, 8]");
    let mixed = Linear::new(&tensor(&[3, 8], DType::BF16), &w).run();
    assert_eq!(message(mixed), "linear: argument `w`: expected dtype bf16, got f32");
    let mixed = Linear::new(&x, &tensor(&[5, 8], DType::F8E4M3)).run();
    assert_eq!(message(mixed), "linear: argument `w`: expected dtype f32 or f16 or bf16, got f8e4m3");
    let bias = Linear::new(&x, &w).bias(&tensor(&[5], DType::BF16)).run();
    assert_eq!(message(bias), "linear: argument `bias`: expected dtype f32, got bf16");
    assert!(
        message(Linear::new(&x, &w).out_dtype(DType::I32).run())
            .contains("`to`: expected one of auto, f32, f16, bf16")
    );
    assert!(
        message(Linear::new(&x, &w).scale(f32::INFINITY).run()).contains("`scale`: expected a finite number")
    );
    let half = tensor(&[3, 8], DType::F16);
    let tf32 = Linear::new(&half, &half).precision(Precision::Tf32).run();
    assert!(message(tf32).contains("only f32 has a TF32 mode"));
}

#[test]
fn scales_must_fit_inputs_and_scaling() {
    let (x, w) = (tensor(&[3, 300], DType::F8E4M3), tensor(&[5, 300], DType::F8E5M2));
    let scales = |shape: &[usize]| tensor(shape, DType::F32);
    let run = |scaling, x_shape: &[usize], w_shape: &[usize]| {
        Linear::new(&x, &w).input_scales(scaling, &scales(x_shape), &scales(w_shape)).run()
    };
    let expects = |result: Result<Tensor>, text: &str| {
        let message = message(result);
        assert!(message.contains(text), "{message}");
    };
    assert_eq!(run(Scaling::Tensor, &[1], &[1]).unwrap().dtype(), DType::BF16);
    run(Scaling::Row, &[3], &[5]).unwrap();
    run(Scaling::Block, &[3, 3], &[1, 3]).unwrap();
    expects(run(Scaling::Tensor, &[3], &[1]), "`x_scale`: expected shape [1] with scaling=tensor, got [3]");
    expects(run(Scaling::Row, &[3], &[3]), "`w_scale`: expected shape [rows=5] with scaling=row, got [3]");
    expects(
        run(Scaling::Block, &[3, 3], &[5, 3]),
        "`w_scale`: expected shape [ceil(rows / 128)=1, ceil(k / 128)=3] with scaling=block",
    );
    let wide = tensor(&[3, 8], DType::F32);
    let one = scales(&[1]);
    expects(
        Linear::new(&wide, &wide).input_scales(Scaling::Tensor, &one, &one).run(),
        "scales are for 8-bit inputs",
    );
    let half = Call::<Forward>::start().input(X, &x).input(W, &w).input(X_SCALE, &one);
    expects(half.run(), "`w_scale`: expected a tensor, because `x_scale` is given");
}

/// Weights of 16 bits beside an x of f32 give the bits of the same weights in f32, in every form of a call.
#[test]
fn weights_of_16_bits_stand_for_the_same_in_f32() {
    let stream = Device::Cpu.default_stream().unwrap();
    for dtype in [DType::F16, DType::BF16] {
        for (m, n, k) in [(1, 40, 70), (3, 33, 129), (7, 64, 64), (50, 70, 300)] {
            let (x, w) = (tensor(&[m, k], DType::F32), tensor(&[2 * n, k], dtype));
            let wide = w.to_dtype(DType::F32).unwrap();
            let bias = tensor(&[2 * n], DType::F32);
            for gate in Gate::ALL {
                let columns = if *gate == Gate::None { 2 * n } else { n };
                let residual = tensor(&[m, columns], DType::F32);
                let finish = |call: Linear<'_>| {
                    let call = call.bias(&bias).activation(Activation::Silu).scale(0.5).residual(&residual);
                    call.run().unwrap().to_vec::<f32>().unwrap()
                };
                let expected = finish(Linear::new(&x, &wide).choice(GATE, *gate));
                let packed = || PackedWeight::gated_for(w.clone(), *gate, DType::F32).unwrap();
                assert_eq!(finish(Linear::new(&x, &w).choice(GATE, *gate)), expected);
                assert_eq!(finish(Linear::packed(&x, &packed())), expected);
                let alone = packed().without_tensor().unwrap();
                assert!(alone.tensor().is_none() && alone.packed_bytes() >= 2 * w.layout().numel());
                assert_eq!(finish(Linear::packed(&x, &alone)), expected);
            }
        }
    }
    // A weight that was packed for x of its own type is used beside f32 all the same.
    let (x, w) = (tensor(&[3, 64], DType::F32), tensor(&[40, 64], DType::BF16));
    let expected = Linear::new(&x, &w).run().unwrap().to_vec::<f32>().unwrap();
    let packed = PackedWeight::new(w.clone()).unwrap();
    assert_eq!(Linear::packed(&x, &packed).run().unwrap().to_vec::<f32>().unwrap(), expected);
    assert!(Linear::packed(&tensor(&[3, 64], DType::BF16), &packed).run().is_ok());
    // What needs the tensor is refused where there is none, and nothing is computed from what stands for it.
    let alone = PackedWeight::gated(w, Gate::None).unwrap().without_tensor().unwrap();
    let mut out = Tensor::zeros(&[3, 20], DType::F32, Device::Cpu).unwrap();
    let call = Linear::packed(&x, &alone).choice(GATE, Gate::Halves);
    let error = call.run_into(&mut out, &stream).unwrap_err().to_string();
    assert!(error.contains("argument `w`: expected a call for") && error.contains("gate=halves"), "{error}");
    assert!(out.to_vec::<f32>().unwrap().iter().all(|&v| v == 0.0));
    let wrong = PackedWeight::gated_for(tensor(&[4, 8], DType::F32), Gate::None, DType::F16);
    assert!(wrong.unwrap_err().to_string().contains("f32, where x is f16"));
}

/// Leading dimensions that no single stride describes give what each product alone gives.
#[test]
fn any_leading_dimensions() {
    let memory = tensor(&[4, 3, 5, 7], DType::F32);
    let w = tensor(&[6, 7], DType::F32);
    // [3, 4, 5, 7] with leading strides that do not merge, and every second index of the first.
    let x = memory.view().permute(&[1, 0, 2, 3]).unwrap();
    let mut strides = x.layout().strides().to_vec();
    strides[0] *= 2;
    let layout = Layout::strided(Shape::new(&[2, 4, 5, 7]).unwrap(), &strides).unwrap();
    // SAFETY: indices 0 and 2 of three.
    let x = unsafe { TensorView::from_raw(x.address(), x.dtype(), layout, x.device()) };
    let whole = Linear::new(x, &w).silu().run().unwrap();
    assert_eq!(whole.shape(), [2, 4, 5, 6]);
    let whole = whole.to_vec::<f32>().unwrap();
    for (index, expected) in whole.chunks_exact(5 * 6).enumerate() {
        let one = x.narrow(0, index / 4, 1).unwrap().narrow(1, index % 4, 1).unwrap();
        let out = Linear::new(one, &w).silu().run().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(out, expected);
    }
    let own = tensor(&[2, 4, 6, 7], DType::F32);
    let whole = Linear::new(x, &own).run().unwrap().to_vec::<f32>().unwrap();
    for (index, expected) in whole.chunks_exact(5 * 6).enumerate() {
        let one = x.narrow(0, index / 4, 1).unwrap().narrow(1, index % 4, 1).unwrap();
        let own = own.view().narrow(0, index / 4, 1).unwrap().narrow(1, index % 4, 1).unwrap();
        assert_eq!(Linear::new(one, own).run().unwrap().to_vec::<f32>().unwrap(), expected);
    }
    let vector = tensor(&[7], DType::F32);
    assert_eq!(Linear::new(&vector, &w).run().unwrap().shape(), [6]);
}

#[test]
fn gates_agree_with_separate_products_and_the_result_may_replace_the_residual() {
    let (x, w) = (tensor(&[3, 8], DType::F32), tensor(&[10, 8], DType::F32));
    let halves = w.view();
    let (gate, up) = (halves.narrow(0, 0, 5).unwrap(), halves.narrow(0, 5, 5).unwrap());
    let g = Linear::new(&x, gate).relu().run().unwrap().to_vec::<f32>().unwrap();
    let u = Linear::new(&x, up).run().unwrap().to_vec::<f32>().unwrap();
    let expected: Vec<f32> = g.iter().zip(&u).map(|(g, u)| 1.0 + 2.0 * (g * u)).collect();
    let mut ones = Tensor::from_slice(&[1f32; 15], &[3, 5], Device::Cpu).unwrap();
    let stream = Device::Cpu.default_stream().unwrap();
    let call = Linear::new(&x, &w).gated(Gate::Halves, Activation::Relu).scale(2.0);
    call.add_to(&mut ones, &stream).unwrap();
    assert_eq!(ones.to_vec::<f32>().unwrap(), expected);
}

#[test]
fn orders_say_what_can_be_moved_in_pieces() {
    let order = |x: TensorView<'_>| {
        let w = Tensor::zeros(&[4, x.shape()[1]], x.dtype(), Device::Cpu).unwrap();
        let mut out = Tensor::zeros(&[x.shape()[0], 4], x.dtype(), Device::Cpu).unwrap();
        let args = Args::new(const { &SPEC }).input(X, x).input(W, w.view()).output(OUT, out.view_mut());
        problem::check(&args, &Attrs::defaults(&SPEC)).unwrap().x_order
    };
    use problem::Order;
    let x = tensor(&[16, 24], DType::BF16);
    assert_eq!(order(x.view()), Order::Rows);
    assert_eq!(order(x.view().permute(&[1, 0]).unwrap()), Order::Columns);
    assert_eq!(order(x.view().narrow(1, 8, 8).unwrap()), Order::Rows);
    assert_eq!(order(x.view().narrow(1, 1, 8).unwrap()), Order::Any);
    assert_eq!(order(x.view().narrow(1, 0, 7).unwrap()), Order::Any);
    assert_eq!(order(x.view().narrow(0, 3, 1).unwrap()), Order::Rows);
}

#[test]
fn what_auto_chose_is_explained() {
    use crate::device::DeviceInfo;
    use crate::op::AnyOp;
    use crate::op::Select;
    let (x, w) = (tensor(&[3, 8], DType::F32), tensor(&[5, 8], DType::F32));
    let mut out = tensor(&[3, 5], DType::F32);
    let args = Args::new(const { &SPEC }).input(X, x.view()).input(W, w.view()).output(OUT, out.view_mut());
    let info = DeviceInfo::cpu(Tier::Portable);
    let attrs = Attrs::defaults(&SPEC);
    let explained = Forward.explain(&args, &attrs, &info, &Select::default()).unwrap();
    assert_eq!((explained.kernel, explained.config.as_str()), ("linear_portable", "f32 in full precision"));
}

#[test]
fn packed_weights_give_the_same_bits() {
    use crate::ops::PackedWeight;
    let data =
        |tensor: &Tensor| tensor.to_vec::<f32>().unwrap().iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3] {
        for (rows, k, gate) in [(34, 70, Gate::None), (66, 33, Gate::Halves), (6, 129, Gate::Interleaved)] {
            let weight = PackedWeight::gated(tensor(&[rows, k], dtype), gate).unwrap();
            assert!(weight.packed_bytes() >= rows * k * dtype.size(), "{weight:?}");
            for m in [1, 5, 40] {
                let x = tensor(&[m, k], dtype);
                let plain = || Linear::new(&x, weight.tensor().unwrap()).gated(gate, Activation::Silu);
                let packed = || Linear::packed(&x, &weight).silu();
                for kernel in ["linear_avx512", "linear_avx2", "linear_portable"] {
                    let run = |call: Linear<'_>| call.kernel(kernel).out_dtype(DType::F32).run();
                    let Ok(expected) = run(plain()) else { continue };
                    let got = run(packed()).unwrap();
                    assert_eq!(data(&got), data(&expected), "{dtype} {kernel} {m}x{rows}x{k} {gate:?}");
                }
            }
        }
    }
}

#[test]
fn a_weight_packed_with_another_gate_is_taken_as_it_is() {
    use crate::ops::PackedWeight;
    let (x, w) = (tensor(&[3, 16], DType::F32), || tensor(&[8, 16], DType::F32));
    let weight = PackedWeight::gated(w(), Gate::Halves).unwrap();
    let call = Linear::packed(&x, &weight).gated(Gate::Interleaved, Activation::Relu);
    let expected = Linear::new(&x, &w()).gated(Gate::Interleaved, Activation::Relu).run().unwrap();
    assert_eq!(call.run().unwrap().to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
}

/// The packed form has the shape of its own weight: with a different tensor it would be read past its end.
#[test]
fn another_weight_in_the_place_of_a_packed_one_is_taken_as_it_is() {
    let (x, small) = (tensor(&[3, 64], DType::F32), tensor(&[2, 64], DType::F32));
    let large = Tensor::randn(&[500, 64], DType::F32, Device::Cpu, 3).unwrap();
    let packed = PackedWeight::new(small).unwrap();
    let out = Linear::packed(&x, &packed).input(W, &large).run().unwrap();
    let expected = Linear::new(&x, &large).run().unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
}

#[test]
fn weights_that_cannot_be_packed_are_named() {
    use crate::ops::PackedWeight;
    let refused = |shape: &[usize], dtype, gate| {
        let w = Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
        PackedWeight::gated(w, gate).unwrap_err().to_string()
    };
    let rank = refused(&[2, 3, 4], DType::F32, Gate::None);
    assert_eq!(rank, "linear: argument `w`: expected shape [rows, k], got [2, 3, 4]");
    assert!(refused(&[3, 4], DType::I32, Gate::None).contains("expected dtype f32, f16, bf16"));
    assert!(refused(&[3, 4], DType::F32, Gate::Halves).contains("an even number of rows"));
    // Nothing to pack, and nothing wrong with that.
    let empty = PackedWeight::new(Tensor::zeros(&[0, 4], DType::F32, Device::Cpu).unwrap()).unwrap();
    let x = tensor(&[3, 4], DType::F32);
    assert_eq!(Linear::packed(&x, &empty).run().unwrap().shape(), [3, 0]);
}

#[test]
fn a_call_says_what_it_would_run() {
    let (x, w) = (tensor(&[3, 64], DType::BF16), tensor(&[5, 64], DType::BF16));
    let chosen = Linear::new(&x, &w).explain().unwrap();
    assert!(chosen.kernel.starts_with("linear_") && !chosen.config.is_empty(), "{chosen}");
    assert!(chosen.others.iter().any(|(kernel, _)| *kernel == "linear_portable"), "{chosen}");
    let named = Linear::new(&x, &w).kernel("linear_portable").explain().unwrap();
    assert_eq!((named.kernel, named.reason.as_str()), ("linear_portable", "named by the caller"));
    let error = Linear::new(&x, &tensor(&[5, 63], DType::BF16)).explain().unwrap_err().to_string();
    assert!(error.contains("`w`"), "{error}");
}

#[test]
fn a_tolerance_chooses_the_precision() {
    use Precision::{Auto, Full, Tf32};
    let chosen = |asked: Precision, tolerance, dtype| asked.chosen(tolerance, dtype, 128);
    // Of 128 products the cuts can sum up to 0.016.
    for (tolerance, of_f32, of_8_bits) in
        [(0.0, Auto, Auto), (1e-6, Auto, Full), (0.0019, Auto, Full), (0.002, Tf32, Full), (0.02, Tf32, Auto)]
    {
        assert_eq!(chosen(Auto, tolerance, DType::F32), of_f32, "{tolerance}");
        assert_eq!(chosen(Auto, tolerance, DType::F8E4M3), of_8_bits, "{tolerance}");
        assert_eq!(chosen(Auto, tolerance, DType::BF16), Auto, "{tolerance}");
        assert_eq!(chosen(Full, tolerance, DType::F32), Full, "{tolerance}");
        assert_eq!(chosen(Tf32, tolerance, DType::F32), Tf32, "{tolerance}");
    }
    let (x, w) = (tensor(&[3, 64], DType::F32), tensor(&[5, 64], DType::F32));
    for wrong in [-0.5, f32::NAN, f32::INFINITY] {
        let told = message(Linear::new(&x, &w).tolerance(wrong).run());
        assert!(told.contains("`tolerance`"), "{told}");
    }
}
