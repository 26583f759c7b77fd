//! Activity records as bytes.
//!
//! The library that was loaded decides on the version of its records. From the ninth version of kernels on, they only grew at
//! the end: so the beginning of a record is read, by offset, and never the size of a struct. Enums are read as numbers,
//! because a newer library may have values that no binding knows.

use crate::profile::DeviceWork;
use std::ffi::{CStr, c_char};

/// Kinds of records.
pub const MEMCPY: u32 = 1;
pub const DRIVER: u32 = 4;
pub const KERNEL: u32 = 10;
pub const EXTERNAL: u32 = 39;
/// Whose numbers the pushed ones are: `CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`.
pub const CUSTOM: u32 = 3;

/// Bytes that are read of a record of a kind.
pub fn prefix(kind: u32) -> Option<usize> {
    match kind {
        KERNEL => Some(152),
        MEMCPY => Some(72),
        EXTERNAL => Some(20),
        _ => None,
    }
}

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A kernel or a copy.
    Work(DeviceWork),
    /// Work with this number was done for this call.
    For { call: u64, correlation: u32 },
}

/// The numbers of a record, by their offsets. All are in its prefix.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn at<const N: usize>(&self, offset: usize) -> [u8; N] {
        self.0.get(offset..offset + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
    }

    fn u16(&self, offset: usize) -> u16 {
        u16::from_ne_bytes(self.at(offset))
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(self.at(offset))
    }

    fn u64(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.at(offset))
    }
}

/// The kind of a record.
pub fn kind(bytes: &[u8]) -> u32 {
    Bytes(bytes).u32(0)
}

/// Reads the prefix of a record; `None` if its kind is of no interest.
///
/// # Safety
/// The name in a record of a kernel must be null or a text that ends with zero.
pub unsafe fn read(bytes: &[u8]) -> Option<Record> {
    let kind = kind(bytes);
    if bytes.len() < prefix(kind)? {
        return None;
    }
    let bytes = Bytes(bytes);
    Some(match kind {
        KERNEL => {
            let size = |offset: usize| u64::from(bytes.u32(offset));
            let name = bytes.u64(104) as usize as *const c_char;
            let name = match name.is_null() {
                true => "kernel".into(),
                // SAFETY: passed on.
                false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            };
            Record::Work(DeviceWork {
                name,
                call: None,
                recorded: None,
                device: bytes.u32(40),
                stream: size(48),
                start: bytes.u64(16),
                end: bytes.u64(24),
                registers: bytes.u16(6).into(),
                shared_bytes: bytes.u32(76).saturating_add(bytes.u32(80)),
                blocks: size(52).saturating_mul(size(56)).saturating_mul(size(60)),
                threads: bytes.u32(64).saturating_mul(bytes.u32(68)).saturating_mul(bytes.u32(72)),
                correlation: bytes.u32(92),
                graph_node: bytes.u64(144),
            })
        }
        MEMCPY => {
            let [from_to] = bytes.at(4);
            let way = match from_to {
                1 => "host to device",
                2 => "device to host",
                8 => "device to device",
                _ => "of another kind",
            };
            Record::Work(DeviceWork {
                name: format!("copy {way}"),
                device: bytes.u32(32),
                stream: u64::from(bytes.u32(40)),
                start: bytes.u64(16),
                end: bytes.u64(24),
                correlation: bytes.u32(44),
                graph_node: bytes.u64(64),
                ..DeviceWork::default()
            })
        }
        _ if bytes.u32(4) != CUSTOM => return None,
        _ => Record::For { call: bytes.u64(8), correlation: bytes.u32(16) },
    })
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    /// A record of zeros with some numbers in it.
    fn record(len: usize, numbers: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (offset, number) in numbers {
            bytes[*offset..*offset + number.len()].copy_from_slice(number);
        }
        bytes
    }

    fn read_safely(bytes: &[u8]) -> Option<Record> {
        // SAFETY: the tests' names are null or texts that end with zero.
        unsafe { read(bytes) }
    }

    #[test]
    fn the_beginning_of_a_kernel_is_read_whatever_follows() {
        let name = c"attention_fwd_sm90";
        let address = (name.as_ptr() as usize as u64).to_ne_bytes();
        let numbers: [(usize, &[u8]); 14] = [
            (0, &10u32.to_ne_bytes()),
            (6, &168u16.to_ne_bytes()),
            (16, &1_000u64.to_ne_bytes()),
            (24, &3_500u64.to_ne_bytes()),
            (40, &1u32.to_ne_bytes()),
            (48, &7u32.to_ne_bytes()),
            (52, &132u32.to_ne_bytes()),
            (56, &2u32.to_ne_bytes()),
            (60, &1u32.to_ne_bytes()),
            (64, &384u32.to_ne_bytes()),
            (68, &[1, 0, 0, 0, 1, 0, 0, 0]),
            (76, &[0, 4, 0, 0, 0, 0, 3, 0]),
            (92, &41u32.to_ne_bytes()),
            (104, &address),
        ];
        for len in [152, 208, 400] {
            let mut bytes = record(len, &numbers);
            let expected = DeviceWork {
                name: "attention_fwd_sm90".into(),
                call: None,
                recorded: None,
                device: 1,
                stream: 7,
                start: 1_000,
                end: 3_500,
                registers: 168,
                shared_bytes: 1024 + (3 << 16),
                blocks: 264,
                threads: 384,
                correlation: 41,
                graph_node: 0,
            };
            assert_eq!(read_safely(&bytes), Some(Record::Work(expected.clone())));
            bytes[144..152].copy_from_slice(&0x0000_0003_0000_0005u64.to_ne_bytes());
            let of_graph = DeviceWork { graph_node: 0x3_0000_0005, ..expected };
            assert_eq!(read_safely(&bytes), Some(Record::Work(of_graph)));
        }
        // One without a name.
        let Some(Record::Work(work)) = read_safely(&record(152, &numbers[..13])) else { panic!("no work") };
        assert_eq!(work.name, "kernel");
    }

    #[test]
    fn copies_and_calls_are_read() {
        let copy: [(usize, &[u8]); 5] = [
            (0, &1u32.to_ne_bytes()),
            (4, &[1]),
            (16, &5u64.to_ne_bytes()),
            (24, &9u64.to_ne_bytes()),
            (44, &12u32.to_ne_bytes()),
        ];
        let Some(Record::Work(work)) = read_safely(&record(88, &copy)) else { panic!("no work") };
        assert_eq!(
            (work.name.as_str(), work.start, work.end, work.correlation),
            ("copy host to device", 5, 9, 12)
        );
        let mut call = record(24, &[(0, &39u32.to_ne_bytes()), (4, &3u32.to_ne_bytes())]);
        call[8..16].copy_from_slice(&(1u64 << 40).to_ne_bytes());
        call[16..20].copy_from_slice(&6u32.to_ne_bytes());
        assert_eq!(read_safely(&call), Some(Record::For { call: 1 << 40, correlation: 6 }));
        // Somebody else's number.
        call[4] = 4;
        assert_eq!(read_safely(&call), None);
    }

    #[test]
    fn what_is_unknown_or_too_short_is_left_out() {
        for kind in [0u32, DRIVER, 5, 1000, u32::MAX] {
            assert_eq!(read_safely(&record(400, &[(0, &kind.to_ne_bytes())])), None, "{kind}");
        }
        for kind in [KERNEL, MEMCPY, EXTERNAL] {
            let len = prefix(kind).unwrap();
            assert_eq!(read_safely(&record(len - 1, &[(0, &kind.to_ne_bytes())])), None, "{kind}");
        }
        assert_eq!(read_safely(&[]), None);
    }
}
