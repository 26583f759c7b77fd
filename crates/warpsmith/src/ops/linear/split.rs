//! Products over a long dimension with few tiles, as a batch of shorter ones: their sums go to scratch memory in f32, where
//! they are added in order.

use super::Problem;
use super::problem::{Order, Part, Strides};
use crate::tensor::DType;

/// Rows and columns of a small tile.
const TILE: usize = 64;
/// The most parts that one thread adds.
const MOST: usize = 16;
/// Parts start at multiples of this many elements, so that they start at multiples of 16 bytes in any type, and where there
/// is one left over, of a stage of K.
const UNIT: usize = 8;
const STAGE: usize = 64;
/// Rows of sums are a multiple of this many elements apart: they are read in pieces of 16 bytes.
pub(super) const ROW_UNIT: usize = 4;

/// When a product is split.
struct Rule {
    /// The number of tiles that keeps a device busy.
    enough_tiles: usize,
    /// The shortest sum of which a part saves more time than a further launch takes.
    long: usize,
    /// The shortest part.
    shortest: usize,
}

/// How a product is split along the dimension that is summed over: `count` parts of `length`, and one of `rest`, if any is
/// left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Split {
    count: usize,
    length: usize,
    rest: usize,
}

impl Split {
    /// For the product of `linear`, where only columns, K and types count: a row must have the same bits in any batch.
    /// So products with many rows, which have enough tiles, are split too, and their cost for the sums bounds the
    /// length of parts.
    pub fn of_product(product: &Problem) -> Option<Split> {
        let size = product.x_dtype.size();
        let columns = product.weight_rows();
        let rule = match size {
            // Tensor cores add them with fewer bits than f32 has, and scales of blocks belong to the sum.
            1 => return None,
            // Six products of bf16 for each of f32 take so long that writing and reading a sum is a fourteenth of its time.
            _ if is_slow(product) => Rule { enough_tiles: 64, long: 3072, shortest: 1024 },
            // With few columns, reading `x` takes the time: the sums of parts are at most a fifth of it.
            _ => {
                Rule { enough_tiles: 128, long: (16 << 10) / size, shortest: (40 * columns).max(4096) / size }
            }
        };
        Split::of(product, columns.div_ceil(TILE), rule)
    }

    /// For the gradient of `x`. The number of its rows must not matter here either.
    pub fn of_dx(product: &Problem) -> Option<Split> {
        // What writing and reading the sums costs a product with many rows, by estimate a twentieth to a fourteenth of its
        // time, which is half of that of a call. With few columns it gains as much, because tiles can be larger.
        let shortest = if is_slow(product) { 1024 } else { (8 * product.n).clamp(1024, 8192) };
        Split::of(product, product.n.div_ceil(TILE), Rule::of_gradient(product, shortest))
    }

    /// For the gradient of `w`, which has no batch rows. Only small ones are split, so that there are few sums.
    pub fn of_dw(product: &Problem) -> Option<Split> {
        let tiles = product.m.div_ceil(TILE) * product.n.div_ceil(TILE);
        Split::of(product, tiles, Rule::of_gradient(product, 512))
    }

    fn of(product: &Problem, tiles: usize, rule: Rule) -> Option<Split> {
        let k = product.k;
        let most = (rule.enough_tiles / tiles.max(1)).min(k / rule.shortest).min(MOST);
        if most < 2 || k < rule.long {
            return None;
        }
        let equal = |count: &usize| k.is_multiple_of(count * UNIT);
        Some(match (most / 2 + 1..=most).rev().find(equal) {
            Some(count) => Split { count, length: k / count, rest: 0 },
            None => {
                let length = k / most / STAGE * STAGE;
                Split { count: most, length, rest: k - most * length }
            }
        })
    }

    /// Parts in all.
    pub fn parts(&self) -> usize {
        self.count + (self.rest > 0) as usize
    }

    /// Bytes of the sums of all parts.
    pub fn bytes(&self, product: &Problem) -> usize {
        self.parts() * between(product) * size_of::<f32>()
    }

