//! What a kernel was compiled to: registers, stack, shared memory, spills, and the machine code itself.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use super::elf::{Elf, Section, u16_at, u32_at};
use super::search::Surroundings;
use crate::{Error, Result};

/// Resources of one kernel function, as recorded in its cubin.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Resources {
    /// The function's symbol.
    pub function: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread: arrays indexed at run time, and spilled registers.
    pub stack_bytes: u32,
    /// Bytes of static shared memory per block. From sm_90 on, a kernel that uses shared memory has 1024 more than
    /// it declares: the system reserves them.
    pub shared_bytes: u64,
}

/// Register spills of one function, as ptxas reports them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Spills {
    /// The function's symbol.
    pub function: String,
    /// Bytes of stack per thread.
    pub stack_bytes: u32,
    /// Bytes stored per thread to make room.
    pub store_bytes: u32,
    /// Bytes loaded back per thread.
    pub load_bytes: u32,
}

// Attributes of `.nv.info`: a format, an attribute, then a value whose size depends on the format.
const FORMAT_SIZED: u8 = 4;
const REGISTERS: u8 = 0x2f;
const FRAME_SIZE: u8 = 0x11;
const MIN_STACK_SIZE: u8 = 0x12;

/// The resources of every kernel in a cubin, by name.
pub fn resources(cubin: &[u8]) -> Result<Vec<Resources>> {
    let elf = Elf::parse(cubin)?;
    let attributes =
        elf.section(".nv.info").map(|section| sized_attributes(section.bytes)).unwrap_or_default();
    let attribute = |function: &str, attribute: u8| {
        let of_function = |symbol: u32| elf.symbol(symbol) == Some(function);
        attributes
            .iter()
            .find(|&&(kind, symbol, _)| kind == attribute && of_function(symbol))
            .map(|found| found.2)
    };
    let mut list = Vec::new();
    for text in &elf.sections {
        let Some(function) = text.name.strip_prefix(".text.") else { continue };
        // Only entry points have an information section of their own; other functions are called by them.
        if elf.section(&format!(".nv.info.{function}")).is_none() {
            continue;
        }
        let frame = attribute(function, FRAME_SIZE).unwrap_or(0);
        // The stack of the whole call tree if it is known, which is at least the frame.
        let stack = attribute(function, MIN_STACK_SIZE).unwrap_or(0);
        list.push(Resources {
            function: function.into(),
            registers: attribute(function, REGISTERS).unwrap_or_else(|| registers_in_header(text)),
            stack_bytes: frame.max(stack),
            shared_bytes: elf.section(&format!(".nv.shared.{function}")).map_or(0, |section| section.size),
        });
    }
    list.sort_by(|a, b| a.function.cmp(&b.function));
    Ok(list)
}

/// Older compilers record the register count only in the top byte of the code section's `info`.
fn registers_in_header(text: &Section) -> u32 {
    text.info >> 24
}

/// The attributes that are a pair of integers: attribute, symbol, value. Reading stops where the data ends early.
fn sized_attributes(bytes: &[u8]) -> Vec<(u8, u32, u32)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let (Some(&[format, attribute]), Some(half)) = (bytes.get(at..at + 2), u16_at(bytes, at + 2)) {
        at += 4;
        if format == FORMAT_SIZED {
            if let (8, Some(symbol), Some(value)) = (half, u32_at(bytes, at), u32_at(bytes, at + 4)) {
                found.push((attribute, symbol, value));
            }
            at += usize::from(half);
        }
    }
    found
}

/// The spills of every function in a compiler's log, in the order reported.
pub fn spills(log: &str) -> Vec<Spills> {
    let mut list = Vec::new();
    let mut function = None;
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            function = Some(name.trim());
        } else if line.contains(" bytes stack frame, ") {
            let numbers: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if let (Some(function), &[stack_bytes, store_bytes, load_bytes]) = (function.take(), &numbers[..])
            {
                list.push(Spills { function: function.into(), stack_bytes, store_bytes, load_bytes });
            }
        }
    }
    list
}

/// A program of the CUDA toolkit: in `CUDA_HOME` or `CUDA_PATH`, on `PATH`, in a Python environment's NVIDIA packages,
/// or in `/usr/local/cuda*`.
pub fn tool(name: &str) -> Option<PathBuf> {
    Surroundings::of_process().tool(name)
}

/// How to get a disassembler.
pub const INSTALL_DISASSEMBLER: &str =
    "`pip install nvidia-cuda-nvdisasm` or `nvidia-cuda-cuobjdump`, or set CUDA_HOME to a CUDA toolkit";

/// A cubin's machine code as text, by `nvdisasm` or `cuobjdump`, whichever is found.
pub fn sass(cubin: &[u8]) -> Result<String> {
    let with = |name: &str, option: &'static str| tool(name).map(|path| (path, option));
    let (tool, option) =
        with("nvdisasm", "-c").or_else(|| with("cuobjdump", "-sass")).ok_or_else(|| Error::Unavailable {
            what: "a disassembler".into(),
            why: "neither nvdisasm nor cuobjdump is in CUDA_HOME, on PATH or in a Python environment".into(),
            fix: INSTALL_DISASSEMBLER.into(),
        })?;
    let file = Temporary::write(cubin)?;
    let output = Command::new(&tool)
        .arg(option)
        .arg(&file.0)
        .output()
        .map_err(|error| Error::io(&tool, "run", &error))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(Error::Io { path: tool, what: format!("{}: {}", output.status, message.trim()) });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A temporary file for tools that cannot read from a pipe, removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn write(bytes: &[u8]) -> Result<Temporary> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("warpsmith-{process}-{count}.cubin"));
        // `create_new`, so that a link planted by someone else is not followed.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let written = file.and_then(|mut file| {
            let temporary = Temporary(path.clone());
            file.write_all(bytes).map(|()| temporary)
        });
        written.map_err(|error| Error::io(path, "write", &error))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn reads_spills_from_a_log() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n\
            ptxas         .     256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
            ptxas info    : Used 34 registers\n";
        let expected = Spills { function: "k".into(), stack_bytes: 256, store_bytes: 12, load_bytes: 16 };
        assert_eq!(spills(log), [expected]);
        assert!(spills("256 bytes stack frame, 1 bytes spill stores, 1 bytes spill loads").is_empty());
    }

    #[test]
    fn refuses_what_is_no_cubin() {
        for bytes in [&b""[..], b"\x7fELF", b"\x7fELF\x02\x01", &[0; 4096]] {
            assert!(matches!(resources(bytes), Err(Error::Parse { .. })), "{} bytes", bytes.len());
        }
    }
}
