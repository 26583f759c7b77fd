//! The cases of `prefix_match`: trees and sequences that reach every path of a search.

use super::{EDGE_PAGES, EDGE_TOKENS, Forward, MAX_PAGES, SEED, STARTS, TABLE, TOKENS, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::radix::RadixTree;
use crate::radix::flat::{Slot, slots_for};
use crate::tensor::{DType, Random};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::matches(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let s = Sizes::of(case);
        let input = |shape: &[usize]| {
            let fill = Fill::Generated(generate);
            Some(ArgPlan { shape: shape.to_vec(), dtype: DType::I32, fill, batch_dim: None })
        };
        let output = |shape: &[usize]| ArgPlan::shared(shape, DType::I32);
        vec![
            input(&[slots_for(s.edges()), 4]),
            input(&[s.num_pages(), s.page_size]),
            input(&[s.num_pages()]),
            input(&[s.batch * s.length]),
            input(&[s.batch + 1]),
            output(&[s.batch]),
            output(&[s.batch]),
            output(&[s.batch, case.attrs.int(MAX_PAGES) as usize]),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[2] = case.sizes[2].max(1);
        case.sizes[4] = case.sizes[4].max(1);
        case.set(MAX_PAGES, case.attrs.int(MAX_PAGES).clamp(0, 1 << 12) as f64);
    }

    fn cases() -> Vec<Case> {
        let case = |sizes: [usize; 5]| Case::new(&Self::SPEC, DType::I32).sizes(&sizes).attr(MAX_PAGES, 40.0);
        let mut cases = Vec::new();
        for sizes in [
            // batch, length, page_size, paths, depth
            [0, 64, 16, 3, 2],
            [7, 0, 16, 3, 2],
            [9, 64, 16, 0, 2],
            [1, 1, 1, 1, 1],
            [1, 16, 16, 1, 1],
            [14, 40, 1, 6, 3],
            [33, 100, 1, 20, 100],
            [29, 130, 3, 9, 4],
            [40, 700, 16, 12, 5],
            [21, 520, 64, 8, 3],
            [15, 2100, 4, 6, 2],
            // Many children of the root.
            [50, 16, 16, 900, 1],
            [50, 2, 1, 600, 2],
        ] {
            cases.push(case(sizes));
            cases.push(case(sizes).values(Values::Special));
        }
        cases.push(case([2, 4, 2, 2, 2]).attr(MAX_PAGES, 3.0));
        // Long chains, and edges that a whole block compares.
        let special = |sizes: [usize; 5]| case(sizes).values(Values::Special);
        cases.push(special([8, 3000, 1, 2, 3000]));
        cases.push(special([8, 16_000, 8, 2, 2000]).attr(MAX_PAGES, 2000.0));
        cases.push(special([9, 20_000, 16, 3, 2]).attr(MAX_PAGES, 1250.0));
        cases.push(special([9, 20_000, 5, 3, 1]).attr(MAX_PAGES, 3.0));
        cases.push(special([30, 640, 16, 12, 5]).attr(MAX_PAGES, 0.0));
        cases.push(special([30, 640, 16, 12, 5]).attr(SEED, f64::from(u32::MAX)));
        for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
            for sizes in [[29, 640, 16, 12, 5], [29, 130, 1, 12, 20], [8, 9000, 4, 3, 3]] {
                cases.push(special(sizes).arranged(arrangement));
            }
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for length in [512, 4096, 32_768] {
            for batch in [1, 8, 64, 512, 4096] {
                if batch * length <= 1 << 24 {
                    let case = Case::new(&Self::SPEC, DType::I32).sizes(&[batch, length, 16, 64, 8]);
                    cases.push(case.attr(MAX_PAGES, (length / 16) as f64));
                }
            }
        }
        // A deep path of short edges: a search can only go one after the other.
        cases.push(Case::new(&Self::SPEC, DType::I32).sizes(&[64, 4096, 16, 64, 256]).attr(MAX_PAGES, 256.0));
        cases
    }
}

/// Token ids: few enough that pages of one token often agree by chance.
const VOCABULARY: u64 = 1000;
/// Pages of the arrays that no edge has.
const SPARE: usize = 3;

/// The sizes of a case.
struct Sizes {
    batch: usize,
    length: usize,
    page_size: usize,
    paths: usize,
    depth: usize,
}

impl Sizes {
    fn of(case: &Case) -> Sizes {
        let [batch, length, page_size, paths, depth] = case.sizes[..] else { unreachable!("five sizes") };
        Sizes { batch, length, page_size, paths, depth }
    }

    fn path_pages(&self) -> usize {
        self.length.checked_div(self.page_size).unwrap_or(0)
    }

    /// One more path than stays in the tree.
    fn num_pages(&self) -> usize {
        (self.paths + 1) * self.path_pages() + SPARE
    }

    /// Most edges: an insertion adds one and may split another.
    fn edges(&self) -> usize {
        (2 * (self.paths * self.depth + 1)).min(self.num_pages())
    }
}

/// A tree with holes, and garbage wherever nothing is stored. Typical sequences are stored in full; special ones are also
/// cut, changed, foreign or empty.
fn generate(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let s = Sizes::of(case);
    let mut rng = Random::new(seed);
    let paths = draw_paths(&s, &mut rng);
    let hash_seed = case.attrs.int(SEED) as u32;
    // A tree whose hashes crowd takes another seed, and one that grew on the way a larger table.
    let fits = |tree: &RadixTree| {
        let flat = tree.flat();
        flat.seed == hash_seed && flat.table.len() == slots_for(s.edges())
    };
    let tree = build(&s, &paths, hash_seed, &mut rng).filter(fits);
    let Some(tree) = tree else {
        // Sizes or a seed that no tree has: an empty one.
        return Forward::plan(case)
            .into_iter()
            .flatten()
            .map(|arg| vec![0.0; arg.shape.iter().product()])
            .collect();
    };
    let flat = tree.flat();
    let mut garbage = || rng.below(VOCABULARY) as f64;
    let mut table: Vec<[f64; 4]> = flat.table.iter().map(|row| row.map(f64::from)).collect();
    for row in table.iter_mut().filter(|row| row[1] == 0.0) {
        *row = [garbage(), 0.0, garbage(), garbage()];
    }
    let mut edge_tokens: Vec<f64> = flat.tokens.iter().map(|&token| f64::from(token)).collect();
    let mut edge_pages: Vec<f64> = flat.pages.iter().map(|&page| f64::from(page)).collect();
    let mut live = vec![false; flat.pages.len()];
    for slot in flat.table.iter().map(|row| Slot::new(*row)).filter(|slot| !slot.is_empty()) {
        live[slot.start as usize..][..slot.len as usize].fill(true);
    }
    for page in (0..live.len()).filter(|&page| !live[page]) {
        edge_tokens[page * s.page_size..][..s.page_size].fill_with(&mut garbage);
        edge_pages[page] = garbage();
    }

    let (mut tokens, mut starts) = (Vec::with_capacity(s.batch * s.length), vec![0.0]);
    for b in 0..s.batch {
        let path = paths.get(b % s.paths.max(1)).map_or(&[][..], Vec::as_slice);
        let kind = if case.values == Values::Special { b % 7 } else { 0 };
        tokens.extend(draw_sequence(kind, path, s.length, &mut rng).into_iter().map(f64::from));
        starts.push(tokens.len() as f64);
    }
    tokens.resize_with(s.batch * s.length, || rng.below(VOCABULARY) as f64);
    let mut values = vec![Vec::new(); 8];
    values[TABLE] = table.into_flattened();
    values[EDGE_TOKENS] = edge_tokens;
    values[EDGE_PAGES] = edge_pages;
    (values[TOKENS], values[STARTS]) = (tokens, starts);
    values
}

/// Paths of which most begin like an earlier one.
fn draw_paths(s: &Sizes, rng: &mut Random) -> Vec<Vec<i32>> {
    let mut paths: Vec<Vec<i32>> = Vec::new();
    for i in 0..s.paths {
        let shared = rng.below(2 * s.path_pages() as u64 + 1) as usize;
        let model = rng.below(i as u64) as usize;
        let mut path = match paths.get(model) {
            Some(model) if shared < s.path_pages() => model[..shared * s.page_size].to_vec(),
            _ => Vec::new(),
        };
        path.resize_with(s.path_pages() * s.page_size, || rng.below(VOCABULARY) as i32);
        paths.push(path);
    }
    paths
}

/// Stores the paths, each in `depth` steps, and one more that is removed again.
fn build(s: &Sizes, paths: &[Vec<i32>], seed: u32, rng: &mut Random) -> Option<RadixTree> {
    let (pages, edges) = (s.num_pages(), s.edges());
    let mut tree = RadixTree::with_capacity(s.page_size, pages, edges, pages, seed).ok()?;
    let mut free: Vec<i32> = (0..pages as i32).collect();
    for i in (1..pages).rev() {
        free.swap(i, rng.below(i as u64 + 1) as usize);
    }
    let doomed: Vec<i32> = (0..s.path_pages() * s.page_size).map(|i| -1 - i as i32).collect();
    for (i, path) in std::iter::once(&doomed).chain(paths).enumerate() {
        for step in 1..=s.depth {
            let count = s.path_pages() * step / s.depth;
            let new = count - tree.find(&path[..count * s.page_size]).pages.len();
            // Pages that the tree has already are not looked at.
            let mut given = vec![-1; count - new];
            given.extend(free.split_off(free.len() - new));
            tree.insert(&path[..count * s.page_size], &given).expect("pages of the pool");
        }
        if i == 0 {
            free.extend(tree.remove(&[]).expect("nothing is pinned"));
        }
    }
    Some(tree)
}

fn draw_sequence(kind: usize, path: &[i32], length: usize, rng: &mut Random) -> Vec<i32> {
    let mut sequence = path.to_vec();
    let mut cut = |sequence: &mut Vec<i32>| sequence.truncate(rng.below(sequence.len() as u64 + 1) as usize);
    match kind {
        0 => {}
        1 => cut(&mut sequence),
        2 => {
            let mut head = sequence.clone();
            cut(&mut head);
            if let Some(token) = sequence.get_mut(head.len()) {
                *token += 1;
            }
        }
        3 => {
            cut(&mut sequence);
            sequence.resize_with(length, || rng.below(VOCABULARY) as i32);
        }
        4 => sequence = (0..length).map(|_| -1 - rng.below(VOCABULARY) as i32).collect(),
        5 => sequence.clear(),
        _ => sequence.truncate(sequence.len().saturating_sub(1)),
    }
    sequence
}
