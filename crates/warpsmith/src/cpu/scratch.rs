//! Scratch memory of the kernels, kept from call to call so that a repeated call allocates nothing.
//!
//! The thread that makes a call keeps the memory, also that of the workers that share the call's loop
//! ([`super::parallel_for_with_scratch`]). So a second call finds what it needs no matter which workers took part in the
//! first. Fresh memory would also cost a page fault for every 4 KiB, more than the work on it.
//!
//! Scopes nest: a scope inside another one gets memory behind it. Once a thread has been through the deepest nest of
//! its calls, all of it is one block of memory. A thread keeps its largest block until it ends.
//!
//! How much a call needs follows from its shapes, so memory may not suffice. The scope that finds this out can be deep
//! in a kernel, in one part of a loop on some worker, where all that code could do is pass an error up. So it unwinds
//! to `or_out_of_memory`, which surrounds every kernel call and turns it into an
//! [`OutOfMemory`](crate::Error::OutOfMemory); the loops carry it to the calling thread as they carry panics. (A
//! program that aborts on panics ends here.)

use crate::error::Result;
use crate::tensor::storage::host_out_of_memory;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

/// Bytes of a cache line, and of the widest vector.
pub const LINE: usize = 64;

/// Types that any bits are a value of, without padding.
///
/// # Safety
/// Both must be true.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($t:ty),*) => { $(
        // SAFETY: numbers, or the bits of one.
        unsafe impl Plain for $t {}
    )* };
}

plain!(u8, u16, u32, u64, usize, i32, i64, f32, half::f16, half::bf16);
plain!(crate::tensor::F8E4M3, crate::tensor::F8E5M2);

// SAFETY: an array is its elements and nothing else.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Memory that starts on a cache line.
#[derive(Default)]
pub(crate) struct Buffer {
    allocation: Option<(NonNull<u8>, Layout)>,
    len: usize,
}

// SAFETY: the buffer owns its memory, which is plain bytes.
unsafe impl Send for Buffer {}
// SAFETY: shared references give only the address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes of zeros; [`OutOfMemory`](crate::Error::OutOfMemory) if they cannot be allocated.
    pub fn zeroed(len: usize) -> Result<Buffer> {
        Buffer::try_zeroed(len).ok_or_else(|| host_out_of_memory(len))
    }

    fn try_zeroed(len: usize) -> Option<Buffer> {
        if len == 0 {
            return Some(Buffer::default());
        }
        #[cfg(any(test, feature = "lab"))]
        if limit::is_exceeded(len) {
            return None;
        }
        // Aligned here: the system's allocator has zero pages that nobody has touched only for small alignments, and would
        // write all of it for larger ones.
        let layout = Layout::from_size_align(len.checked_add(LINE)?, 1).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { allocation: Some((start, layout)), len })
    }

    /// The first byte; dangling but aligned for an empty buffer.
    pub fn as_ptr(&self) -> *mut u8 {
        let Some((start, _)) = self.allocation else { return std::ptr::without_provenance_mut(LINE) };
        let start = start.as_ptr();
        start.wrapping_add((start as usize).next_multiple_of(LINE) - start as usize)
    }

    /// Bytes it holds.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some((start, layout)) = self.allocation {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

/// How much scratch something takes: slices one after the other, each on cache lines of its own.
#[derive(Copy, Clone, Default, Debug, Eq, PartialEq)]
pub struct Need {
    bytes: usize,
}

impl Need {
    /// Room for `len` elements.
    ///
    /// What exceeds the address space counts as all of it, which nobody has: asking for it is an
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    pub const fn of<T>(len: usize) -> Need {
        match len.saturating_mul(size_of::<T>()).checked_next_multiple_of(LINE) {
            Some(bytes) => Need { bytes },
            None => Need { bytes: usize::MAX },
        }
    }

    /// The same for each of `count`, each starting at a multiple of `step` bytes.
    pub(super) const fn times(self, count: usize, step: usize) -> Need {
        match self.bytes.checked_next_multiple_of(step) {
            Some(bytes) => Need { bytes: bytes.saturating_mul(count) },
            None => Need { bytes: usize::MAX },
        }
    }

    /// Room for `len` more elements, of any type.
    pub const fn and<T>(self, len: usize) -> Need {
        self.plus(Need::of::<T>(len))
    }

    /// Room for both.
    pub const fn plus(self, other: Need) -> Need {
        Need { bytes: self.bytes.saturating_add(other.bytes) }
    }

    /// The larger of the two.
    pub fn max(self, other: Need) -> Need {
        Need { bytes: self.bytes.max(other.bytes) }
    }

