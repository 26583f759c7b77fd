//! Fitting parameters by the least absolute relative error.

/// The values that a parameter may have, and what it means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parameter {
    /// What it is.
    pub name: &'static str,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
}

/// Rounds of a search; each has shorter steps than the one before.
const ROUNDS: usize = 18;
/// Steps along a parameter in a round before the next.
const STEPS: usize = 24;

/// The parameters within their bounds that make `error` least, by steps along one after the other that become shorter.
/// The same input gives the same result.
pub fn least(parameters: &[Parameter], error: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut best: Vec<f64> = parameters.iter().map(|p| 0.5 * (p.least + p.most)).collect();
    let mut least = error(&best);
    let mut step = 0.25;
    for _ in 0..ROUNDS {
        for _ in 0..STEPS {
            let before = least;
            for (index, parameter) in parameters.iter().enumerate() {
                for sign in [-1.0, 1.0] {
                    let mut moved = best.clone();
                    let by = sign * step * (parameter.most - parameter.least);
                    moved[index] = (moved[index] + by).clamp(parameter.least, parameter.most);
                    let new = error(&moved);
                    if new < least {
                        (least, best) = (new, moved);
                    }
                }
            }
            if least == before {
                break;
            }
        }
        step *= 0.6;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again_and_one_outlier_does_not_move_it() {
        let parameters =
            [Parameter { name: "a", least: 0.0, most: 10.0 }, Parameter { name: "b", least: 0.5, most: 4.0 }];
        let mut points: Vec<(f64, f64)> = (1..20).map(|x| (x as f64, 2.5 + 1.25 * x as f64)).collect();
        points[7].1 = 400.0;
        let error = |p: &[f64]| points.iter().map(|(x, y)| ((p[0] + p[1] * x - y) / y).abs()).sum();
        let found = least(&parameters, error);
        assert!((found[0] - 2.5).abs() < 0.02 && (found[1] - 1.25).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn bounds_hold() {
        let parameters = [Parameter { name: "a", least: 1.0, most: 2.0 }];
        assert_eq!(least(&parameters, |p| (p[0] - 7.0).abs()), [2.0]);
    }
}
