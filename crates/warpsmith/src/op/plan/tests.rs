use super::table::{MOST_PLANS, Table};
use super::work::make;
use super::*;
use crate::op::{Attrs, Op, Select};
use crate::ops::{Activation, RmsNorm};
use crate::tensor::{DType, Layout};

fn random(shape: &[usize], seed: u64) -> Tensor {
    Tensor::randn(shape, DType::F32, Device::Cpu, seed).unwrap()
}

fn kept(x: &Tensor, eps: f32) -> Plan {
    let mut plan = None;
    RmsNorm::new(x).eps(eps).keep_plan(&mut plan).run().unwrap();
    plan.unwrap()
}

#[test]
fn the_same_kind_of_call_has_the_same_plan() {
    let (x, y) = (random(&[3, 117], 0), random(&[3, 117], 1));
    let plan = kept(&x, 0.25);
    assert!(Arc::ptr_eq(&plan.0, &kept(&y, 0.25).0), "other tensors");
    for other in [
        kept(&x, 0.5),
        kept(&random(&[4, 117], 0), 0.25),
        kept(&random(&[9, 118], 0).narrow(0, 0, 3).unwrap(), 0.25),
    ] {
        assert!(!Arc::ptr_eq(&plan.0, &other.0));
    }
    assert!(format!("{plan:?}").contains("rms_norm"), "{plan:?}");
}

#[test]
fn alignment_is_part_of_a_plan() {
    let memory = random(&[1 + 4 * 64], 0);
    let at = |start| memory.narrow(0, start, 4 * 64).unwrap().reshape(&[4, 64]).unwrap();
    assert!(!Arc::ptr_eq(&kept(&at(0), 0.125).0, &kept(&at(1), 0.125).0));
}

#[test]
fn a_plan_that_is_not_the_calls_is_replaced_and_a_foreign_one_refused() {
    let mut plan = None;
    for rows in [2, 5, 2] {
        let x = random(&[rows, 33], 7);
        let out = RmsNorm::new(&x).keep_plan(&mut plan).run().unwrap();
        let expected = RmsNorm::new(&x).run().unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
    }
    let (x, mut out) = (random(&[5, 33], 0), random(&[5, 33], 1));
    let op = crate::ops::find("activation").unwrap();
    let mut args = Args::new(op.spec()).input(0, x.view()).output(1, out.view_mut());
    let error = plan.unwrap().run(&mut args, &Stream::Host).unwrap_err().to_string();
    assert!(error.contains("activation: argument `plan`"), "{error}");
}

#[test]
fn a_plan_runs_with_new_tensors_of_its_forms_alone() {
    let op = crate::ops::find("activation").unwrap();
    let attrs = Attrs::defaults(op.spec());
    let (x, mut out) = (random(&[4, 40], 0), Tensor::zeros(&[4, 40], DType::F32, Device::Cpu).unwrap());
    let args = Args::new(op.spec()).input(0, x.view()).output(1, out.view_mut());
    let plan = op.prepare(&args, &attrs, &Select::default()).unwrap();
    let _ = args;
    assert!(out.to_vec::<f32>().unwrap().iter().all(|&y| y == 0.0), "preparing runs nothing");
    for seed in 1..4 {
        let x = random(&[4, 40], seed);
        plan.run(&mut Args::new(op.spec()).input(0, x.view()).output(1, out.view_mut()), &Stream::Host)
            .unwrap();
        let expected = Activation::gelu(&x).run().unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
    }
    let wide = random(&[4, 41], 0);
    let error =
        plan.run(&mut Args::new(op.spec()).input(0, wide.view()).output(1, out.view_mut()), &Stream::Host);
    assert!(matches!(error, Err(Error::Argument { .. })));
}

/// What depends on addresses is checked for every call, also for one whose plan is known.
#[test]
fn overlaps_are_found_in_repeated_calls() {
    let mut memory = vec![1f32; 300];
    let start = memory.as_mut_ptr() as usize;
    let layout = Layout::contiguous(crate::tensor::Shape::new(&[100]).unwrap());
    let call = |from: usize, to: usize| {
        use crate::tensor::TensorViewMut;
        // SAFETY: all lie in the vector, and are used by nobody else; overlapping ones are refused before they are touched.
        let (x, out) = unsafe {
            (
                TensorView::from_raw(start + 4 * from, DType::F32, layout, Device::Cpu),
                TensorViewMut::from_raw(start + 4 * to, DType::F32, layout, Device::Cpu),
            )
        };
        Activation::relu(x).run_into(out, &Stream::Host)
    };
    call(0, 200).unwrap();
    call(0, 100).unwrap();
    for to in [4, 48, 96] {
        let error = call(0, to).unwrap_err().to_string();
        assert!(error.contains("overlaps `x`"), "{error}");
    }
    call(100, 0).unwrap();
    std::hint::black_box(&mut memory);
}

#[test]
fn threads_find_and_make_plans_at_once() {
    let weight = random(&[64], 1);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let weight = &weight;
            scope.spawn(move || {
                for round in 0..50 {
                    let x = random(&[1 + (round + thread) % 7, 64], round as u64);
                    let out = RmsNorm::new(&x).weight(weight).eps(0.0625).run().unwrap();
                    assert_eq!(out.shape(), x.shape());
                    if round == 25 {
                        forget();
                    }
                }
            });
        }
    });
}

#[test]
fn plans_are_forgotten_when_there_are_too_many() {
    let memory = random(&[MOST_PLANS + 600], 0);
    for n in 1..MOST_PLANS + 500 {
        Activation::relu(&memory.narrow(0, 0, n).unwrap()).run().unwrap();
    }
    let plans = PLANS.read().unwrap();
    let count: usize = plans.by_hash.values().map(Vec::len).sum();
    assert!(count == plans.queue.len() && count <= MOST_PLANS, "{count}");
}

