//! Plans of the sizes that tell the choices apart.

use super::super::problem::check;
use super::super::{
    ALWAYS_SHARE, GROUP_STARTS, K_PAGES, KV_LENS, OUT, PAGE_TABLE, PREFIX_LENS, Q, SPEC, V_PAGES,
};
use super::*;
use crate::cpu::Tier;
use crate::device::Device;
use crate::op::{Args, Attrs, Value};
use crate::tensor::{DType, Tensor};

/// Requests of `queries` tokens with room for `keys`, 32 heads and 8 KV heads.
pub(in super::super) fn problem(
    [requests, queries, keys]: [usize; 3],
    [levels, groups]: [usize; 2],
    always_share: bool,
) -> Problem {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let q = zeros(&[requests * queries, 32, 128], DType::BF16);
    let mut out = zeros(&[requests * queries, 32, 128], DType::BF16);
    let pages = zeros(&[1, 16, 8, 128], DType::BF16);
    let ints = |shape: &[usize]| zeros(shape, DType::I32);
    let (table, lens) = (ints(&[requests, keys.div_ceil(16)]), ints(&[requests]));
    let (starts, prefixes) = (ints(&[levels, groups + 1]), ints(&[levels, groups]));
    let args = Args::new(const { &SPEC }).input(Q, q.view()).input(K_PAGES, pages.view());
    let args = args.input(V_PAGES, pages.view()).input(PAGE_TABLE, table.view());
    let args = args.input(KV_LENS, lens.view()).input(GROUP_STARTS, starts.view());
    let args = args.input(PREFIX_LENS, prefixes.view()).output(OUT, out.view_mut());
    let attrs = Attrs::defaults(&SPEC).with(ALWAYS_SHARE, Value::Bool(always_share));
    check(&args, &attrs).unwrap()
}

/// The plan for 132 multiprocessors.
fn plan(sizes: [usize; 3], groups: [usize; 2], always_share: bool) -> Plan {
    let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
    Plan::new(&problem(sizes, groups, always_share), &info)
}

#[test]
fn prefixes_are_shared_where_it_pays() {
    let levels = |sizes, groups| plan(sizes, groups, false).levels;
    assert_eq!(levels([64, 1, 8320], [1, 1]), 1, "much is read again and again");
    assert_eq!(levels([16, 1, 8192], [1, 1]), 1);
    assert_eq!(levels([64, 1, 8320], [2, 16]), 2);
    assert_eq!(levels([4, 1, 131_072], [1, 1]), 1);
    assert_eq!(levels([16, 1, 2176], [1, 1]), 0, "launches take longer than reading");
    assert_eq!(levels([64, 1, 8320], [1, 64]), 0, "every request is a group");
    assert_eq!(levels([32, 20, 8320], [1, 1]), 0, "products take longer than reading");
    assert_eq!(levels([1 << 14, 1, 8192], [1, 1]), 0, "the states would take gigabytes");
    for none in [[0, 1], [1, 0]] {
        assert_eq!(plan([64, 1, 8320], none, true).levels, 0);
    }
}

#[test]
fn keys_are_shared_out_where_blocks_are_few() {
    let extent = |sizes| plan(sizes, [0, 1], false).parts[0].extent;
    assert_eq!(extent([1, 1, 8192]), Extent::Round);
    assert_eq!(extent([4, 1, 8192]), Extent::Spans(1));
    assert_eq!(extent([1, 1, 98_304]), Extent::Spans(3), "one wave of blocks");
    assert_eq!(extent([1, 1, 131_072]), Extent::Spans(4));
    assert_eq!(extent([1, 1, 147_456]), Extent::Spans(5));
    assert_eq!(extent([16, 1, 4096]), Extent::All, "short enough to do without a merge");
    assert_eq!(extent([16, 1, 16_384]), Extent::Spans(4), "lengths may differ");
    assert_eq!(extent([256, 1, 131_072]), Extent::All, "enough to even out lengths");
}

