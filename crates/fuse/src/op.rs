//! The operations of nodes.

use crate::shape::Dim;
use crate::types::Scalar;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use warpsmith::DType;

/// What a node computes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// A tensor given to the call.
    Input(Arc<str>),
    /// A number of the formula.
    Scalar(Scalar),
    /// A size, as a float.
    Size(Dim),
    /// A function of one element.
    Unary(Unary),
    /// A function of two elements.
    Binary(Binary),
    /// `args[0] ? args[1] : args[2]`.
    Where,
    /// The nearest value of another type. A number that a whole type does not hold becomes its smallest.
    Cast(DType),
    /// Over the last dimension, of which one element stays.
    Reduce(Reduce),
    /// Sums over every dimension that is 1 in the node's shape, or not in it, but not in the argument's. Never the last.
    SumTo,
    /// Repeats elements to the node's shape.
    Expand,
    /// Row `args[1]` of the matrix `args[0]`, for each element of `args[1]`.
    Gather,
    /// The halves of the last dimension, exchanged, the first of the result negated: a quarter turn, as rotary positions need.
    Rotate,
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Scalar) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

/// Which types a function takes and gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Domain {
    /// Floats; whole numbers and bools become f32.
    Float,
    /// Floats and whole numbers, as they are.
    Number,
    /// Anything; gives a bool.
    Test,
}

macro_rules! unary {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal $domain:ident $cost:literal;)*) => {
        /// Functions of one element.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        pub enum Unary { $($(#[doc = $doc])+ $variant,)* }

        impl Unary {
            /// Every one.
            pub const ALL: &'static [Unary] = &[$(Unary::$variant),*];

            /// Its name in formulas.
            pub const fn name(self) -> &'static str {
                match self { $(Unary::$variant => $name,)* }
            }

            /// The types it takes and gives.
            pub const fn domain(self) -> Domain {
                match self { $(Unary::$variant => Domain::$domain,)* }
            }

            /// Its time, in additions.
            pub const fn cost(self) -> u32 {
                match self { $(Unary::$variant => $cost,)* }
            }

            /// What it computes, in a few words.
            pub const fn doc(self) -> &'static str {
                match self { $(Unary::$variant => concat!($($doc),+),)* }
            }
        }
    };
}

unary! {
    /// `-x`
    Neg "neg" Number 1;
    /// `|x|`
    Abs "abs" Number 1;
    /// -1, 0 or 1; 0 for NaN
    Sign "sign" Number 2;
    /// `x x`
    Square "square" Number 1;
    /// `x` if it is not negative, else 0; NaN and -0 stay
    Relu "relu" Number 1;
    /// The next whole number below
    Floor "floor" Number 1;
    /// The next whole number above
    Ceil "ceil" Number 1;
    /// The nearest whole number, ties to even
    Round "round" Number 1;
    /// The next whole number towards 0
    Trunc "trunc" Number 2;
    /// `x`, as a constant where derivatives are taken
    Detach "detach" Number 0;
    /// `e^x`
    Exp "exp" Float 10;
    /// The natural logarithm
    Log "log" Float 12;
    /// `log(1 + x)`
    Log1p "log1p" Float 16;
    /// The square root
    Sqrt "sqrt" Float 3;
    /// `1 / sqrt(x)`
    Rsqrt "rsqrt" Float 6;
    /// `1 / x`
    Reciprocal "reciprocal" Float 3;
    /// The hyperbolic tangent
    Tanh "tanh" Float 13;
    /// `1 / (1 + e^-x)`
    Sigmoid "sigmoid" Float 14;
    /// `x sigmoid(x)`
    Silu "silu" Float 17;
    /// `x Phi(x)` with the normal distribution
    Gelu "gelu" Float 25;
    /// The approximation of `gelu` with tanh
    GeluTanh "gelu_tanh" Float 18;
    /// `x tanh(softplus(x))`
    Mish "mish" Float 18;
    /// `log(1 + e^x)`
    Softplus "softplus" Float 28;
    /// The error function
    Erf "erf" Float 28;
    /// `1 - erf(x)`
    Erfc "erfc" Float 25;
    /// The sine
    Sin "sin" Float 16;
    /// The cosine
    Cos "cos" Float 16;
    /// The derivative of `silu`
    DSilu "d_silu" Float 19;
    /// The derivative of `gelu`
    DGelu "d_gelu" Float 27;
    /// The derivative of `gelu_tanh`
    DGeluTanh "d_gelu_tanh" Float 22;
    /// The derivative of `mish`
    DMish "d_mish" Float 24;
    /// Whether `x` is 0 or false
    Not "not" Test 1;
    /// Whether `x` is NaN
    IsNan "isnan" Test 1;
}

