//! Copying bytes as they are.

use super::prefetch::{AHEAD, fetch};
use super::simd::Simd;

/// Copies `n` bytes. With `stream`, stores bypass the caches: call [`Simd::fence`] before others read them. With
/// `more`, the bytes that follow are prefetched, as they are copied next.
///
/// # Safety
/// `src..src + n` must be readable, `dst..dst + n` writable, and the two apart.
#[inline(always)]
pub unsafe fn copy_bytes<S: Simd>(s: S, src: *const u8, dst: *mut u8, n: usize, stream: bool, more: bool) {
    let step = S::N * size_of::<f32>();
    let head = if stream { dst.align_offset(step).min(n) } else { n };
    let end = n - (n - head) % step;
    // SAFETY: the three parts cover `0..n`. Streaming starts where `dst` is aligned; moves of whole vectors leave all
    // bits as they are, whatever numbers they would make.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let mut at = head;
        while at < end {
            if more {
                fetch::<S, f32>(src.wrapping_add(at + AHEAD).cast());
            }
            s.stream(dst.add(at).cast(), s.load(src.add(at).cast()));
            at = at.wrapping_add(step);
        }
        std::ptr::copy_nonoverlapping(src.add(end), dst.add(end), n - end);
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::{Task, Tier, dispatch};

    struct Copy<'a>(&'a [u8], &'a mut [u8], bool);

    impl Task for Copy<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            assert_eq!(self.0.len(), self.1.len());
            // SAFETY: two slices of one length.
            unsafe { copy_bytes(s, self.0.as_ptr(), self.1.as_mut_ptr(), self.0.len(), self.2, true) };
            s.fence();
        }
    }

    #[test]
    fn every_byte_is_copied_and_no_other_written() {
        let src: Vec<u8> = (0..700u32).map(|i| (i * 37 % 251) as u8).collect();
        for &tier in &Tier::available() {
            for (from, to, n) in [(0, 0, 0), (1, 3, 5), (0, 0, 512), (3, 64, 500), (7, 1, 640), (0, 63, 64)] {
                for stream in [false, true] {
                    let mut dst = vec![0xaa; 800];
                    dispatch(tier, Copy(&src[from..from + n], &mut dst[to..to + n], stream));
                    assert_eq!(dst[to..to + n], src[from..from + n], "{tier} {from} {to} {n}");
                    let untouched = dst[..to].iter().chain(&dst[to + n..]);
                    assert!(untouched.into_iter().all(|&b| b == 0xaa), "{tier} {from} {to} {n}");
                }
            }
        }
    }
}
