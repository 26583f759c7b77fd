//! Chains of cheap operations in one loop: results in between stay in registers.

use super::floats::{Vectors, run};
use super::{Block, BlockFn};
use std::marker::PhantomData;
use warpsmith::cpu::{Simd, Task, Tier, dispatch};

/// What a link of a chain does with the result so far, `x`, and its operand, `y`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cpu) enum Link {
    /// `x + y`
    Add,
    /// `x - y`
    Sub,
    /// `y - x`
    Rest,
    /// `x y`
    Mul,
}

trait Step {
    fn apply<S: Simd>(s: S, x: S::V, y: S::V) -> S::V;
    /// The step after a product of `a` and `b`: rounded once.
    fn after_product<S: Simd>(s: S, a: S::V, b: S::V, y: S::V) -> S::V;
}

macro_rules! steps {
    ($($name:ident |$s:ident, $x:ident, $y:ident| $apply:expr, |$a:ident, $b:ident| $after:expr;)*) => {$(
        struct $name;
        impl Step for $name {
            #[inline(always)]
            fn apply<S: Simd>($s: S, $x: S::V, $y: S::V) -> S::V { $apply }
            #[inline(always)]
            fn after_product<S: Simd>($s: S, $a: S::V, $b: S::V, $y: S::V) -> S::V { $after }
        }
    )*};
}

steps! {
    Add |s, x, y| s.add(x, y), |a, b| s.fma(a, b, y);
    Sub |s, x, y| s.sub(x, y), |a, b| s.fma(a, b, s.neg(y));
    Rest |s, x, y| s.sub(y, x), |a, b| s.fnma(a, b, y);
    Mul |s, x, y| s.mul(x, y), |a, b| s.mul(s.mul(a, b), y);
}

/// `Second(First(a, b), c)`.
struct Two<First, Second>(PhantomData<(First, Second)>);

impl<First: Step + 'static, Second: Step> Vectors for Two<First, Second> {
    const OPERANDS: usize = 3;

    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::V, b: S::V, c: S::V) -> S::V {
        if std::any::TypeId::of::<First>() == std::any::TypeId::of::<Mul>() {
            Second::after_product(s, a, b, c)
        } else {
            Second::apply(s, First::apply(s, a, b), c)
        }
    }
}

/// `Third(Second(First(a, b), c), d)`.
struct Three<'a, First, Second, Third>(&'a Block, PhantomData<(First, Second, Third)>);

impl<First: Step + 'static, Second: Step + 'static, Third: Step> Task for Three<'_, First, Second, Third> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Block { to, from, moving, n } = *self.0;
        let s = s.pair();
        let product = std::any::TypeId::of::<Mul>();
        let mut i = 0usize;
        while i < n {
            // SAFETY: whoever made the block promised padded operands.
            let load = |k: usize| unsafe { s.load(from[k].cast::<f32>().add(i & moving[k])) };
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            let second_is_product = std::any::TypeId::of::<Second>() == product;
            let first_is_product = std::any::TypeId::of::<First>() == product;
            let y = if second_is_product {
                Third::after_product(s, First::apply(s, a, b), c, d)
            } else if first_is_product {
                Third::apply(s, Second::after_product(s, a, b, c), d)
            } else {
                Third::apply(s, Second::apply(s, First::apply(s, a, b), c), d)
            };
            // SAFETY: as above.
            unsafe { s.store(to.cast::<f32>().add(i), y) };
            i = i.wrapping_add(<S::Pair as Simd>::N);
        }
    }
}

/// # Safety
/// As [`BlockFn`].
unsafe fn run_three<A: Step + 'static, B: Step + 'static, C: Step>(tier: Tier, block: &Block) {
    dispatch(tier, Three::<A, B, C>(block, PhantomData));
}

/// The operation that does two or three links after each other; none if there is no such.
pub(in crate::cpu) fn chain(links: &[Link]) -> Option<BlockFn> {
    macro_rules! choose {
        ($link:expr, $then:ident $(, $before:ident)*) => {
            match $link {
                Link::Add => $then!(Add $(, $before)*),
                Link::Sub => $then!(Sub $(, $before)*),
                Link::Rest => $then!(Rest $(, $before)*),
                Link::Mul => $then!(Mul $(, $before)*),
            }
        };
    }
    match *links {
        // The first has two operands of its own, which can be swapped.
        [Link::Rest, ..] => None,
        [first, second] => {
            macro_rules! two {
                ($b:ident, $a:ident) => {
                    Some(run::<Two<$a, $b>> as BlockFn)
                };
            }
            macro_rules! one {
                ($a:ident) => {
                    choose!(second, two, $a)
                };
            }
            choose!(first, one)
        }
        [first, second, third] => {
            macro_rules! three {
                ($c:ident, $b:ident, $a:ident) => {
                    Some(run_three::<$a, $b, $c> as BlockFn)
                };
            }
            macro_rules! two {
                ($b:ident, $a:ident) => {
                    choose!(third, three, $b, $a)
                };
            }
            macro_rules! one {
                ($a:ident) => {
                    choose!(second, two, $a)
                };
            }
            choose!(first, one)
        }
        _ => None,
    }
}
