//! What the cases of `paged_attention` cannot say: bits that must not change with neighbours, chunks and layouts; slots
//! that no key uses; wrong numbers.

use super::*;
use crate::device::Device;
use crate::tensor::{Layout, Random, Shape};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const PAGE: usize = 16;

fn devices() -> Vec<Device> {
    match Device::best() {
        Device::Cpu => vec![Device::Cpu],
        gpu => vec![Device::Cpu, gpu],
    }
}

/// Every kernel of the device that can run here, with a type it is for; the CPU's highest with both types that tiles multiply.
fn kernels(device: Device) -> Vec<(&'static str, DType)> {
    let tiers = Tier::available();
    let here = |k: &crate::op::KernelInfo| match device {
        Device::Cpu => k.tier.is_some_and(|t| tiers.contains(&t)),
        Device::Cuda(_) => k.cuda.is_some(),
    };
    let kernels = crate::op::AnyOp::kernels(&Forward).into_iter().filter(here);
    let types = |k: &crate::op::KernelInfo| match k.tier {
        _ if k.name.ends_with("generic") => vec![DType::F32],
        Some(Tier::Avx512) => vec![DType::BF16, DType::F16],
        _ => vec![DType::BF16],
    };
    kernels.flat_map(|k| types(&k).into_iter().map(move |dtype| (k.name, dtype))).collect()
}

/// Those that do not leave requests with few rows to another.
fn kernels_for_all(device: Device) -> Vec<(&'static str, DType)> {
    kernels(device).into_iter().filter(|(name, _)| !name.ends_with("sm90")).collect()
}

fn normal(count: usize, seed: u64) -> Vec<f64> {
    let mut rng = Random::new(seed);
    (0..count).map(|_| rng.normal()).collect()
}

fn ints(values: &[i32], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(values, shape, device).unwrap()
}

/// Some requests with their pages, in a pool with pages to spare.
struct Pool {
    lens: Vec<usize>,
    /// What the queries of each request are drawn from.
    seeds: Vec<u64>,
    /// `[pages, PAGE, KV_HEADS, DIM]`.
    k: Vec<f64>,
    v: Vec<f64>,
    table: Vec<i32>,
    width: usize,
    pages: usize,
    /// Zero for none.
    window: usize,
}

impl Pool {
    fn new(lens: &[usize]) -> Pool {
        let width = lens.iter().max().unwrap().div_ceil(PAGE) + 1;
        // Every page once, seven apart, so their number must not be a multiple of that.
        let enough = lens.len() * width + 2;
        let pages = enough + usize::from(enough.is_multiple_of(7));
        let size = pages * PAGE * KV_HEADS * DIM;
        let table = (0..lens.len() * width).map(|i| ((i * 7 + 3) % pages) as i32).collect();
        let seeds = (0..lens.len() as u64).map(|r| 100 + r).collect();
        let (k, v) = (normal(size, 1), normal(size, 2));
        Pool { lens: lens.to_vec(), seeds, k, v, table, width, pages, window: 0 }
    }

    fn shape(&self) -> [usize; 4] {
        [self.pages, PAGE, KV_HEADS, DIM]
    }

    fn tensors(&self, dtype: DType, device: Device) -> [Tensor; 4] {
        let cache = |values: &[f64]| Tensor::from_f64(values, &self.shape(), dtype, device).unwrap();
        let lens: Vec<i32> = self.lens.iter().map(|&len| len as i32).collect();
        let table = ints(&self.table, &[lens.len(), self.width], device);
        [cache(&self.k), cache(&self.v), table, ints(&lens, &[lens.len()], device)]
    }

    /// The queries `counts` of each request, drawn by position so that the same token always asks the same.
    fn queries(&self, counts: &[usize], dtype: DType, device: Device) -> (Tensor, Tensor) {
        let (mut values, mut starts) = (Vec::new(), vec![0]);
        for (r, &count) in counts.iter().enumerate() {
            let len = self.lens[r];
            let all = normal(len * HEADS * DIM, self.seeds[r]);
            values.extend_from_slice(&all[(len - count) * HEADS * DIM..]);
            starts.push(starts[r] + count as i32);
        }
        let tokens = values.len() / (HEADS * DIM);
        let q = Tensor::from_f64(&values, &[tokens, HEADS, DIM], dtype, device).unwrap();
        (q, ints(&starts, &[starts.len()], device))
    }