    /// The products of the parts, of the plain `product`, with their sums at `scratch`.
    pub fn products(&self, product: &Problem, part: &Part, scratch: usize) -> Vec<(Problem, Part)> {
        let whole = (product.n * size_of::<f32>()).is_multiple_of(16);
        let row = pitch(product) as isize;
        let sums = Problem {
            out_dtype: DType::F32,
            out: Strides { batch: product.m as isize * row, row, col: 1 },
            out_order: if whole { Order::Rows } else { Order::Any },
            ..*product
        };
        let at = |index: usize, k: usize| {
            let skipped = |address: usize, strides: Strides| {
                let elements = (index * self.length) as isize * strides.col;
                address.wrapping_add_signed(elements * product.x_dtype.size() as isize)
            };
            let out = scratch + index * between(product) * size_of::<f32>();
            let (x, w) = (skipped(part.x, product.x), skipped(part.w, product.w));
            (Problem { k, ..sums }, Part { x, w, out, ..*part })
        };
        let mut all = Vec::new();
        if product.batch > 1 {
            all.extend((0..self.count).map(|index| at(index, self.length)));
        } else {
            let (first, part) = at(0, self.length);
            let along = |strides: Strides| Strides { batch: self.length as isize * strides.col, ..strides };
            all.push((Problem { batch: self.count, x: along(first.x), w: along(first.w), ..first }, part));
        }
        all.extend((self.rest > 0).then(|| at(self.count, self.rest)));
        all
    }
}

impl Rule {
    fn of_gradient(product: &Problem, shortest: usize) -> Rule {
        Rule { enough_tiles: 128, long: if is_slow(product) { 2048 } else { 4096 }, shortest }
    }
}

/// Whether products are in f32 at full precision.
fn is_slow(product: &Problem) -> bool {
    product.x_dtype == DType::F32 && !product.tf32
}

/// Elements from one row of a part's sums to the next.
pub(super) fn pitch(product: &Problem) -> usize {
    product.n.next_multiple_of(ROW_UNIT)
}

