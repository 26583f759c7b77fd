//! The radix tree against a naive model: every stored prefix in a sorted map, every question answered by looking at all
//! of them. All invariants are checked after every operation, in trees of thousands of pages after every few.

use proptest::prelude::*;
use std::collections::BTreeMap;
use warpsmith::Stream;
use warpsmith::radix::flat::{Flat, Slot};
use warpsmith::radix::{Mirror, Pin, RadixTree, Version};
use warpsmith::tensor::Random;

/// What the model knows of the last page of a prefix.
#[derive(Debug, Clone)]
struct Stored {
    page: i32,
    used: u64,
    /// The node it leads to, if an edge ends with it.
    node: Option<u32>,
}

/// Prefixes of whole pages, each with its last page.
#[derive(Default)]
struct Model {
    page_size: usize,
    stored: BTreeMap<Vec<i32>, Stored>,
    /// When each node came into being, counted in nodes.
    births: BTreeMap<u32, usize>,
    /// Nodes that ever were.
    born: usize,
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

    /// Keys that begin with a prefix and go on are in one place of the map, right behind it.
    fn longer(&self, prefix: &[i32]) -> impl Iterator<Item = &Vec<i32>> {
        let from = self.stored.range(prefix.to_vec()..).map(|(key, _)| key);
        from.take_while(|key| key.starts_with(prefix)).filter(|key| key.len() > prefix.len())
    }

    /// The end of the edge that the last page of a prefix is on: edges do not branch before they end.
    fn edge_end(&self, prefix: &[i32]) -> Vec<i32> {
        let mut end = prefix.to_vec();
        while !end.is_empty() && self.stored[&end].node.is_none() {
            let next = self.longer(&end).next().expect("an edge that goes on ends").clone();
            end = next;
        }
        end
    }

    /// The node in whose edge a stored prefix ends.
    fn node_of(&self, prefix: &[i32]) -> u32 {
        let end = self.edge_end(prefix);
        if end.is_empty() { 0 } else { self.stored[&end].node.expect("an edge ends at a node") }
    }