    /// Out and lse of the last `counts` tokens of each request, as bits.
    fn run(&self, counts: &[usize], dtype: DType, device: Device, kernel: &'static str) -> Vec<Vec<u64>> {
        self.run_with(counts, dtype, device, kernel, None)
    }

    /// As [`Self::run`], with the prefixes of some groups shared.
    fn run_with(
        &self,
        counts: &[usize],
        dtype: DType,
        device: Device,
        kernel: &'static str,
        groups: Option<&Groups>,
    ) -> Vec<Vec<u64>> {
        let [k, v, table, lens] = self.tensors(dtype, device);
        let (q, starts) = self.queries(counts, dtype, device);
        let mut call = PagedAttention::new(&q, &k, &v, &table, &lens).q_starts(&starts).kernel(kernel);
        if self.window > 0 {
            call = call.window(self.window);
        }
        let shared = groups.map(|groups| groups.tensors(device));
        if let Some([starts, lens]) = &shared {
            call = call.cascade(starts, lens).always_share();
        }
        let (out, lse) = call.run_with_lse().unwrap();
        rows(&out, &lse)
    }

    /// Gives the requests of every group the first pages of its first one.
    fn share(&mut self, groups: &Groups) {
        for (starts, lens) in groups.starts.iter().zip(&groups.lens) {
            for (range, &len) in starts.windows(2).zip(lens) {
                let (first, end, pages) =
                    (range[0] as usize, range[1] as usize, (len as usize).div_ceil(PAGE));
                for r in first..end {
                    self.table.copy_within(first * self.width..first * self.width + pages, r * self.width);
                }
            }
        }
    }

    /// The pool with one request's keys cut to `len`.
    fn cut(&self, request: usize, len: usize) -> Pool {
        let table = self.table[request * self.width..][..self.width].to_vec();
        let (seeds, k, v) = (vec![self.seeds[request]], self.k.clone(), self.v.clone());
        Pool { lens: vec![len], seeds, k, v, table, ..*self }
    }
}

/// Groups of requests that share prefixes: of each level, where they start, and what they share.
struct Groups {
    starts: Vec<Vec<i32>>,
    lens: Vec<Vec<i32>>,
}

impl Groups {
    fn new(levels: &[(&[i32], &[i32])]) -> Groups {
        let (starts, lens) = levels.iter().map(|(starts, lens)| (starts.to_vec(), lens.to_vec())).unzip();
        Groups { starts, lens }
    }

    fn tensors(&self, device: Device) -> [Tensor; 2] {
        [&self.starts, &self.lens].map(|rows| ints(&rows.concat(), &[rows.len(), rows[0].len()], device))
    }
}

/// The bits of each token.
fn rows(out: &Tensor, lse: &Tensor) -> Vec<Vec<u64>> {
    let bits = |tensor: &Tensor| tensor.to_f64().unwrap().into_iter().map(f64::to_bits).collect::<Vec<_>>();
    let (out, lse) = (bits(out), bits(lse));
    out.chunks(HEADS * DIM).zip(lse.chunks(HEADS)).map(|(out, lse)| [out, lse].concat()).collect()
}

