//! What calls give, and what they refuse.

use warpsmith::cpu::with_threads;
use warpsmith::{DType, Device, Tensor};
use warpsmith_fuse::gradient::gradient;
use warpsmith_fuse::plan::Plan;
use warpsmith_fuse::{Compiled, Dim, Memory, parse, text};

fn dims(text: &str) -> Vec<Dim> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| part.parse().unwrap()).collect()
}

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, Device::Cpu).unwrap()
}

/// The first output of a formula of one vector `x`.
fn of(formula: &str, x: &[f32]) -> Vec<f32> {
    let graph = parse(formula, &[("x", DType::F32, &dims("n"))]).unwrap();
    let out = Compiled::new(graph).unwrap().run(&[&tensor(x, &[x.len()])]).unwrap();
    out[0].to_dtype(DType::F32).unwrap().to_vec().unwrap()
}

#[test]
fn special_values_are_as_in_pytorch() {
    let nan = f32::NAN;
    let infinity = f32::INFINITY;
    assert!(of("maximum(x, 0.0)", &[nan])[0].is_nan() && of("clamp(x, 0.0, 1.0)", &[nan])[0].is_nan());
    assert!(of("relu(x)", &[nan])[0].is_nan() && of("max(x)", &[1.0, nan, 2.0])[0].is_nan());
    assert_eq!(of("relu(x)", &[-0.0])[0].to_bits(), (-0.0f32).to_bits());
    assert_eq!(of("maximum(x, 0.0)", &[-0.0])[0].to_bits(), (-0.0f32).to_bits());
    assert_eq!(of("sign(x)", &[nan, -2.0, 0.0]), [0.0, -1.0, 0.0]);
    assert!(of("silu(x)", &[-infinity])[0].is_nan() && of("gelu(x)", &[-infinity])[0].is_nan());
    assert!(of("softmax(x)", &[-infinity, -infinity]).iter().all(|y| y.is_nan()));
    assert_eq!(of("logsumexp(x)", &[-infinity, -infinity]), [-infinity]);
    assert_eq!(of("1.0 / x", &[0.0, -0.0]), [infinity, -infinity]);
    assert_eq!(of("cast(x, i32)", &[1e20, -1.9, 1.9]), [-2147483648.0, -1.0, 1.0]);
    assert_eq!(of("round(x)", &[0.5, 1.5, -2.5]), [0.0, 2.0, -2.0]);
    assert!(of("sin(x)", &[1e6, infinity])[1].is_nan());
    assert!((of("sin(x)", &[1e6, 0.0])[0] - 1e6f64.sin() as f32).abs() < 1e-6);
    // bf16 times a number: the number is not rounded.
    let graph = parse("cast(x, bf16) * 0.1", &[("x", DType::F32, &dims("n"))]).unwrap();
    let out = Compiled::new(graph).unwrap().run(&[&tensor(&[3.0], &[1])]).unwrap();
    assert_eq!((out[0].dtype(), out[0].to_f64().unwrap()[0]), (DType::BF16, DType::BF16.round(0.3)));
}

#[test]
fn sums_of_nothing_are_zero_and_the_largest_of_nothing_is_an_error() {
    let graph = |formula: &str| parse(formula, &[("x", DType::F32, &dims("r,n"))]).unwrap();
    let empty = tensor(&[], &[2, 0]);
    let run = |formula: &str| Compiled::new(graph(formula)).unwrap().run(&[&empty]);
    assert_eq!(run("sum(x)").unwrap()[0].to_vec::<f32>().unwrap(), [0.0, 0.0]);
    assert!(run("mean(x)").unwrap()[0].to_vec::<f32>().unwrap()[0].is_nan());
    assert!(run("max(x)").unwrap_err().to_string().contains("max"));
    assert_eq!(run("x * 2 + sum(x)").unwrap()[0].shape(), [2, 0]);
}