    fn edge_start(&self, end: &[i32]) -> usize {
        let mut start = end.len() - self.page_size;
        while start > 0 && self.stored[&end[..start]].node.is_none() {
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

    /// An edge ends with this prefix from now on. The tree chooses the number of the node; the model only requires that
    /// no other has it.
    fn end_edge(&mut self, prefix: &[i32], tree: &RadixTree) {
        let Some(last) = self.stored.get_mut(prefix) else { return };
        if last.node.is_none() {
            let node = tree.find(prefix).node;
            last.node = Some(node);
            self.born += 1;
            assert!(node != 0 && self.births.insert(node, self.born).is_none(), "node {node} exists");
        }
    }

    /// After the tree has stored the sequence.
    fn insert(&mut self, tokens: &[i32], pages: &[i32], tree: &RadixTree) -> usize {
        let present = self.pages_in(tokens);
        for n in present..pages.len() {
            let prefix = tokens[..(n + 1) * self.page_size].to_vec();
            self.stored.insert(prefix, Stored { page: pages[n], used: 0, node: None });
        }
        if present < pages.len() {
            self.end_edge(&tokens[..present * self.page_size], tree);
            self.end_edge(tokens, tree);
        }
        self.touch(tokens);
        present
    }

    fn is_pinned(&self, prefix: &[i32]) -> bool {
        self.pins.iter().any(|pin| pin.starts_with(prefix))
    }

    fn drop_prefix(&mut self, prefix: &[i32]) -> i32 {
        let dropped = self.stored.remove(prefix).expect("a stored prefix");
        if let Some(node) = dropped.node {
            self.births.remove(&node).expect("a node that was born");
        }
        dropped.page
    }

    /// The least recently used prefix that nothing follows and nobody has pinned.
    fn oldest_leaf(&self) -> Option<Vec<i32>> {
        let mut oldest: Option<(&Vec<i32>, u64)> = None;
        for (key, stored) in &self.stored {
            let is_older = oldest.is_none_or(|(_, used)| stored.used < used);
            if is_older && self.longer(key).next().is_none() && !self.is_pinned(key) {
                oldest = Some((key, stored.used));
            }
        }
        oldest.map(|(key, _)| key.clone())
    }

    fn evict(&mut self, wanted: usize) -> Vec<i32> {
        let mut freed = Vec::new();
        while freed.len() < wanted {
            let Some(end) = self.oldest_leaf() else { break };
            let start = self.edge_start(&end) / self.page_size;
            freed.extend(&self.pages_of(&end)[start..]);
            for n in start + 1..=end.len() / self.page_size {
                self.drop_prefix(&end[..n * self.page_size]);
            }
        }
        freed
    }

    /// After the tree has removed what follows the prefix: the pages freed in no particular order; `None` if something is
    /// pinned.
    fn remove(&mut self, prefix: &[i32], tree: &RadixTree) -> Option<Vec<i32>> {
        if self.pages_in(prefix) * self.page_size < prefix.len() {
            return Some(Vec::new());
        }
        let doomed: Vec<Vec<i32>> = self.longer(prefix).cloned().collect();
        if doomed.iter().any(|key| self.is_pinned(key)) {
            return None;
        }
        let freed = doomed.iter().map(|key| self.drop_prefix(key)).collect();
        self.end_edge(prefix, tree);
        Some(freed)
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
    /// Brings one of the copies up to date.
    Copy(usize),
    /// Searches one of the copies, as old as it may be.
    Search(usize, Vec<i32>),
    /// Pins what a search of a copy has found, or the first pages of it.
    PinMatch(usize, usize),
}

/// A copy of the tree as a device would have it, and what it holds.
struct Copy {
    mirror: Mirror,
    table: Vec<[i32; 4]>,
    tokens: Vec<i32>,
    pages: Vec<i32>,
    /// Nodes that ever were when it was brought up to date.
    born: usize,
}

impl Copy {
    fn new(tree: &RadixTree) -> Copy {
        let mirror = Mirror::new(tree, &Stream::Host).unwrap();
        let mut copy = Copy { mirror, table: Vec::new(), tokens: Vec::new(), pages: Vec::new(), born: 0 };
        copy.read();
        copy
    }

    fn read(&mut self) {
        self.table = self.mirror.table().to_vec::<i32>().unwrap().as_chunks().0.to_vec();
        self.tokens = self.mirror.tokens().to_vec::<i32>().unwrap();
        self.pages = self.mirror.pages().to_vec::<i32>().unwrap();
    }

    fn flat(&self, page_size: usize) -> Flat<'_> {
        let (table, tokens, pages) = (&self.table[..], &self.tokens[..], &self.pages[..]);
        Flat { table, tokens, pages, page_size, seed: self.mirror.seed() }
    }

    /// Copies what has changed, after which nothing may differ from the tree: not one slot of the table, and no page
    /// that a slot points to. Returns the rows that had changed, of all.
    fn update(&mut self, tree: &RadixTree, born: usize) -> [usize; 2] {
        let changes = tree.changes_since(self.mirror.version()).unwrap();
        let changed = changes.slots.iter().chain(&changes.pages).map(ExactSizeIterator::len).sum();
        self.mirror.update(tree, &Stream::Host).unwrap();
        self.read();
        self.born = born;
        let (copy, flat) = (self.flat(tree.page_size()), tree.flat());
        assert_eq!((copy.seed, copy.table, copy.pages.len()), (flat.seed, flat.table, flat.pages.len()));
        for slot in flat.table.iter().map(|row| Slot::new(*row)).filter(|slot| !slot.is_empty()) {
            let run = slot.start as usize..(slot.start + slot.len) as usize;
            let tokens = run.start * flat.page_size..run.end * flat.page_size;
            assert_eq!(copy.pages[run.clone()], flat.pages[run], "{slot:?}");
            assert_eq!(copy.tokens[tokens.clone()], flat.tokens[tokens], "{slot:?}");
        }
        [changed, flat.table.len() + flat.pages.len()]
    }
}

/// What a search of a copy has found.
struct Answer {
    version: Version,
    /// Nodes that ever were in that version.
    born: usize,
    node: u32,
    prefix: Vec<i32>,
    pages: Vec<i32>,
}

/// Answers that wait to be pinned; older ones are forgotten.
const ANSWERS: usize = 8;

/// A tree, its model, the pool its pages come from, and copies that are told of changes only.
struct Pair {
    tree: RadixTree,
    model: Model,
    pins: Vec<Pin>,
    free: Vec<i32>,
    copies: [Copy; 2],
    answers: Vec<Answer>,
    num_pages: usize,
    /// Rows that had changed in all updates of copies, and rows that there were.
    changed: [usize; 2],
    /// Answers for which a pin was given, and for which none was.
    pinned: [usize; 2],
}

impl Pair {
    fn new(page_size: usize, num_pages: usize) -> Pair {
        let tree = RadixTree::new(page_size, num_pages).unwrap();
        Pair {
            copies: [Copy::new(&tree), Copy::new(&tree)],
            tree,
            model: Model { page_size, ..Model::default() },
            pins: Vec::new(),
            free: (0..num_pages as i32).collect(),
            answers: Vec::new(),
            num_pages,
            changed: [0; 2],
            pinned: [0; 2],
        }
    }

    fn whole<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        &tokens[..tokens.len() - tokens.len() % self.model.page_size]
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Insert(tokens) => self.insert(self.whole(tokens)),
            Action::Find(tokens) => {
                let found = self.tree.find(tokens);
                let longest = self.model.longest(tokens);
                assert_eq!((found.tokens, found.node), (longest.len(), self.model.node_of(&longest)));
                assert_eq!(found.pages, self.model.pages_of(&longest));
            }
            Action::Lookup(tokens) => {
                let longest = self.model.longest(tokens);
                self.model.touch(&longest);
                let found = self.tree.lookup(tokens);
                assert_eq!(found.pages, self.model.pages_of(&longest));
                assert_eq!(found.node, self.model.node_of(&longest));
            }
            Action::Pin(tokens) => {
                let longest = self.model.longest(tokens);
                let (found, pin) = self.tree.lookup_pinned(tokens).unwrap();
                assert_eq!((found.node, &found.pages), (pin.node(), &self.model.pages_of(&longest)));
                self.pinned(pin, longest);
            }
            Action::Unpin(which) if !self.pins.is_empty() => {
                let which = which % self.pins.len();
                self.tree.unpin(self.pins.swap_remove(which)).unwrap();
                self.model.pins.swap_remove(which);
            }
            Action::Unpin(_) => {}
            Action::Evict(wanted) => self.evict(*wanted),
            Action::Remove(tokens) => self.remove(self.whole(tokens)),
            Action::Copy(which) => {
                let [changed, all] = self.copies[which % 2].update(&self.tree, self.model.born);
                self.changed = [self.changed[0] + changed, self.changed[1] + all];
            }
            Action::Search(which, tokens) => self.search(which % 2, tokens),
            Action::PinMatch(which, pages) if !self.answers.is_empty() => {
                self.pin_match(which % self.answers.len(), *pages);
            }
            Action::PinMatch(..) => {}
        }
    }

