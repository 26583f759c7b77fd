//! Calls that no op may accept, made from the valid calls of every op: each must give a typed error that names the
//! op and the argument, leave all memory alone, and never panic. `WARPSMITH_TEST_OP=name` asks one op alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use warpsmith::device::{Device, Stream};
use warpsmith::lab::AnyProvable;
use warpsmith::lab::{Arrangement, Case, Values};
use warpsmith::op::{Args, AttrKind, Attrs, Role, Select, Value};
use warpsmith::ops;
use warpsmith::tensor::{Layout, Shape};
use warpsmith::{DType, Error, Result, Tensor, TensorView, TensorViewMut};

/// Changed calls that some op defines after all: op, argument, change. Each is tested to be accepted.
const DEFINED: &[(&str, &str, &str)] = &[
    // One weight for the whole batch.
    ("linear", "w", "without its first dimension"),
    // Rows of any length.
    ("argmax", "x", "with dimension 1 larger by 1"),
    ("penalize", "logits", "with dimension 1 larger by 1"),
    // One head of queries more.
    ("qkv_store", "qkv", "with dimension 1 larger by 1"),
    // Tokens behind the last sequence, and pages of any size.
    ("prefix_match", "tokens", "with dimension 0 larger by 1"),
    ("prefix_match", "edge_tokens", "with dimension 1 larger by 1"),
    // A table of any number of rows.
    ("embedding", "weight", "with dimension 0 larger by 1"),
    // As many pairs as there are, and a cache of any size.
    ("kv_copy", "pairs", "with dimension 0 larger by 1"),
    ("kv_copy", "cache", "with a leading dimension more"),
    ("kv_copy", "cache", "without its first dimension"),
    ("kv_copy", "cache", "with dimension 0 larger by 1"),
    ("kv_copy", "cache", "with dimension 1 larger by 1"),
    ("kv_copy", "cache", "with dimension 2 larger by 1"),
    ("kv_copy", "cache", "with dimension 3 larger by 1"),
    ("kv_copy", "cache", "with dimension 4 larger by 1"),
    // A vocabulary of any size.
    ("cross_entropy", "logits", "with dimension 1 larger by 1"),
    // Pages that no request uses yet.
    ("paged_attention", "page_table", "with dimension 1 larger by 1"),
    // Any number of experts for a token.
    ("moe_losses", "ids", "with dimension 1 larger by 1"),
];

/// Changed calls that are defined unless an optional argument is given: op, argument, change, and the optional argument.
const DEFINED_WITHOUT: &[(&str, &str, &str, &[&str])] = &[
    ("sample", "logits", "with dimension 1 larger by 1", &["raw"]),
    ("linear_cross_entropy", "w", "with dimension 0 larger by 1", &["dw"]),
    // Any number of experts.
    ("moe_route", "logits", "with dimension 1 larger by 1", &["bias", "counts", "dropped"]),
    ("moe_losses", "logits", "with dimension 1 larger by 1", &["load", "probability"]),
];

/// The same where another argument is given: rows that an index names are of any number.
const DEFINED_WITH: &[(&str, &str, &str, &str)] =
    &[("grouped_linear", "x", "with dimension 0 larger by 1", "index")];

/// A tensor argument without memory yet.
#[derive(Clone)]
struct Arg {
    layout: Layout,
    dtype: DType,
    device: Device,
    /// Bytes by which the address misses an aligned one.
    skew: usize,
    /// Lies this many bytes after the start of that argument instead of in memory of its own.
    inside: Option<(usize, usize)>,
}

/// A call that can be changed before it is made.
#[derive(Clone)]
struct Call {
    op: &'static dyn AnyProvable,
    args: Vec<Option<Arg>>,
    attrs: Attrs,
    select: Select,
}

/// How a call ended.
struct Ending {
    result: Result<Option<&'static str>>,
    memory_changed: bool,
}

const GUARD: usize = 128;
const ALIGNMENT: usize = 64;
/// Makes small positive numbers of the float types.
const BYTE: u8 = 0x3c;

fn contiguous(shape: &[usize]) -> Layout {
    Layout::contiguous(Shape::new(shape).unwrap())
}

