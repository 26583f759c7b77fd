//! Operations on blocks: each a loop over vectors in the L1 cache, compiled for every tier.

mod chains;
mod floats;
mod ints;
mod trigonometry;

use crate::op::{Binary, Op, Unary};
use crate::types::is_int;
use warpsmith::DType;
use warpsmith::cpu::Tier;

pub(super) use chains::{Link, chain};

/// Elements that blocks are padded to a multiple of, so that loops have no ends: as many as the widest vectors have.
pub(super) const PAD: usize = 64;

/// Operands of one operation, at most.
pub(super) const MAX_OPERANDS: usize = 4;

/// What an operation works on.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// The result, padded.
    pub to: *mut u8,
    /// The operands: padded, or [`PAD`] copies of one value.
    pub from: [*const u8; MAX_OPERANDS],
    /// All bits set for operands with an element for each of the result; none for those with one value.
    pub moving: [usize; MAX_OPERANDS],
    /// Elements, a multiple of [`PAD`].
    pub n: usize,
}

/// An operation on blocks.
///
/// # Safety
/// Operands and result must be as [`Block`] says; the result may be an operand, at the same place.
pub(super) type BlockFn = unsafe fn(Tier, &Block);

/// The operation of a node on registers: floats and bools are f32, whole numbers i64.
pub(super) fn operation(op: &Op, dtype: DType, operand: DType) -> Option<BlockFn> {
    Some(match op {
        Op::Unary(Unary::Detach) => return None,
        Op::Unary(f) if is_int(operand) => ints::unary(*f, dtype),
        Op::Unary(f) => floats::unary(*f),
        Op::Binary(f) if is_int(operand) => ints::binary(*f, dtype),
        Op::Binary(f) => floats::binary(*f),
        Op::Where if is_int(dtype) => ints::SELECT,
        Op::Where => floats::SELECT,
        Op::Cast(to) => return cast(operand, *to),
        _ => return None,
    })
}

/// The conversion between two types; none where registers stay as they are.
fn cast(from: DType, to: DType) -> Option<BlockFn> {
    match (from, to) {
        (DType::I64, DType::I32) => Some(ints::NARROW),
        (from, DType::I32 | DType::I64) if is_int(from) => None,
        (from, DType::Bool) if is_int(from) => Some(ints::TRUTH),
        (from, DType::F32) if is_int(from) => Some(ints::TO_FLOAT),
        (from, DType::BF16) if is_int(from) => Some(ints::TO_BF16),
        (from, DType::F16) if is_int(from) => Some(ints::TO_F16),
        (_, DType::I32) => Some(ints::FROM_FLOAT_32),
        (_, DType::I64) => Some(ints::FROM_FLOAT_64),
        (DType::Bool, _) => None,
        (_, DType::Bool) => Some(floats::TRUTH),
        (from, DType::BF16) if from != DType::BF16 => Some(floats::ROUND_BF16),
        (from, DType::F16) if from != DType::F16 => Some(floats::ROUND_F16),
        _ => None,
    }
}

/// The link that an operation on floats is in a chain.
pub(super) fn link(op: &Op, operand: DType) -> Option<Link> {
    match op {
        _ if is_int(operand) => None,
        Op::Binary(Binary::Add) => Some(Link::Add),
        Op::Binary(Binary::Sub) => Some(Link::Sub),
        Op::Binary(Binary::Mul) => Some(Link::Mul),
        _ => None,
    }
}
