//! Memory aligned to cache lines, and scratch that is kept from call to call.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;

/// Bytes of a cache line, and of the widest vector.
pub(super) const LINE: usize = 64;

/// Uninitialised memory that starts on a cache line.
#[derive(Default)]
pub(super) struct Buffer {
    bytes: Option<(std::ptr::NonNull<u8>, Layout)>,
}

// SAFETY: the buffer owns its memory, which is plain bytes.
unsafe impl Send for Buffer {}
// SAFETY: shared references give only the address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least `len` bytes.
    ///
    /// # Panics
    /// If `len` exceeds what an allocation can hold.
    pub fn new(len: usize) -> Buffer {
        if len == 0 {
            return Buffer::default();
        }
        let layout = Layout::from_size_align(len, LINE).expect("scratch smaller than the address space");
        // SAFETY: the layout's size is not zero.
        let Some(start) = std::ptr::NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        Buffer { bytes: Some((start, layout)) }
    }

    /// The first byte; dangling but aligned for an empty buffer.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bytes.map_or(std::ptr::without_provenance_mut(LINE), |(start, _)| start.as_ptr())
    }

    /// Bytes it holds.
    pub fn len(&self) -> usize {
        self.bytes.map_or(0, |(_, layout)| layout.size())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some((start, layout)) = self.bytes {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

/// Which of a thread's buffers to use: a caller packs into one while it works in the other.
#[derive(Copy, Clone)]
pub(crate) enum Slot {
    /// What the threads of one call share.
    Shared,
    /// What one thread works in.
    Own,
}

thread_local! {
    static KEPT: [Cell<Buffer>; 2] = const { [const { Cell::new(Buffer { bytes: None }) }; 2] };
}

/// Calls `f` with at least `len` bytes of this thread's scratch. Fresh memory costs a page fault each 4 KiB, more
/// than the work on it, so buffers are kept; a call inside another's `f` gets memory of its own.
pub(crate) fn with_scratch<R>(slot: Slot, len: usize, f: impl FnOnce(*mut u8) -> R) -> R {
    let mut buffer = KEPT.with(|kept| kept[slot as usize].take());
    if buffer.len() < len {
        buffer = Buffer::new(len);
    }
    let result = f(buffer.as_ptr());
    KEPT.with(|kept| kept[slot as usize].set(buffer));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_kept_and_may_nest() {
        let first = with_scratch(Slot::Own, 100, |a| {
            assert_eq!(a as usize % LINE, 0);
            with_scratch(Slot::Own, 100, |b| assert_ne!(a, b));
            with_scratch(Slot::Shared, 0, |b| assert_eq!(b as usize % LINE, 0));
            a
        });
        // The innermost buffer was put back first and then replaced.
        assert_eq!(with_scratch(Slot::Own, 50, |a| a), first);
    }
}
