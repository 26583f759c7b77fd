//! JSON objects whose keys must differ. Parsers usually keep the last of equal keys, so that two readers can see two different
//! models in one file.

use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// The entries of an object in their order, no two with the same key.
pub struct Entries<T>(pub Vec<(String, T)>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

struct EntriesVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for EntriesVisitor<T> {
    type Value = Entries<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
        let mut entries = Vec::new();
        let mut keys = HashSet::new();
        while let Some((key, value)) = map.next_entry::<String, T>()? {
            refuse_second(&mut keys, &key)?;
            entries.push((key, value));
        }
        Ok(Entries(entries))
    }
}

/// An error if the key was seen before.
pub fn refuse_second<E: serde::de::Error>(seen: &mut HashSet<String>, key: &str) -> Result<(), E> {
    if seen.insert(key.to_owned()) { Ok(()) } else { Err(E::custom(format_args!("a second key `{key}`"))) }
}
