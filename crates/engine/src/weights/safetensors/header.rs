//! The JSON object in front of the data. It is read without intermediate values: a hostile header of small numbers would take
//! many times its size as such.

use crate::weights::json::{Entries, refuse_second};
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::HashSet;
use std::fmt;
use warpsmith::tensor::MAX_RANK;

/// Everything in the header, not yet checked against the data.
#[derive(Default)]
pub struct Listed {
    pub metadata: Vec<(String, String)>,
    pub tensors: Vec<(String, Described)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    pub dtype: String,
    pub shape: Sizes,
    pub data_offsets: (usize, usize),
}

/// At most [`MAX_RANK`] sizes.
pub struct Sizes(pub Vec<usize>);

impl<'de> Deserialize<'de> for Listed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ListedVisitor)
    }
}

struct ListedVisitor;

impl<'de> Visitor<'de> for ListedVisitor {
    type Value = Listed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listed, A::Error> {
        let mut listed = Listed::default();
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            refuse_second(&mut seen, &key)?;
            if key == "__metadata__" {
                listed.metadata = map.next_value::<Entries<String>>()?.0;
                continue;
            }
            let described = map
                .next_value()
                .map_err(|error| A::Error::custom(format_args!("tensor `{key}`: {error}")))?;
            listed.tensors.push((key, described));
        }
        Ok(listed)
    }
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(SizesVisitor)
    }
}

struct SizesVisitor;

impl<'de> Visitor<'de> for SizesVisitor {
    type Value = Sizes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX_RANK} sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Sizes, A::Error> {
        let mut sizes = Vec::new();
        while let Some(size) = sequence.next_element()? {
            if sizes.len() == MAX_RANK {
                return Err(A::Error::custom(format_args!("more than {MAX_RANK} sizes")));
            }
            sizes.push(size);
        }
        Ok(Sizes(sizes))
    }
}
