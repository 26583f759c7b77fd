//! f32 on tiles: queries, keys, exponentials and values are split in three, as [`crate::cpu::gemm`] splits operands.
//!
//! A band's softmax takes as long as its products, but vectors make the one and tiles the other. So three bands are in
//! flight: while vectors compute the exponentials of one, tiles multiply the values for the band before it and compute
//! the scores of the one after it.
//!
//! Where numbers are too large or too small for tiles, vectors do it: scores of a query and a key whose largest
//! magnitudes do not match, and 32 elements of a value whose largest magnitude is out of range. Tiles see zeros for
//! those values; vectors add them after the block to the rows that see the key. Both depend on the query and the key
//! alone, and so do the bits.

mod few;
mod left_out;
mod many;
mod softmax;
mod stage;

pub(super) use few::Few;
pub(super) use many::Split;
