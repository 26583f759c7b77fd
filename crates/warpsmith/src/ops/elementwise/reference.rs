//! The definitions of the activation functions.

use super::function::Kind;
use crate::lab::Real;
use crate::lab::reference::is_stored_in_16_bits;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

impl Kind {
    /// The definition.
    pub fn value<R: Real>(self, x: R) -> R {
        match self {
            Kind::Gelu => R::of(0.5) * x * (x * R::of(FRAC_1_SQRT_2)).one_plus_erf(),
            Kind::GeluTanh => R::of(0.5) * x * inner(x).one_plus_tanh(),
            Kind::Silu => x * sigmoid(x),
            Kind::Relu => {
                if x < R::zero() {
                    R::zero()
                } else {
                    x
                }
            }
            Kind::Mish => x * softplus(x).tanh(),
        }
    }

    /// The definition, as matrix products finish with it: in types of 16 bits GPUs may take what is below 2^-132 for zero.
    pub fn value_of_product<R: Real>(self, x: R) -> R {
        let value = self.value(x);
        let may_be_zero = matches!(self, Kind::Silu | Kind::GeluTanh) && is_stored_in_16_bits();
        if may_be_zero { value.blurred(2f64.powi(-132)) } else { value }
    }

    /// The derivative; at the kink of relu it is zero.
    pub fn derivative<R: Real>(self, x: R) -> R {
        let half = R::of(0.5);
        match self {
            Kind::Gelu => {
                let cdf = half * (x * R::of(FRAC_1_SQRT_2)).one_plus_erf();
                let density = R::of(FRAC_2_SQRT_PI * FRAC_1_SQRT_2 / 2.0) * (-half * x * x).exp();
                cdf + x * density
            }
            Kind::GeluTanh => {
                let (u, t) = (inner(x), inner(x).tanh());
                // Far out, 1 - t² cancels to zero, and the sum has the wrong sign. The truth takes it as a product.
                let rest = (u.one_plus_tanh() * (-u).one_plus_tanh()).or(R::one() - t * t);
                let slope = R::of(FRAC_2_SQRT_PI / SQRT_2) * (R::one() + R::of(3.0 * 0.044715) * x * x);
                half * u.one_plus_tanh() + half * x * rest * slope
            }
            Kind::Silu => sigmoid(x) * (R::one() + x * (R::one() - sigmoid(x))),
            Kind::Relu if x.f64().is_nan() => x,
            Kind::Relu => x.step(),
            Kind::Mish => {
                let t = softplus(x).tanh();
                t + x * sigmoid(x) * (R::one() - t * t)
            }
        }
    }
}

/// sqrt(2 / pi) (x + 0.044715 x^3).
fn inner<R: Real>(x: R) -> R {
    R::of(FRAC_2_SQRT_PI / SQRT_2) * (x + R::of(0.044715) * x * x * x)
}

/// 1 / (1 + e^-x), without overflow.
fn sigmoid<R: Real>(x: R) -> R {
    if x < R::zero() { x.exp() / (R::one() + x.exp()) } else { R::one() / (R::one() + (-x).exp()) }
}

/// ln(1 + e^x), without overflow.
fn softplus<R: Real>(x: R) -> R {
    if x < R::zero() { x.exp().ln_1p() } else { x + (-x).exp().ln_1p() }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::lab::reference::{Random, storing_as};
    use crate::tensor::DType;

    #[test]
    fn tiny_values_may_be_zero_where_products_of_16_bits_end() {
        let deviation = |dtype: DType, x: f64| {
            storing_as(dtype, || Kind::Silu.value_of_product(Random::of(x)).deviation())
        };
        assert!(deviation(DType::BF16, -100.0) > 2f64.powi(-134));
        assert!(deviation(DType::F32, -100.0) < 2f64.powi(-140));
        let ordinary = storing_as(DType::BF16, || Kind::Silu.value(Random::of(-1.0)).deviation());
        assert_eq!(deviation(DType::BF16, -1.0), ordinary);
    }

    /// Rounding may have given a computed number next to zero either sign; one that was given has its own.
    #[test]
    fn the_slope_of_relu_is_uncertain_where_the_sign_is() {
        let given = Random::of(1e-9);
        assert_eq!(Kind::Relu.derivative(given).deviation(), 0.0);
        let cancelled = Random::of(1.0).blurred(1e-8) - Random::of(1.0 - 1e-9);
        assert_eq!(Kind::Relu.derivative(cancelled).deviation(), 0.5);
        let far = Random::of(1.0).blurred(1e-8) - Random::of(0.5);
        assert_eq!(Kind::Relu.derivative(far).deviation(), 0.0);
    }

    /// An infinite gradient shows the sign of what is next to nothing.
    #[test]
    fn the_derivative_of_gelu_tanh_keeps_its_sign_far_out() {
        for x in [-3.0, -5.0, -9.5, -12.0, -20.0] {
            let slope = Kind::GeluTanh.derivative::<f64>(x);
            assert!(slope < 0.0 && slope > -0.02, "{x}: {slope}");
        }
        assert_eq!(Kind::GeluTanh.derivative::<f64>(1e30), 1.0);
        assert!(Kind::GeluTanh.derivative::<f64>(f64::NEG_INFINITY).is_nan());
    }
}