impl Call {
    fn of(op: &'static dyn AnyProvable, case: &Case) -> Call {
        let arg = |plan: warpsmith::lab::ArgPlan| Arg {
            layout: contiguous(&plan.shape),
            dtype: plan.dtype,
            device: Device::Cpu,
            skew: 0,
            inside: None,
        };
        let args = op.plan(case).into_iter().map(|plan| plan.map(arg)).collect();
        Call { op, args, attrs: case.attrs, select: Select::default() }
    }

    fn given(&self) -> Vec<usize> {
        (0..self.args.len()).filter(|&i| self.args[i].is_some()).collect()
    }

    fn arg(&self, index: usize) -> &Arg {
        self.args[index].as_ref().expect("a given argument")
    }

    fn name(&self, index: usize) -> &'static str {
        self.op.spec().args[index].name
    }

    fn outputs(&self) -> Vec<usize> {
        self.given().into_iter().filter(|&i| self.op.spec().args[i].is_output()).collect()
    }

    /// This call with argument `index` changed.
    fn with(&self, index: usize, change: impl FnOnce(&mut Arg)) -> Call {
        let mut call = self.clone();
        change(call.args[index].as_mut().expect("a given argument"));
        call
    }

    fn reshaped(&self, index: usize, shape: &[usize]) -> Call {
        self.with(index, |arg| arg.layout = contiguous(shape))
    }

    /// Makes the call on `stream`, with memory enough for whatever the layouts say.
    fn make_on(&self, stream: &Stream) -> std::thread::Result<Ending> {
        let bytes = |arg: &Arg| arg.layout.span() * arg.dtype.size();
        let mut starts = vec![0; self.args.len()];
        let mut end = 0;
        for index in self.given() {
            starts[index] = end + GUARD;
            end = (starts[index] + bytes(self.arg(index)) + 2 * GUARD).next_multiple_of(ALIGNMENT);
        }
        // Shared arguments may reach past their host's end.
        let room = self.given().into_iter().map(|i| bytes(self.arg(i))).sum::<usize>();
        let mut memory = vec![BYTE; end + room + 2 * ALIGNMENT];
        let base = (memory.as_mut_ptr() as usize).next_multiple_of(ALIGNMENT);
        let shift = base - memory.as_ptr() as usize;
        // Whole numbers are positions or indices: zero is always a valid one.
        for index in self.given().into_iter().filter(|&i| !self.arg(i).dtype.is_float()) {
            memory[shift + starts[index]..][..bytes(self.arg(index))].fill(0);
        }
        let before = memory.clone();
        let mut args = Args::new(self.op.spec());
        for index in self.given() {
            let arg = self.arg(index);
            let start = arg.inside.map_or(starts[index], |(host, offset)| starts[host] + offset);
            let address = base + start + arg.skew;
            // SAFETY: the memory holds the layout's span from there and outlives the call; it is looked at only
            // after it. Views that claim another device must be refused before anything is read.
            args = unsafe {
                match self.op.spec().args[index].is_output() {
                    true => args
                        .output(index, TensorViewMut::from_raw(address, arg.dtype, arg.layout, arg.device)),
                    false => {
                        args.input(index, TensorView::from_raw(address, arg.dtype, arg.layout, arg.device))
                    }
                }
            };
        }
        let result =
            catch_unwind(AssertUnwindSafe(|| self.op.run(&mut args, &self.attrs, stream, &self.select)));
        let memory_changed = *std::hint::black_box(&memory) != before;
        result.map(|result| Ending { result, memory_changed })
    }

    fn make(&self) -> std::thread::Result<Ending> {
        self.make_on(&Stream::Host)
    }
}

/// What was asked, and what went wrong with it.
#[derive(Default)]
struct Report {
    calls: usize,
    failures: Vec<String>,
}

