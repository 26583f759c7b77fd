//! The part of the ELF format that a cubin needs. Every read is bounds-checked, because cubins come from disk.

use crate::{Error, Result};

const SHT_SYMTAB: u32 = 2;
const SHT_NOBITS: u32 = 8;
const EM_CUDA: u16 = 190;

/// A 64-bit little-endian ELF file.
pub(super) struct Elf<'a> {
    pub sections: Vec<Section<'a>>,
}

/// One section.
pub(super) struct Section<'a> {
    pub name: &'a str,
    pub kind: u32,
    pub info: u32,
    pub link: u32,
    /// Its size in memory; it may have no bytes in the file.
    pub size: u64,
    pub bytes: &'a [u8],
}

impl<'a> Elf<'a> {
    /// Reads the section table of a cubin.
    pub fn parse(file: &'a [u8]) -> Result<Elf<'a>> {
        Elf::read(file).ok_or_else(|| {
            Error::parse(
                "cubin",
                "a 64-bit CUDA ELF file whose tables lie inside it",
                format!("{} bytes", file.len()),
            )
        })
    }

    fn read(file: &'a [u8]) -> Option<Elf<'a>> {
        // Identification: magic, 64-bit, little-endian.
        if !file.starts_with(b"\x7fELF\x02\x01") || u16_at(file, 0x12)? != EM_CUDA {
            return None;
        }
        let table = usize::try_from(u64_at(file, 0x28)?).ok()?;
        let [entry_size, count, names] = [0x3a, 0x3c, 0x3e].map(|at| u16_at(file, at).map(usize::from));
        let (entry_size, count, names) = (entry_size?, count?, names?);
        let header = |index: usize| {
            let start = table.checked_add(index.checked_mul(entry_size)?)?;
            file.get(start..start.checked_add(0x40)?)
        };
        let contents = |header: &[u8]| {
            let size = u64_at(header, 0x20)?;
            if u32_at(header, 4)? == SHT_NOBITS {
                return Some((size, &file[..0]));
            }
            let start = usize::try_from(u64_at(header, 0x18)?).ok()?;
            Some((size, file.get(start..start.checked_add(usize::try_from(size).ok()?)?)?))
        };
        let (_, name_bytes) = contents(header(names)?)?;
        let mut sections = Vec::with_capacity(count);
        for index in 0..count {
            let header = header(index)?;
            let (size, bytes) = contents(header)?;
            sections.push(Section {
                name: string_at(name_bytes, u32_at(header, 0)?)?,
                kind: u32_at(header, 4)?,
                link: u32_at(header, 0x28)?,
                info: u32_at(header, 0x2c)?,
                size,
                bytes,
            });
        }
        Some(Elf { sections })
    }

    /// The section of this name.
    pub fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// The name of a symbol by its index.
    pub fn symbol(&self, index: u32) -> Option<&'a str> {
        let symbols = self.sections.iter().find(|section| section.kind == SHT_SYMTAB)?;
        let start = (index as usize).checked_mul(24)?;
        let name = u32_at(symbols.bytes, start)?;
        string_at(self.sections.get(symbols.link as usize)?.bytes, name)
    }
}

fn string_at(table: &[u8], start: u32) -> Option<&str> {
    let rest = table.get(start as usize..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}
