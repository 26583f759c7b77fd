use super::flat::Flat;
use super::*;
use crate::device::Stream;

fn tree(page_size: usize) -> RadixTree {
    RadixTree::new(page_size, 1 << 20).unwrap()
}

fn checked(tree: &RadixTree) {
    tree.check().unwrap();
}

#[test]
fn edges_split_where_sequences_part_and_where_a_pin_ends() {
    let mut tree = tree(1);
    assert_eq!(tree.insert(&[1, 2, 3, 4], &[0, 1, 2, 3]).unwrap(), Inserted { node: 1, present: 0 });
    let inserted = tree.insert(&[1, 2, 9], &[4, 5, 6]).unwrap();
    assert_eq!(inserted.present, 2);
    assert_eq!(tree.stats().nodes, 3);
    checked(&tree);
    let found = tree.find(&[1, 2, 9, 9]);
    assert_eq!(found, Match { node: inserted.node, tokens: 3, pages: vec![0, 1, 6] });
    let (found, pin) = tree.lookup_pinned(&[1, 7]).unwrap();
    assert_eq!((found.tokens, found.node, tree.stats().nodes), (1, pin.node(), 4));
    checked(&tree);
    assert_eq!(tree.stats().pinned_pages, 1);
    assert_eq!(
        tree.evict(usize::MAX),
        [2, 3, 6, 1],
        "the least recently used leaf first, parents after children"
    );
    checked(&tree);
    tree.unpin(pin).unwrap();
    assert_eq!(tree.evict(1), [0]);
    assert_eq!(tree.stats().nodes, 0);
    checked(&tree);
}

#[test]
fn only_whole_pages_match() {
    let mut tree = tree(4);
    tree.insert(&[1, 2, 3, 4, 5, 6, 7, 8], &[7, 9]).unwrap();
    for (query, pages) in [
        (&[1, 2, 3][..], 0),
        (&[1, 2, 3, 4], 1),
        (&[1, 2, 3, 4, 5, 6, 7], 1),
        (&[1, 2, 3, 4, 5, 6, 7, 8, 9], 2),
        (&[1, 2, 3, 5], 0),
        (&[], 0),
    ] {
        let found = tree.find(query);
        assert_eq!((found.tokens, &found.pages[..]), (4 * pages, &[7, 9][..pages]), "{query:?}");
        assert_eq!(found.node == 0, pages == 0);
    }
}

#[test]
fn a_use_postpones_eviction() {
    let mut tree = tree(2);
    for i in 0..4 {
        tree.insert(&[i, i, 8, 8], &[2 * i, 2 * i + 1]).unwrap();
    }
    assert_eq!(tree.lookup(&[0, 0, 8, 9]).tokens, 2);
    assert_eq!(tree.find(&[1, 1, 8, 8]).tokens, 4, "to look is no use");
    assert_eq!(tree.evict(3), [2, 3, 4, 5]);
    checked(&tree);
    assert_eq!(tree.evict(3), [6, 7, 0, 1]);
}

#[test]
fn removal_takes_what_follows_a_prefix_unless_it_is_pinned() {
    let mut tree = tree(1);
    tree.insert(&[1, 2, 3], &[1, 2, 3]).unwrap();
    tree.insert(&[1, 2, 4, 5], &[0, 0, 4, 5]).unwrap();
    let (_, pin) = tree.lookup_pinned(&[1, 2, 4]).unwrap();
    let error = tree.remove(&[1]).unwrap_err().to_string();
    assert!(error.contains("prefix") && error.contains("pinned"), "{error}");
    assert!(tree.remove(&[1, 2]).is_err());
    assert_eq!(tree.remove(&[1, 2, 4]).unwrap(), [5]);
    checked(&tree);
    assert!(tree.remove(&[7]).unwrap().is_empty());
    tree.unpin(pin).unwrap();
    let mut removed = tree.remove(&[1]).unwrap();
    removed.sort_unstable();
    assert_eq!((removed, tree.find(&[1, 2]).tokens), (vec![2, 3, 4], 1));
    checked(&tree);
    assert_eq!(tree.remove(&[]).unwrap(), [1]);
    checked(&tree);
    let whole = RadixTree::new(2, 4).unwrap().remove(&[1]).unwrap_err();
    assert!(whole.to_string().contains("whole pages"), "{whole}");
}