impl Report {
    /// The call must fail with [`Error::Argument`] of its op, on `arg` if one is named, without a write.
    fn refuses(&mut self, call: &Call, what: &str, arg: Option<&str>, on: &Stream) {
        self.calls += 1;
        let spec = call.op.spec();
        let complaint = match call.make_on(on) {
            Err(_) => Some("panics".into()),
            Ok(Ending { result: Ok(_), .. }) => Some("is accepted".into()),
            Ok(Ending { memory_changed: true, .. }) => Some("fails after it has written".into()),
            Ok(Ending { result: Err(Error::Argument { op, arg: named, expected, got }), .. }) => {
                let known = spec.args.iter().map(|a| a.name).chain(spec.attrs.iter().map(|a| a.name));
                let fits = match arg {
                    Some(arg) => arg == named,
                    None => known.chain(["stream"]).any(|name| name == named),
                };
                let says = op == spec.name && fits && !expected.is_empty() && !got.is_empty();
                (!says).then(|| format!("blames {op}: `{named}`: expected {expected}, got {got}"))
            }
            Ok(Ending { result: Err(other), .. }) => Some(format!("gives another error: {other}")),
        };
        self.note(spec.name, what, complaint);
    }

    /// The call must work.
    fn accepts(&mut self, call: &Call, what: &str) {
        self.calls += 1;
        let complaint = match call.make() {
            Err(_) => Some("panics".into()),
            Ok(Ending { result: Err(error), .. }) => Some(format!("is refused: {error}")),
            Ok(_) => None,
        };
        self.note(call.op.spec().name, what, complaint);
    }

    /// The call may be defined or not, but if it is not, the error says why.
    fn survives(&mut self, call: &Call, what: &str) {
        match call.make() {
            Ok(Ending { result: Ok(_), .. }) => self.calls += 1,
            _ => self.refuses(call, what, None, &Stream::Host),
        }
    }

    /// As [`Report::refuses`], unless [`DEFINED`] lists it: then it must work.
    fn judges(&mut self, call: &Call, index: usize, what: &str) {
        let id = (call.op.spec().name, call.name(index), what);
        let given = |name: &str| call.given().into_iter().any(|index| call.name(index) == name);
        let without = DEFINED_WITHOUT.iter().any(|&(op, arg, what, others)| {
            (op, arg, what) == id && !others.iter().any(|other| given(other))
        });
        let with = DEFINED_WITH.iter().any(|&(op, arg, what, other)| (op, arg, what) == id && given(other));
        if without || with || DEFINED.contains(&id) {
            return self.accepts(call, &format!("`{}` {what}", id.1));
        }
        self.refuses(call, &format!("`{}` {what}", id.1), None, &Stream::Host);
    }

    fn note(&mut self, op: &str, what: &str, complaint: Option<String>) {
        self.failures.extend(complaint.map(|complaint| format!("{op}: {what}: {complaint}")));
    }

    fn finish(self) {
        assert!(self.calls > 0, "nothing was called");
        assert!(self.failures.is_empty(), "{} failures:\n{}", self.failures.len(), self.failures.join("\n"));
    }
}

/// Valid calls of an op to start from: plain ones, as small as can be with sizes above one (or of zero, where no tensor
/// has that size), one for each set of optional arguments.
fn bases(op: &'static dyn AnyProvable) -> Vec<Call> {
    let plain = |case: &Case| {
        case.arrangement == Arrangement::Contiguous
            && case.values == Values::Typical
            && !case.in_place
            && case.sizes.iter().all(|&size| size != 1)
            && op.plan(case).iter().flatten().all(|arg| !arg.shape.contains(&0))
    };
    let mut cases: Vec<Case> = op.cases().into_iter().filter(plain).collect();
    cases.sort_by_key(|case| case.sizes.iter().map(|&size| size.max(1)).product::<usize>());
    let mut seen = Vec::new();
    cases.retain(|case| !seen.contains(&case.optional) && (seen.push(case.optional), true).1);
    assert!(!cases.is_empty(), "{} has no plain case", op.spec().name);
    cases.iter().map(|case| Call::of(op, case)).collect()
}

fn for_all(test: impl Fn(&Call, &mut Report)) {
    let mut report = Report::default();
    let wanted = std::env::var("WARPSMITH_TEST_OP").ok();
    for op in ops::PROVABLE.iter().filter(|op| wanted.as_ref().is_none_or(|name| name == op.spec().name)) {
        for base in bases(*op) {
            report.accepts(&base, "a valid call");
            test(&base, &mut report);
        }
    }
    report.finish();
}

