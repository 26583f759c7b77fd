//! Symbolic shape checks: sizes have names, a name means the same size in every argument of a call, and an
//! error reads like a sentence.
//!
//! ```
//! # use warpsmith::{check::Matcher, DType, Device, Tensor};
//! let x = Tensor::zeros(&[2, 3, 64], DType::F32, Device::Cpu)?;
//! let weight = Tensor::zeros(&[63], DType::F32, Device::Cpu)?;
//! let mut sizes = Matcher::new("rms_norm");
//! sizes.shape("x", &x.view(), "... hidden")?;
//! let error = sizes.shape("weight", &weight.view(), "hidden").unwrap_err();
//! assert_eq!(error.to_string(), "rms_norm: argument `weight`: expected shape [hidden=64], got [63]");
//! # Ok::<(), warpsmith::Error>(())
//! ```

use crate::error::{Error, Result};
use crate::tensor::{DType, TensorView};
use std::fmt::Display;

/// Collects named sizes over the arguments of one call.
pub struct Matcher {
    op: &'static str,
    sizes: Vec<(&'static str, usize)>,
    leading: Option<Vec<usize>>,
}

impl Matcher {
    /// A matcher without sizes; errors will name `op`.
    pub fn new(op: &'static str) -> Self {
        Matcher { op, sizes: Vec::new(), leading: None }
    }

    /// Matches a tensor's shape against `pattern`: names and numbers separated by spaces, the first of which may
    /// be `...` for any leading dimensions (the same in every tensor whose pattern has it).
    pub fn shape(&mut self, arg: &str, tensor: &TensorView<'_>, pattern: &'static str) -> Result<()> {
        let mut names: Vec<&'static str> = pattern.split_whitespace().collect();
        let shape = tensor.shape();
        let has_leading = names.first() == Some(&"...");
        if has_leading {
            names.remove(0);
        }
        let fits = if has_leading { shape.len() >= names.len() } else { shape.len() == names.len() };
        if !fits {
            return self.mismatch(arg, has_leading, &names, shape);
        }
        let (leading, rest) = shape.split_at(shape.len() - names.len());
        if has_leading && self.leading.as_deref().is_some_and(|known| known != leading) {
            return self.mismatch(arg, has_leading, &names, shape);
        }
        for (name, &size) in names.iter().zip(rest) {
            let known = name.parse().ok().or_else(|| self.get(name));
            if known.is_some_and(|known| known != size) {
                return self.mismatch(arg, has_leading, &names, shape);
            }
        }
        // Bind only after the whole shape fits, so that an error shows what was known before this argument.
        if has_leading {
            self.leading = Some(leading.to_vec());
        }
        for (name, &size) in names.iter().zip(rest) {
            if name.parse::<usize>().is_err() && self.get(name).is_none() {
                self.sizes.push((name, size));
            }
        }
        Ok(())
    }

    fn mismatch(&self, arg: &str, leading: bool, names: &[&str], got: &[usize]) -> Result<()> {
        let mut parts = Vec::new();
        if leading {
            match &self.leading {
                Some(known) => parts.extend(known.iter().map(usize::to_string)),
                None => parts.push("...".into()),
            }
        }
        parts.extend(names.iter().map(|name| match self.get(name) {
            Some(size) => format!("{name}={size}"),
            None => name.to_string(),
        }));
        Err(Error::argument(self.op, arg, format!("shape [{}]", parts.join(", ")), format!("{got:?}")))
    }

    /// Gives a name a size that no tensor has by itself (for example twice another).
    pub fn bind(&mut self, name: &'static str, size: usize) {
        self.sizes.push((name, size));
    }

    /// A size bound by an earlier argument.
    pub fn get(&self, name: &str) -> Option<usize> {
        self.sizes.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    /// A size that an earlier successful [`Matcher::shape`] is known to have bound.
    ///
    /// # Panics
    /// If no pattern of this op mentions `name`: a mistake in the op, not in the call.
    pub fn size(&self, name: &str) -> usize {
        self.get(name).unwrap_or_else(|| panic!("{}: no pattern binds `{name}`", self.op))
    }

    /// Product of the leading dimensions.
    pub fn leading_count(&self) -> usize {
        self.leading.iter().flatten().product()
    }

    /// Number of leading dimensions.
    pub fn leading_rank(&self) -> usize {
        self.leading.as_ref().map_or(0, Vec::len)
    }

    /// Requires the dtype to be one of `allowed`.
    pub fn dtype(&self, arg: &str, tensor: &TensorView<'_>, allowed: &[DType]) -> Result<DType> {
        if allowed.contains(&tensor.dtype()) {
            return Ok(tensor.dtype());
        }
        let names: Vec<_> = allowed.iter().map(|d| d.name()).collect();
        Err(Error::argument(self.op, arg, format!("dtype {}", names.join(" or ")), tensor.dtype().name()))
    }

    /// Requires two optional arguments to be given both or neither.
    pub fn together(
        &self,
        a: (&str, Option<&TensorView<'_>>),
        b: (&str, Option<&TensorView<'_>>),
    ) -> Result<()> {
        let (missing, given) = match (a.1, b.1) {
            (Some(_), None) => (b.0, a.0),
            (None, Some(_)) => (a.0, b.0),
            _ => return Ok(()),
        };
        Err(Error::argument(self.op, missing, format!("a tensor, because `{given}` is given"), "nothing"))
    }

    /// Requires an option's value to satisfy `ok`.
    pub fn option(&self, name: &str, value: impl Display, expected: &str, ok: bool) -> Result<()> {
        if ok { Ok(()) } else { Err(Error::argument(self.op, name, expected, value.to_string())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Tensor};

    fn tensor(shape: &[usize]) -> Tensor {
        Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap()
    }

    #[test]
    fn leading_dimensions_unify() {
        let mut m = Matcher::new("op");
        m.shape("x", &tensor(&[2, 3, 8]).view(), "... hidden").unwrap();
        assert_eq!((m.leading_count(), m.leading_rank(), m.size("hidden")), (6, 2, 8));
        m.shape("y", &tensor(&[2, 3, 8]).view(), "... hidden").unwrap();
        let e = m.shape("z", &tensor(&[3, 2, 8]).view(), "... hidden").unwrap_err();
        assert_eq!(e.to_string(), "op: argument `z`: expected shape [2, 3, hidden=8], got [3, 2, 8]");
    }

    #[test]
    fn rank_and_number_mismatches() {
        let mut m = Matcher::new("op");
        assert!(m.shape("x", &tensor(&[4]).view(), "a b").is_err());
        assert!(m.shape("x", &tensor(&[]).view(), "... a").is_err());
        m.shape("x", &tensor(&[4, 2]).view(), "a 2").unwrap();
        let e = m.shape("y", &tensor(&[4, 3]).view(), "a 2").unwrap_err();
        assert_eq!(e.to_string(), "op: argument `y`: expected shape [a=4, 2], got [4, 3]");
    }

    #[test]
    fn dtypes_are_named() {
        let e = Matcher::new("op").dtype("x", &tensor(&[1]).view(), &[DType::F16, DType::BF16]).unwrap_err();
        assert_eq!(e.to_string(), "op: argument `x`: expected dtype f16 or bf16, got f32");
    }
}