#[test]
fn mistakes_of_the_caller_are_typed_errors_and_change_nothing() {
    let mut tree = RadixTree::new(2, 8).unwrap();
    tree.insert(&[1, 2], &[3]).unwrap();
    let before = tree.stats();
    for (tokens, pages, arg) in [
        (&[1, 2, 3][..], &[4][..], "tokens"),
        (&[1], &[4], "tokens"),
        (&[], &[4], "tokens"),
        (&[5, 6], &[8], "pages"),
        (&[5, 6], &[-1], "pages"),
        (&[5, 6, 7, 8], &[4, 4], "pages"),
        (&[5, 6], &[3], "pages"),
        (&[1, 2, 5, 6, 7, 7], &[0, 4, 3], "pages"),
    ] {
        match tree.insert(tokens, pages) {
            Err(Error::Argument { op: "radix_tree", arg: named, .. }) => {
                assert_eq!(named, arg, "{tokens:?} {pages:?}")
            }
            other => panic!("{tokens:?} {pages:?}: {other:?}"),
        }
        assert_eq!(tree.stats(), before);
        checked(&tree);
    }
    assert!(RadixTree::new(0, 8).is_err() && RadixTree::new(1, 1 << 40).is_err());
    let mut other = RadixTree::new(2, 8).unwrap();
    for (version, tokens, arg) in
        [(other.version(), 2, "version"), (tree.version(), 1, "tokens"), (tree.version(), 4, "tokens")]
    {
        let error = tree.pin_match(version, 1, tokens).unwrap_err();
        assert!(matches!(error, Error::Argument { arg: ref named, .. } if named == arg), "{error}");
        assert_eq!(tree.stats(), before);
    }
    assert!(tree.changes_since(other.version()).is_err());
    let (_, pin) = tree.lookup_pinned(&[1, 2]).unwrap();
    assert!(other.unpin(pin).is_err());
    assert_eq!(tree.stats().pins, 1, "a pin that was given to another tree is never given back");
    assert!(tree.evict(1).is_empty());
}

#[test]
fn a_chain_of_thousands_neither_overflows_nor_slows() {
    let mut tree = tree(1);
    let tokens: Vec<i32> = (0..20_000).map(|i| i % 7).collect();
    let pages: Vec<i32> = (0..20_000).collect();
    // Backwards, every insertion but the first only splits; forwards it would take quadratic time.
    tree.insert(&tokens, &pages).unwrap();
    for len in (1..tokens.len()).rev().step_by(2) {
        let (_, pin) = tree.lookup_pinned(&tokens[..len]).unwrap();
        tree.unpin(pin).unwrap();
    }
    assert_eq!(tree.stats().nodes, 10_001);
    checked(&tree);
    let (found, pin) = tree.lookup_pinned(&tokens).unwrap();
    assert_eq!((found.tokens, found.pages), (tokens.len(), pages.clone()));
    tree.unpin(pin).unwrap();
    assert_eq!(tree.remove(&[]).unwrap().len(), pages.len());
    checked(&tree);
}

/// Tokens whose hashes agree under the seed that the tree begins with.
#[test]
fn colliding_tokens_make_the_tree_take_another_seed() {
    let slots = tree(1).flat().table.len() as u32;
    let mut colliding: Vec<i32> = Vec::new();
    for token in 0.. {
        // In the low bits that tables of up to 1024 slots look at.
        if flat::hash(0, 0, &[token]) % (16 * slots) == 5 {
            colliding.push(token);
            if colliding.len() > 2 * flat::MAX_PROBES {
                break;
            }
        }
    }
    let mut tree = tree(1);
    for (page, &token) in colliding.iter().enumerate() {
        tree.insert(&[token], &[page as i32]).unwrap();
    }
    checked(&tree);
    assert_ne!(tree.flat().seed, 0);
    assert!(tree.stats().slots <= 4096, "{}", tree.stats().slots);
    for (page, &token) in colliding.iter().enumerate() {
        assert_eq!(tree.find(&[token]).pages, [page as i32]);
    }
}

#[test]
fn memory_stays_in_proportion_to_what_is_stored() {
    let mut tree = tree(2);
    for i in 0..20_000 {
        tree.evict(tree.stats().pages.saturating_sub(60));
        tree.insert(&[i, 1, 2, 3, 4, i], &[3 * i, 3 * i + 1, 3 * i + 2]).unwrap();
    }
    checked(&tree);
    assert!(tree.stats().capacity <= 256, "{:?}", tree.stats());
    assert!(tree.stats().slots <= 128 && tree.nodes.len() <= 64, "{:?}", tree.stats());
}