#[test]
fn lengths_decide_where_blocks_with_all_keys_could_be_as_fast() {
    let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
    let part = |sizes, full| {
        let part = Plan::new(&Problem { full, ..problem(sizes, [0, 1], false) }, &info).parts[0];
        (part.extent, part.lengths_decide)
    };
    assert_eq!(part([64, 1, 8320], false), (Extent::Spans(3), true));
    assert_eq!(part([64, 1, 8320], true), (Extent::All, false), "two waves of nine spans, or six of three");
    assert_eq!(part([40, 1, 8320], false), (Extent::Spans(1), true));
    assert_eq!(part([40, 1, 8320], true), (Extent::Spans(1), false), "the second wave is short");
    assert_eq!(part([4, 1, 8192], false), (Extent::Spans(1), false), "too few blocks");
    assert_eq!(part([16, 1, 4096], false), (Extent::All, false));
    let long = Problem { head_dim: 256, ..problem([64, 1, 8320], [0, 1], false) };
    assert!(!Plan::new(&long, &info).parts[0].lengths_decide, "long heads have no room for it");
}

#[test]
fn warps_follow_from_rows_and_blocks() {
    let shape = |sizes| {
        let Shape { warp_rows, key_warps, .. } = plan(sizes, [0, 1], false).parts[0].shape;
        [warp_rows, key_warps]
    };
    assert_eq!(shape([64, 1, 4096]), [8, 4]);
    assert_eq!(shape([16, 1, 4096]), [8, 8], "a block a multiprocessor");
    assert_eq!(shape([32, 1, 4096]), [8, 4], "more than that");
    assert_eq!(shape([16, 1, 512]), [8, 4], "few keys");
    assert_eq!(shape([64, 2, 4096]), [8, 4]);
    assert_eq!(shape([64, 3, 4096]), [16, 4], "twelve rows");
}

#[test]
fn few_keys_take_a_warp_for_each_segment_and_what_they_need() {
    let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
    for full in [false, true] {
        let shape = |keys| {
            let p = Problem { full, ..problem([2, 1, keys], [0, 1], false) };
            let shape = Plan::new(&p, &info).parts[0].shape;
            [shape.key_warps, shape.step, shape.ring]
        };
        assert_eq!(shape(16), [1, 16, 3], "a unit of keys and one of values");
        assert_eq!(shape(32), [1, 32, 5]);
        assert_eq!(shape(128), [1, 32, 5], "what longer requests have");
        assert_eq!(shape(144), [2, 32, 5]);
        assert_eq!(shape(272), [4, 32, 5]);
    }
}

#[test]
fn sixteen_rows_of_long_heads_are_halved_where_warps_are_idle() {
    let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..DeviceInfo::cpu(Tier::Portable) };
    let rows = |head_dim, queries, keys| {
        let p = Problem { head_dim, ..problem([1, queries, keys], [0, 1], false) };
        Plan::new(&p, &info).parts[0].shape.warp_rows
    };
    assert_eq!(rows(256, 4, 2048), 8);
    assert_eq!(rows(128, 4, 2048), 16, "not so long");
    assert_eq!(rows(256, 4, 8192), 16, "all warps have keys");
    assert_eq!(rows(256, 5, 2048), 8, "three warps");
}

#[test]
fn every_number_of_queries_has_one_launch() {
    for (sizes, groups) in [
        ([64, 1, 8320], [1, 1]),
        ([64, 3, 8320], [2, 16]),
        ([32, 20, 8320], [3, 4]),
        ([2, 1, 100], [1, 1]),
        ([3, 1, 100], [1, 2]),
    ] {
        let plan = plan(sizes, groups, true);
        assert_eq!(plan.levels, groups[0]);
        for level in 0..=plan.levels {
            let all = 1..=sizes[0] * sizes[1];
            for queries in if level < plan.levels { all } else { sizes[1]..=sizes[1] } {
                let takes = |part: &&Part| {
                    part.level == level && (part.min_queries..=part.max_queries).contains(&queries)
                };
                assert_eq!(plan.parts.iter().filter(takes).count(), 1, "{queries} at level {level}: {plan}");
            }
        }
    }
}