#[test]
fn wrong_ranks_and_sizes() {
    for_all(|base, report| {
        for index in base.given() {
            let shape = base.arg(index).layout.shape().to_vec();
            let with_leading = [&[2], &shape[..]].concat();
            report.judges(&base.reshaped(index, &with_leading), index, "with a leading dimension more");
            if shape.len() > 1 {
                report.judges(&base.reshaped(index, &shape[1..]), index, "without its first dimension");
            }
            if !shape.is_empty() {
                report.judges(&base.reshaped(index, &[]), index, "of rank 0");
            }
            for dim in 0..shape.len() {
                let mut larger = shape.clone();
                larger[dim] += 1;
                report.judges(
                    &base.reshaped(index, &larger),
                    index,
                    &format!("with dimension {dim} larger by 1"),
                );
            }
        }
    });
}

#[test]
fn all_of_rank_zero_or_eight() {
    for_all(|base, report| {
        for shape in [&[][..], &[1; 8], &[2, 1, 2, 1, 2, 1, 1, 2]] {
            let mut call = base.clone();
            for arg in call.args.iter_mut().flatten() {
                arg.layout = contiguous(shape);
            }
            report.survives(&call, &format!("all arguments of shape {shape:?}"));
        }
    });
}

#[test]
fn unsupported_types() {
    for_all(|base, report| {
        let planned: Vec<_> = base.op.cases().iter().map(|case| base.op.plan(case)).collect();
        for index in base.given() {
            for dtype in DType::ALL {
                // A type that some case gives this argument may go with the other arguments.
                let used = planned.iter().any(|plan| plan[index].as_ref().is_some_and(|p| p.dtype == dtype));
                if !used {
                    let call = base.with(index, |arg| arg.dtype = dtype);
                    report.judges(&call, index, &format!("of type {dtype}"));
                }
            }
        }
    });
}

#[test]
fn missing_arguments() {
    for_all(|base, report| {
        for index in base.given() {
            let mut call = base.clone();
            call.args[index] = None;
            let what = format!("without `{}`", base.name(index));
            match base.op.spec().args[index].optional {
                false => report.refuses(&call, &what, Some(base.name(index)), &Stream::Host),
                true => report.survives(&call, &what),
            }
        }
    });
}

#[test]
fn overlapping_outputs() {
    for_all(|base, report| {
        for output in base.outputs() {
            let name = base.name(output);
            let size = base.arg(output).dtype.size();
            for other in base.given().into_iter().filter(|&other| other != output) {
                let other_bytes = base.arg(other).layout.span() * base.arg(other).dtype.size();
                let what = |how: &str| format!("`{name}` {how} `{}`", base.name(other));
                if other_bytes > size {
                    let call = base.with(output, |arg| arg.inside = Some((other, size)));
                    // Of two outputs either may be blamed, and this one may reach past its host onto another.
                    let own_bytes = base.arg(output).layout.span() * size;
                    let alone = base.outputs().len() == 1 || size + own_bytes <= other_bytes;
                    let blamed = (alone && !base.outputs().contains(&other)).then_some(name);
                    report.refuses(&call, &what("one element into"), blamed, &Stream::Host);
                }
                let onto = base.with(output, |arg| arg.inside = Some((other, 0)));
                let same = (base.arg(output).layout, base.arg(output).dtype)
                    == (base.arg(other).layout, base.arg(other).dtype);
                match base.op.spec().args[output].role {
                    Role::Out { in_place_of: Some(input) } if input == other && same => {
                        report.accepts(&onto, &what("in place of"));
                    }
                    _ => report.refuses(&onto, &what("in the memory of"), None, &Stream::Host),
                }
            }
            let layout = base.arg(output).layout;
            for dim in (0..layout.rank()).filter(|&dim| layout.shape()[dim] > 1) {
                let mut strides = layout.strides().to_vec();
                strides[dim] = 0;
                let call = base.with(output, |arg| {
                    arg.layout = Layout::strided(*layout.shape(), &strides).unwrap();
                });
                let what = format!("`{name}` with stride 0 in dimension {dim}");
                report.refuses(&call, &what, Some(name), &Stream::Host);
            }
        }
    });
}

