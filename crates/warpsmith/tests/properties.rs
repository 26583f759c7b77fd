//! Properties of tensors, shape checks, element types and selection, each against a naive model on random input.

use proptest::prelude::*;
use proptest::sample::select;
use std::collections::{BTreeSet, HashMap};
use warpsmith::cpu::Tier;
use warpsmith::device::{Device, DeviceInfo, Stream};
use warpsmith::jit::Arch;
use warpsmith::lab::proof::{Expectation, Prepared, compare};
use warpsmith::lab::{Arrangement, Array, Case, Values};
use warpsmith::op::{Args, Attrs, Dim, Dims, Leading, Matcher, OpSpec, Select, ShapeSpec};
use warpsmith::ops;
use warpsmith::tensor::{Layout, MAX_RANK, Shape, Space};
use warpsmith::{DType, Error, Tensor, TensorView, TensorViewMut};

// ---- the naive model: a tensor is the list of its elements' offsets in row-major order ----

fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let Some((&first, rest)) = shape.split_first() else { return vec![vec![]] };
    let tails = indices(rest);
    (0..first).flat_map(|i| tails.iter().map(move |tail| [&[i], &tail[..]].concat())).collect()
}

fn offset(index: &[usize], strides: &[isize]) -> usize {
    index.iter().zip(strides).map(|(&i, &s)| i * s as usize).sum()
}

fn offsets(layout: &Layout) -> Vec<usize> {
    indices(layout.shape()).iter().map(|index| offset(index, layout.strides())).collect()
}

fn listed(layout: &Layout) -> Vec<usize> {
    (0..layout.numel()).map(|i| layout.offset_of(i)).collect()
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0usize), 2 => Just(1), 8 => 2..5usize], 0..5)
}

fn any_layout() -> impl Strategy<Value = Layout> {
    shapes().prop_flat_map(layout_of)
}

/// Any strides: with gaps, repeating, interleaving.
fn layout_of(shape: Vec<usize>) -> impl Strategy<Value = Layout> {
    let strides = prop::collection::vec(prop_oneof![1 => Just(0isize), 6 => 1..40isize], shape.len());
    let free = strides
        .prop_map({
            let shape = shape.clone();
            move |strides| Layout::strided(Shape::new(&shape).unwrap(), &strides).unwrap()
        })
        .boxed();
    prop_oneof![free, nested_layout_of(shape)]
}

/// Distinct elements: dimensions in any order in memory, with gaps after each.
fn nested_layout_of(shape: Vec<usize>) -> impl Strategy<Value = Layout> {
    let rank = shape.len();
    let order = Just((0..rank).collect::<Vec<_>>()).prop_shuffle();
    (order, prop::collection::vec(0..3usize, rank)).prop_map(move |(order, gaps)| {
        let mut strides = vec![0; rank];
        let mut next = 1;
        for &dim in &order {
            strides[dim] = next as isize;
            next *= shape[dim].max(1) + gaps[dim];
        }
        Layout::strided(Shape::new(&shape).unwrap(), &strides).unwrap()
    })
}

