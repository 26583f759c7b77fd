//! The radix tree against a naive model: every stored prefix in a sorted map, every question answered by looking at all
//! of them. All invariants are checked after every operation.

use proptest::prelude::*;
use std::collections::BTreeMap;
use warpsmith::radix::flat::Flat;
use warpsmith::radix::{Pin, RadixTree};
use warpsmith::random::Random;

/// What the model knows of the last page of a prefix.
#[derive(Debug, Clone)]
struct Stored {
    page: i32,
    used: u64,
    /// Whether an edge ends with it.
    ends: bool,
}

/// Prefixes of whole pages, each with its last page.
#[derive(Default)]
struct Model {
    page_size: usize,
    stored: BTreeMap<Vec<i32>, Stored>,
    pins: Vec<Vec<i32>>,
    clock: u64,
}

impl Model {
    fn pages_in(&self, tokens: &[i32]) -> usize {
        (1..=tokens.len() / self.page_size)
            .take_while(|n| self.stored.contains_key(&tokens[..n * self.page_size]))
            .count()
    }

    fn longest(&self, tokens: &[i32]) -> Vec<i32> {
        tokens[..self.pages_in(tokens) * self.page_size].to_vec()
    }

    fn pages_of(&self, prefix: &[i32]) -> Vec<i32> {
        (1..=prefix.len() / self.page_size).map(|n| self.stored[&prefix[..n * self.page_size]].page).collect()
    }

    fn longer(&self, prefix: &[i32]) -> Vec<Vec<i32>> {
        let begins = |key: &&Vec<i32>| key.starts_with(prefix) && key.len() > prefix.len();
        self.stored.keys().filter(begins).cloned().collect()
    }

    /// The end of the edge that the last page of a prefix is on: edges do not branch before they end.
    fn edge_end(&self, prefix: &[i32]) -> Vec<i32> {
        let mut end = prefix.to_vec();
        while !end.is_empty() && !self.stored[&end].ends {
            let next = end.len() + self.page_size;
            end = self
                .longer(&end)
                .into_iter()
                .find(|key| key.len() == next)
                .expect("an edge that goes on ends");
        }
        end
    }

    fn edge_start(&self, end: &[i32]) -> usize {
        let mut start = end.len() - self.page_size;
        while start > 0 && !self.stored[&end[..start]].ends {
            start -= self.page_size;
        }
        start
    }

    fn touch(&mut self, prefix: &[i32]) {
        self.clock += 1;
        let end = self.edge_end(prefix);
        for n in 1..=end.len() / self.page_size {
            self.stored.get_mut(&end[..n * self.page_size]).expect("a stored prefix").used = self.clock;
        }
    }

    fn end_edge(&mut self, prefix: &[i32]) {
        if let Some(last) = self.stored.get_mut(prefix) {
            last.ends = true;
        }
    }

    fn insert(&mut self, tokens: &[i32], pages: &[i32]) -> usize {
        let present = self.pages_in(tokens);
        if present < pages.len() {
            self.end_edge(&tokens[..present * self.page_size]);
        }
        for n in present..pages.len() {
            let prefix = tokens[..(n + 1) * self.page_size].to_vec();
            self.stored.insert(prefix, Stored { page: pages[n], used: 0, ends: n + 1 == pages.len() });
        }
        self.touch(tokens);
        present
    }

    fn is_pinned(&self, prefix: &[i32]) -> bool {
        self.pins.iter().any(|pin| pin.starts_with(prefix))
    }

    fn drop_prefix(&mut self, prefix: &[i32]) -> i32 {
        self.stored.remove(prefix).expect("a stored prefix").page
    }

    fn evict(&mut self, wanted: usize) -> Vec<i32> {
        let mut freed = Vec::new();
        while freed.len() < wanted {
            let leaf = |key: &&Vec<i32>| self.longer(key).is_empty() && !self.is_pinned(key);
            let oldest = self.stored.keys().filter(leaf).min_by_key(|key| self.stored[*key].used).cloned();
            let Some(end) = oldest else { break };
            let start = self.edge_start(&end) / self.page_size;
            freed.extend(&self.pages_of(&end)[start..]);
            for n in start + 1..=end.len() / self.page_size {
                self.drop_prefix(&end[..n * self.page_size]);
            }
        }
        freed
    }