#[test]
fn what_points_outside_the_arrays_is_no_match() {
    let mut tree = tree(2);
    tree.insert(&[1, 2, 3, 4], &[5, 6]).unwrap();
    let flat = tree.flat();
    let at = flat.table.iter().position(|row| row[1] != 0).unwrap();
    for slot in
        [[0, 1, 1 << 29, 2], [0, 1, -1, 2], [0, 1, 0, i32::MAX], [0, 1, 0, -2], [0, 1, 0, 0], [0, -1, 0, 2]]
    {
        let mut table = flat.table.to_vec();
        table[at] = slot;
        assert_eq!(Flat { table: &table, ..flat }.find(&[1, 2, 3, 4], |_, _| ()).pages, 0, "{slot:?}");
    }
    assert_eq!(Flat { table: &[], ..flat }.find(&[1, 2], |_, _| ()).pages, 0);
    // A node that is its own child: the walk ends with the sequence.
    let mut table = vec![[0; 4]; 64];
    table[flat::hash(0, 0, &[1, 2]) as usize % 64] = [0, 3, 0, 1];
    table[flat::hash(0, 3, &[1, 2]) as usize % 64] = [3, 3, 0, 1];
    let looped = Flat { table: &table, ..flat };
    assert_eq!(looped.find(&[1, 2].repeat(50), |_, _| ()).pages, 50);
}

#[test]
fn a_mirror_copies_what_has_changed_and_survives_growth() {
    let mut tree = RadixTree::with_capacity(2, 1 << 16, 2000, 8000, 9).unwrap();
    let mut mirror = Mirror::new(&tree, &Stream::Host).unwrap();
    same(&mirror, &tree);
    let mut last = tree.version();
    for i in 0..6000 {
        tree.insert(&[i % 50, 1, i, i, 7, 7], &[3 * i, 3 * i + 1, 3 * i + 2]).unwrap();
        if i % 3 == 0 {
            tree.evict(4);
        }
        if i == 600 {
            let changes = tree.changes_since(last).unwrap();
            let copied: usize = changes.slots.iter().chain(&changes.pages).map(ExactSizeIterator::len).sum();
            assert!((1..2000).contains(&copied), "{changes:?}");
        }
        if i % 97 == 0 || i == 599 {
            mirror.update(&tree, &Stream::Host).unwrap();
            same(&mirror, &tree);
            last = tree.version();
        }
    }
    mirror.update(&tree, &Stream::Host).unwrap();
    let nothing = Changes { slots: Vec::new(), pages: Vec::new() };
    assert_eq!(tree.changes_since(mirror.version()).unwrap(), nothing);
}

/// Whether a mirror has all that the tree uses.
fn same(mirror: &Mirror, tree: &RadixTree) {
    let (flat, used) = (tree.flat(), tree.arena.used());
    let size = flat.page_size;
    assert_eq!(mirror.table().to_vec::<i32>().unwrap(), flat.table.as_flattened());
    assert_eq!(mirror.tokens().to_vec::<i32>().unwrap()[..size * used], flat.tokens[..size * used]);
    assert_eq!(mirror.pages().to_vec::<i32>().unwrap()[..used], flat.pages[..used]);
    assert_eq!((mirror.seed(), mirror.tokens().shape()[1]), (flat.seed, size));
    assert_eq!(mirror.version(), tree.version());
}

#[test]
fn mirrors_of_one_tree_do_not_take_changes_from_each_other() {
    // With room, so that no array grows: one that has is copied as a whole.
    let mut tree = RadixTree::with_capacity(1, 8, 8, 8, 0).unwrap();
    tree.insert(&[1, 2], &[0, 1]).unwrap();
    let mut mirrors = [(); 2].map(|()| Mirror::new(&tree, &Stream::Host).unwrap());
    tree.evict(2);
    tree.insert(&[3, 4], &[0, 1]).unwrap();
    for mirror in &mut mirrors {
        mirror.update(&tree, &Stream::Host).unwrap();
        same(mirror, &tree);
    }
    // A mirror that was not updated for a while gets everything it missed.
    for i in 0..300 {
        tree.evict(1);
        tree.insert(&[i], &[i % 2]).unwrap();
        mirrors[0].update(&tree, &Stream::Host).unwrap();
        same(&mirrors[0], &tree);
        if i % 7 == 0 {
            mirrors[1].update(&tree, &Stream::Host).unwrap();
            same(&mirrors[1], &tree);
        }
    }
}