    pub(super) const fn bytes(self) -> usize {
        self.bytes
    }
}

/// Scratch that slices are taken from, front to back. What is in it was left by whoever used it before.
pub struct Region<'a> {
    next: *mut u8,
    left: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Region<'a> {
    /// # Safety
    /// The `len` bytes at `start`, aligned to a cache line, must be initialised and used by nothing else during `'a`.
    pub(super) unsafe fn new(start: *mut u8, len: usize) -> Region<'a> {
        Region { next: start, left: len, memory: PhantomData }
    }

    fn take<T>(&mut self, len: usize) -> *mut T {
        const { assert!(align_of::<T>() <= LINE) };
        let bytes = Need::of::<T>(len).bytes;
        assert!(bytes <= self.left, "{bytes} bytes of scratch asked for, {} left", self.left);
        let start = self.next;
        (self.next, self.left) = (start.wrapping_add(bytes), self.left - bytes);
        start.cast()
    }

    /// The next `len` elements, with whatever values they hold.
    ///
    /// # Panics
    /// If fewer are left.
    pub fn slice<T: Plain>(&mut self, len: usize) -> &'a mut [T] {
        let start = self.take(len);
        // SAFETY: the bytes are initialised, any are elements, and nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    /// The next `len` elements, set to `value`.
    ///
    /// # Panics
    /// As [`Region::slice`].
    pub fn filled<T: Plain>(&mut self, len: usize, value: T) -> &'a mut [T] {
        let slice = self.slice(len);
        slice.fill(value);
        slice
    }

    /// An empty list with room for `capacity` elements.
    ///
    /// # Panics
    /// As [`Region::slice`].
    pub fn list<T>(&mut self, capacity: usize) -> List<'a, T> {
        const { assert!(!std::mem::needs_drop::<T>()) };
        let start = self.take(capacity);
        // SAFETY: the elements need not be initialised, and nobody else has them.
        List { slots: unsafe { std::slice::from_raw_parts_mut(start, capacity) }, len: 0 }
    }
}

/// A list in scratch, of elements without a destructor.
pub struct List<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// That many slots are initialised.
    len: usize,
}

impl<'a, T> List<'a, T> {
    /// Appends an element.
    ///
    /// # Panics
    /// If the list is full.
    #[inline]
    pub fn push(&mut self, value: T) {
        self.slots[self.len].write(value);
        self.len += 1;
    }

    /// Forgets all elements.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T> Extend<T> for List<'_, T> {
    #[inline]
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push(value));
    }
}

