//! Memory of the host: from the allocator, or, where it is much, in huge pages of its own.

use crate::cpu::scratch::Plain;
use crate::device::{Device, Memory};
use crate::error::{Error, Result};
use crate::profile;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Buffers start on a cache line so that full-width vector and streaming stores are aligned.
const ALIGNMENT: usize = 64;

/// Bytes of a huge page. Where the system's are larger it uses none, and nothing else changes.
const HUGE_PAGE: usize = 2 << 20;

/// From here on a buffer is mapped by itself.
///
/// Kernels that go through many rows at once, as attention does with a page per token, spend up to a tenth of their
/// time on TLB misses with small pages; and memory the allocator gives must be zeroed at once, by one thread, where a
/// mapping is zeroed by whoever touches it first.
const MAPPED_FROM: usize = 2 * HUGE_PAGE;

/// Owned memory, zeros at first.
pub(crate) struct HostBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is plain memory owned by one value; access is governed by the borrows of its owner.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub fn new(len: usize) -> Result<Self> {
        let start = match len {
            0 => Some(NonNull::without_provenance(ALIGNMENT.try_into().expect("not zero"))),
            MAPPED_FROM.. => map(len),
            // SAFETY: the size is not zero.
            _ => layout(len).and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) })),
        };
        let start = start.ok_or_else(|| out_of_memory(len))?;
        profile::memory(None, start.as_ptr() as u64, len as i64);
        Ok(HostBuffer { start, len })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        profile::memory(None, self.start.as_ptr() as u64, -(self.len as i64));
        match self.len {
            0 => {}
            // SAFETY: mapped in `new`, to the end of the last page.
            MAPPED_FROM.. => unsafe { unmap(self.start.as_ptr(), self.len) },
            // SAFETY: allocated in `new` with this very layout.
            _ => unsafe { dealloc(self.start.as_ptr(), layout(self.len).expect("as it was allocated")) },
        }
    }
}

/// An empty list with room for `count` elements; [`Error::OutOfMemory`] if it cannot be allocated. For lists whose
/// length follows from what a caller gives.
pub(crate) fn room_for<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let reserved = list.try_reserve_exact(count);
    reserved.map_err(|_| out_of_memory(count.saturating_mul(size_of::<T>())))?;
    Ok(list)
}

/// `count` zeros, likewise. Pages are not touched before they are used.
pub(crate) fn zeroed<T: Plain>(count: usize) -> Result<Vec<T>> {
    if count == 0 || size_of::<T>() == 0 {
        return Ok(vec![]);
    }
    let layout = Layout::array::<T>(count).ok();
    // SAFETY: the size is not zero.
    let start = layout.and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }));
    let start = start.ok_or_else(|| out_of_memory(count.saturating_mul(size_of::<T>())))?;
    // SAFETY: allocated as vectors do, and any bits, zeros too, are elements.
    Ok(unsafe { Vec::from_raw_parts(start.as_ptr().cast(), count, count) })
}

/// The error of a host allocation of `bytes` that failed.
pub(crate) fn out_of_memory(bytes: usize) -> Error {
    Memory::of_host().exceeded(Device::Cpu.to_string(), bytes as u64)
}

fn layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len, ALIGNMENT).ok()
}

/// Zeros that start on a huge page; `None` if the system cannot provide them.
fn map(len: usize) -> Option<NonNull<u8>> {
    // Room to start later: systems map to the end of a small page.
    let room = len.checked_add(HUGE_PAGE)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, nobody's address asked for.
    let first = unsafe { libc::mmap(std::ptr::null_mut(), room, protection, flags, -1, 0) };
    if first == libc::MAP_FAILED {
        return None;
    }
    let first: *mut u8 = first.cast();
    let before = first.align_offset(HUGE_PAGE);
    let start = first.wrapping_add(before);
    let end = start.wrapping_add(len.next_multiple_of(page_size()));
    // SAFETY: all inside the new mapping; what is given back is used by nobody.
    unsafe {
        unmap(first, before);
        unmap(end, first.wrapping_add(room.next_multiple_of(page_size())) as usize - end as usize);
        // A hint: everything works without huge pages.
        libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
    }
    NonNull::new(start)
}

/// Gives pages back.
///
/// # Safety
/// They must be mapped, from the start of one on, and used by nobody.
unsafe fn unmap(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: passed on.
        let failed = unsafe { libc::munmap(start.cast(), len) } != 0;
        // It fails for wrong arguments, and where a mapping cut in two would be one too many: then the pages stay.
        debug_assert!(!failed, "{}", std::io::Error::last_os_error());
    }
}

fn page_size() -> usize {
    // SAFETY: a query.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_any_size_are_aligned_zeros_that_can_be_written() {
        for len in [0, 1, 4096, MAPPED_FROM - 1, MAPPED_FROM, MAPPED_FROM + 1, 5 * HUGE_PAGE + 4097] {
            let buffer = HostBuffer::new(len).unwrap();
            let alignment = if len >= MAPPED_FROM { HUGE_PAGE } else { ALIGNMENT };
            assert_eq!(buffer.as_ptr() as usize % alignment, 0, "{len}");
            assert_eq!(buffer.len(), len);
            // SAFETY: the buffer's own bytes.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), len) };
            assert!(bytes.iter().all(|&b| b == 0), "{len}");
            bytes.fill(1);
        }
    }

    #[test]
    fn lists_that_are_too_long_are_an_error() {
        assert_eq!(zeroed::<i32>(1000).unwrap(), [0; 1000]);
        assert!(zeroed::<u64>(0).unwrap().is_empty() && room_for::<u64>(7).unwrap().capacity() >= 7);
        for count in [1 << 58, usize::MAX] {
            assert!(matches!(zeroed::<u64>(count), Err(Error::OutOfMemory { .. })), "{count}");
            assert!(matches!(room_for::<u64>(count), Err(Error::OutOfMemory { .. })), "{count}");
        }
    }

    #[test]
    fn more_than_can_be_addressed_is_an_error() {
        for len in [isize::MAX as usize, usize::MAX - HUGE_PAGE, usize::MAX] {
            assert!(matches!(HostBuffer::new(len), Err(Error::OutOfMemory { .. })), "{len}");
        }
    }
}