#[test]
fn repeated_inputs_are_fine() {
    for_all(|base, report| {
        for index in base.given().into_iter().filter(|i| !base.outputs().contains(i)) {
            let call = base.with(index, |arg| {
                let strides = vec![0; arg.layout.rank()];
                arg.layout = Layout::strided(*arg.layout.shape(), &strides).unwrap();
            });
            report.accepts(&call, &format!("`{}` with all strides 0", base.name(index)));
        }
    });
}

#[test]
fn misaligned_addresses() {
    for_all(|base, report| {
        for index in base.given().into_iter().filter(|&index| base.arg(index).dtype.size() > 1) {
            let call = base.with(index, |arg| arg.skew = 1);
            let what = format!("`{}` at an odd address", base.name(index));
            report.refuses(&call, &what, Some(base.name(index)), &Stream::Host);
        }
    });
}

#[test]
fn empty_tensors() {
    let mut report = Report::default();
    for op in ops::PROVABLE {
        // With the fewest optional arguments: their sizes may depend on the first.
        let cases = op.cases().into_iter().filter(|case| case.sizes.iter().all(|&size| size > 0));
        let Some(case) = cases.min_by_key(|case| case.optional.count_ones()) else {
            panic!("{} has no case that is not empty", op.spec().name)
        };
        for (index, size) in op.spec().sizes.iter().enumerate() {
            let mut empty = case.clone();
            empty.sizes[index] = 0;
            let call = Call::of(*op, &empty);
            let what = format!("with {}=0", size.name);
            // Nothing to do is always defined in the first size: the number of rows, tokens or elements.
            match index {
                0 => report.accepts(&call, &what),
                _ => report.survives(&call, &what),
            }
        }
    }
    report.finish();
}

#[test]
fn other_devices() {
    let elsewhere = Device::Cuda(0);
    for_all(|base, report| {
        if base.given().len() > 1 {
            for index in base.given() {
                let call = base.with(index, |arg| arg.device = elsewhere);
                let what = format!("`{}` on another device", base.name(index));
                report.refuses(&call, &what, None, &Stream::Host);
            }
        }
        let mut call = base.clone();
        call.args.iter_mut().flatten().for_each(|arg| arg.device = elsewhere);
        report.refuses(&call, "tensors on another device than the stream", Some("stream"), &Stream::Host);
    });
}

#[test]
fn options_at_their_limits() {
    for_all(|base, report| {
        for (index, attr) in base.op.spec().attrs.iter().enumerate() {
            let with = |value: Value| Call { attrs: base.attrs.with(index, value), ..base.clone() };
            let what = |value: Value| format!("{}={value}", attr.name);
            match attr.kind {
                AttrKind::Float(_) | AttrKind::OptionalFloat => {
                    report.refuses(&with(Value::Float(f64::NAN)), "NaN", Some(attr.name), &Stream::Host);
                    for value in [f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, 5e-324, -0.0] {
                        report.survives(&with(Value::Float(value)), &what(Value::Float(value)));
                    }
                }
                AttrKind::Int(_) => {
                    for value in [i64::MIN, -1, 0, 1, 3, i64::from(u32::MAX), 1 << 32, i64::MAX] {
                        report.survives(&with(Value::Int(value)), &what(Value::Int(value)));
                    }
                }
                AttrKind::Bool(_) => {
                    for value in [false, true] {
                        report.survives(&with(Value::Bool(value)), &what(Value::Bool(value)));
                    }
                }
                AttrKind::Choice(names) => {
                    for at in 0..names.len() as u8 {
                        report.survives(&with(Value::Choice(at)), &what(Value::Choice(at)));
                    }
                    for at in [names.len() as u8, u8::MAX] {
                        let value = Value::Choice(at);
                        report.refuses(&with(value), &what(value), Some(attr.name), &Stream::Host);
                        assert!(base.attrs.clone().set(base.op.spec(), index, value).is_err());
                    }
                }
            }
        }
    });
}

