//! Operations on floats.

use super::trigonometry::{cos, sin};
use super::{Block, BlockFn};
use crate::op::{Binary, Unary};
use half::{bf16, f16};
use std::marker::PhantomData;
use warpsmith::cpu::simd::Four;
use warpsmith::cpu::{CpuElement, Simd, Task, Tier, dispatch, math};

/// A function of up to three vectors.
pub(super) trait Vectors {
    const OPERANDS: usize;
    fn apply<S: Simd>(s: S, a: S::V, b: S::V, c: S::V) -> S::V;
}

struct Loop<'a, F>(&'a Block, PhantomData<F>);

impl<F: Vectors> Task for Loop<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Block { to, from, moving, n } = *self.0;
        let s = s.pair().pair();
        let (to, from) = (to.cast::<f32>(), from.map(<*const u8>::cast::<f32>));
        let mut i = 0usize;
        while i < n {
            // SAFETY: whoever made the block promised padded operands.
            let load = |k: usize| unsafe { s.load(from[k].add(i & moving[k])) };
            let a = load(0);
            let b = if F::OPERANDS > 1 { load(1) } else { a };
            let c = if F::OPERANDS > 2 { load(2) } else { a };
            // SAFETY: as above.
            unsafe { s.store(to.add(i), F::apply(s, a, b, c)) };
            i = i.wrapping_add(Four::<S>::N);
        }
    }
}

/// # Safety
/// As [`BlockFn`].
pub(super) unsafe fn run<F: Vectors>(tier: Tier, block: &Block) {
    dispatch(tier, Loop::<F>(block, PhantomData));
}

macro_rules! functions {
    ($($name:ident $operands:literal |$s:ident, $a:ident, $b:ident, $c:ident| $body:expr;)*) => {$(
        struct $name;
        impl Vectors for $name {
            const OPERANDS: usize = $operands;
            #[inline(always)]
            fn apply<S: Simd>($s: S, $a: S::V, $b: S::V, $c: S::V) -> S::V { $body }
        }
    )*};
}

#[inline(always)]
fn bool<S: Simd>(s: S, m: S::M) -> S::V {
    s.select(m, s.splat(1.0), s.zero())
}

