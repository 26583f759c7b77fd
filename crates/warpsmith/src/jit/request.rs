//! Compilation requests, and the hashes that identify them.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{LazyLock, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::Arch;
use super::headers::{self, Header};
use crate::{Error, Result};

/// Increment when the same request must produce different code, so that old packs and caches are not used.
const FORMAT: u32 = 1;

/// The device code of an op, embedded with `include_str!`.
#[derive(Copy, Clone, Debug)]
pub struct Source {
    /// The kernel's name, used in messages and as the file name in line information.
    pub name: &'static str,
    /// CUDA C++ that includes nothing but `warpsmith/*.cuh`.
    pub code: &'static str,
}

/// What the compiled code is for.
#[derive(Copy, Clone, Debug, Default, Eq, Hash, PartialEq)]
pub enum Profile {
    /// Speed.
    #[default]
    Release,
    /// Speed, with line numbers for profilers and sanitizers.
    LineInfo,
    /// Stepping in a debugger: no optimisation.
    Debug,
}

/// One kernel source to compile, with everything that determines the result except the compiler's version.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The kernel source.
    pub source: &'a Source,
    /// Generated declarations (the C twins of params structs) placed before the source.
    pub prelude: &'a str,
    /// Macros, in any order; an empty value defines the macro as nothing.
    pub defines: &'a [(&'a str, String)],
    /// Architecture to compile for.
    pub arch: Arch,
    /// What the code is for.
    pub profile: Profile,
    /// Approximate division, square root and transcendental functions, denormals flushed.
    pub fast_math: bool,
}

impl<'a> Request<'a> {
    /// A release build of `source` without prelude, defines or fast math.
    pub fn new(source: &'a Source, arch: Arch) -> Self {
        Request { source, prelude: "", defines: &[], arch, profile: Profile::Release, fast_math: false }
    }

    /// The translation unit given to the compiler.
    pub fn program(&self) -> String {
        let Source { name, code } = self.source;
        // Devices before sm_70 copy parameters, and their compilers refuse the word that says not to.
        let words = match self.arch.major {
            ..7 => "#undef __grid_constant__\n#define __grid_constant__\n",
            _ => "",
        };
        format!("{words}#line 1 \"{name}.prelude\"\n{}\n#line 1 \"{name}.cu\"\n{code}", self.prelude)
    }

    /// The headers the program includes.
    pub fn headers(&self) -> Vec<&'static Header> {
        headers::included_by(&[self.prelude, self.source.code])
    }

    /// The compiler's options except the architecture: defines sorted by name, then the fixed ones.
    pub fn options(&self) -> Vec<String> {
        let mut defines: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")).collect();
        defines.sort();
        let mut options = defines;
        // Kernels annotate only entry points. `-v` makes ptxas report registers and spills in the log.
        options.extend(
            ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"].map(String::from),
        );
        match self.profile {
            Profile::Release => {}
            Profile::LineInfo => options.push("--generate-line-info".into()),
            // Implies line information: ptxas warns if both are given.
            Profile::Debug => options.push("--device-debug".into()),
        }
        if self.fast_math {
            options.push("--use_fast_math".into());
        }
        options
    }

    /// Identifies the request: equal keys give equal code from equal compilers.
    ///
    /// The compiler's version is not part of the key, so that a pack can be searched on a machine without a compiler;
    /// the disk cache adds it.
    pub fn key(&self) -> Key {
        let mut digest = Digest::new("key");
        digest.bytes(source_digest(self.source, self.prelude).as_bytes());
        digest.bytes(self.arch.to_string().as_bytes());
        for option in self.options() {
            digest.bytes(option.as_bytes());
        }
        Key(*digest.finish().as_bytes())
    }

    /// The same request for another architecture.
    pub fn with_arch(&self, arch: Arch) -> Self {
        Request { arch, ..self.clone() }
    }

    /// Refuses names that would change the meaning of the program or of an option.
    pub(super) fn check(&self) -> Result<()> {
        let name = self.source.name;
        if name.is_empty()
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte))
        {
            return Err(Error::parse("kernel name", "letters, digits and `_-./`", name));
        }
        let mut seen: Vec<&str> = Vec::new();
        for &(define, ref value) in self.defines {
            let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            if !define.bytes().all(word) || define.bytes().next().is_none_or(|byte| byte.is_ascii_digit()) {
                return Err(Error::parse(format!("{name}: define"), "a C identifier", define));
            }
            if value.contains(['\0', '\n', '\r']) {
                return Err(Error::parse(
                    format!("{name}: value of {define}"),
                    "one line",
                    value.escape_debug().to_string(),
                ));
            }
            if seen.contains(&define) {
                return Err(Error::parse(format!("{name}: defines"), "each name once", define));
            }
            seen.push(define);
        }
        Ok(())
    }
}

/// Identifies a kernel's source for evidence: its name, prelude, code and every header it includes, directly or
/// indirectly. Defines, options and architecture are not part of it.
pub fn source_hash(source: &Source, prelude: &str) -> String {
    source_digest(source, prelude).to_hex().to_string()
}