macro_rules! binary {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal $symbol:literal $cost:literal;)*) => {
        /// Functions of two elements.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        pub enum Binary { $($(#[doc = $doc])+ $variant,)* }

        impl Binary {
            /// Every one.
            pub const ALL: &'static [Binary] = &[$(Binary::$variant),*];

            /// Its name as a function.
            pub const fn name(self) -> &'static str {
                match self { $(Binary::$variant => $name,)* }
            }

            /// Its sign between two operands; empty if it has none.
            pub const fn symbol(self) -> &'static str {
                match self { $(Binary::$variant => $symbol,)* }
            }

            /// Its time, in additions.
            pub const fn cost(self) -> u32 {
                match self { $(Binary::$variant => $cost,)* }
            }

            /// What it computes, in a few words.
            pub const fn doc(self) -> &'static str {
                match self { $(Binary::$variant => concat!($($doc),+),)* }
            }
        }
    };
}

binary! {
    /// The sum; of bools, whether one is true
    Add "add" "+" 1;
    /// The difference
    Sub "sub" "-" 1;
    /// The product; of bools, whether both are true
    Mul "mul" "*" 1;
    /// The quotient, never a whole type
    Div "div" "/" 3;
    /// `a^b`
    Pow "pow" "**" 200;
    /// The larger; NaN if one is NaN, the first if they are equal
    Max "maximum" "" 2;
    /// The smaller; NaN if one is NaN, the first if they are equal
    Min "minimum" "" 2;
    /// Whether `a < b`
    Lt "lt" "<" 1;
    /// Whether `a <= b`
    Le "le" "<=" 1;
    /// Whether `a > b`
    Gt "gt" ">" 1;
    /// Whether `a >= b`
    Ge "ge" ">=" 1;
    /// Whether `a = b`
    Eq "eq" "==" 1;
    /// Whether `a` is not `b`
    Ne "ne" "!=" 1;
    /// Whether both are true
    And "and" "&" 1;
    /// Whether one is true
    Or "or" "|" 1;
    /// Whether exactly one is true
    Xor "xor" "^" 1;
}

impl Binary {
    /// Whether it gives a bool that says how two numbers compare.
    pub const fn is_comparison(self) -> bool {
        matches!(self, Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::Eq | Binary::Ne)
    }

    /// Whether it takes bools only.
    pub const fn is_logical(self) -> bool {
        matches!(self, Binary::And | Binary::Or | Binary::Xor)
    }
}

/// Reductions over the last dimension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reduce {
    /// The sum; of whole numbers and bools as i64.
    Sum,
    /// The mean, of floats.
    Mean,
    /// The largest; NaN if one is NaN.
    Max,
    /// The smallest; NaN if one is NaN.
    Min,
}

impl Reduce {
    /// Every one.
    pub const ALL: [Reduce; 4] = [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min];

    /// Its name in formulas.
    pub const fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Mean => "mean",
            Reduce::Max => "max",
            Reduce::Min => "min",
        }
    }
}

impl Op {
    /// Its name in errors and plans.
    pub fn name(&self) -> &str {
        match self {
            Op::Input(name) => name,
            Op::Scalar(_) => "number",
            Op::Size(_) => "size",
            Op::Unary(f) => f.name(),
            Op::Binary(f) => f.name(),
            Op::Where => "where",
            Op::Cast(_) => "cast",
            Op::Reduce(f) => f.name(),
            Op::SumTo => "sum_to",
            Op::Expand => "expand",
            Op::Gather => "gather",
            Op::Rotate => "rotate_half",
        }
    }

    /// The time of one element, in additions.
    pub fn cost(&self) -> u32 {
        match self {
            Op::Input(_) | Op::Scalar(_) | Op::Size(_) | Op::Expand => 0,
            Op::Unary(f) => f.cost(),
            Op::Binary(f) => f.cost(),
            Op::Where | Op::Cast(_) | Op::Reduce(_) | Op::SumTo | Op::Gather | Op::Rotate => 1,
        }
    }

    /// Whether an element of the result depends on one element of each argument.
    pub fn is_elementwise(&self) -> bool {
        matches!(self, Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Cast(_) | Op::Expand)
    }

    /// Whether it is given rather than computed.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_)) || self.is_number()
    }

    /// Whether it is one number, known when a call begins.
    pub fn is_number(&self) -> bool {
        matches!(self, Op::Scalar(_) | Op::Size(_))
    }
}