/// As the options of another op may be.
#[test]
fn options_of_another_kind() {
    let values = [Value::Float(0.0), Value::Int(0), Value::Bool(false), Value::Choice(0)];
    for_all(|base, report| {
        let spec = base.op.spec();
        for (index, attr) in spec.attrs.iter().enumerate() {
            let own = match attr.kind {
                AttrKind::OptionalFloat => Value::Float(0.0),
                kind => kind.default_value(),
            };
            let other = |value: &Value| std::mem::discriminant(value) != std::mem::discriminant(&own);
            for value in values.into_iter().filter(other) {
                let mut call = base.clone();
                call.attrs = call.attrs.with(index, value);
                let what = format!("{}={value:?}", attr.name);
                report.refuses(&call, &what, Some(attr.name), &Stream::Host);
                assert!(
                    call.op.outputs(&Args::new(spec), &call.attrs, &[]).is_err(),
                    "{}: {what}",
                    spec.name
                );
                assert!(base.attrs.clone().set_named(spec, attr.name, value).is_err());
            }
        }
    });
}

#[test]
fn unknown_and_foreign_kernels() {
    for op in ops::PROVABLE {
        let base = &bases(*op)[0];
        let named = |name: &'static str| {
            let mut call = base.clone();
            call.select.kernel = Some(name.into());
            call.make().expect("no panic")
        };
        let ending = named("no_such_kernel");
        let Err(Error::UnknownKernel { op: blamed, kernel, known }) = ending.result else {
            panic!("{}: {:?}", op.spec().name, ending.result)
        };
        assert_eq!((blamed, kernel.as_str()), (op.spec().name, "no_such_kernel"));
        assert_eq!(known, op.kernels().iter().map(|k| k.name).collect::<Vec<_>>());
        for kernel in op.kernels().iter().filter(|kernel| kernel.is_cuda()) {
            let ending = named(kernel.name);
            assert!(!ending.memory_changed);
            let Err(Error::Unsupported { refusals, .. }) = ending.result else {
                panic!("{} on the CPU: {:?}", kernel.name, ending.result)
            };
            assert!(refusals.len() == 1 && refusals[0].1.contains("CUDA"), "{refusals:?}");
        }
    }
}

#[test]
fn tensors_that_cannot_be() {
    let cpu = Device::Cpu;
    assert!(matches!(Tensor::zeros(&[usize::MAX, 2], DType::F32, cpu), Err(Error::Parse { .. })));
    assert!(matches!(Tensor::zeros(&[1; 9], DType::F32, cpu), Err(Error::Parse { .. })));
    let Err(Error::OutOfMemory { free, total, .. }) = Tensor::zeros(&[1 << 58], DType::F32, cpu) else {
        panic!("more than any machine has")
    };
    assert!(0 < free && free < total, "{free} of {total}");
    assert!(matches!(Tensor::randn(&[1 << 58], DType::F32, cpu, 0), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Tensor::from_bytes(&[0; 7], &[2], DType::F32, cpu), Err(Error::Parse { .. })));
    assert!(matches!(Tensor::from_f64(&[0.0; 3], &[2], DType::F32, cpu), Err(Error::Parse { .. })));
    assert!(matches!(TensorView::from_slice(&[0f32; 3], &[2, 2]), Err(Error::Parse { .. })));
    let x = Tensor::zeros(&[2, 3], DType::F32, cpu).unwrap();
    assert!(matches!(x.to_vec::<i32>(), Err(Error::Parse { .. })));
    assert!(x.view().narrow(0, 1, 2).is_none() && x.view().narrow(2, 0, 1).is_none());
    assert!(x.view().narrow(0, 1, usize::MAX).is_none());
    assert!(x.view().reshape(&[4]).is_none() && x.view().reshape(&[usize::MAX, 4]).is_none());
    let shape = Shape::new(&[2, 3]).unwrap();
    assert!(Layout::strided(shape, &[1]).is_err() && Layout::strided(shape, &[isize::MAX, 1]).is_err());
}