/// Elements from the sums of one part to those of the next.
pub(super) fn between(product: &Problem) -> usize {
    product.batch * product.m * pitch(product)
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::problem::Matrix;
    use super::*;

    fn product(dtype: DType, sizes: [usize; 3]) -> Problem {
        let [_, n, k] = sizes;
        let x = Matrix { row: k as isize, col: 1, aligned: true };
        let w = Matrix { row: 1, col: n as isize, aligned: true };
        let out = Matrix { row: n as isize, col: 1, aligned: true };
        Problem::product(dtype, false, sizes, [x, w, out])
    }

    /// Of `linear`, with many rows.
    fn forward(dtype: DType, tf32: bool, n: usize, k: usize) -> Option<(usize, usize, usize)> {
        let split = Split::of_product(&Problem { tf32, ..product(dtype, [4096, n, k]) })?;
        Some((split.count, split.length, split.rest))
    }

    #[test]
    fn long_products_with_few_columns_are_split() {
        assert_eq!(forward(DType::F32, true, 208, 15544), Some((7, 2176, 312)));
        assert_eq!(forward(DType::F16, false, 168, 14872), Some((4, 3712, 24)));
        assert_eq!(forward(DType::F32, false, 1152, 4008), Some((3, 1336, 0)));
        assert_eq!(forward(DType::F32, false, 2048, 8192), Some((2, 4096, 0)));
        for (n, k) in [(8, 8184), (1024, 8192), (4096, 65536), (400, 15992)] {
            assert_eq!(forward(DType::BF16, false, n, k), None, "{n} {k}");
        }
        for (n, k) in [(2049, 4096), (4096, 4096), (64, 3064)] {
            assert_eq!(forward(DType::F32, false, n, k), None, "{n} {k}");
        }
        assert_eq!(forward(DType::F8E4M3, false, 64, 65536), None);
    }

    /// They have enough tiles, or sums so short that another launch takes longer than the parts save.
    #[cfg(feature = "lab")]
    #[test]
    fn no_product_that_is_timed_is_split() {
        use super::super::{Forward, GATE, Gate, PRECISION, Precision};
        use crate::lab::Provable;
        for case in Forward::bench_cases() {
            let [m, n, k, _] = case.sizes[..] else { unreachable!("four sizes") };
            let p = Problem {
                gate: Gate::ALL[case.attrs.choice(GATE)],
                tf32: case.attrs.choice(PRECISION) == Precision::Tf32 as usize,
                ..product(case.dtype, [m, n, k])
            };
            assert_eq!(Split::of_product(&p), None, "{case:?}");
        }
    }

    fn dx(dtype: DType, n: usize, k: usize) -> Option<(usize, usize, usize)> {
        let split = Split::of_dx(&product(dtype, [1, k, n]))?;
        Some((split.count, split.length, split.rest))
    }

    #[test]
    fn long_gradients_with_few_columns_are_split() {
        assert_eq!(dx(DType::BF16, 128256, 1024), Some((8, 16032, 0)));
        assert_eq!(dx(DType::BF16, 14544, 128), Some((9, 1616, 0)));
        assert_eq!(dx(DType::BF16, 151936, 4096), Some((2, 75968, 0)));
        assert_eq!(dx(DType::F16, 50257, 768), Some((8, 6272, 81)));
        assert_eq!(dx(DType::F32, 4096, 1024), Some((4, 1024, 0)));
        for (n, k) in [(128256, 8192), (11312, 1152), (8320, 5504), (16383, 1024), (4095, 64), (0, 0)] {
            assert_eq!(dx(DType::BF16, n, k), None, "{n} {k}");
        }
    }

    #[test]
    fn rows_of_x_never_matter() {
        for dtype in [DType::BF16, DType::F32] {
            for (n, k) in [(128256, 1024), (14544, 128), (50257, 768), (4096, 4096), (100, 100)] {
                for split in [Split::of_dx, Split::of_product] {
                    let of = |m: usize| split(&product(dtype, [m, k, n]));
                    for m in [2, 64, 65, 4096, 1 << 20] {
                        assert_eq!(of(m), of(1), "{dtype} {m} {n} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_of_w_with_enough_tiles_are_whole() {
        let dw = |n: usize, k: usize, lines: usize| {
            Split::of_dw(&product(DType::BF16, [n, k, lines])).map(|split| split.parts())
        };
        assert_eq!(dw(128, 256, 16384), Some(16));
        assert_eq!(dw(512, 512, 4096), Some(2));
        assert_eq!(dw(1024, 1024, 65536), None);
        assert_eq!(dw(64, 64, 1000), None);
    }

    #[test]
    fn parts_cover_the_sum_once() {
        for k in [1024, 4096, 4099, 14544, 50257, 128256, 65536 + 8] {
            for tiles in [1, 2, 3, 16, 40, 64, 128] {
                for shortest in [512, 1024, 8192] {
                    let product = product(DType::BF16, [1, 1, k]);
                    let rule = Rule::of_gradient(&product, shortest);
                    let Some(split) = Split::of(&product, tiles, rule) else { continue };
                    let Split { count, length, rest } = split;
                    assert_eq!(count * length + rest, k);
                    assert!(length.is_multiple_of(UNIT) && (2..=MOST).contains(&count), "{split:?}");
                    assert!(length + STAGE > shortest, "{split:?}");
                }
            }
        }
    }

    #[test]
    fn parts_lie_side_by_side() {
        let product = product(DType::F16, [5, 770, 50257]);
        let split = Split::of_dx(&product).unwrap();
        let all = split.products(&product, &Part::product(1 << 20, 1 << 30, 1 << 40), 4096);
        let [(parts, first), (rest, last)] = all[..] else { panic!("a batch and a rest") };
        let (count, length) = (parts.batch, parts.k);
        assert_eq!((parts.x.batch, parts.w.batch), (length as isize, (length * 770) as isize));
        assert_eq!((last.x, last.w), (first.x + count * length * 2, first.w + count * length * 770 * 2));
        assert_eq!((rest.batch, rest.k), (1, 50257 - count * length));
        assert_eq!((parts.out.row, parts.out.batch), (772, 5 * 772));
        assert_eq!((first.out, last.out), (4096, 4096 + count * 5 * 772 * 4));
        assert_eq!((split.parts(), between(&product)), (count + 1, 5 * 772));
        assert_eq!(split.bytes(&product), (count + 1) * 5 * 772 * 4);
    }

    #[test]
    fn a_batch_has_a_product_for_each_part() {
        let one = product(DType::F32, [5, 40, 4099]);
        let batch = Problem { batch: 3, x: Strides { batch: 7 * 4099, ..one.x }, ..one };
        let split = Split::of_product(&batch).unwrap();
        assert_eq!(Some(split), Split::of_product(&one));
        let all = split.products(&batch, &Part::product(1 << 20, 1 << 30, 1 << 40), 4096);
        assert_eq!(all.len(), split.parts());
        for (index, (part, addresses)) in all.iter().enumerate() {
            assert_eq!((part.batch, part.x, part.w), (3, batch.x, batch.w));
            assert_eq!(addresses.x, (1 << 20) + index * split.length * 4);
            assert_eq!(addresses.out, 4096 + index * 3 * 5 * 40 * 4);
        }
        assert_eq!(all.iter().map(|(part, _)| part.k).sum::<usize>(), 4099);
    }
}