functions! {
    Detach 1 |_s, a, _b, _c| a;
    Neg 1 |s, a, _b, _c| s.neg(a);
    Abs 1 |s, a, _b, _c| s.abs(a);
    Sign 1 |s, a, _b, _c| {
        let negative = s.select(s.lt(a, s.zero()), s.splat(-1.0), s.zero());
        s.select(s.gt(a, s.zero()), s.splat(1.0), negative)
    };
    Square 1 |s, a, _b, _c| s.mul(a, a);
    // -0 and NaN stay.
    Relu 1 |s, a, _b, _c| s.select(s.lt(a, s.zero()), s.zero(), a);
    Floor 1 |s, a, _b, _c| s.floor(a);
    Ceil 1 |s, a, _b, _c| s.neg(s.floor(s.neg(a)));
    Round 1 |s, a, _b, _c| s.round(a);
    Trunc 1 |s, a, _b, _c| s.with_sign(s.floor(s.abs(a)), a);
    Exp 1 |s, a, _b, _c| math::exp(s, a);
    Log 1 |s, a, _b, _c| math::log(s, a);
    Log1p 1 |s, a, _b, _c| math::log1p(s, a);
    Sqrt 1 |s, a, _b, _c| s.sqrt(a);
    Rsqrt 1 |s, a, _b, _c| math::rsqrt(s, a);
    Reciprocal 1 |s, a, _b, _c| s.div(s.splat(1.0), a);
    Tanh 1 |s, a, _b, _c| math::tanh(s, a);
    Sigmoid 1 |s, a, _b, _c| math::sigmoid(s, a);
    Silu 1 |s, a, _b, _c| math::silu(s, a);
    Gelu 1 |s, a, _b, _c| math::gelu(s, a);
    GeluTanh 1 |s, a, _b, _c| math::gelu_tanh(s, a);
    Mish 1 |s, a, _b, _c| math::mish(s, a);
    Softplus 1 |s, a, _b, _c| math::softplus(s, a);
    Erf 1 |s, a, _b, _c| math::erf(s, a);
    Erfc 1 |s, a, _b, _c| math::erfc(s, a);
    Sin 1 |s, a, _b, _c| sin(s, a);
    Cos 1 |s, a, _b, _c| cos(s, a);
    DSilu 1 |s, a, _b, _c| math::d_silu(s, a);
    DGelu 1 |s, a, _b, _c| math::d_gelu(s, a);
    DGeluTanh 1 |s, a, _b, _c| math::d_gelu_tanh(s, a);
    DMish 1 |s, a, _b, _c| math::d_mish(s, a);
    Not 1 |s, a, _b, _c| bool(s, s.eq(a, s.zero()));
    IsNan 1 |s, a, _b, _c| bool(s, s.is_nan(a));
    Truth 1 |s, a, _b, _c| s.select(s.eq(a, s.zero()), s.zero(), s.splat(1.0));
    RoundBf16 1 |s, a, _b, _c| bf16::rounded(s, a);
    RoundF16 1 |s, a, _b, _c| f16::rounded(s, a);

    Add 2 |s, a, b, _c| s.add(a, b);
    Sub 2 |s, a, b, _c| s.sub(a, b);
    Mul 2 |s, a, b, _c| s.mul(a, b);
    Div 2 |s, a, b, _c| s.div(a, b);
    // The operand order keeps `a` where they are equal, and NaN of `a`.
    Max 2 |s, a, b, _c| s.select(s.is_nan(b), b, s.max(b, a));
    Min 2 |s, a, b, _c| s.select(s.is_nan(b), b, s.min(b, a));
    Lt 2 |s, a, b, _c| bool(s, s.lt(a, b));
    Le 2 |s, a, b, _c| bool(s, s.le(a, b));
    Gt 2 |s, a, b, _c| bool(s, s.lt(b, a));
    Ge 2 |s, a, b, _c| bool(s, s.le(b, a));
    Eq 2 |s, a, b, _c| bool(s, s.eq(a, b));
    Ne 2 |s, a, b, _c| s.select(s.eq(a, b), s.zero(), s.splat(1.0));
    And 2 |s, a, b, _c| s.mul(a, b);
    Or 2 |s, a, b, _c| s.max(a, b);
    Xor 2 |s, a, b, _c| s.select(s.eq(a, b), s.zero(), s.splat(1.0));

    Select 3 |s, a, b, c| s.select(s.eq(a, s.zero()), c, b);
}

pub(super) const SELECT: BlockFn = run::<Select>;
pub(super) const TRUTH: BlockFn = run::<Truth>;
pub(super) const ROUND_BF16: BlockFn = run::<RoundBf16>;
pub(super) const ROUND_F16: BlockFn = run::<RoundF16>;

/// Powers, one by one: rare enough, now that those with whole exponents are products.
unsafe fn pow(_: Tier, block: &Block) {
    let Block { to, from, moving, n } = *block;
    for i in 0..n {
        // SAFETY: passed on; the result is written after both operands are read.
        unsafe {
            let a = from[0].cast::<f32>().add(i & moving[0]).read();
            let b = from[1].cast::<f32>().add(i & moving[1]).read();
            to.cast::<f32>().add(i).write(f64::from(a).powf(f64::from(b)) as f32);
        }
    }
}

pub(super) fn unary(f: Unary) -> BlockFn {
    macro_rules! table {
        ($($name:ident)*) => { match f { $(Unary::$name => run::<$name>,)* } };
    }
    table! {
        Detach Neg Abs Sign Square Relu Floor Ceil Round Trunc Exp Log Log1p Sqrt Rsqrt Reciprocal Tanh Sigmoid Silu Gelu GeluTanh
        Mish Softplus Erf Erfc Sin Cos DSilu DGelu DGeluTanh DMish Not IsNan
    }
}

pub(super) fn binary(f: Binary) -> BlockFn {
    macro_rules! table {
        ($($name:ident)*) => { match f { Binary::Pow => pow, $(Binary::$name => run::<$name>,)* } };
    }
    table! { Add Sub Mul Div Max Min Lt Le Gt Ge Eq Ne And Or Xor }
}