/// Strides may be negative, or 0.
#[test]
fn inputs_can_be_reversed_and_repeated() {
    let graph = parse("x * 2.0 + sum(x)", &[("x", DType::F32, &dims("r,n"))]).unwrap();
    let compiled = Compiled::new(graph).unwrap();
    let values = [1.0f32, 2.0, 3.0];
    let mut out = [0f32; 6];
    let memory = |address: usize, strides: &'static [isize]| Memory {
        address,
        dtype: DType::F32,
        shape: &[2, 3],
        strides,
    };
    let last = &raw const values[2];
    // SAFETY: rows are the three numbers, last first, twice; the output has room for six.
    unsafe {
        compiled.call(&[memory(last as usize, &[0, -1])], &[memory(out.as_mut_ptr() as usize, &[3, 1])])
    }
    .unwrap();
    assert_eq!(out, [12.0, 10.0, 8.0, 12.0, 10.0, 8.0]);
}

/// The same bits for a row alone, in a batch, and on any number of threads.
#[test]
fn rows_do_not_depend_on_the_batch() {
    for columns in [3, 100, 700, 5000] {
        let inputs: [(&str, DType, &[Dim]); 2] =
            [("x", DType::BF16, &dims("r,n")), ("w", DType::F32, &dims("n"))];
        let graph =
            parse("rms_norm(gelu(x) + x) * w + w * w, softmax(x), x + w * w, sum(x * w * 0.5)", &inputs)
                .unwrap();
        let compiled = Compiled::new(graph).unwrap();
        let x = Tensor::randn(&[37, columns], DType::BF16, Device::Cpu, 1).unwrap();
        let w = Tensor::randn(&[columns], DType::F32, Device::Cpu, 2).unwrap();
        let whole = compiled.run(&[&x, &w]).unwrap();
        let alone = compiled.run(&[&x.narrow(0, 11, 1).unwrap(), &w]).unwrap();
        let single = with_threads(1, || compiled.run(&[&x, &w]).unwrap());
        let many = with_threads(5, || compiled.run(&[&x, &w]).unwrap());
        for i in 0..4 {
            let bytes = |tensor: &Tensor| tensor.view().to_bytes().unwrap();
            let row = bytes(&whole[i]).len() / 37;
            assert_eq!(bytes(&alone[i]), bytes(&whole[i])[11 * row..12 * row], "{columns} columns");
            assert!(bytes(&single[i]) == bytes(&whole[i]) && bytes(&many[i]) == bytes(&whole[i]));
        }
    }
}

#[test]
fn indices_out_of_range_and_wrong_tensors_are_refused() {
    let graph =
        parse("gather(t, i)", &[("t", DType::F32, &dims("v,4")), ("i", DType::I64, &dims("n"))]).unwrap();
    let compiled = Compiled::new(graph).unwrap();
    let table = tensor(&[1.0; 12], &[3, 4]);
    let index = |at: i64| Tensor::from_slice(&[at], &[1], Device::Cpu).unwrap();
    assert!(compiled.run(&[&table, &index(2)]).is_ok());
    for bad in [3, -1] {
        let error = compiled.run(&[&table, &index(bad)]).unwrap_err().to_string();
        assert!(error.contains("below 3") && error.contains(&bad.to_string()), "{error}");
    }
    let error = compiled.run(&[&table, &table]).unwrap_err().to_string();
    assert!(error.contains("`i`"), "{error}");
    assert!(compiled.run(&[&table]).is_err());
    let mut x = [0f32; 8];
    let graph = parse("x + 1.0", &[("x", DType::F32, &dims("n"))]).unwrap();
    let compiled = Compiled::new(graph).unwrap();
    let base = x.as_mut_ptr() as usize;
    let memory = |at: usize, strides: &'static [isize]| Memory {
        address: base + at,
        dtype: DType::F32,
        shape: &[4],
        strides,
    };
    let (low, shifted, still) = (memory(0, &[1]), memory(8, &[1]), memory(16, &[0]));
    for (bad, why) in [(shifted, "of its own"), (still, "apart")] {
        // SAFETY: all of it lies in the array; the call refuses before it writes.
        let error = unsafe { compiled.call(&[low], &[bad]) }.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // SAFETY: two parts of one array.
    unsafe { compiled.call(&[low], &[memory(16, &[1])]) }.unwrap();
    assert_eq!(x[4..], [1.0; 4]);
}