#[test]
fn a_plan_in_use_stays_however_many_others_are_made() {
    type Relu = crate::ops::activation::Forward;
    let (spec, select) = (const { &Relu::SPEC }, Select::default());
    let attrs = Attrs::defaults(spec);
    let (x, mut out) = (random(&[3 * MOST_PLANS], 0), random(&[3 * MOST_PLANS], 0));
    // A table of its own: other tests empty the one of all calls.
    let mut table = Table::default();
    let mut call = |n: usize| {
        let (x, out) = (x.view().narrow(0, 0, n).unwrap(), out.view_mut().narrow(0, 0, n).unwrap());
        let args = Args::new(spec).input(0, x).output(1, out);
        let asked = Asked::of::<Relu>(&args, &attrs, &select);
        let hash = hash(&asked);
        if let Some(plan) = table.find(hash, &asked) {
            return plan.clone();
        }
        let plan = Plan::of(&asked, make::<Relu>(&asked, None).unwrap());
        table.insert(hash, plan.clone());
        assert!(table.queue.len() <= MOST_PLANS);
        plan
    };
    let hot = call(1);
    for n in 2..=3 * MOST_PLANS {
        call(n);
        if n % (MOST_PLANS / 4) == 0 {
            assert!(Arc::ptr_eq(&hot.0, &call(1).0), "made again after {n} other plans");
        }
    }
    assert!(!Arc::ptr_eq(&call(2).0, &call(3).0));
    let count: usize = table.by_hash.values().map(Vec::len).sum();
    assert_eq!((count, table.queue.len()), (MOST_PLANS, MOST_PLANS));
}

/// The shapes that count are the op's own, not those that the arguments' description tells.
#[test]
fn arguments_are_judged_by_the_ops_own_description() {
    use crate::op::{ArgSpec, DTypeRule, shape};
    static LIES: OpSpec = OpSpec {
        name: "activation",
        args: &[
            ArgSpec::input("x", shape![.., a], DTypeRule::ANY, ""),
            ArgSpec::output("out", shape![b], DTypeRule::ANY, "").in_place_of(0),
        ],
        ..OpSpec::EMPTY
    };
    let op = crate::ops::find("activation").unwrap();
    let same = |(one, other): (&ArgSpec, &ArgSpec)| one.role == other.role;
    assert!(op.spec().args.iter().zip(LIES.args).all(same), "otherwise this tests nothing");
    let (x, mut short) = (random(&[64, 64], 0), vec![7f32; 3]);
    let attrs = Attrs::defaults(op.spec());
    for _ in 0..2 {
        let out = crate::tensor::TensorViewMut::from_slice(&mut short, &[3]).unwrap();
        let mut args = Args::new(&LIES).input(0, x.view()).output(1, out);
        for error in [
            op.check(&args, &attrs).unwrap_err(),
            op.prepare(&args, &attrs, &Select::default()).unwrap_err(),
            op.run(&mut args, &attrs, &Stream::Host, &Select::default()).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::Argument { arg, .. } if arg == "out"), "{error}");
        }
        let forms = op.outputs(&args, &attrs, &[]).unwrap();
        assert_eq!(forms[1], Some((vec![64, 64], DType::F32)));
    }
    assert_eq!(short, [7.0; 3]);
    // Required arguments are the op's own too.
    static OPTIONAL: OpSpec = OpSpec {
        name: "activation",
        args: &[
            ArgSpec::input("x", shape![.., a], DTypeRule::ANY, "").optional(),
            ArgSpec::output("out", shape![.., a], DTypeRule::ANY, "").in_place_of(0),
        ],
        ..OpSpec::EMPTY
    };
    let mut out = random(&[4], 0);
    let mut args = Args::new(&OPTIONAL).output(1, out.view_mut());
    let error = op.run(&mut args, &attrs, &Stream::Host, &Select::default()).unwrap_err();
    assert!(matches!(&error, Error::Argument { arg, .. } if arg == "x"), "{error}");
}

#[test]
fn a_workspace_of_the_callers_is_used_if_it_fits() {
    let op = crate::ops::find("rms_norm_backward").unwrap();
    let spec = op.spec();
    let at = |name: &str| spec.args.iter().position(|arg| arg.name == name).unwrap();
    let (x, weight, dout) = (random(&[70, 48], 0), random(&[48], 1), random(&[70, 48], 2));
    let run = |workspace: Option<usize>| {
        let [mut dx, mut dweight] = [&[70, 48][..], &[48]].map(|shape| random(shape, 3));
        let mut args = Args::new(spec).input(at("x"), x.view()).input(at("weight"), weight.view());
        args = args.input(at("dout"), dout.view()).output(at("dx"), dx.view_mut());
        args = args.output(at("dweight"), dweight.view_mut());
        let plan = op.prepare(&args, &Attrs::defaults(spec), &Select::default()).unwrap();
        assert!(plan.workspace_bytes() > 0, "sums over rows are kept in the workspace");
        let result = match workspace {
            None => plan.run(&mut args, &Stream::Host),
            Some(less) => {
                let bytes = plan.workspace_bytes() - less;
                let mut workspace = Tensor::zeros(&[bytes], DType::U8, Device::Cpu).unwrap();
                plan.run_with_workspace(&mut args, &mut workspace, &Stream::Host)
            }
        };
        result.map(|()| dweight.to_vec::<f32>().unwrap())
    };
    assert_eq!(run(Some(0)).unwrap(), run(None).unwrap());
    let error = run(Some(1)).unwrap_err().to_string();
    assert!(error.contains("argument `workspace`"), "{error}");
}
