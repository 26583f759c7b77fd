use super::*;
use crate::device::Device;
use crate::radix::RadixTree;

fn tensor(data: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, Device::Cpu).unwrap()
}

fn mirror() -> Mirror {
    let mut tree = RadixTree::with_capacity(2, 100, 0, 0, 77).unwrap();
    tree.insert(&[1, 2, 3, 4, 5, 6], &[10, 11, 12]).unwrap();
    tree.insert(&[1, 2, 7, 8], &[0, 13]).unwrap();
    Mirror::new(&tree, &Stream::Host).unwrap()
}

#[test]
fn a_sequence_gets_the_same_alone_and_in_a_batch_and_every_column_is_written() {
    let mirror = mirror();
    let sequences: [&[i32]; 6] =
        [&[1, 2, 3, 4, 5, 6], &[], &[1, 2, 7, 8, 9], &[9, 9], &[1], &[1, 2, 3, 4, 5]];
    let mut starts = vec![0];
    sequences.iter().for_each(|sequence| starts.push(starts[starts.len() - 1] + sequence.len() as i32));
    let tokens = tensor(&sequences.concat(), &[19]);
    let all = PrefixMatch::new(&mirror, &tokens, &tensor(&starts, &[7])).max_pages(4).run().unwrap();
    assert_eq!(all.matched.to_vec::<i32>().unwrap(), [6, 0, 4, 0, 0, 4]);
    let pages = [[10, 11, 12, -1], [-1; 4], [10, 13, -1, -1], [-1; 4], [-1; 4], [10, 11, -1, -1]];
    assert_eq!(all.pages.to_vec::<i32>().unwrap(), pages.concat());
    for b in 0..sequences.len() {
        let starts = tensor(&starts[b..b + 2], &[2]);
        let alone = PrefixMatch::new(&mirror, &tokens, &starts).max_pages(4).run().unwrap();
        assert_eq!(alone.pages.to_vec::<i32>().unwrap(), pages[b]);
        assert_eq!(alone.nodes.to_vec::<i32>().unwrap()[0], all.nodes.to_vec::<i32>().unwrap()[b]);
    }
}

/// The answer waits while the tree changes and the mirror follows.
#[test]
fn an_answer_is_about_the_tree_as_it_was_when_the_search_was_made() {
    let mut tree = RadixTree::new(1, 3).unwrap();
    tree.insert(&[1, 2, 3], &[0, 1, 2]).unwrap();
    let mut mirror = Mirror::new(&tree, &Stream::Host).unwrap();
    let (tokens, starts) = (tensor(&[1, 2, 9, 1], &[4]), tensor(&[0, 3, 4], &[3]));
    let found = PrefixMatch::new(&mirror, &tokens, &starts).max_pages(3).run().unwrap();
    let [matched, nodes] = [&found.matched, &found.nodes].map(|tensor| tensor.to_vec::<i32>().unwrap());
    assert_eq!((&matched[..], found.version), (&[2, 1][..], mirror.version()));
    // The edge is split where the first match ends, and keeps its number behind that.
    let pin = tree.pin_match(found.version, nodes[0] as u32, 2).unwrap().unwrap();
    assert_eq!((tree.stats().pinned_pages, tree.evict(3)), (2, vec![2]));
    tree.unpin(pin).unwrap();
    tree.remove(&[]).unwrap();
    tree.insert(&[7], &[0]).unwrap();
    mirror.update(&tree, &Stream::Host).unwrap();
    assert_ne!(found.version, mirror.version());
    assert!(tree.pin_match(found.version, nodes[1] as u32, 1).unwrap().is_none());
}

#[test]
fn starts_out_of_order_or_range_are_refused_before_a_write() {
    let mirror = mirror();
    let tokens = tensor(&[1, 2, 3, 4], &[4]);
    for starts in [[0, 3, 2], [-1, 2, 4], [0, 2, 5], [i32::MAX, 0, 0], [0, i32::MIN, 4]] {
        let starts = tensor(&starts, &[3]);
        let [mut matched, mut nodes, mut pages] =
            [tensor(&[7; 2], &[2]), tensor(&[7; 2], &[2]), tensor(&[7; 4], &[2, 2])];
        let call = PrefixMatch::new(&mirror, &tokens, &starts).max_pages(2);
        let error = call.run_into(&mut matched, &mut nodes, &mut pages, &Stream::Host).unwrap_err();
        assert!(matches!(error, Error::Argument { ref arg, .. } if arg == "starts"), "{error}");
        assert_eq!(pages.to_vec::<i32>().unwrap(), [7; 4]);
        assert_eq!(matched.to_vec::<i32>().unwrap(), [7; 2]);
    }
}

#[test]
fn options_and_sizes_that_make_no_sense_are_refused() {
    let mirror = mirror();
    let (tokens, starts) = (tensor(&[1], &[1]), tensor(&[0, 1], &[2]));
    for (option, value) in [
        (MAX_PAGES, -1),
        (MAX_PAGES, 4 << 30),
        (SEED, -1),
        (SEED, 1 << 32),
        (SEED, i64::MAX),
        (SEED, i64::MIN),
    ] {
        let call = PrefixMatch::new(&mirror, &tokens, &starts).int(option, value);
        assert!(matches!(call.run(), Err(Error::Argument { .. })), "{option} {value}");
    }
    let none = tensor(&[], &[0]);
    assert!(matches!(PrefixMatch::new(&mirror, &tokens, &none).run(), Err(Error::Argument { .. })));
}