#[test]
fn graphs_survive_json_and_formulas() {
    let inputs: [(&str, DType, &[Dim]); 2] =
        [("x", DType::BF16, &dims("B,S,64")), ("t1", DType::F32, &dims("64"))];
    let graph = parse("softmax(x * 0.5 + t1), where(x > inf, sum(x), -2.0) ** 3", &inputs).unwrap();
    let read = text::json::read(&text::json::write(&graph)).unwrap();
    assert_eq!(read.to_string(), graph.to_string());
    assert_eq!(text::json::write(&read), text::json::write(&graph));
    let error = text::json::read(
        r#"{"inputs": [], "nodes": [{"name": "a", "op": "exp", "args": ["z"]}], "outputs": ["a"]}"#,
    );
    assert!(error.unwrap_err().to_string().contains("`z`"));
}

#[test]
fn errors_show_the_place_and_what_was_meant() {
    let error = |formula: &str| {
        parse(formula, &[("x", DType::F32, &dims("n")), ("mask", DType::Bool, &dims("m"))])
            .unwrap_err()
            .to_string()
    };
    for (formula, parts) in [
        ("sigmod(x)", &["did you mean `sigmoid`", "  ^"][..]),
        ("x + maks", &["did you mean `mask`", "      ^"]),
        ("x + ", &["expected a value, got the end"]),
        ("(x + 1", &["expected `)`"]),
        ("x & x", &["bools only"]),
        ("x + mask", &["do not broadcast", "mask: bool [m]"]),
        ("rms_norm(x, epsilon=1)", &["no argument `epsilon`", "weight, eps"]),
        ("x < 1 < 2", &["cannot be chained"]),
        ("x $ 2", &["`$` has no meaning"]),
        ("cast(x, f8e4m3)", &["fusion knows"]),
        ("where(x, x, x)", &["must be a bool"]),
        ("exp", &["`(` is missing"]),
    ] {
        let text = error(formula);
        for part in parts {
            assert!(text.contains(part), "{formula}: {text}");
        }
    }
    assert!(error(&"(".repeat(5000)).contains("inside each other"));
    assert!(error(&"-".repeat(5000)).contains("inside each other"));
}

#[test]
fn plans_fuse_what_pays_and_say_why_not() {
    let inputs: [(&str, DType, &[Dim]); 3] = [
        ("x", DType::BF16, &dims("B,4096")),
        ("r", DType::BF16, &dims("B,4096")),
        ("w", DType::BF16, &dims("4096")),
    ];
    let plan = |formula: &str| Plan::new(&parse(formula, &inputs).unwrap());
    assert_eq!(plan("rms_norm(x + r) * w").kernels.len(), 1);
    assert_eq!(plan("h = x + r; h, rms_norm(h, w)").kernels.len(), 1);
    assert_eq!(plan("softmax(layer_norm(x, w))").kernels.len(), 1);
    assert_eq!(plan("x + 1, r * 2").kernels.len(), 2);
    assert_eq!(plan("x + 1, x * 2").kernels.len(), 1);
    // Too much to do again for every row.
    let split = plan("x * exp(tanh(w))");
    assert_eq!(split.kernels.len(), 2);
    assert!(split.splits[0].why.contains("repeated"), "{:?}", split.splits);
    assert_eq!(plan("x + sum_to(x * r, [4096])").kernels.len(), 2);
}

