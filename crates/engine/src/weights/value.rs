//! Values of GGUF's keys.

use super::error::shown;
use std::fmt;

/// Declares the numbers a value or an array can hold, with their names and GGUF's ids.
macro_rules! numbers {
    ($($variant:ident($type:ty) = $id:literal, $name:literal;)*) => {
        /// The value of a key.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs)]
        pub enum Value {
            $($variant($type),)*
            Bool(bool),
            String(String),
            Array(Array),
        }

        /// A value that is an array. All elements have the same type.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs)]
        pub enum Array {
            $($variant(Vec<$type>),)*
            Bool(Vec<bool>),
            String(Strings),
        }

        impl Value {
            /// The name of the value's type.
            pub fn type_name(&self) -> &'static str {
                match self {
                    $(Value::$variant(_) => $name,)*
                    Value::Bool(_) => "bool",
                    Value::String(_) => "string",
                    Value::Array(_) => "array",
                }
            }
        }

        impl Array {
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Array::$variant(elements) => elements.len(),)*
                    Array::Bool(elements) => elements.len(),
                    Array::String(strings) => strings.len(),
                }
            }

            /// The name of the elements' type.
            pub fn type_name(&self) -> &'static str {
                match self {
                    $(Array::$variant(_) => $name,)*
                    Array::Bool(_) => "bool",
                    Array::String(_) => "string",
                }
            }

            /// The element at `index`.
            pub fn get(&self, index: usize) -> Option<Value> {
                Some(match self {
                    $(Array::$variant(elements) => Value::$variant(*elements.get(index)?),)*
                    Array::Bool(elements) => Value::Bool(*elements.get(index)?),
                    Array::String(strings) => Value::String(strings.get(index)?.into()),
                })
            }
        }

        impl fmt::Display for Value {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Value::$variant(number) => write!(f, "{number}"),)*
                    Value::Bool(value) => write!(f, "{value}"),
                    Value::String(text) => write!(f, "\"{}\"", shown(text)),
                    Value::Array(array) => write!(f, "{array}"),
                }
            }
        }

        /// GGUF's ids of the types of numbers, for its reader.
        pub(super) mod ids {
            $(#[allow(non_upper_case_globals)] pub const $variant: u32 = $id;)*
        }
    };
}
numbers! {
    U8(u8) = 0, "u8";
    I8(i8) = 1, "i8";
    U16(u16) = 2, "u16";
    I16(i16) = 3, "i16";
    U32(u32) = 4, "u32";
    I32(i32) = 5, "i32";
    F32(f32) = 6, "f32";
    U64(u64) = 10, "u64";
    I64(i64) = 11, "i64";
    F64(f64) = 12, "f64";
}

impl Array {
    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 5;
        write!(f, "{} x {}: [", self.len(), self.type_name())?;
        for (i, element) in (0..MOST).map_while(|i| Some((i, self.get(i)?))) {
            write!(f, "{}{element}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str(if self.len() > MOST { ", ...]" } else { "]" })
    }
}

/// Many strings in one piece of memory. A vocabulary has some hundred thousand of them, and a file could claim many more
/// empty ones than there is room for separate strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    /// For each string, where it ends in `text`.
    ends: Vec<usize>,
}

impl Strings {
    /// No string, with room for `count` of them.
    pub(super) fn with_capacity(count: usize) -> Strings {
        Strings { text: String::new(), ends: Vec::with_capacity(count) }
    }

    pub(super) fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("the index is in range"))
    }
}