    /// The pages freed in no particular order; `None` if something is pinned.
    fn remove(&mut self, prefix: &[i32]) -> Option<Vec<i32>> {
        if self.pages_in(prefix) * self.page_size < prefix.len() {
            return Some(Vec::new());
        }
        let doomed = self.longer(prefix);
        if doomed.iter().any(|key| self.is_pinned(key)) {
            return None;
        }
        self.end_edge(prefix);
        Some(doomed.iter().map(|key| self.drop_prefix(key)).collect())
    }

    fn pinned_pages(&self) -> usize {
        // A pin holds whole edges, and ends where one ends.
        self.stored.keys().filter(|key| self.is_pinned(key)).count()
    }
}

#[derive(Debug, Clone)]
enum Action {
    Insert(Vec<i32>),
    Find(Vec<i32>),
    Lookup(Vec<i32>),
    Pin(Vec<i32>),
    Unpin(usize),
    Evict(usize),
    Remove(Vec<i32>),
    Copy,
}

/// A tree, its model, the pool its pages come from, and arrays that are told of changes only.
struct Pair {
    tree: RadixTree,
    model: Model,
    pins: Vec<Pin>,
    free: Vec<i32>,
    table: Vec<[i32; 4]>,
    tokens: Vec<i32>,
    pages: Vec<i32>,
    seed: u32,
    num_pages: usize,
}

impl Pair {
    fn new(page_size: usize, num_pages: usize) -> Pair {
        Pair {
            tree: RadixTree::new(page_size, num_pages).unwrap(),
            model: Model { page_size, ..Model::default() },
            pins: Vec::new(),
            free: (0..num_pages as i32).collect(),
            table: Vec::new(),
            tokens: Vec::new(),
            pages: Vec::new(),
            seed: 0,
            num_pages,
        }
    }

    fn whole<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        &tokens[..tokens.len() - tokens.len() % self.model.page_size]
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Insert(tokens) => {
                let tokens = self.whole(tokens);
                let count = tokens.len() / self.model.page_size;
                let lacking = count.saturating_sub(self.free.len());
                self.evict(lacking);
                if count <= self.free.len() {
                    let pages = self.free.split_off(self.free.len() - count);
                    let inserted = self.tree.insert(tokens, &pages).unwrap();
                    assert_eq!(inserted.present, self.model.insert(tokens, &pages));
                    self.free.extend(&pages[..inserted.present]);
                }
            }
            Action::Find(tokens) => {
                let found = self.tree.find(tokens);
                let longest = self.model.longest(tokens);
                assert_eq!((found.tokens, found.pages), (longest.len(), self.model.pages_of(&longest)));
            }
            Action::Lookup(tokens) => {
                let longest = self.model.longest(tokens);
                self.model.touch(&longest);
                assert_eq!(self.tree.lookup(tokens).pages, self.model.pages_of(&longest));
            }
            Action::Pin(tokens) => {
                let longest = self.model.longest(tokens);
                self.model.end_edge(&longest);
                self.model.touch(&longest);
                let (found, pin) = self.tree.lookup_pinned(tokens).unwrap();
                assert_eq!(found.pages, self.model.pages_of(&longest));
                self.pins.push(pin);
                self.model.pins.push(longest);
            }
            Action::Unpin(which) if !self.pins.is_empty() => {
                let which = which % self.pins.len();
                self.tree.unpin(self.pins.swap_remove(which)).unwrap();
                self.model.pins.swap_remove(which);
            }
            Action::Unpin(_) => {}
            Action::Evict(wanted) => self.evict(*wanted),
            Action::Remove(tokens) => {
                let prefix = self.whole(tokens).to_vec();
                match (self.tree.remove(&prefix), self.model.remove(&prefix)) {
                    (Ok(mut freed), Some(mut expected)) => {
                        self.free.extend(&freed);
                        freed.sort_unstable();
                        expected.sort_unstable();
                        assert_eq!(freed, expected);
                    }
                    (Err(_), None) => {}
                    (tree, model) => panic!("tree {tree:?}, model {model:?}"),
                }
            }
            Action::Copy => self.copy(),
        }
        self.tree.check().unwrap();
        let stats = self.tree.stats();
        assert_eq!(stats.pages, self.model.stored.len());
        assert_eq!(stats.pages + self.free.len(), self.num_pages, "no page is lost or doubled");
        assert_eq!(stats.pins, self.pins.len());
        assert_eq!(stats.nodes, self.model.stored.values().filter(|stored| stored.ends).count());
        assert_eq!(stats.pinned_pages, self.model.pinned_pages());
    }

    fn evict(&mut self, wanted: usize) {
        let freed = self.tree.evict(wanted);
        assert_eq!(freed, self.model.evict(wanted));
        self.free.extend(freed);
    }

    /// Brings the arrays up to date and searches them for all that is stored.
    fn copy(&mut self) {
        let changes = self.tree.take_changes();
        let flat = self.tree.flat();
        // What was never written must not matter.
        const GARBAGE: i32 = 0x5a5a_5a5a;
        if self.table.len() != flat.table.len() {
            self.table = vec![[GARBAGE; 4]; flat.table.len()];
        }
        self.tokens.resize(flat.tokens.len(), GARBAGE);
        self.pages.resize(flat.pages.len(), GARBAGE);
        for rows in changes.slots {
            self.table[rows.clone()].copy_from_slice(&flat.table[rows]);
        }
        for rows in changes.pages {
            self.pages[rows.clone()].copy_from_slice(&flat.pages[rows.clone()]);
            let tokens = rows.start * flat.page_size..rows.end * flat.page_size;
            self.tokens[tokens.clone()].copy_from_slice(&flat.tokens[tokens]);
        }
        self.seed = flat.seed;
        let copy = Flat {
            table: &self.table,
            tokens: &self.tokens,
            pages: &self.pages,
            page_size: flat.page_size,
            seed: self.seed,
        };
        for key in self.model.stored.keys() {
            let query = [&key[..], &[-5, -5]].concat();
            let mut pages = Vec::new();
            copy.find(&query, |start, len| pages.extend_from_slice(&copy.pages[start..start + len]));
            assert_eq!(pages, self.model.pages_of(key));
        }
    }
}