impl<T> Deref for List<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` slots are initialised.
        unsafe { self.slots[..self.len].assume_init_ref() }
    }
}

impl<T> DerefMut for List<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the first `len` slots are initialised.
        unsafe { self.slots[..self.len].assume_init_mut() }
    }
}

/// What a thread keeps.
struct Arena {
    kept: Buffer,
    /// Bytes of `kept` in use.
    used: usize,
    /// Bytes in use, those of buffers beside `kept` included, and the most there were.
    live: usize,
    most: usize,
}

thread_local! {
    static ARENA: RefCell<Arena> =
        const { RefCell::new(Arena { kept: Buffer { allocation: None, len: 0 }, used: 0, live: 0, most: 0 }) };
}

/// A scope's memory, given back when it is dropped: also if the scope panics. Scopes are closures, so the last one to
/// begin is the first to end.
struct Scope {
    start: *mut u8,
    bytes: usize,
    /// Memory of its own, where what is kept has no room.
    own: Option<Buffer>,
    /// Whether the arena counts it: not if the thread is about to end and its arena is gone.
    counted: bool,
}

impl Scope {
    /// `None` if the memory cannot be had.
    fn begin(bytes: usize) -> Option<Scope> {
        let kept = |arena: &RefCell<Arena>| arena.borrow_mut().begin(bytes);
        let (start, own, counted) = match ARENA.try_with(kept) {
            Ok(Some(start)) => (start, None, true),
            missing => {
                let own = Buffer::try_zeroed(bytes)?;
                let counted = missing.is_ok();
                if counted {
                    ARENA.with_borrow_mut(|arena| arena.count(bytes));
                }
                (own.as_ptr(), Some(own), counted)
            }
        };
        Some(Scope { start, bytes, own, counted })
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if self.counted {
            let (bytes, in_kept) = (self.bytes, self.own.is_none());
            let outgrown = ARENA.try_with(|arena| arena.borrow_mut().end(bytes, in_kept));
            // Dropped here, outside of the borrow.
            drop(outgrown);
        }
    }
}

impl Arena {
    /// The memory of a scope, if what is kept has room. Otherwise the scope is not counted yet: there may be none for it.
    fn begin(&mut self, bytes: usize) -> Option<*mut u8> {
        if self.used == 0 && self.kept.len() < bytes {
            self.grow(self.most.max(bytes));
        }
        if self.kept.len() - self.used < bytes {
            return None;
        }
        let start = self.kept.as_ptr().wrapping_add(self.used);
        self.used += bytes;
        self.count(bytes);
        Some(start)
    }

    /// Counts a scope that has its memory.
    fn count(&mut self, bytes: usize) {
        self.live += bytes;
        self.most = self.most.max(self.live);
    }

    /// Ends the last scope; returns memory that has become too small.
    fn end(&mut self, bytes: usize, in_kept: bool) -> Buffer {
        self.live -= bytes;
        if in_kept {
            self.used -= bytes;
        }
        // The next pass through the same scopes finds room for all of them.
        if self.live == 0 && self.kept.len() < self.most { self.grow(self.most) } else { Buffer::default() }
    }

    /// Replaces what is kept, of which nothing may be in use, by at least as many bytes; returns what it was. Without memory
    /// for that, nothing changes: scopes then have to find their own.
    fn grow(&mut self, bytes: usize) -> Buffer {
        // Powers of two, so that problems that grow call by call do not allocate each time.
        let rounded = bytes.checked_next_power_of_two().and_then(Buffer::try_zeroed);
        match rounded.or_else(|| Buffer::try_zeroed(bytes)) {
            Some(larger) => std::mem::replace(&mut self.kept, larger),
            None => Buffer::default(),
        }
    }
}

/// Calls `f` with scratch of this thread. For kernels: if the memory cannot be had, `f` is not called, and the kernel
/// call ends with [`OutOfMemory`](crate::Error::OutOfMemory).
pub fn with<R>(need: Need, f: impl FnOnce(Region<'_>) -> R) -> R {
    if need.bytes == 0 {
        // SAFETY: no bytes at all.
        return f(unsafe { Region::new(std::ptr::without_provenance_mut(LINE), 0) });
    }
    // Not a panic: the hook that reports those has nothing to report.
    let scope = Scope::begin(need.bytes).unwrap_or_else(|| resume_unwind(Box::new(Missing(need.bytes))));
    // SAFETY: the memory is the scope's, which ends after `f`, and was zeroed when it was allocated.
    f(unsafe { Region::new(scope.start, need.bytes) })
}

/// What unwinds from a scope whose bytes could not be had.
struct Missing(usize);

/// Calls `f`; scratch that cannot be had inside it becomes an [`OutOfMemory`](crate::Error::OutOfMemory).
pub(crate) fn or_out_of_memory<R>(f: impl FnOnce() -> Result<R>) -> Result<R> {
    // What unwinds is either caught before anybody sees the outputs, whose contents are not defined after an error, or goes on.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result,
        Err(payload) => match payload.downcast::<Missing>() {
            Ok(missing) => Err(host_out_of_memory(missing.0)),
            Err(panic) => resume_unwind(panic),
        },
    }
}

/// A limit on single allocations, for tests of what happens without memory.
#[cfg(any(test, feature = "lab"))]
pub mod limit {
    use std::cell::Cell;

    thread_local! {
        static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Calls `f` on a thread that has given back its scratch and finds no more than `bytes` of it in one piece.
    pub fn with_at_most<R>(bytes: usize, f: impl FnOnce() -> R) -> R {
        struct Undo(usize);
        impl Drop for Undo {
            fn drop(&mut self) {
                LIMIT.set(self.0);
            }
        }
        super::forget();
        let _undo = Undo(LIMIT.replace(bytes));
        f()
    }

    pub(super) fn is_exceeded(bytes: usize) -> bool {
        LIMIT.try_with(Cell::get).is_ok_and(|limit| bytes > limit)
    }
}

/// Gives back what this thread keeps, unless it is in use.
#[cfg(any(test, feature = "lab"))]
fn forget() {
    let forgotten = ARENA.try_with(|arena| match &mut *arena.borrow_mut() {
        Arena { live: 0, kept, most, .. } => {
            *most = 0;
            std::mem::take(kept)
        }
        _ => Buffer::default(),
    });
    drop(forgotten);
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn slices_are_aligned_apart_and_as_long_as_asked_for() {
        let need = Need::of::<u8>(3).and::<f32>(100).and::<u64>(0).and::<[u32; 4]>(5);
        with(need, |mut region| {
            let a = region.filled(3, 1u8);
            let b = region.filled(100, 2f32);
            let c = region.slice::<u64>(0);
            let d = region.filled(5, [3u32; 4]);
            for address in [a.as_ptr() as usize, b.as_ptr() as usize, d.as_ptr() as usize] {
                assert!(address.is_multiple_of(LINE));
            }
            assert!(a == [1; 3] && b == [2.0; 100] && c.is_empty() && d == [[3; 4]; 5]);
        });
    }

    #[test]
    fn scopes_nest_and_a_second_pass_has_all_of_them_in_one_block() {
        let nested = || {
            with(Need::of::<u8>(100), |mut outer| {
                let outer = outer.filled(100, 7u8);
                let inner =
                    with(Need::of::<u32>(5000), |mut inner| inner.filled(5000, 9u32).as_ptr() as usize);
                assert!(outer.iter().all(|&x| x == 7));
                (outer.as_ptr() as usize, inner)
            })
        };
        nested();
        let (outer, inner) = nested();
        assert_eq!(inner - outer, 128);
        assert_eq!(nested(), (outer, inner));
    }

    #[test]
    fn a_panic_gives_the_memory_back() {
        let scope = || with(Need::of::<u8>(1000), |mut region| region.slice::<u8>(1000).as_ptr() as usize);
        let first = scope();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            with(Need::of::<u8>(500), |_| -> () { panic!("inside a scope") });
        }));
        assert!(panicked.is_err());
        assert_eq!(scope(), first);
    }

    #[test]
    fn more_than_was_asked_for_is_refused() {
        let taken = catch_unwind(|| with(Need::of::<u8>(64), |mut region| region.slice::<u8>(65).len()));
        assert!(taken.is_err());
        let full = catch_unwind(|| {
            with(Need::of::<u32>(2), |mut region| region.list::<u32>(2).extend([1, 2, 3]));
        });
        assert!(full.is_err());
    }

    #[test]
    fn a_list_is_what_was_pushed() {
        with(Need::of::<(usize, bool)>(4), |mut region| {
            let mut list = region.list(4);
            list.extend([(1, true), (2, false)]);
            list.push((0, true));
            list.sort_unstable();
            assert_eq!(*list, [(0, true), (1, true), (2, false)]);
            list.clear();
            assert!(list.is_empty());
        });
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_and_nothing_else_changes() {
        let scope = |bytes: usize| with(Need::of::<u8>(bytes), |mut region| region.filled(bytes, 1u8).len());
        let missing =
            |bytes: usize| matches!(or_out_of_memory(|| Ok(scope(bytes))), Err(Error::OutOfMemory { .. }));
        for bytes in [1 << 62, isize::MAX as usize, usize::MAX] {
            assert!(missing(bytes), "{bytes}");
            assert_eq!(scope(1000), 1000);
        }
        assert_eq!(Need::of::<u64>(usize::MAX), Need::of::<u8>(10).and::<u64>(1 << 62));
        limit::with_at_most(4992, || {
            assert!(!missing(4992) && missing(4993), "a multiple of a line, and a byte more");
            // Of two that nest, the inner one is missing, and the outer one is given back.
            let nested = || with(Need::of::<u8>(100), |_| scope(8000));
            for _ in 0..3 {
                assert!(or_out_of_memory(|| Ok(nested())).is_err());
                assert_eq!(ARENA.with_borrow(|arena| (arena.used, arena.live)), (0, 0));
            }
            // On workers too.
            crate::cpu::with_threads(3, || {
                let result = or_out_of_memory(|| {
                    crate::cpu::parallel_for(64, 1, |part| {
                        limit::with_at_most(4992, || assert_eq!(scope(6000 + part.start), 6000 + part.start));
                    });
                    Ok(())
                });
                assert!(matches!(result, Err(Error::OutOfMemory { .. })));
            });
        });
        let panicked = catch_unwind(|| or_out_of_memory(|| -> Result<()> { panic!("as it was") }));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"as it was"));
    }

    #[test]
    fn scratch_can_be_had_while_a_thread_ends() {
        struct AtEnd;
        impl Drop for AtEnd {
            fn drop(&mut self) {
                with(Need::of::<u8>(100), |mut region| assert_eq!(region.filled(100, 1u8).len(), 100));
            }
        }
        thread_local! {
            static AT_END: AtEnd = const { AtEnd };
        }
        // Destructors run in an order of the system's choice: one of the two threads has its arena gone by then.
        for scratch_first in [false, true] {
            let thread = std::thread::spawn(move || {
                let scratch = || with(Need::of::<u8>(10), |mut region| region.filled(10, 1u8).len());
                if scratch_first {
                    scratch();
                }
                AT_END.with(|_| ());
                scratch();
            });
            thread.join().unwrap();
        }
    }
}