/// Hash of the text a request compiles. A [`Source`] is static, so its part is computed once per process: a request
/// for a loaded kernel does not hash the headers again.
fn source_digest(source: &Source, prelude: &str) -> blake3::Hash {
    let place = |text: &'static str| (text.as_ptr() as usize, text.len());
    type Memo = HashMap<[(usize, usize); 2], blake3::Hash>;
    static MEMO: LazyLock<Mutex<Memo>> = LazyLock::new(Mutex::default);

    let code = *MEMO
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .entry([place(source.name), place(source.code)])
        .or_insert_with(|| {
            let mut digest = Digest::new("source");
            digest.bytes(source.name.as_bytes());
            digest.bytes(source.code.as_bytes());
            digest.headers(&headers::included_by(&[source.code]));
            digest.finish()
        });
    let mut digest = Digest::new("program");
    digest.bytes(code.as_bytes());
    digest.bytes(prelude.as_bytes());
    digest.headers(&headers::included_by(&[prelude]));
    digest.finish()
}

/// Identity of a [`Request`]: 32 bytes, written as 64 hexadecimal digits.
#[derive(Copy, Clone, Eq, Hash, PartialEq, Ord, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key([u8; 32]);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

impl FromStr for Key {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let lower = text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        match blake3::Hash::from_hex(text) {
            Ok(hash) if lower => Ok(Key(*hash.as_bytes())),
            _ => Err(Error::parse("kernel key", "64 hexadecimal digits", text)),
        }
    }
}

impl TryFrom<String> for Key {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Key> for String {
    fn from(key: Key) -> String {
        key.to_string()
    }
}

/// Hashes a sequence of fields, each with its length: moving a byte from one field to the next changes the hash.
struct Digest(blake3::Hasher);

impl Digest {
    fn new(purpose: &str) -> Self {
        let mut digest = Digest(blake3::Hasher::new());
        digest.bytes(format!("warpsmith {purpose} {FORMAT}").as_bytes());
        digest
    }

    fn bytes(&mut self, field: &[u8]) {
        self.0.update(&(field.len() as u64).to_le_bytes()).update(field);
    }

    fn headers(&mut self, headers: &[&Header]) {
        self.0.update(&(headers.len() as u64).to_le_bytes());
        for header in headers {
            self.bytes(header.name.as_bytes());
            self.bytes(header.code.as_bytes());
        }
    }

    fn finish(self) -> blake3::Hash {
        self.0.finalize()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    static PLAIN: Source = Source { name: "plain", code: "extern \"C\" __global__ void plain() {}" };
    static WITH_HEADER: Source = Source {
        name: "plain",
        code: "#include \"warpsmith/base.cuh\"\nextern \"C\" __global__ void plain() {}",
    };
    const ARCH: Arch = Arch::new(9, 0, true);

    #[test]
    fn key_depends_on_everything_but_the_order_of_defines() {
        let base = Request::new(&PLAIN, ARCH);
        let ab = [("A", "1".to_string()), ("B", "2".to_string())];
        let ba = [("B", "2".to_string()), ("A", "1".to_string())];
        let renamed = Source { name: "other", ..PLAIN };
        let variants = [
            base.clone(),
            Request { prelude: "struct P {};", ..base.clone() },
            Request { defines: &ab, ..base.clone() },
            Request { arch: Arch::new(9, 0, false), ..base.clone() },
            Request { profile: Profile::LineInfo, ..base.clone() },
            Request { profile: Profile::Debug, ..base.clone() },
            Request { fast_math: true, ..base.clone() },
            Request { source: &WITH_HEADER, ..base.clone() },
            Request { source: &renamed, ..base.clone() },
        ];
        let mut keys: Vec<Key> = variants.iter().map(Request::key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), variants.len());
        assert_eq!(
            Request { defines: &ab, ..base.clone() }.key(),
            Request { defines: &ba, ..base.clone() }.key()
        );
        assert_eq!(base.key().to_string().parse::<Key>().unwrap(), base.key());
    }

    #[test]
    fn source_hash_covers_prelude_and_headers() {
        let hash = source_hash(&PLAIN, "");
        assert_eq!(hash.len(), 64);
        assert_eq!(hash, source_hash(&PLAIN, ""));
        assert_ne!(hash, source_hash(&PLAIN, "struct P {};"));
        assert_ne!(hash, source_hash(&WITH_HEADER, ""));
        assert_ne!(source_hash(&PLAIN, ""), source_hash(&PLAIN, "#include \"warpsmith/base.cuh\""));
    }

    #[test]
    fn refuses_names_that_would_become_something_else() {
        let bad = [("1A", "1"), ("A=1 -DB", "1"), ("", "1"), ("A", "1\n2"), ("A", "1\0")];
        for (name, value) in bad {
            let defines = [(name, value.to_string())];
            let request = Request { defines: &defines, ..Request::new(&PLAIN, ARCH) };
            assert!(matches!(request.check(), Err(Error::Parse { .. })), "{name}={value}");
        }
        let twice = [("A", "1".to_string()), ("A", "2".to_string())];
        assert!(Request { defines: &twice, ..Request::new(&PLAIN, ARCH) }.check().is_err());
        let quoted = Source { name: "a\"b", code: "" };
        assert!(Request::new(&quoted, ARCH).check().is_err());
    }

    #[test]
    fn keys_are_read_strictly() {
        for text in ["", "00", &"g".repeat(64), &"A".repeat(64), &"0".repeat(65)] {
            assert!(text.parse::<Key>().is_err(), "{text}");
        }
    }
}
