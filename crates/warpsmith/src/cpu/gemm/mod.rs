//! Matrix products on the CPU: `x · Wᵀ` with the caller's last steps fused.
//!
//! `x` is `[m, k]`, the weights are `[n, k]`, or two such matrices in the gated form. [`run`] sums over k and hands
//! every sum, still in L1, to the caller's [`Epilogue`], which stores the result. bf16 and the 8-bit floats (whose
//! values bf16 holds exactly) run on AMX tiles or AVX-512 dot products where the machine has them, f16 on tiles where
//! it has those for f16, everything else as f32, which AMX multiplies as sums of bf16.
//!
//! # The order of sums
//! A sum is one accumulator, to which k is added in ascending order, in steps that depend on the instruction set
//! alone: one element (f32), two (AVX-512 BF16), 32 (AMX), six times 32 (f32 on AMX). On vectors each block of at most 512
//! units has such a sum, and those are added in ascending order: a long sum rounds more with every addition. The blocks follow
//! from the length of k alone. Where k is cut in other places the accumulator is kept in f32 between them, which rounds
//! nothing. So a row's bits depend neither on `m`, nor on how the work is split, nor on whether the weights are packed.
//!
//! # Which operand is where
//! The kernels multiply rows of a *left* operand, taken from memory as they are, with *panels* of a right one, which are
//! transposed in units of 32 bits. Packed weights are panels, and `x` is left. Without them:
//! - on AMX the weights are packed for many rows. For few they are left and `x` is packed: `(W · xᵀ)ᵀ`. Tiles load 16
//!   rows of W straight from memory, so one row of `x` reads the weights once and moves nothing else. The finished tiles
//!   are transposed in registers.
//! - f32 on AMX does the same, but both operands are split into three bf16 terms first.
//! - on vectors the weights are packed; for few rows panel by panel, in L1.
//! - weights of 16 bits that are multiplied as f32 are packed as they are ([`narrow`]) and widened when they are read.
//! - weights of f32 whose columns are contiguous are used as panels in place, if there are few rows, on tiles and on
//!   vectors.
//!
//! Panels are packed in strips by the thread that multiplies with them, or by all threads where there are few.

mod amx;
mod block;
mod blocked;
mod columns;
#[cfg(target_arch = "x86_64")]
mod direct;
#[cfg(target_arch = "x86_64")]
mod dot;
mod drive;
mod epilogue;
mod isa;
mod lines;
mod matrix;
mod narrow;
mod packed;
mod panel;
mod partition;
mod rate;
mod results;
#[cfg(target_arch = "x86_64")]
mod split;
mod stream;
mod tiles;
mod vector;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Tiles;
pub use block::{BlockProduct, Blocks, Place};
#[cfg(target_arch = "x86_64")]
pub(crate) use direct::{DirectProduct, Pairs, Rows};
pub use epilogue::{Epilogue, Output, Tile};
pub use isa::Isa;
pub use matrix::Matrix;
pub use packed::PackedWeights;
pub use rate::{bf16_rate, f32_rate};
#[cfg(target_arch = "x86_64")]
pub(crate) use split::{
    Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, Turned, ValueSplitter, left_element, split_block,
    split_left, turn_sums,
};

use super::scratch;
use crate::error::Result;
use crate::tensor::DType;
use matrix::Unit;
use panel::Side;

/// The weights of a product.
#[derive(Copy, Clone, Debug)]
pub enum Weights<'a> {
    /// One matrix: [`Tile::for_vectors`] gives its products.
    Plain(Matrix),
    /// Two matrices of the same shape: [`Tile::for_pairs`] gives both products of an output.
    Gated {
        /// The matrix of the first product.
        gate: Matrix,
        /// The matrix of the second.
        up: Matrix,
    },
    /// Either, packed by [`pack`].
    Packed(&'a PackedWeights),
}

/// One product.
#[derive(Copy, Clone, Debug)]
pub struct Gemm<'a> {
    /// The rows.
    pub x: Matrix,
    /// What they are multiplied with.
    pub weights: Weights<'a>,
    /// What to compute with, at most what the machine has; packed weights bring their own.
    pub isa: Isa,
}

fn side_of(weights: &Weights<'_>) -> Option<Side> {
    match *weights {
        Weights::Plain(matrix) => Some(Side::one(matrix)),
        Weights::Gated { gate, up } => {
            assert!(gate.rows == up.rows && gate.k == up.k && gate.dtype == up.dtype, "{gate:?} and {up:?}");
            Some(Side { halves: [gate, up], gated: true })
        }
        Weights::Packed(_) => None,
    }
}

/// Packs weights for products with `x` of type `x_dtype`; does nothing if they are packed already.
///
/// # Errors
/// [`OutOfMemory`](crate::Error::OutOfMemory).
///
/// # Safety
/// The matrices must be readable.
///
/// # Panics
/// If the two matrices of the gated form differ in shape or type.
pub unsafe fn pack(isa: Isa, x_dtype: DType, weights: &Weights<'_>) -> Result<Option<PackedWeights>> {
    let Some(side) = side_of(weights) else { return Ok(None) };
    let isa = isa.min(Isa::supported());
    // SAFETY: passed on.
    scratch::or_out_of_memory(|| unsafe {
        PackedWeights::pack(isa, Unit::of(isa, x_dtype, side.halves[0].dtype), &side).map(Some)
    })
}

/// Computes the product and hands it to `epilogue`, tile by tile, on all threads.
///
/// # Safety
/// The matrices must be readable, and what the epilogue writes must hold `m` x `n` results and overlap none of them.
///
/// # Panics
/// If the operands differ in k, or packed weights were packed for another type of `x`.
pub unsafe fn run<E: Epilogue>(gemm: &Gemm<'_>, epilogue: &E) {
    let x = Side::one(gemm.x);
    // SAFETY: passed on.
    unsafe {
        match (side_of(&gemm.weights), gemm.weights) {
            (Some(w), _) => {
                assert_eq!(x.k(), w.k(), "k of {:?} and {w:?}", gemm.x);
                let isa = gemm.isa.min(Isa::supported());
                let unit = Unit::of(isa, gemm.x.dtype, w.halves[0].dtype);
                drive::unpacked(isa, unit, &x, &w, epilogue);
            }
            (None, Weights::Packed(w)) => {
                assert_eq!(x.k(), w.k(), "k of {:?} and {w:?}", gemm.x);
                assert!(w.fits(gemm.x.dtype), "{:?} and {w:?}", gemm.x);
                drive::packed(&x, w, epilogue);
            }
            (None, _) => unreachable!("only packed weights have no matrix"),
        }
    }
}

#[cfg(feature = "tests")]
mod tests;