#[test]
fn a_mirror_refuses_another_tree() {
    let [mut tree, mut other] = [(); 2].map(|()| RadixTree::new(1, 8).unwrap());
    tree.insert(&[1, 2], &[0, 1]).unwrap();
    other.insert(&[1, 2], &[3, 4]).unwrap();
    let mut mirror = Mirror::new(&tree, &Stream::Host).unwrap();
    match mirror.update(&other, &Stream::Host) {
        Err(Error::Argument { arg, expected, got, .. }) => {
            assert_eq!(arg, "tree");
            assert!(expected.contains(&tree.id.to_string()) && got.contains(&other.id.to_string()));
        }
        other => panic!("{other:?}"),
    }
    same(&mirror, &tree);
}

#[test]
fn a_number_that_is_given_to_another_node_pins_nothing() {
    let mut tree = tree(1);
    tree.insert(&[1, 2], &[0, 1]).unwrap();
    let (found, version) = (tree.find(&[1, 2]), tree.version());
    tree.evict(2);
    assert_eq!(tree.pin_match(version, found.node, 2).unwrap(), None, "it is free");
    assert_eq!(tree.insert(&[3, 4], &[0, 1]).unwrap().node, found.node);
    assert_eq!(tree.pin_match(version, found.node, 2).unwrap(), None, "it is another's");
    assert_eq!(tree.pin_match(version, 17, 2).unwrap(), None, "there never was one");
    assert_eq!(tree.stats().pinned_pages, 0);
    // The same tokens again are another node too.
    tree.evict(2);
    tree.insert(&[1, 2], &[0, 1]).unwrap();
    assert_eq!(tree.pin_match(version, found.node, 2).unwrap(), None);
    let pin = tree.pin_match(tree.version(), found.node, 2).unwrap().unwrap();
    assert_eq!(tree.stats().pinned_pages, 2);
    tree.unpin(pin).unwrap();
    checked(&tree);
}

#[test]
fn a_pin_of_a_match_ends_where_the_match_does() {
    let mut tree = tree(2);
    let tokens: Vec<i32> = (0..12).collect();
    tree.insert(&tokens, &[0, 1, 2, 3, 4, 5]).unwrap();
    tree.insert(&[9, 9], &[6]).unwrap();
    let (found, version) = (tree.find(&tokens[..9]), tree.version());
    assert_eq!((found.tokens, found.node), (8, 1));
    // Other sequences split the edge meanwhile: before the end of the match, and behind it.
    tree.insert(&[0, 1, 2, 3, 7, 7], &[0, 0, 7]).unwrap();
    tree.insert(&[&tokens[..10], &[7, 7]].concat(), &[0, 0, 0, 0, 0, 8]).unwrap();
    let pin = tree.pin_match(version, found.node, found.tokens).unwrap().unwrap();
    checked(&tree);
    assert_eq!((tree.find(&tokens[..8]).node, tree.stats().pinned_pages), (pin.node(), 4));
    let again = tree.pin_match(version, found.node, found.tokens).unwrap().unwrap();
    assert_eq!(again.node(), pin.node());
    tree.unpin(again).unwrap();
    let mut evicted = tree.evict(usize::MAX);
    evicted.sort_unstable();
    assert_eq!((evicted, tree.find(&tokens).pages), (vec![4, 5, 6, 7, 8], vec![0, 1, 2, 3]));
    tree.unpin(pin).unwrap();
    checked(&tree);
    // Nothing matched: a pin of nothing, as `lookup_pinned` gives one.
    let pin = tree.pin_match(version, 0, 0).unwrap().unwrap();
    assert_eq!((pin.node(), tree.stats().pins, tree.stats().pinned_pages), (0, 1, 0));
    tree.unpin(pin).unwrap();
    assert_eq!(tree.evict(usize::MAX).len(), 4);
}

#[test]
fn to_pin_a_match_is_a_use() {
    let mut tree = tree(1);
    for i in 0..3 {
        tree.insert(&[i], &[i]).unwrap();
    }
    let pin = tree.pin_match(tree.version(), tree.find(&[0]).node, 1).unwrap().unwrap();
    tree.unpin(pin).unwrap();
    assert_eq!(tree.evict(3), [1, 2, 0]);
}
