//! Shapes with sizes that may only be known when a graph is called.

use crate::error::{Error, Result};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 8;

/// One size of a shape.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Dim {
    /// Known when the graph is built.
    Fixed(usize),
    /// Known when it is called. Sizes of one name are equal; those of two names may be.
    Named(Arc<str>),
}

impl Dim {
    /// A size with a name.
    pub fn named(name: &str) -> Dim {
        Dim::Named(name.into())
    }

    /// Whether this is the number 1, along which tensors are repeated.
    pub fn is_one(&self) -> bool {
        *self == Dim::Fixed(1)
    }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::Fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Named(name) => f.write_str(name),
        }
    }
}

impl std::str::FromStr for Dim {
    type Err = Error;

    /// A number, or a name of letters, digits and `_` that begins with a letter.
    fn from_str(text: &str) -> Result<Dim> {
        if let Ok(size) = text.parse() {
            return Ok(Dim::Fixed(size));
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(word) {
            true => Ok(Dim::named(text)),
            false => Err(Error::argument("size", "a number or a name", text)),
        }
    }
}

/// A shape as text: `[B, 4096]`.
pub fn show(shape: &[Dim]) -> String {
    let sizes: Vec<String> = shape.iter().map(Dim::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

/// The shape of an elementwise operation on two tensors, if they fit: sizes are aligned at the end, and a 1 becomes the
/// other's size. A name and a number other than 1 do not fit, although the size might turn out to be that number.
pub fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let of = |shape: &[Dim], i: usize| match (i + shape.len()).checked_sub(rank) {
        Some(at) => shape[at].clone(),
        None => Dim::Fixed(1),
    };
    let join = |i| match (of(a, i), of(b, i)) {
        (x, y) if x == y || y.is_one() => Some(x),
        (x, y) if x.is_one() => Some(y),
        _ => None,
    };
    (0..rank).map(join).collect()
}

/// The sizes of names in one call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes(BTreeMap<Arc<str>, usize>);

impl Sizes {
    /// Takes the sizes of one tensor.
    ///
    /// # Errors
    /// If the shape does not fit, or a name had another size before.
    pub fn bind(&mut self, argument: &str, shape: &[Dim], given: &[usize]) -> Result<()> {
        let refuse = |why: String| Err(Error::argument(argument, format!("shape {}", show(shape)), why));
        if shape.len() != given.len() {
            return refuse(format!("{given:?}"));
        }
        for (dim, &size) in shape.iter().zip(given) {
            match dim {
                Dim::Fixed(fixed) if *fixed != size => return refuse(format!("{given:?}")),
                Dim::Named(name) => match self.0.insert(name.clone(), size) {
                    Some(before) if before != size => {
                        return refuse(format!("{given:?}, but {name} is {before}"));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        Ok(())
    }

    /// The size of a dimension.
    ///
    /// # Errors
    /// If its name has none.
    pub fn of(&self, dim: &Dim) -> Result<usize> {
        match dim {
            Dim::Fixed(size) => Ok(*size),
            Dim::Named(name) => self
                .0
                .get(name)
                .copied()
                .ok_or_else(|| Error::argument(&**name, "a size that an input gives", "none")),
        }
    }

    /// The sizes of a shape.
    ///
    /// # Errors
    /// If one of its names has no size.
    pub fn shape(&self, shape: &[Dim]) -> Result<Vec<usize>> {
        shape.iter().map(|dim| self.of(dim)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(text: &str) -> Vec<Dim> {
        text.split(',').filter(|part| !part.is_empty()).map(|part| part.parse().unwrap()).collect()
    }

    #[test]
    fn shapes_broadcast_as_in_numpy() {
        for (a, b, joined) in [
            ("B,4", "4", Some("B,4")),
            ("", "3,1", Some("3,1")),
            ("B,1,4", "S,1", Some("B,S,4")),
            ("B,4", "B,4", Some("B,4")),
            ("B,4", "3,4", None),
            ("2,4", "3,4", None),
            ("B", "S", None),
        ] {
            assert_eq!(broadcast(&shape(a), &shape(b)), joined.map(shape), "{a} {b}");
            assert_eq!(broadcast(&shape(b), &shape(a)), joined.map(shape), "{b} {a}");
        }
    }

    #[test]
    fn names_have_one_size() {
        let mut sizes = Sizes::default();
        sizes.bind("x", &shape("B,4"), &[2, 4]).unwrap();
        sizes.bind("y", &shape("B"), &[2]).unwrap();
        assert_eq!(sizes.shape(&shape("B,B,7")).unwrap(), [2, 2, 7]);
        let error = sizes.bind("z", &shape("B"), &[3]).unwrap_err().to_string();
        assert!(error.contains("`z`") && error.contains("B is 2"), "{error}");
        assert!(
            sizes.bind("z", &shape("4"), &[3]).is_err() && sizes.bind("z", &shape("4"), &[4, 1]).is_err()
        );
        assert!(sizes.of(&Dim::named("S")).is_err());
    }
}
