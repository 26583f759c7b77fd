//! Products over a long dimension with few tiles, as a batch of shorter ones: their sums go to scratch memory in f32, where
//! they are added in order.

use super::super::Problem;
use super::super::problem::{Order, Part, Strides};
use super::add::Sum;
use crate::tensor::DType;

/// Rows and columns of a small tile, and the tiles from which on a device has enough to do.
const TILE: usize = 64;
const ENOUGH_TILES: usize = 128;
/// The most parts that one thread adds.
const MOST: usize = 16;
/// Parts start at multiples of this many elements, so that they start at multiples of 16 bytes in any type, and where there
/// is one left over, of a stage of K.
const UNIT: usize = 8;
const STAGE: usize = 64;
/// Sums from which on a part saves more time than a further launch takes: of products that are as fast as tensor cores are,
/// and of those in f32.
const LONG: usize = 4096;
const LONG_IF_SLOW: usize = 2048;
/// The shortest part of a gradient of `w`. Only small ones are split, so that its sums are few.
const SHORTEST_OF_DW: usize = 512;

/// How a product is split along the dimension that is summed over: `count` parts of `length`, and one of `rest`, if any is
/// left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Split {
    count: usize,
    length: usize,
    rest: usize,
}

impl Split {
    /// Of the gradient of `x`. The number of its rows must not matter: a row must have the same bits in any batch.
    pub fn of_dx(product: &Problem) -> Option<Split> {
        // What writing and reading the sums costs a product with many rows, by estimate a twentieth to a fourteenth of its
        // time, which is half of that of a call. With few columns it gains as much, because tiles can be larger. Six
        // products of bf16 for each of f32 take so long that it hardly matters.
        let shortest = if is_slow(product) { 1024 } else { (8 * product.n).clamp(1024, 8192) };
        Split::of(product, product.n.div_ceil(TILE), shortest)
    }

    /// Of the gradient of `w`, which has no rows of a batch.
    pub fn of_dw(product: &Problem) -> Option<Split> {
        let tiles = product.m.div_ceil(TILE) * product.n.div_ceil(TILE);
        Split::of(product, tiles, SHORTEST_OF_DW)
    }

    fn of(product: &Problem, tiles: usize, shortest: usize) -> Option<Split> {
        let k = product.k;
        let most = (ENOUGH_TILES / tiles.max(1)).min(k / shortest).min(MOST);
        if most < 2 || k < if is_slow(product) { LONG_IF_SLOW } else { LONG } {
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
    fn parts(&self) -> usize {
        self.count + (self.rest > 0) as usize
    }

    /// Bytes of the sums of all parts.
    pub fn bytes(&self, product: &Problem) -> usize {
        self.parts() * product.m * pitch(product) * size_of::<f32>()
    }

    /// The products of the parts, with their sums at `scratch`, and how these become the result.
    pub fn apply(&self, product: &Problem, part: &Part, scratch: usize) -> (Vec<(Problem, Part)>, Sum) {
        let (pitch, size) = (pitch(product), product.x_dtype.size());
        let between = (product.m * pitch) as isize;
        let out = Strides { batch: between, row: pitch as isize, col: 1 };
        let whole = (product.n * size_of::<f32>()).is_multiple_of(16);
        let along = |strides: Strides| Strides { batch: self.length as isize * strides.col, ..strides };
        let parts = Problem {
            out_dtype: DType::F32,
            batch: self.count,
            k: self.length,
            x: along(product.x),
            w: along(product.w),
            out,
            out_order: if whole { Order::Rows } else { Order::Any },
            ..*product
        };
        let mut all = vec![(parts, Part { out: scratch, ..*part })];
        if self.rest > 0 {
            let skipped = (self.count * self.length) as isize;
            let after = |address: usize, strides: Strides| {
                address.wrapping_add_signed(skipped * strides.col * size as isize)
            };
            let rest = Problem { batch: 1, k: self.rest, x: product.x, w: product.w, ..parts };
            let at = scratch + self.count * product.m * pitch * size_of::<f32>();
            all.push((
                rest,
                Part { x: after(part.x, product.x), w: after(part.w, product.w), out: at, ..*part },
            ));
        }
        let sum = Sum {
            parts: scratch,
            count: self.parts(),
            between: product.m * pitch,
            pitch,
            rows: product.m,
            columns: product.n,
            out: part.out,
            out_row: product.out.row,
            out_col: product.out.col,
            vector: product.out_order == Order::Rows,
            is_shared: false,
        };
        (all, sum)
    }
}

/// Whether products are in f32 at full precision.
fn is_slow(product: &Problem) -> bool {
    product.x_dtype == DType::F32 && !product.tf32
}

/// Elements from one row of a part's sums to the next.
fn pitch(product: &Problem) -> usize {
    product.n.next_multiple_of(super::add::UNIT)
}

#[cfg(test)]
mod tests {
    use super::super::super::problem::Matrix;
    use super::*;

    fn product(dtype: DType, sizes: [usize; 3]) -> Problem {
        let [_, n, k] = sizes;
        let x = Matrix { row: k as isize, col: 1, aligned: true };
        let w = Matrix { row: 1, col: n as isize, aligned: true };
        let out = Matrix { row: n as isize, col: 1, aligned: true };
        Problem::product(dtype, false, sizes, [x, w, out])
    }

    fn dx(dtype: DType, n: usize, k: usize) -> Option<(usize, usize, usize)> {
        let split = Split::of_dx(&product(dtype, [1, k, n]))?;
        Some((split.count, split.length, split.rest))
    }

    #[test]
    fn long_sums_with_few_columns_are_split() {
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
                let of = |m: usize| Split::of_dx(&product(dtype, [m, k, n]));
                for m in [2, 64, 65, 4096, 1 << 20] {
                    assert_eq!(of(m), of(1), "{dtype} {m} {n} {k}");
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
                    let Some(split) = Split::of(&product, tiles, shortest) else { continue };
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
        let (all, sum) = split.apply(&product, &Part::product(1 << 20, 1 << 30, 1 << 40), 4096);
        let [(parts, first), (rest, last)] = all[..] else { panic!("a batch and a rest") };
        let (count, length) = (parts.batch, parts.k);
        assert_eq!((parts.x.batch, parts.w.batch), (length as isize, (length * 770) as isize));
        assert_eq!((last.x, last.w), (first.x + count * length * 2, first.w + count * length * 770 * 2));
        assert_eq!((rest.batch, rest.k), (1, 50257 - count * length));
        assert_eq!((parts.out.row, parts.out.batch), (772, 5 * 772));
        assert_eq!((first.out, last.out), (4096, 4096 + count * 5 * 772 * 4));
        assert_eq!((sum.count, sum.between, sum.columns), (count + 1, 5 * 772, 770));
        assert_eq!(split.bytes(&product), (count + 1) * 5 * 772 * 4);
    }
}