    fn check(&self) {
        self.tree.check().unwrap();
        let stats = self.tree.stats();
        assert_eq!(stats.pages, self.model.stored.len());
        assert_eq!(stats.pages + self.free.len(), self.num_pages, "no page is lost or doubled");
        assert_eq!(stats.pins, self.pins.len());
        assert_eq!(stats.nodes, self.model.births.len());
        assert_eq!(stats.pinned_pages, self.model.pinned_pages());
    }

    fn insert(&mut self, tokens: &[i32]) {
        let count = tokens.len() / self.model.page_size;
        let lacking = count.saturating_sub(self.free.len());
        self.evict(lacking);
        if count <= self.free.len() {
            let pages = self.free.split_off(self.free.len() - count);
            let inserted = self.tree.insert(tokens, &pages).unwrap();
            assert_eq!(inserted.present, self.model.insert(tokens, &pages, &self.tree));
            assert_eq!(inserted.node, self.model.node_of(tokens));
            self.free.extend(&pages[..inserted.present]);
        }
    }

    fn evict(&mut self, wanted: usize) {
        let freed = self.tree.evict(wanted);
        assert_eq!(freed, self.model.evict(wanted));
        self.free.extend(freed);
    }

    fn remove(&mut self, prefix: &[i32]) {
        match (self.tree.remove(prefix), self.model.remove(prefix, &self.tree)) {
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

    /// The tree has pinned a prefix, and its edge ends there now.
    fn pinned(&mut self, pin: Pin, prefix: Vec<i32>) {
        self.model.end_edge(&prefix, &self.tree);
        self.model.touch(&prefix);
        assert_eq!(pin.node(), self.model.node_of(&prefix));
        self.pins.push(pin);
        self.model.pins.push(prefix);
    }

    fn search(&mut self, which: usize, tokens: &[i32]) {
        let copy = &self.copies[which];
        let flat = copy.flat(self.model.page_size);
        let mut pages = Vec::new();
        let found = flat.find(tokens, |start, len| pages.extend_from_slice(&flat.pages[start..start + len]));
        let (version, node) = (copy.mirror.version(), found.node as u32);
        if version == self.tree.version() {
            let expected = self.tree.find(tokens);
            assert_eq!((node, &pages), (expected.node, &expected.pages));
        }
        let prefix = tokens[..found.pages * self.model.page_size].to_vec();
        if self.answers.len() == ANSWERS {
            self.answers.remove(0);
        }
        self.answers.push(Answer { version, born: copy.born, node, prefix, pages });
    }

    /// Pins are given if and only if the node of the answer is still the one that was found, and where one is given the
    /// pages are those that hold the tokens now.
    fn pin_match(&mut self, which: usize, pages: usize) {
        let answer = &self.answers[which];
        let pages = pages % (answer.pages.len() + 1);
        let prefix = answer.prefix[..pages * self.model.page_size].to_vec();
        let lives = self.model.births.get(&answer.node).is_some_and(|&birth| birth <= answer.born);
        let pin = self.tree.pin_match(answer.version, answer.node, prefix.len()).unwrap();
        assert_eq!(pin.is_some(), lives || answer.node == 0);
        self.pinned[usize::from(pin.is_none())] += 1;
        if let Some(pin) = pin {
            assert_eq!(self.model.longest(&prefix), prefix);
            assert_eq!(answer.pages[..pages], self.model.pages_of(&prefix));
            self.pinned(pin, prefix);
        }
    }
}

/// What a run is like.
#[derive(Clone, Copy)]
struct Shape {
    page_size: usize,
    num_pages: usize,
    /// Different tokens: the fewer, the more sequences begin alike.
    tokens: u64,
    /// Operations from one check of all invariants to the next.
    check: usize,
}

fn draw_tokens(rng: &mut Random, shape: Shape) -> Vec<i32> {
    let page_size = shape.page_size;
    let len = rng.below(8 * page_size as u64 + 1) as usize;
    let mut tokens: Vec<i32> = Vec::with_capacity(len);
    while tokens.len() < len {
        // Pages of one token, mostly: with page sizes above one, random pages would never agree.
        let odd = rng.below(8) == 0;
        let token = rng.below(shape.tokens) as i32;
        tokens.extend((0..page_size).map(|_| if odd { rng.below(3) as i32 } else { token }));
    }
    tokens.truncate(len);
    tokens
}

fn draw(rng: &mut Random, shape: Shape) -> Action {
    let tokens = draw_tokens(rng, shape);
    match rng.below(32) {
        0..10 => Action::Insert(tokens),
        10..12 => Action::Find(tokens),
        12..16 => Action::Lookup(tokens),
        16..18 => Action::Pin(tokens),
        18..20 => Action::PinMatch(rng.bits() as usize, rng.bits() as usize),
        20..23 => Action::Search(rng.bits() as usize, tokens),
        23..27 => Action::Unpin(rng.bits() as usize),
        27..30 => Action::Evict(rng.below(6) as usize),
        // One of the copies seldom: it misses more.
        30 => Action::Copy(rng.below(4).min(1) as usize),
        _ => match rng.below(4) {
            0 => Action::Remove(tokens),
            _ => Action::Evict(1),
        },
    }
}

fn live(rng: &mut Random, shape: Shape, count: usize) -> Pair {
    let mut pair = Pair::new(shape.page_size, shape.num_pages);
    for i in 1..=count {
        pair.apply(&draw(rng, shape));
        if i % shape.check == 0 || i == count {
            pair.check();
        }
    }
    pair
}

/// Runs `count` operations, on a new tree from time to time: pools from one page up, page sizes 1 to 4.
fn run(seed: u64, count: usize) {
    const LIFE: usize = 20_000;
    let mut rng = Random::new(seed);
    for first in (0..count).step_by(LIFE) {
        let page_size = [1, 2, 1, 4, 3][first / LIFE % 5];
        let num_pages = [1, 64, 5, 24, 100, 12][first / LIFE % 6];
        live(&mut rng, Shape { page_size, num_pages, tokens: 3, check: 1 }, LIFE.min(count - first));
    }
}

/// Trees of thousands of edges, of which little changes between two copies.
fn run_large(seed: u64, lives: usize, count: usize) {
    let mut rng = Random::new(seed);
    for life in 0..lives {
        let (page_size, num_pages) = [(1, 3000), (2, 8000)][life % 2];
        let pair = live(&mut rng, Shape { page_size, num_pages, tokens: 40, check: 200 }, count);
        let ([changed, all], stats) = (pair.changed, pair.tree.stats());
        assert!(stats.slots > 2000 && 4 * changed < all, "{changed} of {all} rows changed, {stats:?}");
        assert!(pair.pinned.iter().all(|&count| count > 0), "pins given and refused: {:?}", pair.pinned);
    }
}

#[test]
fn random_operations_agree_with_the_model() {
    run(1, 200_000);
}

#[test]
fn random_operations_on_large_trees_agree_with_the_model() {
    run_large(1, 2, 20_000);
}

#[test]
#[ignore = "takes minutes"]
fn ten_million_random_operations_agree_with_the_model() {
    std::thread::scope(|scope| {
        for seed in 2..4 {
            scope.spawn(move || {
                run(seed, 5_000_000);
                run_large(seed, 4, 50_000);
            });
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
        1 => any::<usize>().prop_map(Action::Copy),
        2 => (any::<usize>(), sequences()).prop_map(|(copy, tokens)| Action::Search(copy, tokens)),
        2 => any::<(usize, usize)>().prop_map(|(answer, pages)| Action::PinMatch(answer, pages)),
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
            pair.check();
        }
    }
}