/// Asserts that each of some requests, the last `counts` tokens of it, has the same bits alone and in chunks.
fn assert_same_alone_and_in_chunks(
    pool: &Pool,
    counts: &[usize],
    chunks: &[usize],
    device: Device,
    (kernel, dtype): (&'static str, DType),
) {
    let together = pool.run(counts, dtype, device, kernel);
    let mut first = 0;
    for (r, &count) in counts.iter().enumerate() {
        let (len, want) = (pool.lens[r], &together[first..first + count]);
        assert!(pool.cut(r, len).run(&[count], dtype, device, kernel) == want, "{kernel}: request {r} alone");
        for &chunk in chunks {
            let parts = (0..count).step_by(chunk).flat_map(|start| {
                let end = (start + chunk).min(count);
                pool.cut(r, len - count + end).run(&[end - start], dtype, device, kernel)
            });
            assert!(parts.collect::<Vec<_>>() == want, "{kernel}: request {r} by {chunk}");
        }
        first += count;
    }
}

/// Two tests, because they take long and are run side by side.
fn assert_bits_of_few_rows(chunks: &[usize]) {
    let pool = Pool::new(&[700, 1, 2100, 40, 513]);
    for device in devices() {
        for kernel in kernels_for_all(device) {
            assert_same_alone_and_in_chunks(&pool, &[100, 1, 30, 40, 1], chunks, device, kernel);
        }
    }
}

#[test]
fn bits_depend_neither_on_neighbours_nor_on_single_rows() {
    assert_bits_of_few_rows(&[1]);
}

#[test]
fn bits_depend_neither_on_neighbours_nor_on_chunks() {
    assert_bits_of_few_rows(&[7, 64]);
}

#[test]
fn bits_of_many_rows_depend_neither_on_neighbours_nor_on_chunks() {
    // Rows enough in every chunk for the kernel that is for them; a window that begins in other blocks for each of a tile's
    // rows; and requests that have enough of the largest tiles together, but not alone.
    let long = Pool::new(&[700, 2100, 513]);
    let window = Pool { window: 90, ..Pool::new(&[700, 2100, 513]) };
    let many = Pool::new(&[190; 20]);
    for device in devices() {
        for kernel in kernels(device).into_iter().filter(|(name, _)| name.ends_with("sm90")) {
            for pool in [&long, &window] {
                assert_same_alone_and_in_chunks(pool, &[300, 180, 120], &[60], device, kernel);
            }
            assert_same_alone_and_in_chunks(&many, &[150; 20], &[], device, kernel);
        }
    }
}

#[test]
fn sharing_prefixes_changes_no_bit() {
    let lens = [1700, 1501, 3000, 1100, 1024, 700, 1];
    let counts = [1, 5, 60, 1, 0, 2, 1];
    // A tree that cuts spans at every level, with empty groups and requests in none; and one that cuts none.
    let trees = [
        Groups::new(&[
            (&[0, 4, 5, 5], &[900, 512, 0]),
            (&[0, 2, 4, 4], &[1030, 1000, 0]),
            (&[2, 3, 3, 3], &[2600, 0, 0]),
        ]),
        Groups::new(&[(&[0, 5], &[1024])]),
        Groups::new(&[(&[1, 3, 6], &[100, 600]), (&[1, 3, 3], &[1400, 0])]),
    ];
    for (tree, groups) in trees.iter().enumerate() {
        let mut pool = Pool::new(&lens);
        pool.share(groups);
        for device in devices() {
            // On Hopper, requests with many rows are another kernel's unless prefixes are shared.
            for (kernel, dtype) in kernels_for_all(device) {
                let apart = pool.run(&counts, dtype, device, kernel);
                let shared = pool.run_with(&counts, dtype, device, kernel, Some(groups));
                assert!(shared == apart, "{kernel}, tree {tree}");
            }
        }
    }
}

#[test]
fn wrong_groups_are_errors_on_the_cpu() {
    let mut pool = Pool::new(&[100, 90, 80]);
    pool.share(&Groups::new(&[(&[0, 3], &[32])]));
    let [k, v, table, lens] = pool.tensors(DType::F32, Device::Cpu);
    let (q, starts) = pool.queries(&[1, 1, 20], DType::F32, Device::Cpu);
    let run = |levels: &[(&[i32], &[i32])]| {
        let [groups, prefixes] = Groups::new(levels).tensors(Device::Cpu);
        let call = PagedAttention::new(&q, &k, &v, &table, &lens).q_starts(&starts);
        call.cascade(&groups, &prefixes).run()
    };
    let bad = |levels: &[(&[i32], &[i32])], text: &str| {
        let error = run(levels).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    run(&[(&[0, 3], &[32])]).unwrap();
    run(&[(&[0, 3, 3], &[16, 0]), (&[0, 1, 3], &[99, 32])]).unwrap();
    bad(&[(&[0, 4], &[32])], "`group_starts`: expected starts that ascend from 0 to at most requests=3");
    bad(&[(&[2, 1], &[32])], "got 2 and 1 for group 0 of level 0");
    bad(&[(&[-1, 1], &[32])], "got -1 and 1");
    bad(&[(&[0, 3], &[-1])], "`prefix_lens`: expected lengths from 0 to the 60 keys before the queries");
    bad(&[(&[0, 3], &[61])], "got 61 for group 0 of level 0");
    bad(&[(&[0, 3], &[33])], "`page_table`: expected page 2 to be that of request 0 too");
    bad(
        &[(&[0, 1, 3], &[32, 16]), (&[0, 2, 3], &[32, 32])],
        "groups of level 1 within those of the level before",
    );
}

#[test]
fn wrong_groups_reach_no_other_request_on_a_device() {
    let Device::Cuda(_) = Device::best() else { return eprintln!("skipped: no GPU") };
    let device = Device::best();
    let counts = [1, 5, 60, 1, 2, 2, 1, 1];
    let mut pool = Pool::new(&[1700, 1501, 3000, 1100, 1300, 700, 2000, 1]);
    let right: [&[i32]; 2] = [&[0, 3, 5], &[900, 1000]];
    pool.share(&Groups::new(&[(right[0], right[1])]));
    // What is wrong, and the requests that it may reach.
    let wrong = [
        (Groups::new(&[(&[i32::MIN, 3, 5], right[1])]), 0..0),
        (Groups::new(&[(&[0, 3, i32::MAX], right[1])]), 3..8),
        (Groups::new(&[(&[i32::MAX; 3], right[1])]), 0..0),
        (Groups::new(&[(&[0, 3, 1], right[1])]), 0..5),
        (Groups::new(&[(&[5, 0, 3], right[1])]), 0..5),
        (Groups::new(&[(right[0], &[i32::MAX, 1000])]), 0..3),
        (Groups::new(&[(right[0], &[900, 1 << 20])]), 3..5),
        (Groups::new(&[(right[0], &[-1, i32::MIN])]), 0..0),
        // A level whose group is in two of that before; and one that goes back behind it.
        (Groups::new(&[(right[0], right[1]), (&[2, 4, 4], &[1030, 0])]), 2..4),
        (Groups::new(&[(right[0], right[1]), (&[0, 3, 5], &[100, i32::MAX])]), 0..5),
    ];
    for (kernel, dtype) in kernels_for_all(device) {
        let apart = pool.run(&counts, dtype, device, kernel);
        for (number, (groups, reached)) in wrong.iter().enumerate() {
            let rows = pool.run_with(&counts, dtype, device, kernel, Some(groups));
            let mut first = 0;
            for (request, count) in counts.into_iter().enumerate() {
                let own = first..first + count;
                let same = rows[own.clone()] == apart[own];
                assert!(same || reached.contains(&request), "{kernel}: request {request} of groups {number}");
                first += count;
            }
        }
    }
}

#[test]
fn slots_without_keys_are_not_read() {
    let clean = Pool::new(&[700, 1, 0, 40, 513]);
    let mut poisoned =
        Pool { lens: clean.lens.clone(), table: clean.table.clone(), ..Pool::new(&clean.lens) };
    let mut used = vec![false; clean.pages * PAGE];
    for (r, &len) in clean.lens.iter().enumerate() {
        for key in 0..len {
            used[clean.table[r * clean.width + key / PAGE] as usize * PAGE + key % PAGE] = true;
        }
        // What lies past a request's pages need not exist.
        let pages = len.div_ceil(PAGE);
        poisoned.table[r * clean.width + pages..(r + 1) * clean.width].fill(i32::MAX);
    }
    for (slot, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
        let range = slot * KV_HEADS * DIM..(slot + 1) * KV_HEADS * DIM;
        poisoned.k[range.clone()].fill(f64::NAN);
        poisoned.v[range].fill(f64::INFINITY);
    }
    let counts = [20, 1, 0, 3, 1];
    for device in devices() {
        for (kernel, dtype) in kernels(device) {
            let want = clean.run(&counts, dtype, device, kernel);
            assert!(want.iter().flatten().all(|&bits| f64::from_bits(bits).is_finite()));
            assert!(poisoned.run(&counts, dtype, device, kernel) == want, "{kernel}");
        }
    }
}

/// Asserts that the last `count` tokens of each request have the same bits however the cache lies in memory.
fn assert_same_in_all_layouts(
    pool: &Pool,
    count: usize,
    device: Device,
    (kernel, dtype): (&'static str, DType),
) {
    let [k, v, table, lens] = pool.tensors(dtype, device);
    let (q, _) = pool.queries(&vec![count; pool.lens.len()], dtype, device);
    let run = |k: TensorView<'_>, v: TensorView<'_>| {
        let call = PagedAttention::new(&q, k, v, &table, &lens).kernel(kernel);
        let (out, lse) = call.run_with_lse().unwrap();
        rows(&out, &lse)
    };
    let want = run(k.view(), v.view());
    // [page][key or value][slot][head], and [page][key or value][head][slot].
    for order in [[0, 1, 2, 3, 4], [0, 1, 3, 2, 4]] {
        let memory =
            Shape::new(&[pool.pages, 2, [PAGE, KV_HEADS][order[2] - 2], [PAGE, KV_HEADS][order[3] - 2], DIM]);
        // Both orders are their own inverses.
        let both = Layout::contiguous(memory.unwrap()).permute(&order);
        assert_eq!(both.shape()[2..], pool.shape()[1..]);
        let mut values = vec![0.0; both.numel()];
        let page = PAGE * KV_HEADS * DIM;
        for (which, source) in [&pool.k, &pool.v].into_iter().enumerate() {
            for (i, &value) in source.iter().enumerate() {
                values[both.offset_of((i / page * 2 + which) * page + i % page)] = value;
            }
        }
        let shared = Tensor::from_f64(&values, &[values.len()], dtype, device).unwrap();
        let half = |which: usize| {
            let [page, kind, slot, head, step] = both.strides().try_into().unwrap();
            let layout =
                Layout::strided(Shape::new(&pool.shape()).unwrap(), &[page, slot, head, step]).unwrap();
            let address = shared.view().address() + which * kind as usize * dtype.size();
            // SAFETY: the elements lie inside `shared`, which outlives the view.
            unsafe { TensorView::from_raw(address, dtype, layout, device) }
        };
        assert!(run(half(0), half(1)) == want, "{kernel} {order:?}");
    }
}

#[test]
fn layouts_of_the_cache_do_not_matter() {
    let (few, many) = (Pool::new(&[100, 33]), Pool::new(&[300, 133]));
    for device in devices() {
        for kernel in kernels_for_all(device) {
            assert_same_in_all_layouts(&few, 2, device, kernel);
        }
        for kernel in kernels(device) {
            assert_same_in_all_layouts(&many, 60, device, kernel);
        }
    }
}

#[test]
fn wrong_numbers_are_errors_on_the_cpu() {
    let pool = Pool::new(&[40, 20]);
    let [k, v, table, lens] = pool.tensors(DType::F32, Device::Cpu);
    let (q, starts) = pool.queries(&[3, 1], DType::F32, Device::Cpu);
    let cpu = |values: &[i32]| ints(values, &[values.len()], Device::Cpu);
    let bad = |result: Result<Tensor>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let with_lens = |lens: &Tensor| PagedAttention::new(&q, &k, &v, &table, lens).q_starts(&starts).run();
    bad(
        with_lens(&cpu(&[40, -1])),
        "`kv_lens`: expected lengths from 0 to max_pages*page_size=64, got -1 for request 1",
    );
    bad(with_lens(&cpu(&[65, 20])), "got 65 for request 0");
    let with_starts =
        |starts: &[i32]| PagedAttention::new(&q, &k, &v, &table, &lens).q_starts(&cpu(starts)).run();
    bad(with_starts(&[0, 3, 2]), "`q_starts`: expected starts that ascend from 0 to at most num_tokens=4");
    bad(with_starts(&[0, 3, 5]), "got 3 and 5 for request 1");
    bad(with_starts(&[-1, 3, 4]), "got -1 and 3 for request 0");
    for (at, page) in [(1, -1), (pool.width, pool.pages as i32)] {
        let mut wrong = pool.table.clone();
        wrong[at] = page;
        let table = ints(&wrong, &[2, pool.width], Device::Cpu);
        let result = PagedAttention::new(&q, &k, &v, &table, &lens).q_starts(&starts).run();
        bad(
            result,
            &format!("`page_table`: expected pages from 0 to below num_pages={}, got {page}", pool.pages),
        );
    }
}

/// Asserts that wrong numbers in the last `counts` tokens of two requests neither reach the other's rows nor give NaN.
fn assert_wrong_numbers_are_moved(
    pool: &Pool,
    counts: [usize; 2],
    device: Device,
    (kernel, dtype): (&'static str, DType),
) {
    let want = pool.run(&counts, dtype, device, kernel);
    // Nothing of these can be reached by a key of the second request.
    let [k, v, _, _] = pool.tensors(dtype, device);
    let (q, _) = pool.queries(&counts, dtype, device);
    let mut table = pool.table.clone();
    table[1] = -5;
    table[2] = i32::MAX;
    let (first, lens) = (counts[0], [pool.lens[0] as i32, pool.lens[1] as i32]);
    let starts = [0, first as i32, (first + counts[1]) as i32];
    let run = |table: &[i32], lens: [i32; 2], starts: [i32; 3]| {
        let table = ints(table, &[2, pool.width], device);
        let (lens, starts) = (ints(&lens, &[2], device), ints(&starts, &[3], device));
        let call = PagedAttention::new(&q, &k, &v, &table, &lens).q_starts(&starts).kernel(kernel);
        let (out, lse) = call.run_with_lse().unwrap();
        rows(&out, &lse)
    };
    let absent = run(&table, lens, starts);
    assert!(
        absent[first..] == want[first..] && absent[0] != want[0],
        "{kernel}: pages that do not exist hold no keys"
    );
    assert!(absent.iter().flatten().all(|&bits| f64::from_bits(bits).is_finite()), "{kernel}");
    let long = run(&pool.table, [lens[0], i32::MAX], starts);
    assert!(long[..first] == want[..first], "{kernel}: a length past the table");
    let negative = run(&pool.table, [-7, lens[1]], starts);
    let nothing = |row: &Vec<u64>| row[..HEADS * DIM].iter().all(|&bits| f64::from_bits(bits) == 0.0);
    assert!(negative[first..] == want[first..] && negative[..first].iter().all(nothing), "{kernel}");
    let far = run(&pool.table, lens, [0, starts[1], 1000]);
    assert!(far[..first] == want[..first], "{kernel}: an end past the tokens");
}

#[test]
fn wrong_numbers_are_moved_into_the_tensors_on_a_device() {
    let Device::Cuda(_) = Device::best() else { return eprintln!("skipped: no GPU") };
    let device = Device::best();
    let (few, many) = (Pool::new(&[100, 40]), Pool::new(&[300, 130]));
    for kernel in kernels_for_all(device) {
        assert_wrong_numbers_are_moved(&few, [2, 1], device, kernel);
    }
    for kernel in kernels(device) {
        assert_wrong_numbers_are_moved(&many, [60, 50], device, kernel);
    }
}

#[test]
fn mistakes_are_named() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let q = tensor(&[4, 6, 64], DType::F32);
    let pages = tensor(&[8, 16, 2, 64], DType::F32);
    let narrow = tensor(&[8, 16, 2, 64], DType::F8E4M3);
    let (table, lens) = (ints(&[0; 4], &[2, 2], Device::Cpu), ints(&[0; 2], &[2], Device::Cpu));
    let scale = tensor(&[3], DType::F32);
    let bad = |q: &Tensor, pages: &Tensor, text: &str| {
        let error = PagedAttention::new(q, pages, pages, &table, &lens).run().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    bad(&tensor(&[4, 6, 48], DType::F32), &tensor(&[8, 16, 2, 48], DType::F32), "head_dim out of 32, 64");
    bad(&tensor(&[4, 5, 64], DType::F32), &pages, "divides num_heads=5, got 2");
    bad(&tensor(&[5, 6, 64], DType::F32), &pages, "tokens for requests=2, the same number for each, got 5");
    bad(&q, &tensor(&[8, 300, 2, 64], DType::F32), "a page_size from 1 to 256, got 300");
    bad(
        &q,
        &tensor(&[8, 16, 2, 64], DType::F16),
        "`k_pages`: expected dtype f32 or f8e4m3 or f8e5m2, got f16",
    );
    let wrong = |call: PagedAttention<'_>, text: &str| {
        let error = call.run().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let call = |pages| PagedAttention::new(&q, pages, pages, &table, &lens);
    let one = tensor(&[1], DType::F32);
    wrong(call(&pages).scales(&one, &one), "`k_scale`: expected nothing, because the cache is f32");
    wrong(call(&narrow).scales(&scale, &scale), "`k_scale`: expected shape [1 or num_kv_heads=2], got [3]");
    wrong(call(&pages).q_starts(&lens), "`q_starts`: expected shape [requests + 1=3], got [2]");
    wrong(call(&pages).softcap(-1.0), "`softcap`");
    wrong(call(&pages).scale(f32::NAN), "`scale`");
}
