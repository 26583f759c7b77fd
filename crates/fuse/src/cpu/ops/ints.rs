//! Operations on whole numbers, which registers hold as i64, and between them and floats.

use super::{Block, BlockFn};
use crate::op::{Binary, Unary};
use half::{bf16, f16};
use std::marker::PhantomData;
use warpsmith::DType;
use warpsmith::cpu::{Simd, Task, Tier, dispatch};

/// A function of elements of these types.
trait Elements {
    type A: Copy;
    type B: Copy;
    type C: Copy;
    type Out: Copy;
    const OPERANDS: usize;
    fn apply(a: Self::A, b: Option<Self::B>, c: Option<Self::C>) -> Self::Out;
}

struct Loop<'a, F>(&'a Block, PhantomData<F>);

impl<F: Elements> Task for Loop<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Block { to, from, moving, n } = *self.0;
        let mut i = 0usize;
        while i < n {
            // SAFETY: whoever made the block promised padded operands of the types of the operation.
            unsafe {
                let a = from[0].cast::<F::A>().add(i & moving[0]).read();
                let b = (F::OPERANDS > 1).then(|| from[1].cast::<F::B>().add(i & moving[1]).read());
                let c = (F::OPERANDS > 2).then(|| from[2].cast::<F::C>().add(i & moving[2]).read());
                to.cast::<F::Out>().add(i).write(F::apply(a, b, c));
            }
            i = i.wrapping_add(1);
        }
    }
}

/// # Safety
/// As [`BlockFn`].
unsafe fn run<F: Elements>(tier: Tier, block: &Block) {
    dispatch(tier, Loop::<F>(block, PhantomData));
}

macro_rules! one {
    ($($name:ident $from:ty => $to:ty, |$a:ident| $body:expr;)*) => {$(
        struct $name;
        impl Elements for $name {
            type A = $from;
            type B = $from;
            type C = $from;
            type Out = $to;
            const OPERANDS: usize = 1;
            #[inline(always)]
            fn apply($a: $from, _: Option<$from>, _: Option<$from>) -> $to { $body }
        }
    )*};
}

macro_rules! two {
    ($($name:ident => $to:ty, |$a:ident, $b:ident| $body:expr;)*) => {$(
        struct $name;
        impl Elements for $name {
            type A = i64;
            type B = i64;
            type C = i64;
            type Out = $to;
            const OPERANDS: usize = 2;
            #[inline(always)]
            fn apply($a: i64, $b: Option<i64>, _: Option<i64>) -> $to {
                let $b = $b.unwrap_or(0);
                $body
            }
        }
    )*};
}

/// Numbers that an integer type does not hold become its smallest, as x86 converts.
#[inline(always)]
fn whole(x: f32, limit: f32, lowest: i64) -> i64 {
    if x >= -limit && x < limit { x as i64 } else { lowest }
}

one! {
    Neg i64 => i64, |a| a.wrapping_neg();
    Abs i64 => i64, |a| a.wrapping_abs();
    Sign i64 => i64, |a| a.signum();
    Square i64 => i64, |a| a.wrapping_mul(a);
    Relu i64 => i64, |a| a.max(0);
    Narrow i64 => i64, |a| i64::from(a as i32);
    NegNarrow i64 => i64, |a| i64::from(a.wrapping_neg() as i32);
    AbsNarrow i64 => i64, |a| i64::from(a.wrapping_abs() as i32);
    SquareNarrow i64 => i64, |a| i64::from(a.wrapping_mul(a) as i32);
    Same i64 => i64, |a| a;
    IsZero i64 => f32, |a| f32::from(u8::from(a == 0));
    Truth i64 => f32, |a| f32::from(u8::from(a != 0));
    ToFloat i64 => f32, |a| a as f32;
    ToBf16 i64 => f32, |a| bf16::from_f64(a as f64).to_f32();
    ToF16 i64 => f32, |a| f16::from_f64(a as f64).to_f32();
    FromFloat32 f32 => i64, |a| whole(a, 2_147_483_648.0, i64::from(i32::MIN));
    FromFloat64 f32 => i64, |a| whole(a, 9_223_372_036_854_775_808.0, i64::MIN);
}

two! {
    Add => i64, |a, b| a.wrapping_add(b);
    Sub => i64, |a, b| a.wrapping_sub(b);
    Mul => i64, |a, b| a.wrapping_mul(b);
    AddNarrow => i64, |a, b| i64::from(a.wrapping_add(b) as i32);
    SubNarrow => i64, |a, b| i64::from(a.wrapping_sub(b) as i32);
    MulNarrow => i64, |a, b| i64::from(a.wrapping_mul(b) as i32);
    Max => i64, |a, b| a.max(b);
    Min => i64, |a, b| a.min(b);
    Lt => f32, |a, b| f32::from(u8::from(a < b));
    Le => f32, |a, b| f32::from(u8::from(a <= b));
    Gt => f32, |a, b| f32::from(u8::from(a > b));
    Ge => f32, |a, b| f32::from(u8::from(a >= b));
    Eq => f32, |a, b| f32::from(u8::from(a == b));
    Ne => f32, |a, b| f32::from(u8::from(a != b));
}

struct Select;

impl Elements for Select {
    type A = f32;
    type B = i64;
    type C = i64;
    type Out = i64;
    const OPERANDS: usize = 3;

    #[inline(always)]
    fn apply(a: f32, b: Option<i64>, c: Option<i64>) -> i64 {
        let (b, c) = (b.unwrap_or(0), c.unwrap_or(0));
        if a != 0.0 { b } else { c }
    }
}

pub(super) const SELECT: BlockFn = run::<Select>;
pub(super) const NARROW: BlockFn = run::<Narrow>;
pub(super) const TRUTH: BlockFn = run::<Truth>;
pub(super) const TO_FLOAT: BlockFn = run::<ToFloat>;
pub(super) const TO_BF16: BlockFn = run::<ToBf16>;
pub(super) const TO_F16: BlockFn = run::<ToF16>;
pub(super) const FROM_FLOAT_32: BlockFn = run::<FromFloat32>;
pub(super) const FROM_FLOAT_64: BlockFn = run::<FromFloat64>;

pub(super) fn unary(f: Unary, dtype: DType) -> BlockFn {
    let narrow = dtype == DType::I32;
    match f {
        Unary::Neg if narrow => run::<NegNarrow>,
        Unary::Abs if narrow => run::<AbsNarrow>,
        Unary::Square if narrow => run::<SquareNarrow>,
        Unary::Neg => run::<Neg>,
        Unary::Abs => run::<Abs>,
        Unary::Sign => run::<Sign>,
        Unary::Square => run::<Square>,
        Unary::Relu => run::<Relu>,
        Unary::Not => run::<IsZero>,
        _ => run::<Same>,
    }
}

pub(super) fn binary(f: Binary, dtype: DType) -> BlockFn {
    let narrow = dtype == DType::I32;
    match f {
        Binary::Add if narrow => run::<AddNarrow>,
        Binary::Sub if narrow => run::<SubNarrow>,
        Binary::Mul if narrow => run::<MulNarrow>,
        Binary::Add => run::<Add>,
        Binary::Sub => run::<Sub>,
        Binary::Mul => run::<Mul>,
        Binary::Max => run::<Max>,
        Binary::Lt => run::<Lt>,
        Binary::Le => run::<Le>,
        Binary::Gt => run::<Gt>,
        Binary::Ge => run::<Ge>,
        Binary::Eq => run::<Eq>,
        Binary::Ne => run::<Ne>,
        _ => run::<Min>,
    }
}
