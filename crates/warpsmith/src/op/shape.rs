//! The shapes of an op's arguments, as data: what checks, outputs and help derive from.

use std::fmt;

/// One dimension of a described shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// A fixed size.
    Number(usize),
    /// `name * times / over + plus`. A name means the same size in every argument of a call.
    Named {
        /// The size's name.
        name: &'static str,
        /// Factor.
        times: usize,
        /// Divisor; the remainder is dropped.
        over: usize,
        /// What is added last.
        plus: usize,
    },
    /// `name / over`, rounded up. The size is known from another dimension.
    Ceil {
        /// The size's name.
        name: &'static str,
        /// Divisor.
        over: usize,
    },
    /// 1, shared by all, or the size of this name, known from another dimension.
    OneOr(&'static str),
}

impl Dim {
    /// The named size it is made of.
    pub const fn name(&self) -> Option<&'static str> {
        match *self {
            Dim::Number(_) => None,
            Dim::Named { name, .. } | Dim::Ceil { name, .. } | Dim::OneOr(name) => Some(name),
        }
    }

    /// The size of the dimension where `name` has the size `known`.
    pub(super) fn evaluate(&self, known: usize) -> Option<usize> {
        match *self {
            Dim::Number(size) => Some(size),
            Dim::Named { times, over, plus, .. } => (known.checked_mul(times)? / over).checked_add(plus),
            Dim::Ceil { over, .. } => Some(known.div_ceil(over)),
            Dim::OneOr(_) => Some(known),
        }
    }

    /// What its name must be for the dimension to have `size`, if that follows from it.
    pub(super) fn solve(&self, size: usize) -> Option<usize> {
        let Dim::Named { times, over, plus, .. } = *self else { return None };
        let product = size.checked_sub(plus)?.checked_mul(over)?;
        product.is_multiple_of(times).then(|| product / times)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Dim::Number(size) => write!(f, "{size}"),
            Dim::Ceil { name, over } => write!(f, "ceil({name} / {over})"),
            Dim::OneOr(name) => write!(f, "1 or {name}"),
            Dim::Named { name, times, over, plus } => {
                if times != 1 {
                    write!(f, "{times} * ")?;
                }
                f.write_str(name)?;
                if over != 1 {
                    write!(f, " / {over}")?;
                }
                if plus != 0 {
                    write!(f, " + {plus}")?;
                }
                Ok(())
            }
        }
    }
}

/// What may come before the described dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leading {
    /// Nothing.
    None,
    /// Any dimensions, the same in every argument that has them.
    Rows,
    /// Nothing, or those dimensions but the last: one matrix for all rows, or one for each group of rows.
    Matrices,
}

/// A described shape. Written with [`dims!`](crate::op::dims).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// What may come first.
    pub leading: Leading,
    /// The last dimensions.
    pub dims: &'static [Dim],
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leading = (self.leading != Leading::None).then(|| "...".to_string());
        let parts: Vec<String> = leading.into_iter().chain(self.dims.iter().map(Dim::to_string)).collect();
        write!(f, "[{}]", parts.join(", "))
    }
}

/// The shapes an argument may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShapeSpec {
    /// The option, a choice, at whose position in `forms` the shape stands; without one, the shape may be any of them.
    pub option: Option<usize>,
    /// The shapes.
    pub forms: &'static [Dims],
}

impl ShapeSpec {
    /// One of several shapes.
    pub const fn any(forms: &'static [Dims]) -> Self {
        ShapeSpec { option: None, forms }
    }

    /// Whether it has dimensions whose sizes are only known from other arguments.
    pub(super) fn depends_on_others(&self) -> bool {
        let mut dims = self.forms.iter().flat_map(|form| form.dims);
        dims.any(|dim| matches!(dim, Dim::Ceil { .. } | Dim::OneOr(_)))
    }

    /// The shape at the position of an option's choice.
    pub const fn by_option(option: usize, forms: &'static [Dims]) -> Self {
        ShapeSpec { option: Some(option), forms }
    }
}

impl fmt::Display for ShapeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut forms: Vec<String> = self.forms.iter().map(Dims::to_string).collect();
        forms.dedup();
        let last = forms.pop().unwrap_or_default();
        match forms.is_empty() {
            true => f.write_str(&last),
            false => write!(f, "{} or {last}", forms.join(", ")),
        }
    }
}