/// Sequences over few tokens, so that many begin alike.
fn draw_tokens(rng: &mut Random, page_size: usize) -> Vec<i32> {
    let len = rng.below(8 * page_size as u64 + 1) as usize;
    let mut tokens: Vec<i32> = Vec::with_capacity(len);
    while tokens.len() < len {
        // Pages of one token, mostly: with page sizes above one, random pages would never agree.
        let odd = rng.below(8) == 0;
        let token = rng.below(3) as i32;
        tokens.extend((0..page_size).map(|_| if odd { rng.below(3) as i32 } else { token }));
    }
    tokens.truncate(len);
    tokens
}

fn draw(rng: &mut Random, page_size: usize) -> Action {
    let tokens = draw_tokens(rng, page_size);
    match rng.below(32) {
        0..10 => Action::Insert(tokens),
        10..14 => Action::Find(tokens),
        14..19 => Action::Lookup(tokens),
        19..23 => Action::Pin(tokens),
        23..27 => Action::Unpin(rng.bits() as usize),
        27..30 => Action::Evict(rng.below(6) as usize),
        30 => Action::Copy,
        _ => match rng.below(4) {
            0 => Action::Remove(tokens),
            _ => Action::Evict(1),
        },
    }
}

/// Runs `count` operations, on a new tree from time to time: pools from one page up, page sizes 1 to 4.
fn run(seed: u64, count: usize) {
    const LIFE: usize = 20_000;
    let mut rng = Random::new(seed);
    for first in (0..count).step_by(LIFE) {
        let page_size = [1, 2, 1, 4, 3][first / LIFE % 5];
        let num_pages = [1, 64, 5, 24, 100, 12][first / LIFE % 6];
        let mut pair = Pair::new(page_size, num_pages);
        for _ in first..count.min(first + LIFE) {
            pair.apply(&draw(&mut rng, page_size));
        }
    }
}

#[test]
fn random_operations_agree_with_the_model() {
    run(1, 200_000);
}

#[test]
#[ignore = "takes minutes"]
fn ten_million_random_operations_agree_with_the_model() {
    std::thread::scope(|scope| {
        for seed in 2..4 {
            scope.spawn(move || run(seed, 5_000_000));
        }
    });
}

fn sequences() -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(0..2i32, 0..10)
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => sequences().prop_map(Action::Insert),
        1 => sequences().prop_map(Action::Find),
        2 => sequences().prop_map(Action::Lookup),
        2 => sequences().prop_map(Action::Pin),
        2 => any::<usize>().prop_map(Action::Unpin),
        2 => (0..6usize).prop_map(Action::Evict),
        1 => sequences().prop_map(Action::Remove),
        1 => Just(Action::Copy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn short_histories_agree_with_the_model(
        page_size in 1..3usize,
        num_pages in 1..30usize,
        history in prop::collection::vec(actions(), 0..40),
    ) {
        let mut pair = Pair::new(page_size, num_pages);
        for action in &history {
            pair.apply(action);
        }
    }
}