/// Central differences in f64 of what the forward graph means.
#[test]
fn gradients_agree_with_differences() {
    use warpsmith_fuse::eval::{Elements, Given, Value, evaluate};
    let floats = |value: &Value| -> Vec<f64> {
        match &value.elements {
            Elements::Floats(all) => all.iter().map(|x| x.value).collect(),
            Elements::Ints(all) => all.iter().map(|x| x.unwrap_or(0) as f64).collect(),
        }
    };
    let formulas = [
        "rms_norm(x, w) * y",
        "layer_norm(x, w, y)",
        "softmax(x * w) * y",
        "log_softmax(x) + w * y",
        "logsumexp(x) * sum(y)",
        "silu(x) * y + gelu(w) - gelu_tanh(x) / (2 + mish(y))",
        "x / (3 + tanh(y)) ** 2 + sigmoid(w)",
        "where(x > y, x * w, exp(y)) + clamp(x, -0.5, 0.5)",
        "maximum(x, y) * minimum(w, x) + abs(y) + relu(x)",
        "max(x * w) - min(y) + mean(x)",
        "erf(x) + erfc(y) * sin(w) + cos(x) + softplus(y) + log(2 + x * x) + log1p(y * y)",
        "sqrt(1 + x * x) * rsqrt(2 + y * y) + reciprocal(3 + w * w) + square(x) ** 1.5",
        "expand(sum_to(x, [w]), [r, w]) * y",
    ];
    for formula in formulas {
        let shapes = [dims("r,w"), dims("w"), dims("r,w")];
        let names = ["x", "w", "y"];
        let inputs: Vec<(&str, DType, &[Dim])> =
            names.iter().zip(&shapes).map(|(name, shape)| (*name, DType::F32, &shape[..])).collect();
        let graph = parse(formula, &inputs).unwrap_or_else(|error| panic!("{error}"));
        let Ok(pair) = gradient(&graph, &names).map_err(|error| panic!("{formula}: {error}"));
        let sizes = [vec![3, 5], vec![5], vec![3, 5]];
        let values: Vec<Vec<f64>> = (0..3)
            .map(|i| Tensor::randn(&sizes[i], DType::F32, Device::Cpu, i as u64).unwrap().to_f64().unwrap())
            .collect();
        let given = |values: &[Vec<f64>]| -> Vec<(Vec<usize>, Given)> {
            values
                .iter()
                .zip(&sizes)
                .map(|(all, shape)| (shape.clone(), Given::Floats(all.clone())))
                .collect()
        };
        let forward = evaluate(&pair.forward, &given(&values)).unwrap();
        let results: Vec<&Value> =
            pair.forward.outputs().iter().map(|(_, id)| &forward[id.index()]).collect();
        let weights: Vec<f64> =
            (0..results[0].elements.len()).map(|i| ((i * 7 + 3) % 11) as f64 / 5.0 - 1.0).collect();
        let loss = |values: &[Vec<f64>]| -> f64 {
            let all = evaluate(&graph, &given(values)).unwrap();
            floats(&all[graph.outputs()[0].1.index()]).iter().zip(&weights).map(|(y, g)| y * g).sum()
        };
        let backward = &pair.backward;
        let find = |name: &str| -> (Vec<usize>, Given) {
            if let Some(i) = names.iter().position(|other| *other == name) {
                return (sizes[i].clone(), Given::Floats(values[i].clone()));
            }
            if name.starts_with("grad_") {
                return (results[0].shape.clone(), Given::Floats(weights.clone()));
            }
            let at = pair.forward.outputs().iter().position(|(other, _)| &**other == name).unwrap();
            (results[at].shape.clone(), Given::Floats(floats(results[at])))
        };
        let wanted: Vec<_> = backward.inputs().iter().map(|&id| find(backward.input_name(id))).collect();
        let gradients = evaluate(backward, &wanted).unwrap();
        for (i, (name, id)) in backward.outputs().iter().enumerate() {
            for (j, got) in floats(&gradients[id.index()]).into_iter().enumerate() {
                const STEP: f64 = 1e-5;
                let mut moved = values.clone();
                moved[i][j] += STEP;
                let above = loss(&moved);
                moved[i][j] -= 2.0 * STEP;
                let expected = (above - loss(&moved)) / (2.0 * STEP);
                assert!(
                    (got - expected).abs() < 1e-6 * (1.0 + expected.abs()),
                    "{formula}: {name}[{j}]: {got} {expected}"
                );
            }
        }
        // And the kernels compute what the graphs mean.
        let compiled = Compiled::new(backward.clone()).unwrap();
        let tensors: Vec<Tensor> = wanted
            .iter()
            .map(|(shape, given)| match given {
                Given::Floats(all) => Tensor::from_f64(all, shape, DType::F32, Device::Cpu).unwrap(),
                Given::Ints(_) => unreachable!(),
            })
            .collect();
        let out = compiled.run(&tensors.iter().collect::<Vec<_>>()).unwrap();
        for ((_, id), tensor) in backward.outputs().iter().zip(out) {
            for (got, want) in tensor.to_f64().unwrap().into_iter().zip(floats(&gradients[id.index()])) {
                assert!((got - want).abs() < 1e-4 * (1.0 + want.abs()), "{formula}: {got} {want}");
            }
        }
    }
}