/// A [`Dims`](crate::op::Dims): dimensions separated by commas, each a number or a name with `N *` before or `/ N` or
/// `+ N` after it, `ceil(name / N)`, or `(1 or name)`. Begins with `..` for leading rows, `[..]` for leading matrices.
#[macro_export]
#[doc(hidden)]
macro_rules! __dims {
    (@list $done:tt) => { $crate::__dims!(@end $done) };
    (@end [$($dim:expr,)*]) => { &[$($dim),*] };
    (@list [$($done:expr,)*] $times:literal * $name:ident $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::__dims!(@named $name $times 1 0),] $($($rest)*)?)
    };
    (@list [$($done:expr,)*] $number:literal $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::op::Dim::Number($number),] $($($rest)*)?)
    };
    (@list [$($done:expr,)*] (1 or $name:ident) $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::op::Dim::OneOr(stringify!($name)),] $($($rest)*)?)
    };
    (@list [$($done:expr,)*] ceil($name:ident / $over:literal) $(, $($rest:tt)*)?) => {
        $crate::__dims!(
            @list [$($done,)* $crate::op::Dim::Ceil { name: stringify!($name), over: $over },] $($($rest)*)?
        )
    };
    (@list [$($done:expr,)*] $name:ident / $over:literal $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::__dims!(@named $name 1 $over 0),] $($($rest)*)?)
    };
    (@list [$($done:expr,)*] $name:ident + $plus:literal $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::__dims!(@named $name 1 1 $plus),] $($($rest)*)?)
    };
    (@list [$($done:expr,)*] $name:ident $(, $($rest:tt)*)?) => {
        $crate::__dims!(@list [$($done,)* $crate::__dims!(@named $name 1 1 0),] $($($rest)*)?)
    };
    (@named $name:ident $times:literal $over:literal $plus:literal) => {
        $crate::op::Dim::Named { name: stringify!($name), times: $times, over: $over, plus: $plus }
    };
    (.. $(, $($rest:tt)*)?) => {
        $crate::op::Dims { leading: $crate::op::Leading::Rows, dims: $crate::__dims!(@list [] $($($rest)*)?) }
    };
    ([..] $(, $($rest:tt)*)?) => {
        $crate::op::Dims { leading: $crate::op::Leading::Matrices, dims: $crate::__dims!(@list [] $($($rest)*)?) }
    };
    ($($rest:tt)*) => {
        $crate::op::Dims { leading: $crate::op::Leading::None, dims: $crate::__dims!(@list [] $($rest)*) }
    };
}

/// A [`ShapeSpec`](crate::op::ShapeSpec) of one shape, written as for [`dims!`](crate::op::dims).
#[macro_export]
#[doc(hidden)]
macro_rules! __shape {
    ($($dims:tt)*) => {
        $crate::op::ShapeSpec { option: None, forms: const { &[$crate::__dims!($($dims)*)] } }
    };
}

pub use crate::{__dims as dims, __shape as shape};

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn shapes_read_as_they_are_written() {
        let text = |shape: ShapeSpec| shape.to_string();
        assert_eq!(text(shape![.., hidden]), "[..., hidden]");
        assert_eq!(text(shape![num_slots, 4]), "[num_slots, 4]");
        assert_eq!(text(shape![.., 2 * hidden, batch + 1]), "[..., 2 * hidden, batch + 1]");
        assert_eq!(text(shape![max_pos, rotary_dim / 2]), "[max_pos, rotary_dim / 2]");
        assert_eq!(text(shape![(1 or heads), ceil(k / 128)]), "[1 or heads, ceil(k / 128)]");
        assert_eq!(text(shape![]), "[]");
        assert_eq!(text(ShapeSpec::any(&[dims![1], dims![..], dims![[..], n]])), "[1], [...] or [..., n]");
    }

    #[test]
    fn names_follow_from_sizes_where_they_can() {
        let dim = |shape: ShapeSpec| shape.forms[0].dims[0];
        for (of, size, name) in [
            (dim(shape![hidden]), 8, Some(8)),
            (dim(shape![2 * hidden]), 8, Some(4)),
            (dim(shape![2 * hidden]), 7, None),
            (dim(shape![batch + 1]), 8, Some(7)),
            (dim(shape![batch + 1]), 0, None),
            (dim(shape![rotary_dim / 2]), 8, Some(16)),
            (dim(shape![rotary_dim / 2]), usize::MAX, None),
            (dim(shape![ceil(k / 128)]), 8, None),
            (dim(shape![4]), 4, None),
        ] {
            assert_eq!(of.solve(size), name, "{of} = {size}");
            assert!(name.is_none_or(|name| of.evaluate(name) == Some(size)), "{of} = {size}");
        }
        assert_eq!(dim(shape![ceil(k / 128)]).evaluate(129), Some(2));
        assert_eq!(dim(shape![2 * hidden]).evaluate(usize::MAX), None);
    }
}
