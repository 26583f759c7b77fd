//! A place in the bytes of a file, from which values are taken.

use crate::weights::error::{Error, Result};
use std::path::Path;

/// Takes values from bytes, one after the other, after checking that enough bytes are left.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    pub file: &'a Path,
}

/// A number of fixed size.
pub trait Number: Copy {
    const SIZE: usize;
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            const SIZE: usize = size_of::<$type>();
            fn from_le(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().expect("as many bytes as the number has"))
            }
        }
    )*};
}
numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], file: &'a Path) -> Reader<'a> {
        Reader { bytes, at: 0, file }
    }

    /// Size of the file.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes taken so far.
    pub fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `count` bytes. `what` names them in an error, here and below.
    pub fn take(&mut self, count: usize, what: impl Fn() -> String) -> Result<&'a [u8]> {
        if count > self.left() {
            let expected = format!("{count} bytes at byte {}", self.at);
            let got = format!("{} until the end of the file", self.left());
            return Err(Error::format(self.file, what(), expected, got));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    pub fn number<T: Number>(&mut self, what: impl Fn() -> String) -> Result<T> {
        Ok(T::from_le(self.take(T::SIZE, what)?))
    }

    pub fn u32(&mut self, what: impl Fn() -> String) -> Result<u32> {
        self.number(what)
    }

    pub fn bool(&mut self, what: impl Fn() -> String) -> Result<bool> {
        match self.number::<u8>(&what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::format(self.file, what(), "a bool, 0 or 1", other.to_string())),
        }
    }

    /// A number of things, each of which takes at least `least` bytes: no more than the rest of the file can hold, and no
    /// more than `most`. So memory can be reserved for them.
    pub fn count(&mut self, least: usize, most: usize, what: impl Fn() -> String) -> Result<usize> {
        let count = self.number::<u64>(&what)?;
        let room = (self.left() / least).min(most);
        usize::try_from(count).ok().filter(|&count| count <= room).ok_or_else(|| {
            let expected = format!("a count of at most {room}");
            Error::format(self.file, what(), expected, count.to_string())
        })
    }

    /// An array of numbers.
    pub fn numbers<T: Number>(&mut self, what: impl Fn() -> String) -> Result<Vec<T>> {
        let count = self.count(T::SIZE, usize::MAX, &what)?;
        let bytes = self.take(count * T::SIZE, what)?;
        Ok(bytes.chunks_exact(T::SIZE).map(T::from_le).collect())
    }

    pub fn string(&mut self, what: impl Fn() -> String) -> Result<&'a str> {
        let length = self.count(1, usize::MAX, &what)?;
        let bytes = self.take(length, &what)?;
        std::str::from_utf8(bytes).map_err(|error| {
            let got = format!("an invalid byte at {} of {length}", error.valid_up_to());
            Error::format(self.file, what(), "UTF-8", got)
        })
    }
}