proptest! {
    #[test]
    fn layouts_are_lists_of_offsets(layout in any_layout()) {
        let model = offsets(&layout);
        prop_assert_eq!(&listed(&layout), &model);
        prop_assert_eq!(layout.numel(), model.len());
        prop_assert_eq!(layout.span(), model.iter().max().map_or(0, |last| last + 1));
        prop_assert_eq!(layout.is_contiguous(), model.iter().copied().eq(0..model.len()));
        let distinct = model.iter().collect::<BTreeSet<_>>().len() == model.len();
        prop_assert!(distinct || layout.overlaps_itself(), "{layout:?} repeats an element");
    }

    #[test]
    fn properly_nested_layouts_do_not_overlap(layout in shapes().prop_flat_map(nested_layout_of)) {
        prop_assert!(!layout.overlaps_itself(), "{layout:?}");
    }

    #[test]
    fn narrowing_keeps_the_elements_of_a_range(
        layout in any_layout(), dim in 0..5usize, start in 0..5usize, len in 0..5usize,
    ) {
        let fits = dim < layout.rank() && start + len <= layout.shape()[dim];
        let narrowed = layout.narrow(dim, start, len);
        prop_assert_eq!(narrowed.is_some(), fits);
        if let Some((part, at)) = narrowed {
            let inside = |index: &&Vec<usize>| (start..start + len).contains(&index[dim]);
            let all = indices(layout.shape());
            let model: Vec<_> = all.iter().filter(inside).map(|i| offset(i, layout.strides())).collect();
            prop_assert_eq!(listed(&part).iter().map(|o| o + at).collect::<Vec<_>>(), model);
            prop_assert!(at + part.span() <= layout.span(), "the part lies inside");
            prop_assert_eq!(part, Layout::strided(*part.shape(), part.strides()).unwrap(), "canonical");
        }
    }

    #[test]
    fn halves_share_no_element_and_miss_none(layout in any_layout(), dim in 0..5usize, at in 0..6usize) {
        let mut memory = vec![0u8; layout.span()];
        let base = memory.as_mut_ptr() as usize;
        // SAFETY: the memory holds the layout, lives to the end, and is used through this view alone.
        let whole = unsafe { TensorViewMut::from_raw(base, DType::U8, layout, Device::Cpu) };
        let fits = dim < layout.rank() && at <= layout.shape()[dim];
        let halves = whole.split_at(dim, at);
        prop_assert_eq!(halves.is_some(), fits && !layout.overlaps_itself());
        if let Some((low, high)) = halves {
            prop_assert_eq!([low.shape()[dim], high.shape()[dim]], [at, layout.shape()[dim] - at]);
            let of = |half: TensorView<'_>| -> BTreeSet<usize> {
                listed(half.layout()).into_iter().map(|o| o + half.address() - base).collect()
            };
            let (low, high) = (of(low.as_view()), of(high.as_view()));
            prop_assert!(low.is_disjoint(&high));
            prop_assert_eq!(low.union(&high).copied().collect::<BTreeSet<_>>(), offsets(&layout).into_iter().collect());
        }
    }

    #[test]
    fn permuting_reorders_indices(
        (layout, order) in any_layout().prop_flat_map(|layout| {
            (Just(layout), Just((0..layout.rank()).collect::<Vec<_>>()).prop_shuffle())
        }),
    ) {
        let permuted = layout.permute(&order);
        let source = |index: &Vec<usize>| {
            let mut original = vec![0; index.len()];
            order.iter().zip(index).for_each(|(&from, &i)| original[from] = i);
            offset(&original, layout.strides())
        };
        let model: Vec<_> = indices(permuted.shape()).iter().map(source).collect();
        prop_assert_eq!(listed(&permuted), model);
        prop_assert_eq!(permuted, Layout::strided(*permuted.shape(), permuted.strides()).unwrap(), "canonical");
        // An order with a dimension too many, twice or that does not exist is refused.
        for wrong in [[&order[..], &[0]].concat(), vec![0; 2.max(order.len())], vec![order.len(); order.len()]] {
            prop_assert!(wrong.is_empty() || layout.permuted(&wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn reshaping_needs_contiguous_elements_of_equal_number(layout in any_layout(), shape in shapes()) {
        let possible = layout.is_contiguous() && shape.iter().product::<usize>() == layout.numel();
        let reshaped = layout.reshape(Shape::new(&shape).unwrap());
        prop_assert_eq!(reshaped.is_some(), possible);
        if let Some(reshaped) = reshaped {
            prop_assert_eq!(listed(&reshaped), listed(&layout));
        }
    }

    #[test]
    fn joint_spaces_visit_what_each_layout_does(
        (a, b, c, dims) in shapes().prop_flat_map(|shape| {
            let rank = shape.len();
            (layout_of(shape.clone()), layout_of(shape.clone()), layout_of(shape), 0..=rank)
        }),
    ) {
        let space = Space::new(dims, [&a, &b, &c]);
        let points = indices(&a.shape()[..dims]);
        prop_assert_eq!(space.len(), points.len());
        prop_assert_eq!(space.is_empty(), points.is_empty());
        prop_assert!(space.rank >= 1 && space.rank <= dims.max(1));
        for (i, point) in points.iter().enumerate() {
            prop_assert_eq!(space.offsets(i), [&a, &b, &c].map(|l| offset(point, &l.strides()[..dims])));
        }
        if !points.is_empty() {
            let dense = (0..points.len()).all(|i| space.offsets(i) == [i; 3]);
            prop_assert_eq!(space.is_contiguous(), dense);
        }
    }

    #[test]
    fn shapes_are_refused_exactly_when_they_cannot_be_addressed(
        dims in prop::collection::vec(prop_oneof![0..9usize, any::<usize>(), (0..64u32).prop_map(|p| 1 << p)], 0..10),
    ) {
        let limit = isize::MAX as u128 / 8;
        let product = dims.iter().filter(|&&d| d > 0).try_fold(1u128, |n, &d| {
            n.checked_mul(d as u128).filter(|n| *n <= limit)
        });
        prop_assert_eq!(Shape::new(&dims).is_ok(), dims.len() <= MAX_RANK && product.is_some());
    }

    #[test]
    fn strided_layouts_can_be_addressed(
        (shape, strides) in shapes().prop_flat_map(|s| {
            let rank = s.len();
            (Just(s), prop::collection::vec(any::<isize>(), rank))
        }),
    ) {
        // No panic, and what is accepted has a span that fits.
        if let Ok(layout) = Layout::strided(Shape::new(&shape).unwrap(), &strides) {
            prop_assert!(layout.span() as u128 * 8 <= isize::MAX as u128 + 8);
        }
    }
}

// ---- shape checks ----

const PATTERNS: [&str; 7] = ["a", "b a", "... a", "... a b", "a 2", "... 3", "..."];

/// What a pattern says, by hand: sizes by name, and the leading dimensions under `...`.
fn unify(known: &mut HashMap<String, Vec<usize>>, pattern: &str, shape: &[usize]) -> bool {
    let names: Vec<&str> = pattern.split(' ').filter(|name| *name != "...").collect();
    let leads = pattern.starts_with("...");
    if shape.len() < names.len() || (!leads && shape.len() > names.len()) {
        return false;
    }
    let lead = shape.len() - names.len();
    let mut facts: Vec<(String, Vec<usize>)> =
        names.iter().zip(&shape[lead..]).map(|(name, &size)| (name.to_string(), vec![size])).collect();
    if leads {
        facts.push(("...".into(), shape[..lead].to_vec()));
    }
    let agrees = |(name, value): &(String, Vec<usize>)| match name.parse::<usize>() {
        Ok(number) => *value == [number],
        Err(_) => known.get(name).is_none_or(|old| old == value),
    };
    if !facts.iter().all(agrees) {
        return false;
    }
    known.extend(facts);
    true
}

static NOTHING: OpSpec = OpSpec { name: "op", ..OpSpec::EMPTY };

/// The pattern as an op's description has it.
fn described(pattern: &'static str) -> ShapeSpec {
    let dim = |name: &'static str| match name.parse() {
        Ok(number) => Dim::Number(number),
        Err(_) => Dim::Named { name, times: 1, over: 1, plus: 0 },
    };
    let dims: Vec<Dim> = pattern.split_whitespace().filter(|name| *name != "...").map(dim).collect();
    let leading = if pattern.starts_with("...") { Leading::Rows } else { Leading::None };
    ShapeSpec::any(vec![Dims { leading, dims: dims.leak() }].leak())
}

proptest! {
    #[test]
    fn patterns_unify_like_the_naive_model(
        calls in prop::collection::vec((select(&PATTERNS[..]), prop::collection::vec(1..4usize, 0..4)), 1..6),
    ) {
        let (args, attrs) = (Args::new(&NOTHING), Attrs::defaults(&NOTHING));
        let mut matcher = Matcher::new(&args, &attrs);
        let mut known = HashMap::new();
        for (pattern, shape) in calls {
            let result = matcher.shape("x", &described(pattern), &shape);
            prop_assert_eq!(result.is_ok(), unify(&mut known, pattern, &shape), "{} {:?}", pattern, shape);
            if let Err(error) = result {
                let says = matches!(&error, Error::Argument { op: "op", arg, got, .. }
                    if arg == "x" && *got == format!("{shape:?}"));
                prop_assert!(says, "{error}");
            }
            for name in ["a", "b"] {
                prop_assert_eq!(matcher.get(name), known.get(name).map(|size| size[0]));
            }
            let leading = known.get("...").cloned().unwrap_or_default();
            prop_assert_eq!(matcher.leading_rank(), leading.len());
            prop_assert_eq!(matcher.leading_count(), leading.iter().product::<usize>());
        }
    }
}

// ---- element types ----

/// All finite values of a type of at most two bytes, ascending, with the parity of the last bit.
fn finite_values(dtype: DType) -> Vec<(f64, bool)> {
    let count = 1u32 << (8 * dtype.size());
    let value = |bits: u32| (dtype.read(&bits.to_ne_bytes()[..dtype.size()]), bits & 1 == 0);
    let mut all: Vec<_> = (0..count).map(value).filter(|(x, _)| x.is_finite()).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// The nearest of `values`, the even one of two; beyond the last, what half a step further gives.
fn nearest(values: &[(f64, bool)], x: f64) -> f64 {
    let above = values.partition_point(|(v, _)| *v < x).min(values.len() - 1);
    let (high, low) = (values[above], values[above.saturating_sub(1)]);
    match (high.0 - x).abs().total_cmp(&(x - low.0).abs()) {
        std::cmp::Ordering::Less => high.0,
        std::cmp::Ordering::Greater => low.0,
        std::cmp::Ordering::Equal if high.1 => high.0,
        std::cmp::Ordering::Equal => low.0,
    }
}

/// Halfway between neighbours and just beside it is where a conversion in two steps goes wrong.
#[test]
fn rounding_is_to_the_nearest_even_value() {
    for dtype in [DType::F8E4M3, DType::F8E5M2, DType::F16, DType::BF16] {
        let values = finite_values(dtype);
        let mut wrong = Vec::new();
        for pair in values.windows(2) {
            let middle = pair[0].0 / 2.0 + pair[1].0 / 2.0;
            for x in [middle, middle.next_down(), middle.next_up(), middle * (1.0 + 1e-9), pair[0].0] {
                let (got, expected) = (dtype.round(x), nearest(&values, x));
                if got != expected {
                    wrong.push(format!("{x:e} became {got:e}, not {expected:e}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{dtype}: {} wrong, such as {}", wrong.len(), wrong[0]);
    }
}

proptest! {
    #[test]
    fn stored_values_survive_a_round_trip(bits in any::<u64>(), dtype in select(&DType::ALL[..])) {
        let bytes = &bits.to_ne_bytes()[..dtype.size()];
        let value = dtype.read(bytes);
        let mut again = vec![0u8; dtype.size()];
        dtype.write(value, &mut again);
        let exact = value.abs() < 2f64.powi(53);
        if dtype == DType::Bool {
            prop_assert_eq!(again[0], (bytes[0] != 0) as u8);
        } else if value.is_nan() {
            prop_assert!(dtype.read(&again).is_nan());
        } else if value.is_infinite() && dtype.size() == 1 {
            prop_assert_eq!(dtype.read(&again), dtype.max_finite().copysign(value), "fp8 saturates");
        } else if exact || dtype.is_float() {
            prop_assert_eq!(&again[..], bytes);
        }
    }

    #[test]
    fn rounding_is_monotone_and_idempotent(
        a in any::<f64>(), b in any::<f64>(), dtype in select(&DType::ALL[..5]),
    ) {
        let (low, high) = if a <= b { (a, b) } else { (b, a) };
        prop_assert!(dtype.round(low) <= dtype.round(high), "{dtype}: {low} {high}");
        let once = dtype.round(a);
        prop_assert_eq!(dtype.round(once).to_bits(), once.to_bits());
        let error = (once - a).abs();
        let bound = dtype.unit_roundoff() * a.abs() + dtype.smallest_subnormal() / 2.0;
        prop_assert!(error <= bound || a.abs() > dtype.max_finite(), "{dtype}: {a} became {once}");
    }

    #[test]
    fn widening_and_narrowing_tensors_loses_nothing(
        bits in prop::collection::vec(any::<u16>(), 0..50), dtype in select(&[DType::F16, DType::BF16][..]),
    ) {
        let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_ne_bytes()).collect();
        let x = Tensor::from_bytes(&bytes, &[bits.len()], dtype, Device::Cpu).unwrap();
        let back = x.to_dtype(DType::F32).unwrap().to_dtype(dtype).unwrap();
        for (now, was) in back.to_f64().unwrap().iter().zip(x.to_f64().unwrap()) {
            prop_assert!(now.to_bits() == was.to_bits() || (now.is_nan() && was.is_nan()));
        }
    }
}

// ---- selection ----

fn device_infos() -> impl Strategy<Value = DeviceInfo> {
    let cpu = select(&Tier::ALL[..]).prop_map(DeviceInfo::cpu);
    let archs = [(5, 2), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
    let cuda = (select(archs.to_vec()), 1..200usize).prop_map(|((major, minor), units)| DeviceInfo {
        device: Device::Cuda(0),
        name: "a GPU".into(),
        arch: Some(Arch::for_device(major, minor)),
        units,
        shared_per_block: 48 << 10,
        cache_bytes: 32 << 20,
        ..DeviceInfo::cpu(Tier::Portable)
    });
    prop_oneof![cpu, cuda]
}

proptest! {
    #[test]
    fn selection_is_explained(op in 0..ops::PROVABLE.len(), case in any::<prop::sample::Index>(), info in device_infos()) {
        let op = ops::PROVABLE[op];
        let cases = op.cases();
        let case = &cases[case.index(cases.len())];
        let mut args = Args::new(op.spec());
        for (index, plan) in op.plan(case).iter().enumerate() {
            let Some(plan) = plan else { continue };
            let layout = Layout::contiguous(Shape::new(&plan.shape).unwrap());
            // SAFETY: explaining reads no element; each address is far from the others.
            args = unsafe {
                let address = (index + 1) << 40;
                match op.spec().args[index].is_output() {
                    true => args.output(index, TensorViewMut::from_raw(address, plan.dtype, layout, info.device)),
                    false => args.input(index, TensorView::from_raw(address, plan.dtype, layout, info.device)),
                }
            };
        }
        let named = |kernel: &'static str| {
            let select = Select { kernel: Some(kernel.into()), allow_batch_variant: true };
            op.explain(&args, &case.attrs, &info, &select)
        };
        let names: BTreeSet<_> = op.kernels().iter().map(|k| k.name).collect();
        prop_assert_eq!(names.len(), op.kernels().len(), "names are unique");
        let mut supporting = BTreeSet::new();
        for &kernel in &names {
            match named(kernel) {
                Ok(found) => {
                    prop_assert_eq!(found.kernel, kernel);
                    supporting.insert(kernel);
                }
                Err(Error::Unsupported { op: blamed, refusals, .. }) => {
                    prop_assert_eq!(blamed, op.spec().name);
                    prop_assert!(refusals.len() == 1 && refusals[0].0 == kernel && !refusals[0].1.is_empty());
                }
                Err(error) => prop_assert!(false, "{kernel}: {error}"),
            }
        }
        match op.explain(&args, &case.attrs, &info, &Select::default()) {
            Ok(chosen) => {
                prop_assert!(supporting.contains(chosen.kernel) && !chosen.reason.is_empty());
                let others: BTreeSet<_> = chosen.others.iter().map(|(kernel, _)| *kernel).collect();
                prop_assert_eq!(others.len() + 1, names.len());
                prop_assert!(!others.contains(chosen.kernel));
                prop_assert!(chosen.others.iter().all(|(_, why)| !why.is_empty()));
            }
            Err(Error::Unsupported { refusals, .. }) => {
                prop_assert_eq!(refusals.len(), names.len());
                prop_assert!(refusals.iter().all(|(_, why)| !why.is_empty()));
                let variant = |name: &&str| !op.kernels().iter().any(|k| k.name == *name && k.batch_invariant);
                prop_assert!(supporting.iter().all(variant), "{supporting:?} could have run");
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}

// ---- an op on random problems ----

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const WEIGHT: usize = 1;
const RESIDUAL: usize = 2;
const SUM: usize = 4;

fn rms_norm() -> &'static dyn warpsmith::lab::AnyProvable {
    warpsmith::lab::find("rms_norm").expect("an op of this name")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rms_norm_holds_its_contract_on_every_tier(
        sizes in (1..9usize, 1..700usize),
        dtype in select(&FLOATS[..]),
        (weight, fused, in_place) in any::<(bool, bool, bool)>(),
        arrangement in select(vec![
            Arrangement::Contiguous, Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned,
        ]),
        values in select(vec![Values::Typical, Values::Large, Values::Special, Values::Exponents]),
        seed in any::<u32>(),
    ) {
        let op = rms_norm();
        let mut case = Case::new(op.spec(), dtype).sizes(&[sizes.0, sizes.1]).arranged(arrangement).values(values);
        case.in_place = in_place;
        case.optional = (weight as u32) << WEIGHT | (fused as u32) << RESIDUAL | (fused as u32) << SUM;
        let mut prepared = Prepared::new(op, &case, Device::Cpu, seed as u64).unwrap();
        let mut judged = 0;
        for kernel in op.kernels() {
            let Some(outcome) = prepared.judge(&kernel, &Stream::Host).unwrap() else { continue };
            judged += 1;
            prop_assert!(outcome.ok, "{} [{}]: {:?}", kernel.name, case.name(op.spec()), outcome.failure);
        }
        prop_assert_eq!(judged, Tier::available().len());
    }

    #[test]
    fn rms_norm_reads_and_writes_any_strides(
        (x, out) in prop::collection::vec(1..6usize, 1..5).prop_flat_map(|s| {
            (layout_of(s.clone()), nested_layout_of(s))
        }),
        dtype in select(&FLOATS[..]),
        seed in any::<u32>(),
    ) {
        let op = rms_norm();
        let memory = Tensor::randn(&[x.span()], dtype, Device::Cpu, seed as u64).unwrap();
        let stored = memory.to_f64().unwrap();
        let input = Array { shape: x.shape().to_vec(), data: offsets(&x).iter().map(|&o| stored[o]).collect() };
        let attrs = warpsmith::op::Attrs::defaults(op.spec());
        let inputs = [Some(input), None, None, None, None];
        let expected = op.expected(dtype, &inputs, 0b01001, &attrs);
        let [truth, naive, deviation] =
            [&expected.truth, &expected.naive, &expected.deviation].map(|e| &e[3].as_ref().unwrap().data[..]);
        for kernel in op.kernels().iter().filter(|k| k.tier.is_some_and(|t| Tier::available().contains(&t))) {
            let target = Tensor::from_f64(&vec![f64::NAN; out.span()], &[out.span()], dtype, Device::Cpu).unwrap();
            // SAFETY: both tensors are live, span their layouts, and are not used otherwise during the call.
            let mut args = unsafe {
                let (from, to) = (memory.view().address(), target.view().address());
                Args::new(op.spec())
                    .input(0, TensorView::from_raw(from, dtype, x, Device::Cpu))
                    .output(3, TensorViewMut::from_raw(to, dtype, out, Device::Cpu))
            };
            let select = Select { kernel: Some(kernel.name.into()), allow_batch_variant: false };
            op.run(&mut args, &attrs, &Stream::Host, &select).unwrap();
            let written = target.to_f64().unwrap();
            let results: Vec<f64> = offsets(&out).iter().map(|&o| written[o]).collect();
            let verdict = compare(Expectation { truth, naive, deviation, dtype }, &results);
            prop_assert!(verdict.is_ok(), "{}: {:?}", kernel.name, verdict);
            let gaps = written.len() - results.len();
            prop_assert_eq!(written.iter().filter(|x| x.is_nan()).count(), gaps, "{} wrote between", kernel.name);
        }
    }
}
