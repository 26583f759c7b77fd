//! Prefixes looked up in the copy of a radix tree on the device.

use crate::common::gpu;
use warpsmith::ops::PrefixMatch;
use warpsmith::radix::{Mirror, RadixTree};
use warpsmith::{Device, Tensor};

crate::harness::tests! {
    a_mirrored_tree_is_searched_and_what_is_out_of_range_does_no_harm;
}

/// The suite's poison is what `pages` ends with, and its cases have valid starts; here neither is so.
fn a_mirrored_tree_is_searched_and_what_is_out_of_range_does_no_harm() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.ctx.ordinal());
    let stream = device.default_stream().unwrap();
    let mut tree = RadixTree::new(16, 5000).unwrap();
    let mut mirror = Mirror::new(&tree, &stream).unwrap();
    let sequence = |i: i32| -> Vec<i32> { (0..1600).map(|t| if t < 800 { t } else { i * t }).collect() };
    let mut next = 0..5000;
    for i in 1..=40 {
        let pages: Vec<i32> = next.by_ref().take(100).collect();
        let present = tree.insert(&sequence(i), &pages).unwrap().present;
        assert_eq!(present, if i == 1 { 0 } else { 50 });
        mirror.update(&tree, &stream).unwrap();
    }
    let tokens: Vec<i32> = (1..=40).flat_map(sequence).collect();
    let search = |mirror: &Mirror, starts: &[i32], max_pages: usize| {
        let tensor = |data: &[i32], shape: &[usize]| Tensor::from_slice(data, shape, device).unwrap();
        let (count, all) = (starts.len() - 1, tensor(&tokens, &[tokens.len()]));
        let [mut matched, mut nodes] = [(); 2].map(|()| tensor(&vec![77; count], &[count]));
        let mut pages = tensor(&vec![77; count * max_pages], &[count, max_pages]);
        let starts = tensor(starts, &[count + 1]);
        let call = PrefixMatch::new(mirror, &all, &starts).max_pages(max_pages);
        let version = call.run_into(&mut matched, &mut nodes, &mut pages, &stream).unwrap();
        assert_eq!(version, mirror.version());
        [matched, nodes, pages].map(|tensor| tensor.to_vec::<i32>().unwrap())
    };
    let starts: Vec<i32> = (0..=40).map(|i| i * 1600).collect();
    let [matched, nodes, pages] = search(&mirror, &starts, 103);
    for i in 0..40 {
        let found = tree.find(&sequence(i as i32 + 1));
        assert_eq!((matched[i] as usize, nodes[i] as u32), (found.tokens, found.node));
        assert_eq!(pages[103 * i..103 * (i + 1)], [&found.pages[..], &[-1; 3]].concat());
    }
    let [matched, _, pages] = search(&mirror, &[i32::MIN, 1600, 1600, 5, -7, i32::MAX], 2);
    assert_eq!(matched, [1600, 0, 0, 0, 1600]);
    assert_eq!(pages, [0, 1, -1, -1, -1, -1, -1, -1, 0, 1]);
    let version = mirror.version();
    let freed = tree.evict(usize::MAX).len();
    assert_eq!(freed, 50 + 40 * 50);
    // The numbers are other sequences' now.
    for i in 41..=80 {
        tree.insert(&sequence(i), &Vec::from_iter(100 * (i - 41)..100 * (i - 40))).unwrap();
    }
    assert!(tree.pin_match(version, nodes[0] as u32, 1600).unwrap().is_none());
    assert_eq!(tree.evict(usize::MAX).len(), freed);
    mirror.update(&tree, &stream).unwrap();
    let [matched, nodes, pages] = search(&mirror, &starts[..3], 1);
    assert_eq!((matched, nodes, pages), (vec![0; 2], vec![0; 2], vec![-1; 2]));
}
